"""Model directories whose linear layers are in NVFP4 already: the two layouts of model hubs.

A linear layer `X` of N outputs and K inputs is stored as

| | NVIDIA ModelOpt | compressed-tensors |
| --- | --- | --- |
| codes, uint8 [N, K / 2] | `X.weight` | `X.weight_packed` |
| scales of 16 along K, float8_e4m3fn [N, K / 16] | `X.weight_scale` | `X.weight_scale` |
| scale of the matrix, float32 [] or [1] | `X.weight_scale_2` | `X.weight_global_scale` |
| a value is | code * scale * scale of the matrix | code * scale / scale of the matrix |
| of inputs, not read here | `X.input_scale` | `X.input_global_scale` |
| said in | quantization_config, hf_quant_config.json | quantization_config |

Both keep the value of even K in the lower four bits of a byte, and scales in rows, neither padded
nor swizzled. The codes and the group scales are taken as they are, bit for bit; of
compressed-tensors' scale the float32 nearest to its reciprocal is taken, as its readers do.

Which layers have codes is what the files hold: a layer that was left in 16 bits (`ignore`,
`exclude_modules`) is read as such. `left_in_16_bits` says it from config.json alone, for the plan
of memory. Scales of keys and values are not read: their format is the precision plan's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import shown_value
from jetrl.models.families import ModelConfig, StoredTensor, stored_tensors
from jetrl.models.patterns import matching
from jetrl.precision.nvfp4 import NVFP4_GROUP, NVFP4Tensor
from jetrl.precision.plan import PrecisionPlan

SIDECAR = "hf_quant_config.json"  # ModelOpt's, of whose older exports config.json says nothing
_OF_KEYS_AND_VALUES = (".k_scale", ".v_scale", ".q_scale")
_MODELOPT_FORMATS = ("NVFP4", "W4A16_NVFP4")
_CT_FORMAT = "nvfp4-pack-quantized"


@dataclass(frozen=True)
class NVFP4Layout:
    """The names and the meaning of the tensors of NVFP4 weights in one kind of directory.

    Attributes:
        ends: What follows `X.weight` in the names of codes, group scales and the matrix's scale.
        divides: Whether values are divided by the matrix's scale, not multiplied.
        left_out: Patterns of the layers that stay in 16 bits, as the tool writes them.
        coded: Patterns of the layers that have codes; empty: all.
    """

    tool: str
    ends: tuple[str, str, str]
    divides: bool
    unread: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    coded: tuple[str, ...] = ()

    def names(self, weight: str) -> tuple[str, ...]:
        """Return the names of the codes, the group scales and the matrix's scale of a weight.

        Args:
            weight: The name of the weight in a directory without codes, `X.weight`.
        """
        return tuple(weight + end for end in self.ends)

    def left_in_16_bits(self, layers: Sequence[str]) -> set[str]:
        """Return the stored layers that stay in 16 bits, by what config.json says."""
        coded = _matching(self.coded, layers) if self.coded else set(layers)
        return set(layers) - coded | _matching(self.left_out, layers)


def _matching(patterns: Sequence[str], layers: Sequence[str]) -> set[str]:
    """Return the layers that one of some patterns stands for."""
    plain = [pattern for pattern in patterns if not pattern.startswith("re:")]
    expressions = [p.removeprefix("re:") for p in patterns if p.startswith("re:")]
    key = "config.json: quantization_config"
    return matching(expressions, layers, key, whole=False) | {
        layer
        for layer in layers
        if any(fnmatchcase(layer, p) or layer.startswith(f"{p}.") for p in plain)
    }


_MODELOPT = NVFP4Layout(
    "NVIDIA ModelOpt",
    ("", "_scale", "_scale_2"),
    divides=False,
    unread=(".input_scale", *_OF_KEYS_AND_VALUES),
)
_COMPRESSED_TENSORS = NVFP4Layout(
    "compressed-tensors",
    ("_packed", "_scale", "_global_scale"),
    divides=True,
    unread=(".input_global_scale", ".input_scale", *_OF_KEYS_AND_VALUES),
)


def nvfp4_layout(quantization: Any) -> NVFP4Layout | None:
    """Return the layout of a directory's NVFP4 weights; None where another method is named.

    Args:
        quantization: config.json's `quantization_config`, or the contents of
            hf_quant_config.json in its place.
    """
    if not isinstance(quantization, Mapping):
        return None
    if quantization.get("quant_method") == "compressed-tensors":
        return _compressed_tensors_layout(quantization)
    producer = quantization.get("producer")
    named = [quantization.get("quant_method"), quantization.get("quant_library")]
    named.append(producer.get("name") if isinstance(producer, Mapping) else None)
    if any(str(name).lower().startswith("modelopt") for name in named):
        return _modelopt_layout(quantization)
    return None


def _modelopt_layout(quantization: Mapping[str, Any]) -> NVFP4Layout:
    """Return the layout of a directory that ModelOpt wrote."""
    where, said = "config.json: quantization_config", quantization
    if isinstance(quantization.get("quantization"), Mapping):
        where, said = f"{SIDECAR}: quantization", quantization["quantization"]
    algorithm = str(said.get("quant_algo")).upper()
    if algorithm not in _MODELOPT_FORMATS:
        raise UserError(
            f"{where}.quant_algo = {shown_value(said.get('quant_algo'))} is not supported; of "
            f"ModelOpt's formats {' and '.join(_MODELOPT_FORMATS)} are read, as a frozen base"
        )
    groups = said.get("config_groups")
    sizes = {f"{where}.group_size": said.get("group_size", NVFP4_GROUP)}
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and "group_size" in weights:
            sizes[f"{where}.config_groups.{name}.weights.group_size"] = weights["group_size"]
    for key, size in sizes.items():
        _check_group_size(key, size)
    key = "exclude_modules" if "exclude_modules" in said else "ignore"
    return _leaving_out(_MODELOPT, f"{where}.{key}", said.get(key))


def _compressed_tensors_layout(quantization: Mapping[str, Any]) -> NVFP4Layout:
    where = "config.json: quantization_config"
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        shown = shown_value(groups)
        raise UserError(f"{where}.config_groups = {shown}: an object of groups is expected")
    for name, group in groups.items():
        _check_group(f"{where}.config_groups.{name}", group, quantization.get("format"))
    for key in ("transform_config", "sparsity_config"):
        if quantization.get(key):
            raise UserError(f"{where}.{key} is not supported: {shown_value(quantization[key])}")
    layout = _leaving_out(_COMPRESSED_TENSORS, f"{where}.ignore", quantization.get("ignore"))
    targets = [
        target
        for name, group in groups.items()
        for target in _texts(f"{where}.config_groups.{name}.targets", group.get("targets"))
    ]
    return replace(layout, coded=() if "Linear" in targets else tuple(targets))


def _check_group(where: str, group: Any, shared_format: Any) -> None:
    """Raise for a group of compressed-tensors' layers that are not in NVFP4."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UserError(f"{where}.weights = {shown_value(weights)}: an object is expected")
    format = group.get("format") or shared_format
    kind = f"{shown_value(weights.get('num_bits'))} bits of type {shown_value(weights.get('type'))}"
    if format != _CT_FORMAT or (weights.get("num_bits"), weights.get("type")) != (4, "float"):
        raise UserError(
            f"{where}: format {shown_value(format)} with {kind} is not supported; of "
            f"compressed-tensors' formats {_CT_FORMAT!r} with 4 bits of type 'float' is read, as a "
            "frozen base"
        )
    _check_group_size(f"{where}.weights.group_size", weights.get("group_size"))
    if weights.get("strategy", "tensor_group") != "tensor_group" or not weights.get(
        "symmetric", True
    ):
        raise UserError(
            f"{where}.weights: strategy {shown_value(weights.get('strategy'))} with symmetric = "
            f"{shown_value(weights.get('symmetric'))}; NVFP4 has 'tensor_group' and true"
        )


