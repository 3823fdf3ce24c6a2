"""Grouped E4M3 products of experts in plain Triton, for compute capability 8.9 and later.

    FProp   rows in groups of 1 x 128, times an FP8 weight: `fp8_grouped_matmul`
    DGrad   the same with dY and the transposed weight, also of INT8 codes: `fp8_grouped_dgrad`
    WGrad   dY in groups of 128 x 1, X in groups of 128 x 128: `add_fp8_grouped_wgrad`

Grids, tiles and sizes of groups are as in `triton.grouped_int8`. Sums have the order of
`precision.gemm`: each block of 128 is summed from zero by tensor cores, then one fused float32
multiply-add applies both scales, blocks in order. Tiles have 64 or 128 rows, so that a Hopper
multiplies by wgmma: a row has the same bits in a tile of either size.

Along rows, a group of 128 never crosses experts: each expert's rows begin at a multiple of 128 and
are padded with zeros. One pass gathers a tile, quantizes it and stores it transposed; of dY it also
stores the codes for DGrad.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.precision.groups import Groups, TokenGroups
from jetrl.precision.quantize import FORMATS, FP8_BLOCK, QTensor
from jetrl.precision.triton.grouped_int8 import (
    SIDE,
    add_product,
    blocks_of_group,
    blocks_of_rows,
    check_total,
    halves_of_columns,
    has_few_rows,
    most_tiles,
    rows_of_tile,
    tiles_of_groups,
)
from jetrl.precision.triton.int8 import int8_squares_turned
from jetrl.precision.triton.layout import (
    cdiv,
    empty_row_groups,
    is_ragged,
    padded_rows,
    whole_groups,
)
from jetrl.precision.triton.portable_int8 import Tile, memory_class, place, pointers, within
from jetrl.precision.triton.quantize import tile_rule, turned_weight
from jetrl.precision.triton.tile import TILE, store_block_transposed, store_groups, tile_columns

# Tiles for many rows per expert and for few. Columns divide 128: a tile has one scale per block.
TILES = {
    "large": (Tile(128, 128, 128, 8, 3, registers=128), Tile(64, 128, 128, 4, 3)),
    "small": (Tile(128, 128, 128, 8, 2), Tile(64, 64, 128, 4, 3)),
}
WGRAD = {"large": Tile(128, 128, 128, 8, 3, registers=128), "small": Tile(128, 128, 128, 8, 2)}
_BLOCK = tl.constexpr(FP8_BLOCK)


@gluon.jit
def _rows_of_block(
    x_ptr, tokens_ptr, first, rows, column, num_columns, row_stride, BY_TOKEN: gl.constexpr
):
    """Load a tile [128, 128] in TILE of `rows` sorted rows from `first` on; zeros outside."""
    line = gl.arange(0, 128, gl.SliceLayout(1, TILE))
    columns = tile_columns(column)
    sources = first + line
    if BY_TOKEN:
        sources = gl.load(tokens_ptr + sources, mask=line < rows, other=0)
    places = x_ptr + sources.to(gl.int64)[:, None] * row_stride + columns[None, :]
    mask = (line < rows)[:, None] & (columns < num_columns)[None, :]
    return gl.load(places, mask=mask, other=0.0)


@gluon.jit
def _quantize_kernel(
    x_ptr,
    tokens_ptr,
    blocks_ptr,
    row_codes_ptr,
    row_scales_ptr,
    codes_ptr,
    scales_ptr,
    num_columns,
    row_stride,
    row_scale_stride,
    width,
    column_blocks,
    BY_TOKEN: gl.constexpr,
    SQUARES: gl.constexpr,
    RAGGED: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Quantize 128 rows of an expert and 128 columns, and store them transposed.

    SQUARES: one group of 128 x 128; else groups of 128 x 1, and of 1 x 128 for DGrad.
    """
    block, column = gl.program_id(0) // column_blocks, gl.program_id(0) % column_blocks
    blocks = gl.num_programs(0) // column_blocks
    first, end = gl.load(blocks_ptr + blocks + block), gl.load(blocks_ptr + 2 * blocks + block)
    rows = end - first
    if rows <= 0:
        return
    y = _rows_of_block(x_ptr, tokens_ptr, first, rows, column, num_columns, row_stride, BY_TOKEN)
    if SQUARES:
        store_block_transposed(
            y,
            block,
            column,
            num_columns,
            codes_ptr,
            scales_ptr,
            width // 128,
            width,
            MAXIMUM,
            FLOOR,
            POW2,
        )
    else:
        # Along rows a block begins anywhere; along columns, at a multiple of 128.
        stored = column_blocks * 128 if RAGGED else num_columns
        store_groups(
            y,
            block - block,
            column,
            rows,
            num_columns,
            row_codes_ptr + first.to(gl.int64) * stored,
            row_scales_ptr + first,
            row_scale_stride,
            codes_ptr + block * 128,
            scales_ptr + block.to(gl.int64) * num_columns,
            width,
            RAGGED,
            True,
            MAXIMUM,
            FLOOR,
            POW2,
        )


