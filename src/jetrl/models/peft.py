"""PEFT's files: an adapter as adapter_config.json and adapter_model.safetensors, read and written.

transformers with peft, and vLLM, read what is written here. Tensors are float32, the master weights
themselves, so an adapter that is written and read again has the same bits. What is trained whole
next to the adapter (embedding, norms, head) is written as PEFT's `modules_to_save`. PEFT copies
these modules, and so unties an embedding from its head unless `ensure_weight_tying` is set: a tied
pair is written twice.

A key of adapter_config.json that this reader does not know is refused unless it is off: an adapter
of another kind would be read as something that it is not.

A merged weight is W + s B A, made in FP32. An adapter that changes a weight by less than a rounding
step does not change what is stored: `merging_losses` measures that for BF16 and for FP8.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.files import printable, shown_value
from jetrl.models.adapter import (
    ALL_LINEAR,
    AdaptedPart,
    Adapter,
    LoRA,
    adapted_parts,
    adapter_names,
)
from jetrl.models.families import ModelConfig, parameter_shapes, stored_tensors
from jetrl.models.hf_files import is_hub_name, load_tensors, read_object
from jetrl.models.hf_save import (
    begin_directory,
    filling,
    publish_directory,
    save_file,
    save_tokenizer,
    write_json,
)
from jetrl.precision.adapter import AdapterShape
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import dequantize, quantize
from jetrl.settings.model_sections import MOST_RANK, AdapterSettings

logger = logging.getLogger(__name__)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model_name_or_path"
_NEEDED = "write the directory of the model that this adapter was trained on there"
# Next to PEFT's files, since the order of two entries in a safetensors head is left to chance.
_OWN, _DIGEST, _TIED = "jetrl_adapter.json", "base_digest", "tied"
_EMBEDDINGS = "embed.weight"
# Keys of adapter_config.json that change no number here, whatever they say.
_WITHOUT_MEANING = {
    "auto_mapping", _BASE, "inference_mode", "peft_version", "revision",
    "task_type", "qalora_group_size", "megatron_core", "runtime_config",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora",
    "modules_to_save", "init_lora_weights", "bias", "ensure_weight_tying",
}  # fmt: skip
_WHOLE = ("train_embeddings", "train_norms", "train_head")
# How A and B began, where the base stayed as it was. PiSSA and its like change the base.
_HARMLESS_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


def is_adapter(path: str | Path) -> bool:
    """Return whether a directory holds an adapter and no model."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_of(path: str | Path) -> str | None:
    """Return the model that an adapter's directory names as its base, None where it names none."""
    base = read_object(Path(path) / CONFIG).get(_BASE)
    if not isinstance(base, str) or not base:
        return None
    if not is_hub_name(base) and not os.path.isdir(base):
        raise UserError(
            f"{Path(path) / CONFIG}: {_BASE} = {shown_value(base)}: no such directory; {_NEEDED}"
        )
    return base


def without_base(path: str | Path) -> UserError:
    """Return the error of an adapter's directory that names no base and belongs to no run."""
    return UserError(f"{Path(path) / CONFIG}: {_BASE} names no base; {_NEEDED}")


def lora_of(settings: AdapterSettings, config: ModelConfig) -> LoRA | None:
    """Return the kind of the adapter that settings ask for; None without one.

    Args:
        settings: The section [adapter].
    """
    if settings.kind is None:
        return None
    whole = settings.train_embeddings, settings.train_norms, settings.train_head
    given = {
        key: value
        for key in ("rank", "alpha", "rslora", "targets")
        if (value := getattr(settings, key)) is not None
    }
    if settings.path is None:
        usual: dict[str, Any] = {"rank": 32, "alpha": 32.0, "rslora": False}
        usual["targets"] = (ALL_LINEAR,)
        usual |= given | dict(zip(_WHOLE, whole, strict=True))
        lora = LoRA(**usual)
        adapted_parts(config, lora.targets)  # its errors are of the setting
        return lora
    lora = read_lora(settings.path, config)
    for key, value in given.items():
        if value != getattr(lora, key) and key != "targets":
            raise UserError(
                f"adapter.{key} = {value}, and the adapter in {settings.path} has "
                f"{getattr(lora, key)}: leave adapter.{key} out to go on with that adapter"
            )
    if "targets" in given:
        raise UserError(
            f"adapter.targets is set, and the adapter in {settings.path} has its own targets: "
            "leave one of the two out"
        )
    embeddings, norms, head = whole
    return dataclasses.replace(
        lora, train_embeddings=embeddings, train_norms=norms, train_head=head
    )


