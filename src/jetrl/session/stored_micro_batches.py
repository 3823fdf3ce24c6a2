"""The micro-batches of a reproduction's file, checked before a forward reads them.

A kernel does not look whether a token is in the vocabulary, or where a sequence ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from jetrl.errors import UserError
from jetrl.models.families import ModelConfig
from jetrl.models.hf_files import load_tensors
from jetrl.training.micro_batches import MicroBatch
from jetrl.types import STEM_BLOCK

_NAME = re.compile(r"(\d{1,9})\.(\w+)")
_BATCH = {
    "token_ids": torch.int64,
    "cu_seqlens": torch.int64,
    "loss_mask": torch.bool,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
    "sample_ids": torch.int64,
}
_STEMS = ("stem_ids", "stem_lengths")  # int64, for each sequence, both or none
_OF_TRAINED_TOKENS = ("before", "ref_logprobs", "values", "returns")  # float32, where there are any


def read_micro_batches(
    file: Path, config: ModelConfig, device: torch.device | str
) -> list[MicroBatch]:
    """Return the micro-batches of a file, on a device.

    Args:
        config: The model that reads the tokens.

    Raises:
        UserError: The file is damaged, or its tensors are no micro-batches for the model; the
            message names file and tensor.
    """
    numbered: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_tensors(file).items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in (*_BATCH, *_STEMS, *_OF_TRAINED_TOKENS):
            raise UserError(f"{file}: tensor {name!r}: no part of a micro-batch")
        numbered.setdefault(int(match[1]), {})[match[2]] = tensor
    if not numbered:
        raise UserError(f"{file}: no micro-batch")
    for number, tensors in numbered.items():
        problem = _problem(tensors, config)
        if problem:
            raise UserError(f"{file}: tensor {number}.{problem}")
    return [MicroBatch.from_tensors(numbered[number], device) for number in sorted(numbered)]


def _problem(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> str:
    """Return the first tensor of a micro-batch that is wrong and how, "" if none is."""
    for name, dtype in _BATCH.items():
        if name not in tensors:
            return f"{name} is missing"
        if tensors[name].dtype != dtype or tensors[name].dim() != 1:
            return f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not {dtype} [n]"
    tokens, ends = tensors["token_ids"], tensors["cu_seqlens"]
    if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
        return f"token_ids: not tokens of a vocabulary of {config.vocab_size}"
    lengths = ends.diff()
    whole = len(lengths) and int(ends[0]) == 0 and int(ends[-1]) == len(tokens)
    if not whole or int(lengths.min()) < 1 or int(lengths.max()) > config.max_position_embeddings:
        return f"cu_seqlens: not sequences of 1 to {config.max_position_embeddings} tokens"
    mask = tensors["loss_mask"]
    lengths_by_name = {
        **dict.fromkeys(("loss_mask", "rollout_logprobs", "advantages"), len(tokens)),
        "sample_ids": len(lengths),
    }
    for name, length in lengths_by_name.items():
        if len(tensors[name]) != length:
            return f"{name} has {len(tensors[name])} numbers, not {length}"
    if bool(mask[ends[:-1]].any()):
        return "loss_mask: trains on the first token of a sequence"
    problem = _stem_problem(tensors)
    if problem:
        return problem
    trained = int(mask.sum())
    for name in _OF_TRAINED_TOKENS:
        tensor = tensors.get(name)
        if tensor is not None and (tensor.dtype, tensor.shape) != (torch.float32, (trained,)):
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, not float32 [{trained}]"
    return ""


def _stem_problem(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return what is wrong with the stems that sequences share, "" if nothing is."""
    given = [name for name in _STEMS if name in tensors]
    if not given:
        return ""
    tokens, ends = tensors["token_ids"], tensors["cu_seqlens"]
    for name in _STEMS:
        stems = tensors.get(name)
        if stems is None or stems.dtype != torch.int64 or stems.shape != (len(ends) - 1,):
            return f"{name}: not int64 [{len(ends) - 1}]"
    stems_by_id: dict[int, list[int]] = {}
    for i, length in enumerate(tensors["stem_lengths"].tolist()):
        start, end = int(ends[i]), int(ends[i + 1])
        if length % STEM_BLOCK or not 0 <= length < end - start:
            return f"stem_lengths: {length} is no number of whole blocks within sequence {i}"
        stem = tokens[start : start + length].tolist()
        if stems_by_id.setdefault(int(tensors["stem_ids"][i]), stem) != stem:
            return f"stem_ids: sequence {i} does not begin with the tokens of its stem"
        if bool(tensors["loss_mask"][start : start + length].any()):
            return f"loss_mask: trains on the stem of sequence {i}"
    return ""
