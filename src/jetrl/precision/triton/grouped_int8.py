"""Grouped INT8 products of experts in plain Triton, for compute capability 8.0 and later.

    FProp, DGrad   rows of a group times its expert's matrix: `int8_grouped_matmul`
    WGrad          the sum over a group's rows, of codes along them: `add_int8_grouped_wgrad`

Group sizes stay on the device. A grid covers the largest number of tiles that any sizes can have;
each program finds its group by the ends of all groups, and those past the last tile end at once. So
the host never waits, and CUDA graphs can capture the products. Rows are read through the tokens of
sorted rows, so X is never copied in their order. With few rows per expert, tiles are small, and the
matrices of experts with rows are read at the bandwidth of memory, others not at all.

Codes along tokens have a scale per feature and group: one pass writes the maxima, one the codes. A
group begins at a multiple of 128, and is padded with zeros. All sums are integers, so tiles change
no bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.groups import Groups
from jetrl.precision.quantize import FORMATS, INT8_CODES, ROTATION, QTensor
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.portable_int8 import (
    OPTIONS,
    Tile,
    int8_dot,
    load_scales,
    place,
    pointers,
    table_of,
    within,
)
from jetrl.precision.triton.quantize import FLOOR_BITS, abs_bits, scale_and_multiplier

# Tiles by the largest mean number of rows per expert (0: more), about half of a tile's rows, since
# groups differ in size. The small ones fit in 99 KB of shared memory.
_LARGE = {
    0: Tile(128, 128, 128, 8, 3),
    160: Tile(64, 256, 128, 8, 3),
    40: Tile(64, 128, 128, 4, 4),
    20: Tile(32, 64, 256, 4, 4),
    8: Tile(16, 64, 256, 4, 4),
}
_SMALL = {
    0: Tile(128, 256, 64, 8, 4),
    160: Tile(64, 128, 64, 4, 4),
    40: Tile(64, 64, 128, 4, 4),
    20: Tile(32, 32, 256, 4, 4),
    8: Tile(16, 32, 256, 4, 4),
}
_PIECES = {**_SMALL, 0: Tile(128, 128, 64, 8, 4)}
TILES = {"large": _LARGE, "small": _SMALL, "pieces": _PIECES}
WGRAD = {
    "large": Tile(128, 128, 128, 8, 3, registers=128),
    "small": Tile(128, 256, 64, 8, 4),
    "pieces": _PIECES[0],
}
SIDE = 8  # rows of tiles that share columns in L2
_ALONG = tl.constexpr(128)  # rows of a group are padded to a multiple
_FEATURES = 128  # per program that quantizes 64 rows along tokens
_TOP = tl.constexpr(FORMATS[INT8_CODES][1])
_FLOOR = tl.constexpr(FLOOR_BITS)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it rounds to an integer
_MAGIC_BITS = tl.constexpr(0x4B400000)


@dataclass(frozen=True)
class TokenCodes:
    """Codes along the rows of each group.

    Attributes:
        codes: int8 [C, P], each group padded with zeros to a multiple of 128; undefined past the
            last group.
        scales: float32 [E, C], of each feature in a group; 0 without rows.
    """

    codes: Tensor
    scales: Tensor


def tile_class(rows: int, experts: int) -> int:
    """Return the key of a table of tiles by the mean number of rows per expert that has rows."""
    mean = cdiv(rows, max(1, min(rows, experts)))
    return min((size for size in _LARGE if mean <= size), default=0)


def has_few_rows(rows: int, experts: int) -> bool:
    """Return whether tiles of 64 rows are for this mean number of rows per expert, not of 128."""
    return cdiv(rows, min(rows, experts)) <= 40


def most_tiles(rows: int, experts: int, size: int) -> int:
    """Return the largest number of tiles of `size` rows, whatever the sizes of groups are."""
    return (rows + min(rows, experts) * (size - 1)) // size


def strips_of(tile: Tile) -> int:
    """Return the number of strips in which a tile is stored."""
    return 4 if tile.columns > 64 else 1


@triton.jit
def tiles_of_groups(ends_ptr, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the number of tiles per group, int32 [EXPERTS], and its sum up to each group."""
    numbers = tl.arange(0, EXPERTS)
    inside = numbers < experts
    ends = tl.load(ends_ptr + numbers, mask=inside, other=0)
    starts = tl.load(ends_ptr + numbers - 1, mask=inside & (numbers > 0), other=0)
    tiles = tl.cdiv(ends - starts, ROWS)
    return tiles, tl.cumsum(tiles, 0)


