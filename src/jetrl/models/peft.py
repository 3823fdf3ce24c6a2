"""Read and write adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT (with transformers) and vLLM read these files. Tensors are the float32 master weights, so
writing and reading an adapter preserves all bits. Fully trained parameters (embedding, norms, head)
are in PEFT's `modules_to_save`. PEFT copies these modules, which unties an embedding from its head
unless `ensure_weight_tying` is set; therefore a tied pair is written twice.

PEFT's names are those of transformers' modules. Qwen2.5-VL's differ from those in its files, which
transformers had before version 4.52, and adapters of then are read too. An image tower has layers
with the same last names, so an adapter of a model with images names its layers in full.

An unknown key in adapter_config.json that is set raises a UserError, since it may select another
kind of adapter. A merged weight is W + s B A, computed in FP32. In a file with fewer bits, a change
below the rounding step is lost.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.distributed.world import world
from jetrl.errors import UserError, named
from jetrl.files import Stored, checked, printable, shown_value
from jetrl.models.adapter import Adapter, LoRA, adapted_parts, adapter_names
from jetrl.models.coded_weights import CodedWeights
from jetrl.models.experts_shape import ExpertsShape
from jetrl.models.families import (
    FAMILIES,
    FP8_BLOCK,
    ModelConfig,
    StoredTensor,
    parameter_shapes,
    stored_tensors,
)
from jetrl.models.hf_files import is_hub_name, load_tensors, read_object
from jetrl.models.hf_save import new_directory, save_file, write_json
from jetrl.models.patterns import matching
from jetrl.precision.quantize import dequantize, quantize
from jetrl.settings.model_sections import MOST_RANK, AdapterSettings

logger = logging.getLogger(__name__)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_BASE = "base_model_name_or_path"
_NEEDED = "write the directory of the model that this adapter was trained on there"
# In a file of its own: safetensors writes several metadata entries in random order.
_OWN, _DIGEST, _TIED = "jetrl_adapter.json", "base_digest", "tied"
_EMBEDDINGS, _HEAD = "embed.weight", "lm_head.weight"
# Keys of adapter_config.json that have no effect here, whatever their value.
_WITHOUT_MEANING = {
    "auto_mapping", "inference_mode", "peft_version", "revision",
    "task_type", "qalora_group_size", "megatron_core", "runtime_config",
}  # fmt: skip
_WHOLE = ("train_embeddings", "train_norms", "train_head")


class _Peft(Stored):
    """The keys of adapter_config.json that are read, with their supported values."""

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1, le=MOST_RANK)]
    lora_alpha: Annotated[float, Field(gt=0, lt=1e30)]
    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None
    use_rslora: bool | None = None
    modules_to_save: list[str] | None = None
    lora_dropout: float | None = None
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, None, "gaussian", "eva", "orthogonal"] = True
    ensure_weight_tying: bool | None = None
    task_type: Literal["CAUSAL_LM", "SEQ_CLS", None] = None
    base_model_name_or_path: Any = None


def _read(path: str | Path) -> _Peft:
    """Return the contents of adapter_config.json. Raises UserError unless it is a plain LoRA."""
    file = Path(path) / CONFIG
    if not file.is_file():
        raise UserError(f"{path}: no adapter there; PEFT's directory has {CONFIG} and {TENSORS}")
    read = checked(TypeAdapter(_Peft), read_object(file), str(file))
    for key, value in sorted((read.model_extra or {}).items()):
        if value and key not in _WITHOUT_MEANING:
            raise UserError(f"{file}: {printable(key)} = {shown_value(value)} is not supported")
    return read


def is_adapter(path: str | Path) -> bool:
    """Return whether a directory has an adapter and no model."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_of(path: str | Path, optional: bool = True) -> str | None:
    """Return the directory or hub name of an adapter's base; None if `optional` and not named.

    Raises UserError for a base that does not exist.
    """
    base = _read(path).base_model_name_or_path
    if not isinstance(base, str) or not base:
        if optional:  # the base of a run may be random weights
            return None
        raise UserError(f"{Path(path) / CONFIG}: {_BASE} names no base; {_NEEDED}")
    if not is_hub_name(base) and not os.path.isdir(base):
        raise UserError(
            f"{Path(path) / CONFIG}: {_BASE} = {shown_value(base)}: no such directory; {_NEEDED}"
        )
    return base


