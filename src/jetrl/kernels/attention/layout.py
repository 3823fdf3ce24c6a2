"""The inputs of the GPU attention kernels: stored keys and values, and lists of work.

Shapes: T tokens, H query heads, G key-value heads, D head_dim, P pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS, Run, backward_lists
from jetrl.precision.formats import BF16, FP8, INT8, Format, key_and_value_formats

BLOCK_KEYS = 64  # keys of one block, and tokens of one page: the kernels read a page as a block
TILE_ROWS = 192  # queries of a forward tile: three warpgroups of 64


@dataclass(frozen=True)
class KeyValueCodes:
    """The keys, already rotated, and the values of a packed batch or of pages, as they are stored.

    All tensors are contiguous and on one device. `...` is T for a packed batch and P, 64 for pages.

    Attributes:
        k: float8_e4m3fn or int8, or bfloat16 without scales, [..., G, D].
        k_scales: float32 [..., G], or None with bfloat16.
        v: like k; FP8 next to INT8 is fine.
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
            assert (scales is not None) == scaled, "keys and values both have scales, or neither"
            if scales is not None:
                assert (scales.dtype, scales.shape) == (torch.float32, codes.shape[:-1])
                assert scales.is_contiguous()

    @staticmethod
    def empty(
        tokens: int, groups: int, head_dim: int, kv_format: str, device: torch.device | str
    ) -> KeyValueCodes:
        """Return an unset cache, one slot per token, for training: codes [T, G, D]."""

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
    """Check that queries, bfloat16 [T, H, D], fit the keys and Hopper's kernels; return H / G."""
    heads, head_dim = q.shape[1:]
    group, rest = divmod(heads, codes.num_heads)
    assert (q.dtype, q.ndim, q.is_contiguous()) == (torch.bfloat16, 3, True)
    assert q.device.type == codes.k.device.type == "cuda"
    assert (head_dim, rest) == (codes.head_dim, 0), f"{heads} query heads of {head_dim}"
    assert head_dim in (64, 128), f"heads of {head_dim}"
    assert 1 <= group <= 16, f"{group} query heads share a key-value head: at most 16 can"
    return group


@dataclass(frozen=True)
class QueryTiles:
    """The lists of work of attention over a flat list of queries, each list longest item first.

    A sequence of a packed batch is one run of rows, or two: a stem, the tokens with which several
    sequences begin, and after it a branch, the rest of one of them. A query sees the keys of its
    own run up to itself, and of a branch the whole stem before them. Stems have whole blocks of
    BACKWARD_KEYS rows. The lists are made once per batch, on the CPU, and serve every layer.

    The lists of the backward (`attention.backward_lists`) are empty for pages. The gradients of raw
    scores, dS, are stored in tiles of 128 keys x 64 queries, keys first, for each head: in a run
    with n blocks of queries, block of keys j and block of queries m meet in its tile
    j * (n - j - 1) + m. Block of keys j of a stem and block of queries b, counted over all its
    branches' n blocks, meet in tile j * n + b of those that come after the stem's own.

    Attributes:
        tiles: int32 [n, 6], the forward's: first query row, rows, position of the first row in its
            sequence; then staged blocks of keys: the first one of the run, less the blocks of its
            stem; the blocks of the stem, and the first of these.
        key_blocks: int32 [m, 2]: first key row (of the packed batch, or 64 * page), valid keys.
        key_tiles: int32 [., 7], the backward's of 128 keys: first key row, end row of its run, its
            first tile of dS (-1 in the later parts of a stem's, which leave out the run's own
            queries); then, of a stem: the first entry of `branches`, the number of entries, its
            first tile of dS with branches; then the place of its sums among those of all parts, -1
            if not a part.
        divided_key_tiles: int32 [., 3], blocks of 128 keys of stems whose queries are divided into
            parts: first key row, place of the first part's sums, number of parts.
        query_tiles: int32 [., 5], the backward's of 64 queries: first row of the run, first query
            row, end row of the run, first row and end row of the stem.
        stored_query_tiles: int32 [., 8], the backward's of 128 queries: first row of the run, first
            query row, end row of the run, first tile of dS of the run; then the first row of the
            stem, its blocks of keys, the first tile of dS with the stem, and the tiles from one of
            the stem's blocks of keys to the next.
        branches: int32 [., 3], each stem's branches: first query row, end row of the run, number of
            its first block of 64 queries in the stem's count.
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

    @property
    def shared(self) -> bool:
        return len(self.branches) > 0

    @staticmethod
    def packed(
        cu_seqlens: Sequence[int], device: torch.device | str, stem_of: Sequence[int] | None = None
    ) -> QueryTiles:
        """Return the work of runs packed end to end, whose queries see their own keys.

        Args:
            cu_seqlens: first row of each run, then the number of rows.
            stem_of: for each run the earlier run that is its stem; -1 for stems and whole
                sequences. None: all are whole sequences.
        """
        starts, lengths = list(cu_seqlens[:-1]), [b - a for a, b in itertools.pairwise(cu_seqlens)]
        assert (cu_seqlens[0], min(lengths, default=1) > 0) == (0, True), "an empty run"
        stems = [-1] * len(lengths) if stem_of is None else list(stem_of)
        for i, stem in enumerate(stems):
            assert stem < i, "a stem is an earlier run"
            if stem >= 0:
                assert (stems[stem], lengths[stem] % BACKWARD_KEYS) == (-1, 0), "of whole blocks"
        # A block may reach past its run, or past the batch: only its valid keys are read.
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
        """Return the work of prefill chunks, whose queries are the last tokens of their contexts.

        Args:
            context_lengths: tokens of each sequence, its queries included.
            block_tables: pages of 64 tokens that hold the keys of each context, in order.
        """
        # Pages take the place of blocks, so a sequence's keys may lie anywhere.
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
    """Cut sequences into the lists of work of `QueryTiles`, and copy these to the device."""
    # The forward: tiles of 192 queries, and every sequence's blocks of keys in one flat list. A
    # tile's keys are the `position` + `rows` first ones of its sequence, which is also its work.
    tiles: list[tuple[int, ...]] = []
    key_blocks: list[tuple[int, int]] = []
    first_blocks: list[int] = []
    row = 0  # of the queries
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
        # Every block of a sequence but the last has 64 valid keys.
        own_keys = context - before * BLOCK_KEYS
        key_blocks += [
            (start, min(BLOCK_KEYS, own_keys - i * BLOCK_KEYS)) for i, start in enumerate(rows)
        ]
        row += queries
    tiles.sort(key=lambda t: -(t[1] + t[2]))
    backward = backward_lists(runs or ())

    # From pinned memory, so that the host does not wait for the copies.
    def upload(records: Sequence[tuple[int, ...]], width: int) -> Tensor:
        host = torch.tensor(records, dtype=torch.int32).reshape(-1, width)
        on_gpu = torch.device(device).type == "cuda"
        return (host.pin_memory() if on_gpu else host).to(device, non_blocking=True)

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
    )


@dataclass(frozen=True)
class SequenceQueries:
    """The places of the queries of B sequences among the R rows of a forward of decode.

    A sequence's queries are consecutive rows, and its last query is at its last key.

    Attributes:
        counts: int32 [B], the queries of each sequence, 0 to `most`.
        first: int32 [B], the row of its first query.
        keys: int32 [R], the keys that the last query of the row's sequence sees; 0 for padding.
    """

    counts: Tensor
    first: Tensor
    keys: Tensor
    most: int