@triton.jit
def rows_of_tile(ends_ptr, tile, tiles, after, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert, the first row and the end of the group of a tile."""
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, EXPERTS) < expert, tiles, 0), 0)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    return expert, start + (tile - before) * ROWS, tl.load(ends_ptr + expert)


@triton.jit
def _blocks_kernel(ends_ptr, blocks_ptr, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Write the expert, the first row and the end of the group of one block of ROWS rows."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    tiles, after = tiles_of_groups(ends_ptr, experts, EXPERTS, ROWS)
    inside = block < tl.sum(tiles, 0)
    expert, first, end = rows_of_tile(
        ends_ptr, tl.where(inside, block, 0), tiles, after, EXPERTS, ROWS
    )
    tl.store(blocks_ptr + block, expert)
    tl.store(blocks_ptr + blocks + block, first)
    tl.store(blocks_ptr + 2 * blocks + block, tl.where(inside, end, first))


@triton.jit
def blocks_of_group(ends_ptr, expert, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the first of a group's blocks of ROWS rows, and their number."""
    numbers = tl.arange(0, EXPERTS)
    lower = numbers < expert
    ends = tl.load(ends_ptr + numbers, mask=lower, other=0)
    starts = tl.load(ends_ptr + numbers - 1, mask=lower & (numbers > 0), other=0)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    count = tl.cdiv(tl.load(ends_ptr + expert) - start, ROWS)
    return tl.sum(tl.cdiv(ends - starts, ROWS), 0), count


@triton.jit
def halves_of_columns(x):
    """Return the first and the second half of the columns of a tile."""
    pairs = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def strips_of_columns(x, NUMBER: tl.constexpr):
    """Return 1, 2 or 4 strips of the columns of a tile, each of which takes fewer registers."""
    if NUMBER == 1:
        strips = (x,)
    else:
        first, second = halves_of_columns(x)
        strips = (first, second)  # type: ignore[assignment]
        if NUMBER == 4:
            strips = halves_of_columns(first) + halves_of_columns(second)
    return strips


@triton.jit
def add_product(total_ptr, product, lines, columns, mask, stride, ADD: tl.constexpr):
    """Add a tile rounded to bfloat16 to a float32 total, or store it if not ADD."""
    places = pointers(total_ptr, lines, columns, stride)
    product = product.to(tl.bfloat16)
    if ADD:
        before = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")
        product = before + product.to(tl.float32)
    tl.store(
        places, product.to(total_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first"
    )


@triton.jit
def _load_codes(places, left, EVEN: tl.constexpr):
    """Load codes [L, DEPTH], zeros past `left` columns."""
    if EVEN:
        return tl.load(places)
    inside = tl.arange(0, places.shape[1]) < left
    return tl.load(places, mask=inside[None, :], other=0)


@triton.jit
def _product_kernel(
    x_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    tokens_ptr,
    ends_ptr,
    out_ptr,
    N,
    K,
    experts,
    EXPERTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIPS: tl.constexpr,
    SIDE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute a tile of rows of one group, times the group's matrix [N, K] of w [E * N, K]."""
    tiles, after = tiles_of_groups(ends_ptr, experts, EXPERTS, ROWS)
    down = tl.sum(tiles, 0)
    across = tl.cdiv(N, COLUMNS)
    if tl.program_id(0) >= down * across:
        return
    tile, n = place(tl.program_id(0), down, across, SIDE)
    expert, first, end = rows_of_tile(ends_ptr, tile, tiles, after, EXPERTS, ROWS)
    rows = first + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    # Past the end, the last row and column are read again, so that no load needs a mask.
    sources = tl.minimum(rows, end - 1)
    if BY_TOKEN:
        sources = tl.load(tokens_ptr + sources)
    lines = expert.to(tl.int64) * N + tl.minimum(columns, N - 1)
    along = tl.arange(0, DEPTH)
    a = pointers(x_ptr, sources, along, K)
    b = pointers(w_ptr, lines, along, K)
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    for k in range(0, K, DEPTH):
        x = _load_codes(a, K - k, EVEN)
        w = _load_codes(b, K - k, EVEN)
        sums = int8_dot(x, w.T, sums)
        a += DEPTH
        b += DEPTH
    s = tl.load(x_scales_ptr + sources)
    w_scales_ptr += expert.to(tl.int64) * N
    strips = strips_of_columns(sums, STRIPS)
    for strip in tl.static_range(STRIPS):
        columns = n * COLUMNS + strip * (COLUMNS // STRIPS) + tl.arange(0, COLUMNS // STRIPS)
        t = load_scales(w_scales_ptr, columns, N)
        y = strips[strip].to(tl.float32) * s[:, None] * t[None, :]
        y = y.to(out_ptr.dtype.element_ty)
        tl.store(pointers(out_ptr, rows, columns, N), y, mask=within(rows, end, columns, N))


@triton.jit
def _halves(parts, NUMBER: tl.constexpr):
    """Return the parts [..., 2], split along their last dimension: first halves, second halves."""
    first = ()
    second = ()
    for i in tl.static_range(NUMBER):
        one, two = tl.split(parts[i])
        first += (one,)  # type: ignore[assignment]
        second += (two,)  # type: ignore[assignment]
    return first + second


@triton.jit
def _stage(values, DISTANCE: tl.constexpr):
    """Return 64 tensors after one stage of the Hadamard transform."""
    made = ()
    for i in tl.static_range(64):
        if i & DISTANCE == 0:
            made += (values[i] + values[i + DISTANCE],)  # type: ignore[assignment]
        else:
            made += (values[i - DISTANCE] - values[i],)  # type: ignore[assignment]
    return made


@triton.jit
def _rotated_rows(x):
    """Return the rows of x [64, C], rotated along them: 64 float32 tensors [C].

    As tensors of their own, the 64 values of a rotation are in one thread, without shuffles. One
    load and 63 splits compile a hundred times faster than 64 loads.
    """
    parts = (tl.reshape(x.T, (x.shape[1], 2, 2, 2, 2, 2, 2)).to(tl.float32),)
    for level in tl.static_range(6):
        parts = _halves(parts, 1 << level)
    for level in tl.static_range(6):
        parts = _stage(parts, 1 << level)
    made = ()
    for i in tl.static_range(64):
        made += (parts[i] * 0.125,)
    return made


@triton.jit
def _code(x):
    """Return float32 x rounded to INT8, ties to even, as int32; NaN becomes 0."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -_TOP), _TOP), 0.0)
    return (x + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS


@triton.jit
def _joined(parts, NUMBER: tl.constexpr):
    """Return the first and second halves of 2 * NUMBER parts, joined in pairs."""
    made = ()
    for i in tl.static_range(NUMBER):
        made += (tl.join(parts[i], parts[i + NUMBER]),)  # type: ignore[assignment]
    return made


@triton.jit
def _words(values, multiplier):
    """Return the codes of 64 tensors [C] as int32 [C, 16], four codes per word."""
    words = ()
    for i in tl.static_range(16):
        word = _code(values[4 * i] * multiplier) & 255
        for j in tl.static_range(1, 4):
            word |= (_code(values[4 * i + j] * multiplier) & 255) << (8 * j)
        words += (word,)
    for level in tl.static_range(4):
        words = _joined(words, 8 >> level)
    return tl.reshape(words[0], (words[0].shape[0], 16))


@triton.jit
def _tokens_kernel(
    x_ptr,
    tokens_ptr,
    ends_ptr,
    blocks_ptr,
    amax_ptr,
    codes_ptr,
    scales_ptr,
    C,
    row_stride,
    width,
    BY_TOKEN: tl.constexpr,
    CODES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Rotate 64 rows of a group along them; take their maxima, or store codes if CODES."""
    block, blocks = tl.program_id(0), tl.num_programs(0) // 2
    expert = tl.load(blocks_ptr + block // 2)
    first = tl.load(blocks_ptr + blocks + block // 2)
    end = tl.load(blocks_ptr + 2 * blocks + block // 2)
    if first == end:
        return
    rows = first + block % 2 * 64 + tl.arange(0, 64)
    columns = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = columns < C
    sources = rows
    if BY_TOKEN:
        sources = tl.load(tokens_ptr + rows, mask=rows < end, other=0)
    mask = within(rows, end, columns, C)
    x = tl.load(pointers(x_ptr, sources, columns, row_stride), mask=mask, other=0.0)
    values = _rotated_rows(x)
    features = expert.to(tl.int64) * C + columns
    if CODES:
        bits = tl.load(amax_ptr + features, mask=inside, other=0)
        scale, multiplier = scale_and_multiplier(bits, _TOP, _FLOOR, False)
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        tl.store(scales_ptr + features, scale, mask=inside & (first + block % 2 == start))
        words = _words(values, multiplier)
        places = pointers(codes_ptr, columns, block * 16 + tl.arange(0, 16), width // 4)
        tl.store(places, words, mask=inside[:, None])
    else:
        bits = abs_bits(values[0])
        for i in tl.static_range(1, 64):
            bits = tl.maximum(bits, abs_bits(values[i]))
        tl.atomic_max(amax_ptr + features, bits, mask=inside, sem="relaxed")


@triton.jit
def _wgrad_kernel(
    dy_ptr,
    x_ptr,
    dy_scales_ptr,
    x_scales_ptr,
    ends_ptr,
    total_ptr,
    N,
    K,
    width,
    ADD: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIPS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Add or store a tile of dW [N, K] of one expert; zeros if it has no rows."""
    down = tl.cdiv(N, ROWS)
    across = tl.cdiv(K, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    m, n = place(tl.program_id(0) % (down * across), down, across, SIDE)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    first, count = blocks_of_group(ends_ptr, expert, EXPERTS, _ALONG)
    along = first * _ALONG + tl.arange(0, DEPTH)
    a = pointers(dy_ptr, tl.minimum(rows, N - 1), along, width)
    b = pointers(x_ptr, tl.minimum(columns, K - 1), along, width)
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    for _ in range(0, count * _ALONG, DEPTH):
        sums = int8_dot(tl.load(a), tl.load(b).T, sums)
        a += DEPTH
        b += DEPTH
    lines = expert.to(tl.int64) * N + rows
    s = tl.load(dy_scales_ptr + lines, mask=rows < N, other=0.0)
    x_scales_ptr += expert.to(tl.int64) * K
    strips = strips_of_columns(sums, STRIPS)
    for strip in tl.static_range(STRIPS):
        columns = n * COLUMNS + strip * (COLUMNS // STRIPS) + tl.arange(0, COLUMNS // STRIPS)
        t = load_scales(x_scales_ptr, columns, K)
        dw = strips[strip].to(tl.float32) * s[:, None] * t[None, :]
        add_product(total_ptr, dw, lines, columns, within(rows, N, columns, K), K, ADD)


def blocks_of_rows(groups: Groups, blocks: int) -> Tensor:
    """Return the expert, first row and end of its group of blocks of 128 rows, int32 [3, blocks].

    A block past the last one ends with its first row.
    """
    table = torch.empty(3, blocks, dtype=torch.int32, device=groups.ends.device)
    experts = groups.num_experts
    _blocks_kernel[(blocks,)](
        groups.ends, table, experts, triton.next_power_of_2(experts), _ALONG.value, num_warps=1
    )
    return table


def int8_grouped_matmul(
    x: QTensor, w: QTensor, groups: Groups, by_token: bool, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return Y [R, N]: row r is X's row times the matrix of its expert; w is [E * N, K].

    x is [T, K] if `by_token`, else [R, K]. A row has the bits of `precision.int8.int8_matmul`.
    """
    rows, experts = len(groups.tokens), groups.num_experts
    tile = TILES[table_of(x.codes.device)][tile_class(rows, experts)]
    return product(x, w, groups, by_token, out_dtype, tile)


def product(
    x: QTensor, w: QTensor, groups: Groups, by_token: bool, out_dtype: torch.dtype, tile: Tile
) -> Tensor:
    """`int8_grouped_matmul` by tiles of a given size."""
    rows, experts, k = len(groups.tokens), groups.num_experts, x.shape[1]
    columns = w.shape[0] // experts
    assert k == w.shape[1], f"products along {k} and {w.shape[1]} values"
    assert x.codes.stride() == w.codes.stride() == (k, 1), "codes with K contiguous"
    assert x.shape[0] == (len(groups.places) if by_token else rows), f"{x.shape[0]} rows of X"
    out = torch.empty(rows, columns, dtype=out_dtype, device=x.codes.device)
    if rows:
        _product_kernel[(most_tiles(rows, experts, tile.rows) * cdiv(columns, tile.columns),)](
            x.codes,
            w.codes,
            x.scales,
            w.scales,
            groups.tokens,
            groups.ends,
            out,
            columns,
            k,
            experts,
            triton.next_power_of_2(experts),
            by_token,
            tile.rows,
            tile.columns,
            tile.depth,
            strips_of(tile),
            SIDE,
            k % tile.depth == 0,
            **tile.options,
        )
    return out


def group_tokens(x: Tensor, groups: Groups, by_token: bool) -> TokenCodes:
    """Return bfloat16 x, [T, C] if `by_token`, else [R, C], as codes along the rows of groups.

    Codes and scales of a group are those of `precision.int8.int8_tokens` of its rows.
    """
    rows, experts, features = len(groups.tokens), groups.num_experts, x.shape[1]
    assert (x.dtype, x.stride(1)) == (torch.bfloat16, 1), f"{x.dtype}, strides {x.stride()}"
    assert len(x) == (len(groups.places) if by_token else rows), f"{len(x)} rows of X"
    tiles = most_tiles(rows, experts, _ALONG.value)
    codes = torch.empty(features, tiles * _ALONG.value, dtype=torch.int8, device=x.device)
    amax = torch.zeros(2, experts, features, dtype=torch.int32, device=x.device)
    made = TokenCodes(codes, amax[1].view(torch.float32))
    if not rows:
        return made
    table = blocks_of_rows(groups, tiles)
    for stores_codes in (False, True):
        _tokens_kernel[(tiles * _ALONG.value // ROTATION, cdiv(features, _FEATURES))](
            x,
            groups.tokens,
            groups.ends,
            table,
            amax,
            codes.view(torch.int32),
            made.scales,
            features,
            x.stride(0),
            codes.shape[1],
            by_token,
            stores_codes,
            _FEATURES,
            num_warps=4,
            **OPTIONS,
        )
    return made


def add_int8_grouped_wgrad(
    total: Tensor, begun: bool, dy: Tensor, x: Tensor, groups: Groups, by_token: bool
) -> None:
    """Add dW, rounded to bfloat16, to `total` [E * N, K], or store it if the sum is not `begun`.

    dY is bfloat16 [R, N], X [T, K] if `by_token`, else [R, K]; dW of experts without rows is zero.
    A `total` that is not begun may be bfloat16.
    """
    codes = group_tokens(dy, groups, by_token=False)
    add_wgrad_product(total, begun, codes, group_tokens(x, groups, by_token), groups)


def add_wgrad_product(
    total: Tensor,
    begun: bool,
    dy: TokenCodes,
    x: TokenCodes,
    groups: Groups,
    tile: Tile | None = None,
) -> None:
    """`add_int8_grouped_wgrad` of dY [N, P] and X [K, P] in codes; `tile` changes no bits."""
    (rows, width), columns, experts = dy.codes.shape, x.codes.shape[0], groups.num_experts
    tile = tile or WGRAD[table_of(dy.codes.device)]
    assert width == x.codes.shape[1], f"codes of {width} and {x.codes.shape[1]} rows"
    assert _ALONG.value % tile.depth == 0, f"{tile}"
    check_total(total, begun, (experts * rows, columns))
    _wgrad_kernel[(experts * cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)](
        dy.codes,
        x.codes,
        dy.scales,
        x.scales,
        groups.ends,
        total,
        rows,
        columns,
        width,
        begun,
        triton.next_power_of_2(experts),
        tile.rows,
        tile.columns,
        tile.depth,
        strips_of(tile),
        SIDE,
        **tile.options,
    )


def check_total(total: Tensor, begun: bool, shape: tuple[int, int]) -> None:
    """Check the sum of a weight's gradients."""
    assert (total.shape, total.is_contiguous()) == (shape, True), f"{total.shape}, not {shape}"
    assert total.dtype == torch.float32 or not begun, f"sums in {total.dtype}"