def is_scalar(path: str | Path) -> bool:
    """Return whether an adapter directory is for a model with a scalar head."""
    return bool(_read(path).task_type == "SEQ_CLS")


def lora_of(settings: AdapterSettings, config: ModelConfig) -> LoRA | None:
    """Return the LoRA settings of `[adapter]` or of the adapter at adapter.path; None without one.

    Raises UserError if the settings differ from the adapter at adapter.path.
    """
    if settings.kind is None:
        return None
    asked = {key: getattr(settings, key) for key in ("rank", "alpha", "rslora", "targets")}
    given: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    whole: dict[str, Any] = {key: getattr(settings, key) for key in _WHOLE}
    if settings.path is None:
        lora = LoRA(**{"rank": 32, "alpha": 32.0} | given | whole)
        adapted_parts(config, lora.targets)  # for its errors
        return lora
    with named("adapter.path"):
        lora = read_lora(settings.path, config)
    for key, value in given.items():
        if key == "targets" or value != getattr(lora, key):
            has = "its own targets" if key == "targets" else getattr(lora, key)
            raise UserError(
                f"adapter.{key} = {value}, and the adapter in {settings.path} has {has}: leave "
                f"adapter.{key} out to continue with that adapter"
            )
    return dataclasses.replace(lora, **whole)


def adapter_of(
    settings: AdapterSettings, config: ModelConfig, seed: int, device: str = "cpu"
) -> Adapter | None:
    """Return a new adapter, or the one at adapter.path; None without one.

    For device "meta" no tensor is read or drawn.
    """
    lora = lora_of(settings, config)
    if lora is None:
        return None
    if device == "meta" or settings.path is None:
        return Adapter.new(config, lora, seed, device)
    return read_adapter(settings.path, config, lora)


