"""Inputs of the GPU attention kernels: stored keys and values, and work lists.

Shapes: T tokens, H query heads, G key-value heads, D head_dim, P pages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS, Run, backward_lists
from jetrl.kernels.attention.padded_lists import PaddedLists, uploaded
from jetrl.precision.formats import BF16, FP8, INT8, Format, key_and_value_formats

BLOCK_KEYS = 64  # keys per block, and tokens per page: kernels read a page as a block
SPLIT_KEYS = 1024  # keys per split of a context, unless the plan sets another number
TILE_ROWS = 192  # queries per forward tile: three warpgroups of 64


@dataclass(frozen=True)
class KeyValueCodes:
    """Stored keys (already rotated) and values of a packed batch or of pages.

    All tensors are contiguous and on one device. `...` is T for a packed batch and P, 64 for pages.

    Attributes:
        k: float8_e4m3fn or int8, or bfloat16 without scales, [..., G, D].
        k_scales: float32 [..., G], or None with bfloat16.
        v: like k, but FP8 and INT8 can be mixed.
    """

    k: Tensor
    k_scales: Tensor | None
    v: Tensor
    v_scales: Tensor | None

    def __post_init__(self) -> None:
        scaled = self.k_scales is not None
        dtypes = [format.dtype for format in ((FP8, INT8) if scaled else (BF16,))]
        for codes, scales in ((self.k, self.k_scales), (self.v, self.v_scales)):
            assert codes.dtype in dtypes, f"{codes.dtype}, scales: {scaled}"
            assert (codes.shape, codes.is_contiguous()) == (self.k.shape, True)
            assert (scales is not None) == scaled, "both keys and values need scales, or neither"
            if scales is not None:
                assert (scales.dtype, scales.shape) == (torch.float32, codes.shape[:-1])
                assert scales.is_contiguous()

    @staticmethod
    def empty(
        tokens: int, groups: int, head_dim: int, kv_format: str, device: torch.device | str
    ) -> KeyValueCodes:
        """Return an uninitialized cache for training, one slot per token: codes [T, G, D]."""

        def unset(format: Format) -> tuple[Tensor, Tensor | None]:
            codes = torch.empty(tokens, groups, head_dim, dtype=format.dtype, device=device)
            if format.code is None:
                return codes, None
            return codes, codes.new_empty(codes.shape[:2], dtype=torch.float32)

        (k, k_scales), (v, v_scales) = map(unset, key_and_value_formats(kv_format))
        return KeyValueCodes(k=k, k_scales=k_scales, v=v, v_scales=v_scales)

    @property
    def scaled(self) -> bool:
        return self.k_scales is not None

    @property
    def num_heads(self) -> int:
        """The number of key-value heads, G."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1]


def check_queries(q: Tensor, codes: KeyValueCodes) -> int:
    """Check queries, bfloat16 [T, H, D], against the keys and the kernels' limits; return H / G."""
    heads, head_dim = q.shape[1:]
    group, rest = divmod(heads, codes.num_heads)
    assert (q.dtype, q.ndim, q.is_contiguous()) == (torch.bfloat16, 3, True)
    assert q.device.type == codes.k.device.type == "cuda"
    assert (head_dim, rest) == (codes.head_dim, 0), f"{heads} query heads of {head_dim}"
    assert head_dim in (64, 128), f"heads of {head_dim}"
    assert 1 <= group <= 16, f"{group} query heads per key-value head, maximum 16"
    return group


