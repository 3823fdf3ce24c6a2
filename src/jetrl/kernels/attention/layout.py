"""The inputs of the GPU attention kernels: stored keys and values, and lists of work.

`KeyValueCodes` names keys and values as they are stored, packed or in pages. `QueryTiles` cuts the
queries of a forward into tiles and names the blocks of keys they see; it is made once for a batch,
on the CPU, from plain integers, and serves every layer.

Shapes: T tokens, H query heads, G key-value heads, D head_dim, P pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.precision.quantize import FORMATS, CodeFormat

# The codes of the stored formats that have scales.
CODES: dict[str, CodeFormat] = {"fp8": "e4m3", "int8": "int8"}
BLOCK_KEYS = 64  # keys of one block, and tokens of one page: the kernels read a page as a block
TILE_ROWS = 192  # queries of a forward tile: three warpgroups of 64
BACKWARD_KEYS = 128  # keys of a dK, dV tile
BACKWARD_QUERIES = 64  # queries of a dQ tile
DS_TILE_BYTES = BACKWARD_KEYS * BACKWARD_QUERIES * 2  # bfloat16
STORED_DS_BYTES = 5 * 2**29  # kept at once, at most; 4 x 4096 tokens of 32 heads take 2.06 GiB


def stored_dtype(format: str) -> torch.dtype:
    """Return the dtype of keys or values that are stored as "fp8", "int8", "bf16" or "fp32"."""
    if format in CODES:
        return FORMATS[CODES[format]][0]
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[format]


@dataclass(frozen=True)
class KeyValueCodes:
    """The keys, already rotated, and the values of a packed batch or of pages, as they are stored.

    All tensors are contiguous and on one device. `...` is T for a packed batch and P, 64 for pages.

    Attributes:
        k: float8_e4m3fn or int8, or bfloat16 without scales, [..., G, D].
        k_scales: float32 [..., G], one scale for each token and head, or None with bfloat16.
        v: like k; FP8 beside INT8 is fine.
        v_scales: like k_scales.
    """

    k: Tensor
    k_scales: Tensor | None
    v: Tensor
    v_scales: Tensor | None

    def __post_init__(self) -> None:
        formats = ("bf16",) if self.k_scales is None else tuple(CODES)
        dtypes = [stored_dtype(format) for format in formats]
        expected = " or ".join(map(str, dtypes))
        for name, codes, scales in (("k", self.k, self.k_scales), ("v", self.v, self.v_scales)):
            right = codes.dtype in dtypes and codes.shape == self.k.shape
            if not right or not codes.is_contiguous():
                raise ValueError(
                    f"{name}: contiguous {expected} of shape {list(self.k.shape)} expected, got "
                    f"{codes.dtype} {list(codes.shape)} with strides {codes.stride()}"
                )
            if (scales is None) != (self.k_scales is None):
                raise ValueError("keys and values must both have scales, or neither")
            if scales is not None and (
                scales.dtype != torch.float32
                or scales.shape != codes.shape[:-1]
                or not scales.is_contiguous()
            ):
                raise ValueError(
                    f"{name} scales: contiguous float32 of shape {list(codes.shape[:-1])} "
                    f"expected, got {scales.dtype} {list(scales.shape)}"
                )
        if self.k.shape[-1] not in (64, 128):
            raise ValueError(f"head_dim must be 64 or 128 on the GPU, got {self.k.shape[-1]}")

    @property
    def scaled(self) -> bool:
        """True if keys and values are codes with scales, FP8 or INT8."""
        return self.k_scales is not None

    @property
    def num_heads(self) -> int:
        """The number of key-value heads, G."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """The size of a head, D."""
        return self.k.shape[-1]


def check_queries(q: Tensor, codes: KeyValueCodes) -> int:
    """Return H / G, the query heads that share a key-value head, once the queries fit the keys.

    Args:
        q: bfloat16 [T, H, D], contiguous and on the GPU of the keys.
        codes: the stored keys and values.

    Raises:
        ValueError: queries of another dtype, layout, device or size, with the values.
    """
    if q.dtype != torch.bfloat16 or q.ndim != 3 or not q.is_contiguous():
        raise ValueError(
            f"q: contiguous bfloat16 [T, H, D] expected, got {q.dtype} {list(q.shape)} "
            f"with strides {q.stride()}"
        )
    if q.device != codes.k.device or q.device.type != "cuda":
        raise ValueError(f"q on {q.device} and keys on {codes.k.device}: one GPU expected")
    heads, head_dim = q.shape[1:]
    group, rest = divmod(heads, codes.num_heads)
    if head_dim != codes.head_dim or rest or not 1 <= group <= 16:
        raise ValueError(
            f"{heads} query heads of {head_dim} do not fit {codes.num_heads} key-value heads of "
            f"{codes.head_dim}: at most 16 query heads share one, all of one size"
        )
    return group


@dataclass(frozen=True)
class QueryTiles:
    """The lists of work of attention over a flat list of queries, each list longest item first.

    The three lists of the backward are empty for pages. The gradients of raw scores, dS, are stored
    in tiles of 128 keys x 64 queries, of every head alike: in a sequence with n blocks of queries,
    block of keys j and block of queries m meet in its tile j * (n - j - 1) + m.

    Attributes:
        tiles: int32 [n, 4], the forward's: first query row, rows, position of the first row in its
            sequence, first staged block of its sequence.
        key_blocks: int32 [m, 2]: first key row (a row of the packed batch, or 64 * page), valid
            keys.
        key_tiles: int32 [., 3], the backward's of 128 keys: first key row, end row of its sequence,
            its first tile of dS.
        query_tiles: int32 [., 3], the backward's of 64 queries: first row of the sequence, first
            query row, end row of the sequence.
        stored_query_tiles: int32 [., 4], the backward's of 128 queries: the columns of query_tiles,
            then the first tile of dS of the sequence.
        stored_tiles: tiles of dS of one head.
        num_queries: rows of q.
        longest: keys of the longest context.
    """

    tiles: Tensor
    key_blocks: Tensor
    key_tiles: Tensor
    query_tiles: Tensor
    stored_query_tiles: Tensor
    stored_tiles: int
    num_queries: int
    longest: int

    @staticmethod
    def packed(cu_seqlens: Sequence[int], device: torch.device | str) -> QueryTiles:
        """Return the work of whole sequences packed end to end, whose queries see their own keys.

        Args:
            cu_seqlens: first row of each sequence, then the number of rows.
            device: of the lists.
        """
        starts, lengths = list(cu_seqlens[:-1]), _lengths(cu_seqlens)
        # A block may reach past its sequence, or past the batch: only its valid keys are read.
        blocks = [
            [s + b for b in range(0, n, BLOCK_KEYS)] for s, n in zip(starts, lengths, strict=True)
        ]
        return _build(lengths, lengths, blocks, starts, device)

    @staticmethod
    def paged(
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        device: torch.device | str,
    ) -> QueryTiles:
        """Return the work of prefill chunks, whose queries are the last tokens of their contexts.

        Args:
            query_lengths: queries of each sequence.
            context_lengths: tokens of each sequence, its queries included.
            block_tables: pages of 64 tokens that hold the keys of each context, in order.
            device: of the lists.

        Raises:
            ValueError: a sequence without queries, with more queries than tokens, or with too few
                pages.
        """
        # Pages take the place of blocks, so a sequence's keys may lie anywhere.
        blocks = []
        for i, (queries, context, table) in enumerate(
            zip(query_lengths, context_lengths, block_tables, strict=True)
        ):
            pages = -(-context // BLOCK_KEYS)
            if not 0 < queries <= context or len(table) < pages:
                raise ValueError(
                    f"sequence {i}: {queries} queries, {context} keys and {len(table)} pages"
                )
            blocks.append([page * BLOCK_KEYS for page in table[:pages]])
        return _build(query_lengths, context_lengths, blocks, None, device)


def _lengths(cu_seqlens: Sequence[int]) -> list[int]:
    """Return the lengths of packed sequences, none of which may be empty."""
    lengths = [b - a for a, b in itertools.pairwise(cu_seqlens)]
    if cu_seqlens[0] != 0 or min(lengths, default=1) < 1:
        raise ValueError(f"cu_seqlens must start at 0 and increase, got {list(cu_seqlens)[:9]}")
    return lengths


def _build(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    starts: Sequence[int] | None,
    device: torch.device | str,
) -> QueryTiles:
    """Cut sequences into the lists of work of `QueryTiles`, and copy these to the device.

    Args:
        query_lengths: queries of each sequence, its last tokens.
        context_lengths: tokens of each sequence.
        block_rows: first row of each block of 64 keys of each sequence.
        starts: first row of each sequence of a packed batch; None for pages, which have no
            backward.
        device: of the lists.
    """
    # The forward: tiles of 192 queries, and every sequence's blocks of keys in one flat list. A
    # tile's keys are the `position` + `rows` first ones of its sequence, which is also its work.
    tiles: list[tuple[int, int, int, int]] = []
    key_blocks: list[tuple[int, int]] = []
    row = 0  # of the queries
    for queries, context, rows in zip(query_lengths, context_lengths, block_rows, strict=True):
        for first in range(0, queries, TILE_ROWS):
            count = min(TILE_ROWS, queries - first)
            tiles.append((row + first, count, context - queries + first, len(key_blocks)))
        # Every block of a sequence but the last has 64 valid keys.
        key_blocks += [
            (start, min(BLOCK_KEYS, context - i * BLOCK_KEYS)) for i, start in enumerate(rows)
        ]
        row += queries
    tiles.sort(key=lambda t: -(t[1] + t[2]))

    # The backward. Block of keys j meets the blocks of queries from 2 j on, blocks - 2 j of them;
    # the sum of these counts over the blocks before j is where its tiles of dS begin. `first_tile`
    # is the tile that it shares with block of queries 2 j.
    key_tiles: list[tuple[int, int, int]] = []
    query_tiles: list[tuple[int, int, int]] = []
    stored_query_tiles: list[tuple[int, int, int, int]] = []
    stored = 0
    for start, n in zip(starts or (), query_lengths, strict=starts is not None):
        end, blocks = start + n, -(-n // BACKWARD_QUERIES)
        per_key = BACKWARD_KEYS // BACKWARD_QUERIES
        for j, first_row in enumerate(range(start, end, BACKWARD_KEYS)):
            first_tile = stored + j * (blocks - j - 1) + per_key * j
            key_tiles.append((first_row, end, first_tile))
            stored_query_tiles.append((start, first_row, end, stored))
        query_tiles += [(start, i, end) for i in range(start, end, BACKWARD_QUERIES)]
        # Block of keys j has blocks - 2 j tiles; their sum over all j.
        tall = -(-n // BACKWARD_KEYS)
        stored += tall * blocks - (tall - 1) * tall
    # Longest first: keys by their distance to the end of the sequence (the queries that see them),
    # queries by their distance from its start (the keys that they see).
    key_tiles.sort(key=lambda t: t[0] - t[1])
    query_tiles.sort(key=lambda t: t[0] - t[1])
    stored_query_tiles.sort(key=lambda t: t[0] - t[1])

    # From pinned memory, so that the host does not wait for the copies.
    def upload(records: Sequence[tuple[int, ...]], width: int) -> Tensor:
        host = torch.tensor(records, dtype=torch.int32).reshape(-1, width)
        on_gpu = torch.device(device).type == "cuda"
        return (host.pin_memory() if on_gpu else host).to(device, non_blocking=True)

    return QueryTiles(
        tiles=upload(tiles, 4),
        key_blocks=upload(key_blocks, 2),
        key_tiles=upload(key_tiles, 3),
        query_tiles=upload(query_tiles, 3),
        stored_query_tiles=upload(stored_query_tiles, 4),
        stored_tiles=stored,
        num_queries=row,
        longest=max(context_lengths, default=0),
    )