def adapted_config(settings: AdapterSettings, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the adapter, which may untie the head from the embedding."""
    if settings.path is None or not config.tie_word_embeddings:
        return config
    return read_adapter(settings.path, config, lora_of(settings, config)).shape(config)


def read_lora(path: str | Path, config: ModelConfig) -> LoRA:
    """Return the LoRA settings of an adapter directory without reading its tensors.

    Raises UserError if they are not supported, or do not match the model.
    """
    read, file = _read(path), Path(path) / CONFIG
    if read.task_type == "SEQ_CLS" and config.head == "lm":
        raise UserError(
            f"{file}: task_type = SEQ_CLS is of a classifier; an adapter of a language model has "
            "CAUSAL_LM"
        )
    tensors = [part.name for parts in _loaded(config).values() for part in parts]
    for module in read.modules_to_save or ():
        # PEFT lists both names for any classifier.
        of_head = config.head == "score" and module in ("classifier", "score")
        if not of_head and not any(_is_saved(name, [module]) for name in tensors):
            frozen = "" if config.vision is None else " outside of its frozen image tower"
            raise UserError(
                f"{file}: modules_to_save names {printable(module)}, which the model does not have"
                f"{frozen}"
            )
    if read.lora_dropout:
        logger.warning("%s: lora_dropout is not applied here", file)
    given = read.target_modules
    targets = given if isinstance(given, str) else tuple(given)
    targeted = adapted_parts(config, targets, key=f"{file}: target_modules")
    if read.exclude_modules:
        names = [part.module for parts in targeted.values() for part in parts]
        excluded = _excluded(names, read.exclude_modules, f"{file}: exclude_modules")
        targets = tuple(name for name in names if name not in excluded)
        if not targets:
            raise UserError(f"{file}: exclude_modules excludes every layer of target_modules")
    return LoRA(read.r, read.lora_alpha, bool(read.use_rslora), targets)


def _excluded(names: list[str], excluded: list[str] | str, key: str) -> set[str]:
    """Return the names that `exclude_modules` matches, possibly none."""
    if isinstance(excluded, str):
        return matching([excluded], names, key)
    return {name for name in names for last in excluded if f".{name}".endswith(f".{last}")}


def read_adapter(path: str | Path, config: ModelConfig, trains: LoRA | None = None) -> Adapter:
    """Return the adapter of a directory, with float32 tensors on the CPU.

    `trains` selects fully trained parameters; None: none are. Raises UserError for a missing,
    unexpected or damaged tensor.
    """
    directory = Path(path)
    lora = read_lora(directory, config)
    if trains is not None:
        lora = dataclasses.replace(lora, **{key: getattr(trains, key) for key in _WHOLE})
    file, own = directory / TENSORS, directory / _OWN
    if not file.is_file():
        raise UserError(f"{file}: no such file; save an adapter in .bin again with safetensors")
    # Earlier versions of jetrl did not write the head of a tied pair.
    said: dict[str, Any] = {_TIED: True} | read_object(own) if own.is_file() else {_TIED: False}
    stored, read = _with_present_names(load_tensors(file), config), _read(directory)
    saved = read.modules_to_save or []
    replaced = _take_whole(stored, file, config, saved)
    tied = bool(said[_TIED] or read.ensure_weight_tying)
    unties = config.tie_word_embeddings and _unties(config, replaced, file, saved, tied)
    adapter = Adapter(lora, {}, {}, replaced, str(directory), said.get(_DIGEST), unties)
    shapes, parts = lora.shapes(adapter.shape(config)), adapted_parts(config, lora.targets)
    tensors: dict[str, Tensor] = {}
    for layer, shape in shapes.items():
        a_shape = (lora.rank, shape.num_columns)
        names = [f"{PREFIX}{part.module}.lora_" for part in parts[layer]]
        rows = [part.shape[0] for part in parts[layer]]
        a = [_taken(stored, file, f"{name}A.weight", a_shape) for name in names]
        b = [
            _taken(stored, file, f"{name}B.weight", (count, lora.rank))
            for name, count in zip(names, rows, strict=True)
        ]
        tensors |= zip(adapter_names(layer), (torch.cat(a), torch.cat(b)), strict=True)
    if stored:
        of_language = f"{PREFIX}{FAMILIES[config.family].language_module}."
        if config.vision is not None and not min(stored).startswith(of_language):
            raise UserError(
                f"{file}: tensor {min(stored)} is not of the language model, and the image tower "
                "is frozen here: train the adapter again, with target_modules or exclude_modules "
                "that leave the tower out"
            )
        more = f", and {len(stored) - 1} more" if len(stored) > 1 else ""
        raise UserError(
            f"{file}: {CONFIG} and the model have no place for tensor {min(stored)}{more}: is this "
            "adapter for another base, or are its target_modules too few?"
        )
    return dataclasses.replace(adapter, shapes=shapes, tensors=tensors)


def _taken(stored: dict[str, Tensor], file: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """Remove a tensor from `stored`, check it and return it in float32."""
    tensor, problem = stored.pop(name, None), None
    if tensor is None:
        raise UserError(f"{file}: tensor {name} is missing; {CONFIG} names its module")
    if tuple(tensor.shape) != shape:
        problem = f"has shape {list(tensor.shape)}, and this model needs {list(shape)}: is it an "
        problem += "adapter for another base?"
    elif not tensor.is_floating_point():
        problem = f"is {tensor.dtype}: a floating dtype is needed"
    elif not bool(tensor.float().isfinite().all()):
        problem = "has a NaN or an infinity: take an earlier checkpoint of the adapter"
    if problem:
        raise UserError(f"{file}: tensor {name} {problem}")
    return tensor.float()


def _take_whole(
    stored: dict[str, Tensor], file: Path, config: ModelConfig, saved: list[str]
) -> dict[str, Tensor]:
    """Remove the parameters that an adapter replaces from `stored`; return them by jetrl's names.

    Raises UserError if a module in `saved` has no tensor.
    """
    replaced = {}
    for name, parts in _loaded(config).items():
        for part in parts:
            if _is_saved(part.name, saved) and PREFIX + part.name not in stored:
                raise UserError(
                    f"{file.parent / CONFIG}: modules_to_save names {part.module}, and {TENSORS} "
                    f"has no tensor {PREFIX}{part.name}: save the adapter again"
                )
        key = PREFIX + parts[0].name
        if len(parts) == 1 and not parts[0].linear_weight and key in stored:
            replaced[name] = _taken(stored, file, key, parts[0].shape)
    return replaced


def _loaded(config: ModelConfig) -> Mapping[str, tuple[StoredTensor, ...]]:
    """Return the tensors of a model by their names in transformers, with an untied head."""
    return stored_tensors(dataclasses.replace(config, tie_word_embeddings=False), loaded=True)


def _with_present_names(stored: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors by the names of transformers' present modules."""
    family = FAMILIES[config.family]
    old, new = (f"{PREFIX}{module}.layers." for module in (family.prefix, family.language_module))
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in stored.items()
    }