def adapter_of(
    settings: AdapterSettings, config: ModelConfig, seed: int, device: str = "cpu"
) -> Adapter | None:
    """Return the adapter that settings ask for, new or read from adapter.path; None without one.

    Args:
        settings: The section [adapter].
        device: The device of the model; for "meta" no tensor is read or made.
    """
    lora = lora_of(settings, config)
    if lora is None:
        return None
    if device == "meta":
        return Adapter.outline(config, lora)
    if settings.path is None:
        return Adapter.new(config, lora, seed)
    return read_adapter(settings.path, config, lora)


def adapted_config(settings: AdapterSettings, config: ModelConfig) -> ModelConfig:
    """Return the config of a model with the adapter that settings ask for, which may untie it."""
    if settings.path is None or not config.tie_word_embeddings:
        return config
    return read_adapter(settings.path, config, lora_of(settings, config)).shape(config)


def is_scalar(path: str | Path) -> bool:
    """Return whether an adapter's directory is of a model with a scalar head, a reward model."""
    return read_object(Path(path) / CONFIG).get("task_type") == "SEQ_CLS"


def read_lora(path: str | Path, config: ModelConfig) -> LoRA:
    """Return the kind of the adapter of a directory, without reading its tensors."""
    directory = Path(path)
    file = directory / CONFIG
    if not file.is_file():
        raise UserError(
            f"{directory}: no adapter there; PEFT's directory has {CONFIG} and {TENSORS}"
        )
    contents = read_object(file)
    _check_kind(file, contents)
    rank, alpha = contents.get("r"), contents.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise UserError(f"{file}: r = {shown_value(rank)}: a rank from 1 to {MOST_RANK} is needed")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e30:
        raise UserError(f"{file}: lora_alpha = {shown_value(alpha)}: a number above 0 is needed")
    targets = contents.get("target_modules")
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        targets = tuple(targets)
    elif not isinstance(targets, str):
        raise UserError(
            f"{file}: target_modules = {shown_value(targets)}: a list of names, or one text"
        )
    adapted_parts(config, targets, key=f"{file}: target_modules")
    return LoRA(rank, float(alpha), contents.get("use_rslora") is True, targets)


