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
nor swizzled. Codes and group scales are read bit for bit; compressed-tensors' matrix scale becomes
the float32 nearest to its reciprocal, as for its readers. Other groups than 16 do not fit the
shapes.

The files decide which layers have codes; the others (`ignore`, `exclude_modules`) are read in 16
bits. `left_in_16_bits` reads this from config.json, for the memory plan. Scales of keys and values
are not read: their format is the precision plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import Stored, checked, shown_value
from jetrl.models.families import ModelConfig, StoredTensor, linear_layers
from jetrl.models.patterns import matching
from jetrl.precision.nvfp4 import NVFP4_GROUP, NVFP4Tensor
from jetrl.precision.plan import PrecisionPlan

SIDECAR = "hf_quant_config.json"  # ModelOpt's, of whose older exports config.json says nothing
_WHERE = "config.json: quantization_config"
_UNREAD = (".input_scale", ".k_scale", ".v_scale", ".q_scale")
_CT_FORMAT = "nvfp4-pack-quantized"
_NotThere = Annotated[dict[str, Any], Field(max_length=0)] | None


class _CodedGroup(Stored):
    format: Any = None
    targets: list[str] | None = None


class _Fp8(Stored):
    quant_method: Literal["fp8"]
    weight_block_size: Annotated[list[Literal[128]], Field(min_length=2, max_length=2)]


class _ModelOpt(Stored):
    """The keys that are read from ModelOpt's description."""

    quant_algo: Literal["NVFP4", "W4A16_NVFP4"]
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None


class _CompressedTensors(Stored):
    """The keys that are read from compressed-tensors' description."""

    config_groups: Annotated[dict[str, _CodedGroup], Field(min_length=1)]
    format: Any = None
    ignore: list[str] | None = None
    transform_config: _NotThere = None
    sparsity_config: _NotThere = None


@dataclass(frozen=True)
class NVFP4Layout:
    """The names and meaning of the tensors of NVFP4 weights in one kind of directory.

    `ends` follow `X.weight` in the names of codes, group scales and matrix scale; `divides`: values
    are divided by the matrix scale. `left_out` and `coded` are the tool's patterns of layers in 16
    bits and of layers with codes (empty: all).
    """

    tool: str
    ends: tuple[str, str, str]
    divides: bool
    unread: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    coded: tuple[str, ...] = ()

    def names(self, weight: str) -> tuple[str, ...]:
        """Return the names of the codes, the group scales and the matrix scale of `X.weight`."""
        return tuple(weight + end for end in self.ends)


def _matching(patterns: Sequence[str], layers: Sequence[str]) -> set[str]:
    """Return the layers that at least one of the tool's patterns matches."""
    plain = [pattern for pattern in patterns if not pattern.startswith("re:")]
    expressions = [p.removeprefix("re:") for p in patterns if p.startswith("re:")]
    return matching(expressions, layers, _WHERE, whole=False) | {
        layer
        for layer in layers
        if any(fnmatchcase(layer, p) or layer.startswith(f"{p}.") for p in plain)
    }


_MODELOPT = NVFP4Layout(
    "NVIDIA ModelOpt", ("", "_scale", "_scale_2"), divides=False, unread=_UNREAD
)
_CT_UNREAD = (".input_global_scale", *_UNREAD)
_COMPRESSED_TENSORS = NVFP4Layout(
    "compressed-tensors", ("_packed", "_scale", "_global_scale"), divides=True, unread=_CT_UNREAD
)


def nvfp4_layout(quantization: Any) -> NVFP4Layout | None:
    """Return the layout of a directory's NVFP4 weights; None if another method is named.

    `quantization` is config.json's `quantization_config`, or the contents of hf_quant_config.json.
    """
    if not isinstance(quantization, Mapping):
        return None
    if quantization.get("quant_method") == "compressed-tensors":
        return _compressed_tensors_layout(quantization)
    producer = quantization.get("producer")
    named = [quantization.get("quant_method"), quantization.get("quant_library")]
    named.append(producer.get("name") if isinstance(producer, Mapping) else None)
    if not any(str(name).lower().startswith("modelopt") for name in named):
        return None
    where, said = _WHERE, quantization
    if isinstance(quantization.get("quantization"), Mapping):
        where, said = f"{SIDECAR}: quantization", quantization["quantization"]
    algorithm = said.get("quant_algo")
    upper = algorithm.upper() if isinstance(algorithm, str) else algorithm
    read = checked(TypeAdapter(_ModelOpt), {**said, "quant_algo": upper}, where)
    return replace(_MODELOPT, left_out=tuple(read.exclude_modules or read.ignore or ()))