@dataclass(frozen=True)
class QueryTiles:
    """Attention work lists for a flat list of queries, each sorted longest item first.

    A sequence of a packed batch is one or two runs of rows: a stem, the shared first tokens of
    several sequences, followed by a branch, the rest of one of them. A query attends to the keys of
    its own run up to itself; in a branch, it also attends to the whole stem. The length of a stem
    is a multiple of BACKWARD_KEYS. The lists are built once per batch, on the CPU, for all layers.

    The backward lists (`attention.backward_lists`) are empty for pages. The gradient of raw scores,
    dS, is stored per head in tiles of 128 keys x 64 queries, keys first. In a run with n blocks of
    queries, block of keys j and block of queries m have tile j * (n - j - 1) + m. Block of keys j
    of a stem and block of queries b, counted over all n blocks of its branches, have tile j * n + b
    after the tiles of the stem itself.

    Attributes:
        tiles: int32 [n, 6], for the forward: first query row, number of rows, position of the first
            row in its sequence; then, in staged blocks of keys: first block of the run minus the
            number of stem blocks, number of stem blocks, first stem block.
        key_blocks: int32 [m, 2]: first key row (in the packed batch, or 64 * page), valid keys.
        key_tiles: int32 [., 7], blocks of 128 keys: first key row, end row of the run, first dS
            tile (-1 for later parts of a stem, which omit the queries of the run); for a stem:
            first entry in `branches`, number of entries, first dS tile with branches; then the
            index of its sums among all parts, -1 if not a part.
        divided_key_tiles: int32 [., 3], blocks of 128 stem keys whose queries are divided into
            parts: first key row, index of the sums of the first part, number of parts.
        query_tiles: int32 [., 5], blocks of 64 queries: first row of the run, first query row, end
            row of the run, first row and end row of the stem.
        stored_query_tiles: int32 [., 8], blocks of 128 queries: first row of the run, first query
            row, end row of the run, first dS tile of the run; then first row of the stem, its
            number of blocks of keys, first dS tile with the stem, and the tile stride between
            blocks of stem keys.
        branches: int32 [., 3], branches of each stem: first query row, end row of the run, index of
            the first block of 64 queries, counted over all branches of the stem.
        runs: the runs of a packed batch, on the CPU.
    """

    tiles: Tensor
    key_blocks: Tensor
    key_tiles: Tensor
    divided_key_tiles: Tensor
    query_tiles: Tensor
    stored_query_tiles: Tensor
    branches: Tensor
    stored_tiles: int
    num_parts: int
    num_queries: int
    longest: int
    runs: Sequence[Run] = ()

    @functools.cached_property
    def padded(self) -> PaddedLists:
        """The work lists of the backward of integer attention, built when first used."""
        return PaddedLists.of(self.runs, self.tiles.device)

    @property
    def shared(self) -> bool:
        return len(self.branches) > 0

    @staticmethod
    def packed(
        cu_seqlens: Sequence[int], device: torch.device | str, stem_of: Sequence[int] | None = None
    ) -> QueryTiles:
        """Return the work lists of a packed batch, where the queries are all rows of all runs.

        Args:
            cu_seqlens: first row of each run, then the total number of rows.
            stem_of: index of the earlier run that is the stem of each run; -1 for stems and whole
                sequences. None: all runs are whole sequences.
        """
        starts, lengths = list(cu_seqlens[:-1]), [b - a for a, b in itertools.pairwise(cu_seqlens)]
        assert (cu_seqlens[0], min(lengths, default=1) > 0) == (0, True), "a run is empty"
        stems = [-1] * len(lengths) if stem_of is None else list(stem_of)
        for i, stem in enumerate(stems):
            assert stem < i, "a stem must be an earlier run"
            if stem >= 0:
                assert (stems[stem], lengths[stem] % BACKWARD_KEYS) == (-1, 0), "not a stem"
        # A block may extend past its run, or past the batch: only valid keys are read.
        blocks = [
            [s + b for b in range(0, n, BLOCK_KEYS)] for s, n in zip(starts, lengths, strict=True)
        ]
        contexts = [
            n + (lengths[stem] if stem >= 0 else 0) for n, stem in zip(lengths, stems, strict=True)
        ]
        runs = [Run(s, n, stem) for s, n, stem in zip(starts, lengths, stems, strict=True)]
        return _build(lengths, contexts, blocks, runs, device)

    @staticmethod
    def paged(
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        device: torch.device | str,
    ) -> QueryTiles:
        """Return the work lists of prefill chunks, whose queries are the last tokens of a context.

        Args:
            context_lengths: tokens per sequence, including its queries.
            block_tables: pages of 64 tokens with the keys of each context, in order.
        """
        # Each page is a block, so the keys of a sequence can be anywhere.
        blocks = []
        for i, (queries, context, table) in enumerate(
            zip(query_lengths, context_lengths, block_tables, strict=True)
        ):
            pages = -(-context // BLOCK_KEYS)
            assert 0 < queries <= context, f"sequence {i}: {queries} queries, {context} keys"
            assert len(table) >= pages, f"sequence {i}: {len(table)} pages"
            blocks.append([page * BLOCK_KEYS for page in table[:pages]])
        return _build(query_lengths, context_lengths, blocks, None, device)


def _build(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    runs: Sequence[Run] | None,
    device: torch.device | str,
) -> QueryTiles:
    """Build the work lists of `QueryTiles`, and copy them to the device."""
    # Forward: tiles of 192 queries, and the blocks of keys of all sequences in one flat list. A
    # tile attends to the first `position` + `rows` keys of its sequence, which is also its cost.
    tiles: list[tuple[int, ...]] = []
    key_blocks: list[tuple[int, int]] = []
    first_blocks: list[int] = []
    row = 0  # query row
    for i, (queries, context, rows) in enumerate(
        zip(query_lengths, context_lengths, block_rows, strict=True)
    ):
        stem = -1 if runs is None else runs[i].stem
        before = 0 if stem < 0 else len(block_rows[stem])
        stem_block = 0 if stem < 0 else first_blocks[stem]
        first_blocks.append(len(key_blocks))
        for first in range(0, queries, TILE_ROWS):
            count = min(TILE_ROWS, queries - first)
            position = context - queries + first
            own = len(key_blocks) - before
            tiles.append((row + first, count, position, own, before, stem_block))
        # All blocks of a sequence except the last have 64 valid keys.
        own_keys = context - before * BLOCK_KEYS
        key_blocks += [
            (start, min(BLOCK_KEYS, own_keys - i * BLOCK_KEYS)) for i, start in enumerate(rows)
        ]
        row += queries
    tiles.sort(key=lambda t: -(t[1] + t[2]))
    backward = backward_lists(runs or ())

    def upload(records: Sequence[tuple[int, ...]], width: int) -> Tensor:
        return uploaded(records, width, device)

    return QueryTiles(
        tiles=upload(tiles, 6),
        key_blocks=upload(key_blocks, 2),
        key_tiles=upload(backward.key_tiles, 7),
        divided_key_tiles=upload(backward.divided_key_tiles, 3),
        query_tiles=upload(backward.query_tiles, 5),
        stored_query_tiles=upload(backward.stored_query_tiles, 8),
        branches=upload(backward.branches, 3),
        stored_tiles=backward.stored_tiles,
        num_parts=backward.num_parts,
        num_queries=row,
        longest=max(context_lengths, default=0),
        runs=runs or (),
    )


@dataclass(frozen=True)
class SequenceQueries:
    """The rows of the queries of B sequences, among R rows of a decode forward.

    The queries of a sequence are consecutive rows, and its last query is at its last key.

    Attributes:
        counts: int32 [B], queries per sequence, 0 to `most`.
        first: int32 [B], row of its first query.
        keys: int32 [R], number of keys that the last query of the same sequence attends to; 0 for
            padding.
    """

    counts: Tensor
    first: Tensor
    keys: Tensor
    most: int