def _check_kind(file: Path, contents: Mapping[str, Any]) -> None:
    """Raise where adapter_config.json describes something else than a plain LoRA."""
    if contents.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: peft_type = {shown_value(contents.get('peft_type'))}: only LORA is supported"
        )
    if contents.get("use_dora"):
        raise UserError(
            f"{file}: use_dora is true, and DoRA, which scales the base's columns by norms that "
            "change with the adapter, is not supported; train a plain LoRA"
        )
    bias = contents.get("bias", "none")
    if bias != "none":
        raise UserError(f"{file}: bias = {shown_value(bias)}: adapters of biases are not supported")
    begun = contents.get("init_lora_weights", True)
    if not any(begun is known or begun == known for known in _HARMLESS_BEGINNINGS):
        raise UserError(
            f"{file}: init_lora_weights = {shown_value(begun)} may have changed the base; convert "
            "the adapter to a plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if contents.get("lora_dropout"):
        logger.warning("%s: lora_dropout is not applied here", file)
    for key in sorted(contents.keys() - _READ - _WITHOUT_MEANING - {"use_dora"}):
        if contents[key]:
            shown = f"{printable(key)} = {shown_value(contents[key])}"
            raise UserError(
                f"{file}: {shown} is not supported here; an adapter without it can be read"
            )


def read_adapter(path: str | Path, config: ModelConfig, trains: LoRA | None = None) -> Adapter:
    """Return the adapter of a directory, for a model.

    Args:
        trains: What is trained whole next to the adapter is as in this one; None: nothing.
    """
    directory = Path(path)
    lora = read_lora(directory, config)
    if trains is not None:
        lora = dataclasses.replace(lora, **{key: getattr(trains, key) for key in _WHOLE})
    file = directory / TENSORS
    if not file.is_file():
        pickled = directory / "adapter_model.bin"
        hint = f"PEFT's directory has it beside {CONFIG}"
        if pickled.is_file():
            hint = f"{pickled.name} is pickled: save it again with safetensors"
        raise UserError(f"{file}: no such file; {hint}")
    own: dict[str, Any] = {_TIED: False}
    if (directory / _OWN).is_file():
        own = read_object(directory / _OWN)
    contents, stored = read_object(directory / CONFIG), load_tensors(file)
    # Earlier versions of jetrl left the head of a tied pair out.
    replaced, unties = take_whole(stored, file, contents, config, bool(own.get(_TIED, True)))
    adapter = Adapter(lora, {}, {}, replaced, str(directory), own.get(_DIGEST), unties)
    shapes = lora.shapes(adapter.shape(config))
    parts = adapted_parts(config, lora.targets)
    tensors: dict[str, Tensor] = {}
    for layer, shape in shapes.items():
        a_name, b_name = adapter_names(layer)
        a, b = [], []
        for part in parts[layer]:
            a.append(_taken(stored, file, part, "A", (lora.rank, shape.num_columns)))
            b.append(_taken(stored, file, part, "B", (part.num_rows, lora.rank)))
        tensors[a_name], tensors[b_name] = torch.cat(a), torch.cat(b)
    if stored:
        more = f", and {len(stored) - 1} more" if len(stored) > 1 else ""
        raise UserError(
            f"{file}: {CONFIG} and the model have no place for tensor {min(stored)}{more}: is this "
            "adapter for another base, or are its target_modules too few?"
        )
    return dataclasses.replace(adapter, shapes=shapes, tensors=tensors)


def _taken(
    stored: dict[str, Tensor], file: Path, part: AdaptedPart, kind: str, shape: tuple[int, int]
) -> Tensor:
    """Return A or B of one stored linear layer, and take it out of the tensors of the file."""
    name = f"{PREFIX}{part.name}.lora_{kind}.weight"
    if name not in stored:
        raise UserError(f"{file}: tensor {name} is missing; {CONFIG} names its layer as a target")
    tensor = stored.pop(name)
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{file}: tensor {name} has shape {list(tensor.shape)}, and with the r of {CONFIG} "
            f"this model needs {list(shape)}: is it an adapter for another base?"
        )
    return checked_numbers(tensor, name, file)


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
    """Write an adapter's directory; every rank of a run calls this function, and rank 0 writes.

    Args:
        masters: The whole master weights that are trained, by our names, and parameters of the base
            that the adapter replaces.
        tokenizer: The tokenizer to write, or None.
        overwrite: Replace an adapter or a model that is at `path`.
    """
    target = Path(path)
    scratch = world().from_first(
        "a folder to write into", lambda: begin_directory(target, overwrite)
    )

    def write() -> None:
        stored = stored_adapter(config, lora, masters)
        contents = adapter_json(config, lora, base, modules_to_save(config, stored))
        write_json(scratch / CONFIG, contents)
        save_file(stored, scratch / TENSORS)
        write_json(scratch / _OWN, {_DIGEST: digest, _TIED: config.tie_word_embeddings})
        if tokenizer is not None:
            save_tokenizer(scratch, tokenizer)
        publish_directory(scratch, target)

    with filling(scratch, target):
        world().from_first("an adapter's directory", write)


