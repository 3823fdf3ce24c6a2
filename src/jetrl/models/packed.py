"""The inputs of a forward: sequences packed end to end, and stems, which several share.

The samples of a group have one prompt. A token's activations depend only on the tokens before it,
so the prompt's are the same in each sample, to the bit, and one copy serves all: the stem. The rest
of a sequence is a branch. Stems have whole blocks of 128 tokens, so that attention's blocks of keys
begin at the same positions as in the whole sequence; the rest of a prompt belongs to each branch.

A batch keeps its sequences whole (`types.Batch`). `Stems` holds the rows that a forward computes,
and the places of the other rows' results.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.types import Batch


def as_token_ids(tokens: Iterable[int], where: str, vocab_size: int) -> list[int]:
    """Return the token ids in a list, an array or a tensor; a UserError names what is none."""
    try:
        token_ids = [operator.index(token) for token in tokens]
    except TypeError:
        raise UserError(
            f"{where}: {tokens!r:.80} is not a list of token ids (`generate` takes a text or a "
            "Prompt, too)"
        ) from None
    for each in token_ids:
        if not 0 <= each < vocab_size:
            raise UserError(f"{where}: token id {each} is outside the vocabulary [0, {vocab_size})")
    return token_ids


@dataclass(frozen=True)
class ImageRows:
    """The embeddings of a forward that are features of images.

    Attributes:
        places: int64 [N], rows of the forward, ascending.
        features: [N, D], in the dtype of activations; [N, (1 + k) * D] if the outputs of the first
            k decoder layers get features too (DeepStack).
        turns: int64 [N, R / 2], the rotary position of each pair of channels (M-RoPE); None: all
            pairs have the token's.
    """

    places: Tensor
    features: Tensor
    turns: Tensor | None = None

    def among(self, rows: Tensor, count: int) -> ImageRows:
        """Return what is left in a forward of the chosen `rows`, int64 [C], of `count` rows."""
        index = torch.full((count,), -1, device=rows.device)
        index[rows] = torch.arange(len(rows), device=rows.device)
        places = index[self.places]
        kept = places >= 0
        turns = None if self.turns is None else self.turns[kept]
        return ImageRows(places[kept], self.features[kept], turns)

    def to(self, device: torch.device) -> ImageRows:
        """Return the rows on a device, without waiting for it."""
        turns = None if self.turns is None else upload(self.turns, device)
        return ImageRows(upload(self.places, device), upload(self.features, device), turns)


@dataclass(frozen=True)
class ForwardInputs:
    """All that the decoder reads of the tokens of a forward; `types.PromptInputs` on the host.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], each token's rotary position.
        images: The tokens whose embeddings are features of images; None without any.
    """

    token_ids: Tensor
    positions: Tensor
    images: ImageRows | None = None

    @staticmethod
    def of(batch: Batch, images: ImageRows | None = None) -> ForwardInputs:
        """Return the inputs of all tokens of a packed batch, on the CPU, with its image rows."""
        assert (images is None) == (not batch.images), "the rows of a batch's images"
        token_ids, positions = batch.token_ids, batch.positions
        return ForwardInputs(torch.from_numpy(token_ids), torch.from_numpy(positions), images)

    @staticmethod
    def packed(token_ids: Tensor, cu_seqlens: Tensor) -> ForwardInputs:
        """Return the inputs of tokens, int64 [T], of texts that start at cu_seqlens, [S + 1]."""
        return ForwardInputs(token_ids, token_positions(cu_seqlens))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, rows: Tensor) -> ForwardInputs:
        images = None if self.images is None else self.images.among(rows, len(self))
        return ForwardInputs(self.token_ids[rows], self.positions[rows], images)

    def to(self, device: torch.device) -> ForwardInputs:
        """Return the inputs on a device, without waiting for it."""
        images = None if self.images is None else self.images.to(device)
        token_ids, positions = upload(self.token_ids, device), upload(self.positions, device)
        return ForwardInputs(token_ids, positions, images)

    def embedded(self, x: Tensor) -> Tensor:
        """Return embeddings [T, D] of the tokens with the features of images in their places."""
        images = self.images
        if images is None:
            return x
        return x.index_copy(0, images.places, images.features[:, : x.shape[-1]])

    def deepened(self, x: Tensor, layer: int) -> Tensor:
        """Return x [T, D] plus the features of images for the output of a decoder layer."""
        first, images = (layer + 1) * x.shape[-1], self.images
        if images is None or first >= images.features.shape[-1]:
            return x
        return x.index_add(0, images.places, images.features[:, first : first + x.shape[-1]])

    def turned(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions [T] and the table of angles [positions, 2, R / 2] that they index.

        With the turns of images it is a table of the T tokens, made of rows of the given one.
        """
        images = self.images
        if images is None or images.turns is None:
            return self.positions, table
        pairs = torch.arange(table.shape[-1], device=table.device)
        rows = table[images.turns, :, pairs].transpose(1, 2)
        own = table[self.positions].index_copy(0, images.places, rows)
        return torch.arange(len(own), device=own.device), own