def _check_group_size(key: str, size: Any) -> None:
    """Raise for another group size than NVFP4's."""
    if size != NVFP4_GROUP:
        shown = shown_value(size)
        raise UserError(f"{key} = {shown}: NVFP4 weights are read in groups of {NVFP4_GROUP}")


def _leaving_out(layout: NVFP4Layout, key: str, patterns: Any) -> NVFP4Layout:
    """Return a layout with the patterns of the layers that stay in 16 bits."""
    return replace(layout, left_out=tuple(_texts(key, patterns)))


def _texts(key: str, value: Any) -> list[str]:
    """Return a list of texts in config.json; a missing one is empty."""
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise UserError(f"{key} = {shown_value(value)}: a list of texts is expected")
    return listed


def is_nvfp4(config: ModelConfig) -> bool:
    """Return whether config.json says that linear layers are in NVFP4."""
    return nvfp4_layout(config.raw.get("quantization_config")) is not None


def left_in_16_bits(config: ModelConfig) -> set[str]:
    """Return the parameters of linear layers that an NVFP4 directory leaves in 16 bits.

    They are named as in `families.parameter_shapes`; a directory without NVFP4 has none.
    """
    layout = nvfp4_layout(config.raw.get("quantization_config"))
    if layout is None:
        return set()
    linears = {
        name: {part.name.removesuffix(".weight") for part in parts}
        for name, parts in stored_tensors(config).items()
        if parts[0].linear_weight
    }
    left = layout.left_in_16_bits([layer for layers in linears.values() for layer in layers])
    return {name for name, layers in linears.items() if layers <= left}