@triton.jit
def _scaled_sum(sums, a, b, scales):
    """Return sums + (a @ b^T) * scales, the product summed from zero and added by one fma."""
    product = tl.dot(a, b.T)
    return tl.fma(product, tl.broadcast_to(scales[:, None], sums.shape), sums)


@triton.jit
def _offsets(lines, last, stride):
    """Return int32 offsets [L, 128] of a block of lines; after the last line, it is read again."""
    return tl.minimum(lines, last)[:, None] * stride + tl.arange(0, _BLOCK)[None, :]


@triton.jit(do_not_specialize=["a_scale_block"])
def _product_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    tokens_ptr,
    ends_ptr,
    out_ptr,
    N,
    K,
    a_stride,
    b_stride,
    b_expert,
    a_scale_block,
    b_scale_row,
    b_scale_block,
    b_scale_expert,
    experts,
    EXPERTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Compute a tile of rows of one group, times the group's matrix [N, K].

    An expert's matrix begins `b_expert` codes and `b_scale_expert` scales after the one before.
    """
    tiles, after = tiles_of_groups(ends_ptr, experts, EXPERTS, ROWS)
    down = tl.sum(tiles, 0)
    across = tl.cdiv(N, COLUMNS)
    if tl.program_id(0) >= down * across:
        return
    tile, n = place(tl.program_id(0), down, across, SIDE)
    expert, first, end = rows_of_tile(ends_ptr, tile, tiles, after, EXPERTS, ROWS)
    rows = first + tl.arange(0, ROWS)
    HALF: tl.constexpr = COLUMNS // 2
    columns = n * COLUMNS + tl.arange(0, HALF)
    # Past the end, the last row and column are read again, so that no load needs a mask.
    sources = tl.minimum(rows, end - 1)
    if BY_TOKEN:
        sources = tl.load(tokens_ptr + sources)
    a = pointers(a_ptr, sources, tl.arange(0, _BLOCK), a_stride)
    # Offsets of 32 bits from one pointer, and scales one block ahead, save registers and time.
    b = b_ptr + expert.to(tl.int64) * b_expert + (n * COLUMNS).to(tl.int64) * b_stride
    last = N - 1 - n * COLUMNS
    left = _offsets(tl.arange(0, HALF), last, b_stride)
    right = _offsets(HALF + tl.arange(0, HALF), last, b_stride)
    a_scales = a_scales_ptr + sources
    b_scales = b_scales_ptr + expert.to(tl.int64) * b_scale_expert
    b_scales += (n * COLUMNS // _BLOCK).to(tl.int64) * b_scale_row
    zeros = tl.minimum(rows, 0)  # a scalar would be waited for before each product
    left_sums = tl.zeros((ROWS, HALF), tl.float32)
    right_sums = tl.zeros((ROWS, HALF), tl.float32)
    a_scale = tl.load(a_scales)
    b_scale = tl.load(b_scales + zeros)
    for k in range(0, K, _BLOCK):
        scales = a_scale * b_scale
        a_scales += a_scale_block
        b_scales += b_scale_block
        a_scale = tl.load(a_scales, mask=k + _BLOCK < K, other=0.0)
        b_scale = tl.load(b_scales + zeros, mask=k + _BLOCK < K, other=0.0)
        x = tl.load(a)
        left_sums = _scaled_sum(left_sums, x, tl.load(b + left), scales)
        right_sums = _scaled_sum(right_sums, x, tl.load(b + right), scales)
        a += _BLOCK
        b += _BLOCK
    halves = (left_sums, right_sums)
    for half in tl.static_range(2):
        y = halves[half].to(out_ptr.dtype.element_ty)
        places = pointers(out_ptr, rows, columns + half * HALF, N)
        tl.store(places, y, mask=within(rows, end, columns + half * HALF, N))


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
    SIDE: tl.constexpr,
):
    """Add or store a tile of dW [N, K] of one expert; zeros if it has no rows."""
    down = tl.cdiv(N, ROWS)
    across = tl.cdiv(K, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    m, n = place(tl.program_id(0) % (down * across), down, across, SIDE)
    rows = m * ROWS + tl.arange(0, ROWS)
    HALF: tl.constexpr = COLUMNS // 2
    columns = n * COLUMNS + tl.arange(0, HALF)
    first, count = blocks_of_group(ends_ptr, expert, EXPERTS, _BLOCK)
    a = dy_ptr + (m * ROWS).to(tl.int64) * width + first * _BLOCK
    b = x_ptr + (n * COLUMNS).to(tl.int64) * width + first * _BLOCK
    top = _offsets(tl.arange(0, ROWS), N - 1 - m * ROWS, width)
    left = _offsets(tl.arange(0, HALF), K - 1 - n * COLUMNS, width)
    right = _offsets(HALF + tl.arange(0, HALF), K - 1 - n * COLUMNS, width)
    a_scales = dy_scales_ptr + first.to(tl.int64) * N
    b_scales = x_scales_ptr + (n * COLUMNS // _BLOCK) * (width // _BLOCK) + first
    features, zeros = tl.minimum(rows, N - 1), tl.minimum(rows, 0)
    left_sums = tl.zeros((ROWS, HALF), tl.float32)
    right_sums = tl.zeros((ROWS, HALF), tl.float32)
    a_scale = tl.load(a_scales + features, mask=count > 0, other=0.0)
    b_scale = tl.load(b_scales + zeros, mask=count > 0, other=0.0)
    for block in range(0, count):
        scales = a_scale * b_scale
        a_scales += N
        b_scales += 1
        a_scale = tl.load(a_scales + features, mask=block + 1 < count, other=0.0)
        b_scale = tl.load(b_scales + zeros, mask=block + 1 < count, other=0.0)
        dy = tl.load(a + top)
        left_sums = _scaled_sum(left_sums, dy, tl.load(b + left), scales)
        right_sums = _scaled_sum(right_sums, dy, tl.load(b + right), scales)
        a += _BLOCK
        b += _BLOCK
    lines = expert.to(tl.int64) * N + rows
    strips = halves_of_columns(left_sums) + halves_of_columns(right_sums)
    for strip in tl.static_range(4):
        columns = n * COLUMNS + strip * (HALF // 2) + tl.arange(0, HALF // 2)
        mask = within(rows, N, columns, K)
        add_product(total_ptr, strips[strip], lines, columns, mask, K, ADD)


@dataclass(frozen=True)
class Matrices:
    """Matrices of experts [N, K] in one FP8 weight, each some rows or columns after the one before.

    Attributes:
        weight: E4M3 in groups of 128 x 128, in whole groups.
        rows: N, output features of an expert.
        row_step, column_step: From one matrix to the next, multiples of 128.
    """

    weight: QTensor
    rows: int
    row_step: int = 0
    column_step: int = 0

    def __post_init__(self) -> None:
        w = self.weight
        assert (w.codes.dtype, w.codes.stride(1)) == (torch.float8_e4m3fn, 1), "E4M3 along K"
        assert w.block == (FP8_BLOCK, FP8_BLOCK), f"{w.block}"


def stacked_matrices(w: QTensor, experts: int) -> Matrices:
    """Return the matrices of an FP8 weight [E * N, K], N a multiple of 128."""
    rows = w.shape[0] // experts
    assert rows % FP8_BLOCK == 0, f"{rows} rows of an expert cross groups of {FP8_BLOCK}"
    codes = whole_groups(w.codes, w.shape[0])
    return Matrices(QTensor(codes, w.scales, w.block), rows, row_step=rows)


def turned_matrices(w: QTensor, experts: int) -> Matrices:
    """Return the transposed matrices of a weight [E * N, K] of INT8 rows, or E4M3 as above."""
    if w.codes.dtype == torch.int8:
        turned = int8_squares_turned(w, experts)
    else:
        assert w.shape[0] // experts % FP8_BLOCK == 0, f"{w.shape}: experts cross groups"
        turned = turned_weight(w)
    return Matrices(turned, turned.shape[0], column_step=turned.shape[1] // experts)


def fp8_grouped_matmul(x: QTensor, w: QTensor, groups: Groups, by_token: bool) -> Tensor:
    """Return Y, bfloat16 [R, N]: row r is X's row times the matrix of its expert.

    Args:
        x: E4M3 in groups of 1 x 128, [T, K] if `by_token`, else [R, K].
        w: E4M3 in groups of 128 x 128, [E * N, K], N a multiple of 128.
    """
    return product(x, stacked_matrices(w, groups.num_experts), groups, by_token)


def fp8_grouped_dgrad(dy: QTensor, w: QTensor, groups: Groups) -> Tensor:
    """Return dX, bfloat16 [R, K], of dY [R, N] in groups of 1 x 128 and the weight [E * N, K].

    The weight is INT8 rows, or E4M3 in groups of 128 x 128.
    """
    return product(dy, turned_matrices(w, groups.num_experts), groups, by_token=False)


@dataclass(frozen=True)
class Rows:
    """E4M3 codes of X [M, K'], in whole groups of 1 x 128, and scales [M, K'/128], rows first."""

    codes: Tensor
    scales: Tensor


def rows_of(x: QTensor, groups: Groups, by_token: bool) -> Rows:
    """Return X, [T, K] if `by_token`, else [R, K], as products read it."""
    assert x.codes.dtype == torch.float8_e4m3fn, "codes must be E4M3"
    assert x.block == (1, FP8_BLOCK), f"{x.block}"
    assert x.codes.stride(1) == 1, "K must be contiguous"
    rows = len(groups.places) if by_token else len(groups.tokens)
    assert x.shape[0] == rows, f"{x.shape[0]} rows of X"
    scales = x.scales if x.scales.stride(0) == 1 else x.scales.mT.contiguous().mT
    return Rows(whole_groups(x.codes, x.shape[0]), scales)


def product(
    x: QTensor, matrices: Matrices, groups: Groups, by_token: bool, tile: Tile | None = None
) -> Tensor:
    """Return rows of x times the matrices of their experts, bfloat16 [R, N].

    `tile` changes no bits.
    """
    rows, experts, columns = len(groups.tokens), groups.num_experts, matrices.rows
    a, w = rows_of(x, groups, by_token), matrices.weight
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.codes.device)
    if not rows:
        return out
    tile = tile or TILES[memory_class(x.codes.device)][has_few_rows(rows, experts)]
    _product_kernel[(most_tiles(rows, experts, tile.rows) * cdiv(columns, tile.columns),)](
        a.codes,
        w.codes,
        a.scales,
        w.scales,
        groups.tokens,
        groups.ends,
        out,
        columns,
        x.shape[1],
        a.codes.stride(0),
        w.codes.stride(0),
        matrices.row_step * w.codes.stride(0) + matrices.column_step,
        a.scales.stride(1),
        w.scales.stride(0),
        w.scales.stride(1),
        scale_step(matrices),
        experts,
        triton.next_power_of_2(experts),
        by_token,
        tile.rows,
        tile.columns,
        SIDE,
        **tile.options,
    )
    return out


def scale_step(matrices: Matrices) -> int:
    """Return how many scales after those of the matrix before the scales of a matrix begin."""
    down, along = matrices.weight.scales.stride()
    return (matrices.row_step * down + matrices.column_step * along) // FP8_BLOCK


def fp8_grouped_gradient(dy: Tensor, groups: Groups, scales: str) -> tuple[QTensor, TokenGroups]:
    """Return bfloat16 dY [R, N] quantized for DGrad, and along the rows of experts for WGrad."""
    rows = empty_row_groups(len(dy), dy.shape[1], FORMATS["e4m3"][0], dy.device)
    return rows, _quantized(dy, groups, False, rows, scales)


def quantized_input(x: Tensor, groups: Groups, by_token: bool, scales: str) -> TokenGroups:
    """Return X of `add_fp8_grouped_wgrad` in groups of 128 x 128."""
    return _quantized(x, groups, by_token, None, scales)


def _quantized(
    x: Tensor, groups: Groups, by_token: bool, rows: QTensor | None, scales: str
) -> TokenGroups:
    """Quantize x along the rows of experts: in groups of 128 x 1 if `rows` is written, too."""
    num_rows, experts, features = len(groups.tokens), groups.num_experts, x.shape[1]
    assert (x.dtype, x.stride(1)) == (torch.bfloat16, 1), f"{x.dtype}, strides {x.stride()}"
    assert len(x) == (len(groups.places) if by_token else num_rows), f"{len(x)} rows"
    tiles, blocks = most_tiles(num_rows, experts, FP8_BLOCK), cdiv(features, FP8_BLOCK)
    dtype = FORMATS["e4m3"][0]
    codes = torch.empty(features, tiles * FP8_BLOCK, dtype=dtype, device=x.device)
    shape = (blocks, tiles) if rows is None else (tiles, features)
    made = TokenGroups(codes, torch.empty(shape, dtype=torch.float32, device=x.device))
    if num_rows:
        # A kernel cannot take None, so any tensor is a placeholder.
        row_codes, row_scales = (codes, made.scales) if rows is None else (rows.codes, rows.scales)
        _quantize_kernel[(tiles * blocks,)](
            x,
            groups.tokens,
            blocks_of_rows(groups, tiles),
            row_codes,
            row_scales,
            codes,
            made.scales,
            features,
            x.stride(0),
            padded_rows(num_rows),
            codes.shape[1],
            blocks,
            by_token,
            rows is None,
            is_ragged(features),
            **tile_rule("e4m3", scales),
        )
    return made


def add_fp8_grouped_wgrad(
    total: Tensor,
    begun: bool,
    dy: TokenGroups,
    x: Tensor,
    groups: Groups,
    by_token: bool,
    scales: str,
) -> None:
    """Add dW, rounded to bfloat16, to `total` [E * N, K], or store it if the sum is not `begun`.

    dY is from `fp8_grouped_gradient`, X bfloat16 [T, K] if `by_token`, else [R, K]. dW of experts
    without rows is zero. A `total` that is not begun may be bfloat16.
    """
    add_wgrad_product(total, begun, dy, quantized_input(x, groups, by_token, scales), groups)


def add_wgrad_product(
    total: Tensor,
    begun: bool,
    dy: TokenGroups,
    x: TokenGroups,
    groups: Groups,
    tile: Tile | None = None,
) -> None:
    """`add_fp8_grouped_wgrad` of X in groups of 128 x 128; `tile` changes no bits."""
    (rows, width), columns, experts = dy.codes.shape, x.codes.shape[0], groups.num_experts
    assert width == x.codes.shape[1], f"codes of {width} and {x.codes.shape[1]} rows"
    check_total(total, begun, (experts * rows, columns))
    tile = tile or WGRAD[memory_class(dy.codes.device)]
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
        SIDE,
        **tile.options,
    )