def _is_saved(tensor: str, modules_to_save: Iterable[str]) -> bool:
    """Return whether the name of a module that contains the tensor ends with one of the names."""
    parts = tensor.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts))]
    return any(module.endswith(name) for module in around for name in modules_to_save)


def _unties(
    config: ModelConfig, replaced: dict[str, Tensor], file: Path, saved: Iterable[str], tied: bool
) -> bool:
    """Return whether an adapter unties the head; if not, keep only the embedding in `replaced`."""
    embedding, head = replaced.get(_EMBEDDINGS), replaced.get(_HEAD)
    both = embedding is not None and head is not None
    same = embedding is not None and head is not None and torch.equal(embedding, head)
    parts = [_loaded(config)[name][0] for name in (_EMBEDDINGS, _HEAD)]
    copies = any(_is_saved(part.name, saved) for part in parts)
    if copies and not tied and not same and (embedding is not None or head is not None):
        return True
    if both and not same:
        raise UserError(f"{file}: embed_tokens and lm_head differ, and the adapter ties them")
    if head is not None:
        replaced[_EMBEDDINGS] = replaced.pop(_HEAD)
    return False


def save_adapter(
    path: str | Path,
    config: ModelConfig,
    lora: LoRA,
    masters: Mapping[str, Tensor],
    base: str | None,
    digest: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> None:
    """Write an adapter directory. All ranks call this function; rank 0 writes.

    Args:
        masters: The whole master weights by jetrl's names, and base parameters that the adapter
            replaces; written in float32.
        base: The directory or hub name of the base.
        digest: The digest of the base (`adapter.base_digest`).
        overwrite: Replace a model directory at `path` when the new one is complete.

    Raises:
        UserError: `path` cannot be written.
        NonFiniteError: a tensor with a NaN or an infinity.
        StorageError: an error of the disk.
    """

    def write() -> None:
        stored = _stored(config, lora, masters)
        write_json(scratch / CONFIG, _adapter_json(config, lora, base, stored))
        save_file(stored, scratch / TENSORS)
        write_json(scratch / _OWN, {_DIGEST: digest, _TIED: config.tie_word_embeddings})

    with new_directory(path, overwrite, tokenizer) as scratch:
        world().from_first("an adapter's directory", write)


def _stored(config: ModelConfig, lora: LoRA, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return master weights by PEFT's names, float32 on the CPU."""
    tensors: dict[str, Tensor] = {}
    left = dict(masters)
    for layer, parts in adapted_parts(config, lora.targets).items():
        a_name, b_name = adapter_names(layer)
        all_a = left.pop(a_name).split(lora.rank)
        all_b = left.pop(b_name).split([part.shape[0] for part in parts])
        for part, a, b in zip(parts, all_a, all_b, strict=True):
            tensors[f"{PREFIX}{part.module}.lora_A.weight"] = a
            tensors[f"{PREFIX}{part.module}.lora_B.weight"] = b
    for name, master in left.items():
        (whole,) = _loaded(config)[name]
        tensors[PREFIX + whole.name] = master
        if name == _EMBEDDINGS and config.tie_word_embeddings:
            tensors[f"{PREFIX}lm_head.weight"] = master
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def _adapter_json(
    config: ModelConfig, lora: LoRA, base: str | None, stored: Mapping[str, Tensor]
) -> dict[str, Any]:
    alpha = lora.alpha
    return {
        "auto_mapping": None,
        _BASE: base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": _modules_to_save(config, stored) or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": _target_names(config, lora),
        "task_type": "SEQ_CLS" if config.head == "score" else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.rslora,
    }


def _target_names(config: ModelConfig, lora: LoRA) -> list[str]:
    """Return `target_modules`: last names, or full names if last names select other layers."""
    parts = adapted_parts(config, lora.targets)
    names = [part.module for of_layer in parts.values() for part in of_layer]
    last = tuple(sorted({name.rpartition(".")[2] for name in names}))
    suffice = config.vision is None and adapted_parts(config, last) == parts
    return list(last) if suffice else names


def _modules_to_save(config: ModelConfig, stored: Iterable[str]) -> list[str]:
    """Return `modules_to_save`: last names, or full names if last names select other modules."""
    every = {part.name for parts in _loaded(config).values() for part in parts}
    whole = {name for name in every if PREFIX + name in stored}
    modules = {name.rpartition(".")[0] for name in whole}
    last = {module.rpartition(".")[2] for module in modules}
    suffice = config.vision is None and {n for n in every if _is_saved(n, last)} == whole
    return sorted(last if suffice else modules)


class MergedWeights(CodedWeights):
    """The parameters of a base with a merged adapter, float32, each computed on access.

    `masters` are whole master weights: A and B of the adapter, and parameters that replace those of
    the base.
    """

    def __init__(
        self,
        config: ModelConfig,
        lora: LoRA,
        base: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.names = parameter_shapes(config)
        self._base, self._masters, self._device = base, masters, device
        self.shapes = lora.shapes(config)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._masters:
            return self._masters[name].detach()
        stored = name if name in self._base else _EMBEDDINGS  # for an untied head
        weight = self._base[stored].to(self._device, torch.float32)
        layer = name.removesuffix(".weight")
        return weight + self.change(layer) if layer in self.shapes else weight

    def fp8_loss(self) -> float:
        """Return the FP8 rounding error of the adapter's change, relative to its norm.

        It is measured on at most 28 linear layers.
        """
        errors, norms = [], []
        for layer in list(self.shapes)[:: -(-len(self.shapes) // 28)]:
            change, merged = self.change(layer), self[f"{layer}.weight"]
            after, before = (dequantize(quantize(w, FP8_BLOCK)) for w in (merged, merged - change))
            errors.append((after - before - change).norm())
            norms.append(change.norm())
        return float(torch.stack(errors).norm() / torch.stack(norms).norm().clamp(min=1e-30))

    def change(self, layer: str) -> Tensor:
        """Return the change of a linear layer's weight, s B A, float32 [N, K]."""
        a, b = (self._masters[n].detach().to(self._device) for n in adapter_names(layer))
        shape = self.shapes[layer]
        change = torch.zeros(shape.num_rows, shape.num_columns, device=a.device)
        counts = [count for _, count in shape.parts]
        parts = zip(shape.parts, a.split(shape.rank), b.split(counts), strict=True)
        for (first, count), part_a, part_b in parts:
            change[first : first + count] = (shape.scale * part_b) @ part_a
        return change


def experts_among_others(config: ModelConfig, names: Iterable[str]) -> bool:
    """Return whether experts are adapted in a model that also has dense layers or shared experts.

    Of such adapters peft 0.21 with transformers 5 reads only some, and reports no error.
    `names` are those of trained parameters.
    """
    adapted = {name.rpartition(".")[0] for name in names}
    blocks = [layer.block for layer in config.layers]
    of_experts = any(
        isinstance(block, ExpertsShape) and f"layers.{index}.{linear}" in adapted
        for index, block in enumerate(blocks)
        for linear in block.by_name
    )
    return of_experts and any(
        not isinstance(block, ExpertsShape) or block.shared_width for block in blocks
    )