def stored_adapter(
    config: ModelConfig, lora: LoRA, masters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return master weights by the names that PEFT's files have, float32 on the CPU."""
    tensors: dict[str, Tensor] = {}
    left = dict(masters)
    for layer, parts in adapted_parts(config, lora.targets).items():
        a_name, b_name = adapter_names(layer)
        all_a = left.pop(a_name).split(lora.rank)
        all_b = left.pop(b_name).split([part.num_rows for part in parts])
        for part, a, b in zip(parts, all_a, all_b, strict=True):
            tensors[f"{PREFIX}{part.name}.lora_A.weight"] = a
            tensors[f"{PREFIX}{part.name}.lora_B.weight"] = b
    for name, master in left.items():
        (whole,) = stored_tensors(config)[name]
        tensors[PREFIX + whole.name] = master
        if name == _EMBEDDINGS and config.tie_word_embeddings:
            tensors[f"{PREFIX}lm_head.weight"] = master
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def adapter_json(
    config: ModelConfig, lora: LoRA, base: str | None, saved: list[str]
) -> dict[str, Any]:
    alpha = lora.alpha
    return {
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": saved or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": _target_names(config, lora),
        "task_type": "SEQ_CLS" if config.head == "score" else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.rslora,
    }


def _target_names(config: ModelConfig, lora: LoRA) -> list[str]:
    """Return target_modules as every reader takes them: last names, or whole ones if need be."""
    parts = adapted_parts(config, lora.targets)
    names = [part.name for of_layer in parts.values() for part in of_layer]
    last = tuple(sorted({name.rpartition(".")[2] for name in names}))
    same = adapted_parts(config, last)
    every = [part.name for of_layer in same.values() for part in of_layer]
    return list(last) if lora.targets in (ALL_LINEAR, (ALL_LINEAR,)) or every == names else names


PREFIX = "base_model.model."
_EMBEDDINGS, _HEAD = "embed.weight", "lm_head.weight"


def take_whole(
    stored: dict[str, Tensor],
    file: Path,
    contents: Mapping[str, Any],
    config: ModelConfig,
    tied: bool,
) -> tuple[dict[str, Tensor], bool]:
    """Return the parameters that an adapter replaces, and whether it unties the embedding."""
    saved = _modules_to_save(file, contents, stored, config)
    replaced = _taken_whole(stored, file, _untied(config))
    tied = tied or bool(contents.get("ensure_weight_tying"))
    return replaced, config.tie_word_embeddings and _unties(replaced, file, saved, tied)


def modules_to_save(config: ModelConfig, stored: Iterable[str]) -> list[str]:
    """Return `modules_to_save` of an adapter's tensors: last names, or whole ones if need be."""
    every = {part.name for parts in stored_tensors(_untied(config)).values() for part in parts}
    whole = {name for name in every if PREFIX + name in stored}
    modules = {name.rpartition(".")[0] for name in whole}
    last = {module.rpartition(".")[2] for module in modules}
    return sorted(last if {name for name in every if _is_saved(name, last)} == whole else modules)


def _untied(config: ModelConfig) -> ModelConfig:
    """Return the config of a model whose output head has a tensor of its own, if it has a head."""
    return dataclasses.replace(config, tie_word_embeddings=False)


def _modules_to_save(
    file: Path, contents: Mapping[str, Any], stored: Mapping[str, Tensor], config: ModelConfig
) -> tuple[str, ...]:
    """Return `modules_to_save`, all tensors of which the adapter has to hold."""
    names, config_file = contents.get("modules_to_save") or [], file.parent / "adapter_config.json"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{config_file}: modules_to_save = {shown_value(names)}: a list of names")
    for parts in stored_tensors(_untied(config)).values():
        for name in (part.name for part in parts):
            if _is_saved(name, names) and PREFIX + name not in stored:
                module = name.rpartition(".")[0]
                raise UserError(
                    f"{config_file}: modules_to_save names {module}, and {file.name} has no tensor "
                    f"{PREFIX}{name}: save the adapter again, or take the module off the list"
                )
    return tuple(names)


def _is_saved(tensor: str, modules_to_save: Iterable[str]) -> bool:
    """Return whether a tensor is of a saved module: its name ends so, without regard to dots."""
    parts = tensor.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts))]
    return any(module.endswith(name) for module in around for name in modules_to_save)


def _unties(replaced: dict[str, Tensor], file: Path, saved: Iterable[str], tied: bool) -> bool:
    """Return whether an adapter unties its base's pair; of a tied pair leave the embedding."""
    embedding, head = replaced.get(_EMBEDDINGS), replaced.get(_HEAD)
    if embedding is None and head is None:
        return False
    same = embedding is not None and head is not None and torch.equal(embedding, head)
    copies = _is_saved("model.embed_tokens.weight", saved) or _is_saved("lm_head.weight", saved)
    if copies and not tied and not same:
        return True
    if not same and embedding is not None and head is not None:
        raise UserError(
            f"{file}: embed_tokens and lm_head differ, and the adapter ties them: train it again, "
            "with both in modules_to_save and without ensure_weight_tying"
        )
    if head is not None:
        replaced[_EMBEDDINGS] = replaced.pop(_HEAD)
    return False