def pack(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[ForwardInputs, Tensor]:
    """Return texts end to end, and their starts and T: int64 [S + 1]."""
    cu_seqlens = torch.tensor([0, *map(len, sequences)], device=device).cumsum(0)
    token_ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    return ForwardInputs.packed(token_ids, cu_seqlens), cu_seqlens


def token_positions(cu_seqlens: Tensor) -> Tensor:
    """Return each token's position in its sequence, int64 [T], on the device of cu_seqlens."""
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return torch.arange(len(starts), device=cu_seqlens.device) - starts


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; pinned memory keeps the host from waiting for a GPU."""
    if host.device.type != "cpu" or device.type == "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Stems:
    """The rows of a packed batch that a forward computes if sequences share stems.

    A run is a stem, a branch or a whole sequence, computed row after row. Legend: T rows of the
    batch, C rows that are computed, R runs.

    Attributes:
        rows: int64 [C] on the CPU, the batch's rows that are computed, run after run.
        row_of: int64 [T] on the CPU, the computed row that holds each row of the batch.
        run_starts: The first computed row of each run, and C; R + 1 numbers.
        stem_of: The number of each run's stem among the runs, -1 without one; R numbers.

    Two sequences [a b c] and [a b d e] that share two tokens (if STEM_BLOCK were 2):

        Stems(rows=[0, 1, 2, 5, 6], row_of=[0, 1, 2, 0, 1, 3, 4], run_starts=[0, 2, 3, 5],
              stem_of=[-1, 0, 0])
    """

    rows: Tensor
    row_of: Tensor
    run_starts: Sequence[int]
    stem_of: Sequence[int]

    @staticmethod
    def of(batch: Batch) -> Stems | None:
        """Return the stems of a batch; None if no sequences share one."""
        if batch.stem_ids is None or batch.stem_lengths is None:
            return None
        if batch.num_computed_tokens == batch.num_tokens:
            return None
        stems, counts = np.unique(batch.stem_ids, return_counts=True)
        shared = set(stems[counts > 1].tolist())
        row_of = np.empty(batch.num_tokens, dtype=np.int64)
        rows: list[np.ndarray] = []
        run_starts, stem_of = [0], []
        run_of_stem: dict[int, int] = {}

        def add_run(first: int, end: int, stem: int) -> None:
            row_of[first:end] = np.arange(run_starts[-1], run_starts[-1] + end - first)
            rows.append(np.arange(first, end))
            run_starts.append(run_starts[-1] + end - first)
            stem_of.append(stem)

        for i, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
            stem, length = int(batch.stem_ids[i]), int(batch.stem_lengths[i])
            if stem not in shared or length == 0:
                add_run(start, end, -1)
                continue
            if stem not in run_of_stem:
                run_of_stem[stem] = len(stem_of)
                add_run(start, start + length, -1)
            first = run_starts[run_of_stem[stem]]
            row_of[start : start + length] = np.arange(first, first + length)
            add_run(start + length, end, run_of_stem[stem])
        computed = torch.from_numpy(np.concatenate(rows))
        return Stems(computed, torch.from_numpy(row_of), run_starts, stem_of)
