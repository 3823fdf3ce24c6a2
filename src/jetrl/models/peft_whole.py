"""The modules of PEFT's adapters that are saved whole: embedding, head and norms.

PEFT copies each module of `modules_to_save`, and so unties an embedding from its head: with
`embed_tokens` alone the head stays the base's, unless `ensure_weight_tying` is set. Modules that
are stored without being in that list share their tensor, as they do in the base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import shown_value
from jetrl.models.families import ModelConfig
from jetrl.models.hf_names import stored_tensors

PREFIX = "base_model.model."
_EMBEDDINGS, _HEAD = "embed.weight", "lm_head.weight"


def take_whole(
    stored: dict[str, Tensor],
    file: Path,
    contents: Mapping[str, Any],
    config: ModelConfig,
    tied: bool,
) -> tuple[dict[str, Tensor], bool]:
    """Return the parameters that an adapter replaces, and whether it unties the embedding.

    Raises:
        UserError: A module of `modules_to_save` is not stored; a tensor has another shape or is not
            finite; a pair that is to be tied differs.
    """
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