def _taken_whole(stored: dict[str, Tensor], file: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Return the parameters that the adapter replaces, by our names, and take them out."""
    replaced = {}
    for name, parts in stored_tensors(config).items():
        key = PREFIX + parts[0].name
        if len(parts) == 1 and not parts[0].linear_weight and key in stored:
            replaced[name] = stored.pop(key)
            if tuple(replaced[name].shape) != parts[0].shape:
                raise UserError(
                    f"{file}: tensor {key} has shape {list(replaced[name].shape)}, and the model "
                    f"needs {list(parts[0].shape)}"
                )
            checked_numbers(replaced[name], key, file)
    return replaced


def checked_numbers(tensor: Tensor, name: str, file: Path) -> Tensor:
    """Return a stored tensor as float32, once its values are known to be finite numbers."""
    if not tensor.is_floating_point():
        raise UserError(f"{file}: tensor {name} is {tensor.dtype}: a floating dtype is needed")
    if not bool(tensor.float().isfinite().all()):
        raise UserError(
            f"{file}: tensor {name} has a NaN or an infinity: take an earlier checkpoint of the "
            "adapter"
        )
    return tensor.float()


_MEASURED_LINEARS = 28


class MergedWeights(Mapping[str, Tensor]):
    """The parameters of a base with an adapter merged in, float32, made when they are asked for.

    Args:
        masters: The whole master weights that were trained: A and B of the adapter, and parameters
            that take the place of the base's.
    """

    def __init__(
        self,
        config: ModelConfig,
        lora: LoRA,
        base: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._base, self._masters, self._device = base, masters, device
        self._names, self._stored = list(parameter_shapes(config)), set(base)
        self._shapes = lora.shapes(config)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._masters:
            return self._masters[name].detach()
        stored = name if name in self._stored else "embed.weight"  # of a head that is untied
        weight = self._base[stored].to(self._device, torch.float32)
        layer = name.removesuffix(".weight")
        return weight + self.change(layer) if layer in self._shapes else weight

    def change(self, layer: str) -> Tensor:
        """Return what the adapter adds to a linear layer's weight, float32 [N, K]."""
        a, b = (self._masters[n].detach().to(self._device) for n in adapter_names(layer))
        return dense_change(self._shapes[layer], a, b)

    @property
    def adapted(self) -> list[str]:
        """The names of the linear layers with an adapter."""
        return list(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def dense_change(shape: AdapterShape, a: Tensor, b: Tensor) -> Tensor:
    """Return s B A of every part in its rows, float32 [N, K].

    Args:
        a: The master weight A [P * r, K].
        b: The master weight B [rows of all parts, r].
    """
    change = torch.zeros(shape.num_rows, shape.num_columns, device=a.device)
    counts = [count for _, count in shape.parts]
    parts = zip(shape.parts, a.split(shape.rank), b.split(counts), strict=True)
    for (first, count), part_a, part_b in parts:
        change[first : first + count] = (shape.scale * part_b) @ part_a
    return change


@dataclass(frozen=True)
class MergingLoss:
    """The loss of an adapter's change when the merged weights are rounded to a format.

    Attributes:
        error: The norm of the difference between the change of the rounded weights and the
            adapter's change, over the norm of the latter; 1 where rounding leaves nothing of it.
        changed: The share of the stored numbers that the adapter changes.
    """

    error: float
    changed: float


def merging_losses(base: Mapping[str, Tensor], merged: MergedWeights) -> dict[str, MergingLoss]:
    """Return the losses of merging into BF16 and into FP8, by format; none where nothing changes.

    They are measured on linear layers from the first to the last, 28 at most.
    """
    step = max(1, -(-len(merged.adapted) // _MEASURED_LINEARS))
    sums = {format: torch.zeros(4, dtype=torch.float64) for format in ("bfloat16", "fp8")}
    for layer in merged.adapted[::step]:
        change = merged.change(layer)
        before = base[f"{layer}.weight"].to(change.device, torch.float32)
        for format, total in sums.items():
            left, left_stored = _rounded(before, format)
            right, right_stored = _rounded(before + change, format)
            error = (right - left - change).double().square().sum()
            differ = (right_stored != left_stored).sum()
            numbers = (error, change.double().square().sum(), differ, change.numel())
            total += torch.tensor([float(n) for n in numbers], dtype=torch.float64)
    losses = {}
    for format, (error, norm, differ, count) in ((f, t.tolist()) for f, t in sums.items()):
        if norm:
            losses[format] = MergingLoss((error / norm) ** 0.5, differ / count)
    return losses


def _rounded(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return a weight rounded to a format, as float32, and the stored numbers: of FP8 the codes."""
    if format == "bfloat16":
        rounded = weight.bfloat16().float()
        return rounded, rounded
    quantized = quantize(weight, (FP8_BLOCK, FP8_BLOCK))
    return dequantize(quantized), quantized.codes.view(torch.uint8)