def check_base(config: ModelConfig, plan: PrecisionPlan, path: str | Path) -> None:
    """Raise where a directory is in NVFP4 and a plan would round its linear layers again."""
    layout = nvfp4_layout(config.raw.get("quantization_config"))
    if layout is None:
        return
    if plan.base != "nvfp4":
        raise UserError(
            f"{path}: its linear layers are in NVFP4 ({layout.tool}), which is read as a frozen "
            "base alone: set precision.base=nvfp4 and adapter.kind=lora; to train all parameters, "
            "or for a critic or a reward model, take the model in 16 bits"
        )
    for layer in range(config.num_layers):
        if set(plan.linear_formats(layer, config.num_layers).values()) != {"nvfp4"}:
            raise UserError(
                f"{path}: its linear layers are in NVFP4 ({layout.tool}), and the precision plan "
                f"has layer {layer} in BF16: leave precision.first_layers_bf16, last_layers_bf16 "
                "and sampler_deviation.bf16_layers out"
            )


def read_nvfp4(
    layout: NVFP4Layout,
    part: StoredTensor,
    files: Mapping[str, Path],
    read: Callable[..., Tensor],
) -> NVFP4Tensor:
    """Return a stored weight with its codes and group scales as they are.

    Args:
        read: Returns the tensor of a name, after comparing its shape with those that may be.
    """
    num_rows, num_columns = part.shape
    if num_columns % NVFP4_GROUP:
        raise UserError(
            f"{files[layout.names(part.name)[0]]}: {part.name} has {num_columns} columns, and "
            f"NVFP4 needs multiples of {NVFP4_GROUP}"
        )
    of_codes, of_scales = (num_rows, num_columns // 2), (num_rows, num_columns // NVFP4_GROUP)
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ((of_codes,), (of_scales,), ((), (1,)))
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.float32)
    tensors = []
    for name, dtype, allowed in zip(layout.names(part.name), dtypes, shapes, strict=True):
        tensor = read(name, *allowed)
        if tensor.dtype != dtype:
            raise UserError(
                f"{files[name]}: tensor {name} is {tensor.dtype}, and NVFP4 in {layout.tool}'s "
                f"layout has {dtype} there"
            )
        tensors.append(tensor)
    codes, scales, scale = tensors
    _, of_groups, of_matrix = layout.names(part.name)
    if bool((~(scales.float() >= 0)).any()):
        raise UserError(f"{files[of_groups]}: {of_groups} has scales that are negative or NaN")
    scale = scale.reshape(())
    own = 1 / scale if layout.divides else scale
    if not (bool(scale > 0) and bool(own > 0) and bool(own.isfinite())):
        raise UserError(
            f"{files[of_matrix]}: {of_matrix} = {float(scale):g}, and a finite positive number is "
            "expected"
        )
    return NVFP4Tensor(codes, scales, own)


class CodedWeights(Mapping[str, Tensor]):
    """The parameters of a model by name, with the codes of those that are in NVFP4.

    As an item such a parameter has the values that its codes stand for, in float32.
    """

    @abstractmethod
    def codes(self, name: str) -> NVFP4Tensor | None:
        """Return a parameter's codes and scales; None where it has 16 or 32 bits, or FP8."""

    @abstractmethod
    def left_wide(self, name: str) -> bool:
        """Return whether a parameter has 16 or 32 bits in a directory with others in NVFP4."""


def codes_of(weights: Mapping[str, Tensor], name: str) -> NVFP4Tensor | None:
    """Return the codes and scales of one of a model's parameters; None where it has none."""
    return weights.codes(name) if isinstance(weights, CodedWeights) else None


def left_wide(weights: Mapping[str, Tensor], name: str) -> bool:
    """Return whether a parameter has 16 or 32 bits in a directory with others in NVFP4."""
    return isinstance(weights, CodedWeights) and weights.left_wide(name)