def _compressed_tensors_layout(quantization: Mapping[str, Any]) -> NVFP4Layout:
    read = checked(TypeAdapter(_CompressedTensors), quantization, _WHERE)
    for name, group in read.config_groups.items():
        format = group.format or read.format
        if format != _CT_FORMAT:
            raise UserError(
                f"{_WHERE}.config_groups.{name}: format = {shown_value(format)}: {_CT_FORMAT!r} "
                "is read"
            )
    targets = [t for group in read.config_groups.values() for t in group.targets or ()]
    coded = () if "Linear" in targets else tuple(targets)
    return replace(_COMPRESSED_TENSORS, left_out=tuple(read.ignore or ()), coded=coded)


def check_quantization(quantization: Any) -> None:
    """Raise for a quantization_config that is neither NVFP4 nor FP8 in blocks of 128 x 128."""
    if quantization is not None and nvfp4_layout(quantization) is None:
        checked(
            TypeAdapter(_Fp8),
            quantization,
            f"{_WHERE} (16 or 32 bits, FP8 in 128 x 128 blocks and NVFP4 are read)",
        )


def layout_of(config: ModelConfig) -> NVFP4Layout | None:
    """Return the layout of a model's NVFP4 weights; None if config.json names another method."""
    return nvfp4_layout(config.raw.get("quantization_config"))


def is_nvfp4(config: ModelConfig) -> bool:
    """Return whether config.json says that linear layers are in NVFP4."""
    return layout_of(config) is not None


def left_in_16_bits(config: ModelConfig) -> set[str]:
    """Return the linear weights, by our names, that an NVFP4 directory leaves in 16 bits."""
    layout = layout_of(config)
    if layout is None:
        return set()
    linears = {
        f"{layer}.weight": {part.module for part in parts}
        for layer, parts in linear_layers(config).items()
    }
    every = [layer for layers in linears.values() for layer in layers]
    left = _matching(layout.left_out, every)
    if layout.coded:
        left |= set(every) - _matching(layout.coded, every)
    return {name for name, layers in linears.items() if layers <= left}


def check_base(config: ModelConfig, plan: PrecisionPlan, path: str | Path) -> None:
    """Raise if a directory is in NVFP4 and a plan would round its linear layers again."""
    layout = layout_of(config)
    if layout is None:
        return
    begin = f"{path}: its linear layers are in NVFP4 ({layout.tool})"
    if not plan.frozen_base:
        raise UserError(
            f"{begin}, which is only read as a frozen base: set precision.base=nvfp4 and "
            "adapter.kind=lora; for a critic or a reward model take the model in 16 bits"
        )
    for layer in range(config.num_layers):
        if not all(f.frozen for f in plan.linear_formats(layer, config.num_layers).values()):
            raise UserError(
                f"{begin}, and the precision plan has layer {layer} in BF16: leave "
                "precision.first_layers_bf16 and last_layers_bf16 out"
            )


def read_nvfp4(
    layout: NVFP4Layout, part: StoredTensor, files: Mapping[str, Path], read: Callable[..., Tensor]
) -> NVFP4Tensor:
    """Return a stored weight with its codes and group scales unchanged.

    `read(name, *shapes)` returns a tensor after checking that it has one of the shapes.
    """
    num_rows, num_columns = part.shape
    names = layout.names(part.name)
    if num_columns % NVFP4_GROUP:
        raise UserError(
            f"{files[names[0]]}: {part.name} has {num_columns} columns, and NVFP4 needs multiples "
            f"of {NVFP4_GROUP}"
        )
    of_codes, of_scales = (num_rows, num_columns // 2), (num_rows, num_columns // NVFP4_GROUP)
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ((of_codes,), (of_scales,), ((), (1,)))
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.float32)
    tensors = []
    for name, dtype, allowed in zip(names, dtypes, shapes, strict=True):
        tensors.append(read(name, *allowed))
        if tensors[-1].dtype != dtype:
            raise UserError(
                f"{files[name]}: tensor {name} is {tensors[-1].dtype}, and NVFP4 in "
                f"{layout.tool}'s layout has {dtype} there"
            )
    codes, scales, scale = tensors
    if bool((~(scales.float() >= 0)).any()):
        raise UserError(f"{files[names[1]]}: {names[1]} has scales that are negative or NaN")
    scale = scale.reshape(())
    own = 1 / scale if layout.divides else scale
    if not (bool(scale > 0) and bool(own > 0) and bool(own.isfinite())):
        raise UserError(
            f"{files[names[2]]}: {names[2]} = {float(scale):g}, and a finite positive number is "
            "expected"
        )
    return NVFP4Tensor(codes, scales, own)
