"""Grouped E4M3 products of experts in plain Triton, for compute capability 8.9 and later.

    FProp   rows in groups of 1 x 128, times an FP8 weight: `fp8_grouped_matmul`
    DGrad   the same with dY and the transposed weight, also of INT8 codes: `fp8_grouped_dgrad`
    WGrad   dY in groups of 128 x 1, X in groups of 128 x 128: `fp8_grouped_wgrad`

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

from jetrl.precision.groups import Groups, TokenGroups
from jetrl.precision.quantize import FORMATS, FP8_BLOCK, QTensor
from jetrl.precision.triton.grouped_int8 import (
    SIDE,
    blocks_of_group,
    has_few_rows,
    most_tiles,
    rows_of_tile,
    tiles_of_groups,
)
from jetrl.precision.triton.int8 import int8_squares_turned
from jetrl.precision.triton.layout import cdiv, empty_row_groups, padded_rows, whole_groups
from jetrl.precision.triton.portable_int8 import (
    OPTIONS,
    Tile,
    memory_class,
    place,
    pointers,
    within,
)
from jetrl.precision.triton.quantize import abs_bits, rule, scale_and_multiplier, turned_weight

# Tiles for many rows per expert and for few. Columns divide 128: a tile has one scale per block.
TILES = {
    "large": (Tile(128, 128, 128, 8, 3), Tile(64, 128, 128, 4, 4)),
    "small": (Tile(128, 128, 128, 8, 2), Tile(64, 64, 128, 4, 3)),
}
WGRAD = {"large": Tile(128, 128, 128, 8, 3), "small": Tile(128, 128, 128, 8, 2)}
_BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit
def _quantize_kernel(
    x_ptr,
    tokens_ptr,
    ends_ptr,
    row_codes_ptr,
    row_scales_ptr,
    codes_ptr,
    scales_ptr,
    C,
    row_stride,
    row_scale_stride,
    width,
    experts,
    EXPERTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    SQUARES: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """Quantize 128 rows of an expert and 128 columns, and store them transposed.

    SQUARES: one group of 128 x 128; else groups of 128 x 1, and of 1 x 128 for DGrad.
    """
    column_blocks = tl.cdiv(C, _BLOCK)
    block = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks
    tiles, after = tiles_of_groups(ends_ptr, experts, EXPERTS, _BLOCK)
    if block >= tl.sum(tiles, 0):
        return
    _, first, end = rows_of_tile(ends_ptr, block, tiles, after, EXPERTS, _BLOCK)
    line = tl.arange(0, _BLOCK)
    rows = first + line
    columns = column * _BLOCK + line
    sources = rows
    if BY_TOKEN:
        sources = tl.load(tokens_ptr + rows, mask=rows < end, other=0)
    mask = within(rows, end, columns, C)
    x = tl.load(pointers(x_ptr, sources, columns, row_stride), mask=mask, other=0.0)
    x = x.to(tl.float32)
    bits = abs_bits(x)
    if SQUARES:
        # Every thread divides the same maximum, and one stores the scale.
        amax = tl.zeros((_BLOCK,), tl.int32) + tl.max(tl.max(bits, 1), 0)
        scale, multiplier = scale_and_multiplier(amax, MAXIMUM, FLOOR_BITS, POW2)
        at = scales_ptr + column * (width // _BLOCK) + block + line
        tl.store(at, scale, mask=line == 0)
    else:
        scale, multiplier = scale_and_multiplier(tl.max(bits, 1), MAXIMUM, FLOOR_BITS, POW2)
        codes = (x * multiplier[:, None]).to(row_codes_ptr.dtype.element_ty)
        # Columns past C are zeros up to a whole group.
        places = pointers(row_codes_ptr, rows, columns, column_blocks * _BLOCK)
        tl.store(places, codes, mask=(rows < end)[:, None])
        at = row_scales_ptr + column.to(tl.int64) * row_scale_stride + rows
        tl.store(at, scale, mask=rows < end)
        scale, multiplier = scale_and_multiplier(tl.max(bits, 0), MAXIMUM, FLOOR_BITS, POW2)
        at = scales_ptr + block.to(tl.int64) * C + columns
        tl.store(at, scale, mask=columns < C)
    codes = (x * multiplier[None, :]).to(codes_ptr.dtype.element_ty)
    places = pointers(codes_ptr, columns, block * _BLOCK + line, width)
    tl.store(places, codes.T, mask=(columns < C)[:, None])


@triton.jit
def _scaled_sum(sums, a, b, scales):
    """Return sums + (a @ b^T) * scales, the product summed from zero and added by one fma."""
    product = tl.dot(tl.load(a), tl.load(b).T)
    return tl.fma(product, tl.broadcast_to(scales[:, None], sums.shape), sums)


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
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    # Past the end, the last row and column are read again, so that no load needs a mask.
    sources = tl.minimum(rows, end - 1)
    if BY_TOKEN:
        sources = tl.load(tokens_ptr + sources)
    along = tl.arange(0, _BLOCK)
    a = pointers(a_ptr, sources, along, a_stride)
    b = pointers(
        b_ptr + expert.to(tl.int64) * b_expert, tl.minimum(columns, N - 1), along, b_stride
    )
    a_scales = a_scales_ptr + sources
    b_scales = b_scales_ptr + expert.to(tl.int64) * b_scale_expert
    b_scales += (n * COLUMNS // _BLOCK).to(tl.int64) * b_scale_row
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, K, _BLOCK):
        sums = _scaled_sum(sums, a, b, tl.load(a_scales) * tl.load(b_scales))
        a += _BLOCK
        b += _BLOCK
        a_scales += a_scale_block
        b_scales += b_scale_block
    y = sums.to(out_ptr.dtype.element_ty)
    tl.store(pointers(out_ptr, rows, columns, N), y, mask=within(rows, end, columns, N))


@triton.jit
def _wgrad_kernel(
    dy_ptr,
    x_ptr,
    dy_scales_ptr,
    x_scales_ptr,
    ends_ptr,
    out_ptr,
    N,
    K,
    width,
    experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Compute a tile of dW [N, K] of one expert; zeros if it has no rows."""
    down = tl.cdiv(N, ROWS)
    across = tl.cdiv(K, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    m, n = place(tl.program_id(0) % (down * across), down, across, SIDE)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    first, count = blocks_of_group(ends_ptr, expert, experts, EXPERTS, _BLOCK)
    along = first * _BLOCK + tl.arange(0, _BLOCK)
    features = tl.minimum(rows, N - 1)
    a = pointers(dy_ptr, features, along, width)
    b = pointers(x_ptr, tl.minimum(columns, K - 1), along, width)
    a_scales = dy_scales_ptr + first.to(tl.int64) * N + features
    b_scales = x_scales_ptr + (n * COLUMNS // _BLOCK) * (width // _BLOCK) + first
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, count):
        sums = _scaled_sum(sums, a, b, tl.load(a_scales) * tl.load(b_scales))
        a += _BLOCK
        b += _BLOCK
        a_scales += N
        b_scales += 1
    lines = expert.to(tl.int64) * N + rows
    mask = within(rows, N, columns, K)
    tl.store(pointers(out_ptr, lines, columns, K), sums.to(out_ptr.dtype.element_ty), mask=mask)


def fp8_grouped_matmul(x: QTensor, w: QTensor, groups: Groups, by_token: bool) -> Tensor:
    """Return Y, bfloat16 [R, N]: row r is X's row times the matrix of its expert.

    Args:
        x: E4M3 in groups of 1 x 128, [T, K] if `by_token`, else [R, K].
        w: E4M3 in groups of 128 x 128, [E * N, K], N a multiple of 128.
    """
    columns = w.shape[0] // groups.num_experts
    assert columns % FP8_BLOCK == 0, f"{columns} rows of an expert cross groups of {FP8_BLOCK}"
    codes = whole_groups(w.codes, w.shape[0])
    matrices = _Matrices(
        rows=columns,
        codes=columns * codes.stride(0),
        scales=columns // FP8_BLOCK * w.scales.stride(0),
    )
    return _product(x, QTensor(codes, w.scales, w.block), groups, by_token, matrices)


def fp8_grouped_dgrad(dy: QTensor, w: QTensor, groups: Groups, tile: Tile | None = None) -> Tensor:
    """Return dX, bfloat16 [R, K], of dY [R, N] in groups of 1 x 128 and the weight [E * N, K].

    The weight is INT8 rows, or E4M3 in groups of 128 x 128. `tile` changes no bits.
    """
    experts = groups.num_experts
    if w.codes.dtype == torch.int8:
        turned = int8_squares_turned(w, experts)
    else:
        assert w.shape[0] // experts % FP8_BLOCK == 0, f"{w.shape}: experts cross groups"
        turned = turned_weight(w)
    columns, width = turned.shape
    matrices = _Matrices(
        rows=columns,
        codes=width // experts,
        scales=width // experts // FP8_BLOCK * turned.scales.stride(1),
    )
    return _product(dy, turned, groups, False, matrices, tile)


@dataclass(frozen=True)
class _Matrices:
    """The N rows of an expert's matrix, and how many codes and scales after the last it begins."""

    rows: int
    codes: int
    scales: int


def _product(
    x: QTensor,
    w: QTensor,
    groups: Groups,
    by_token: bool,
    matrices: _Matrices,
    tile: Tile | None = None,
) -> Tensor:
    """Return rows of x times the matrices of their experts, bfloat16 [R, N]."""
    rows, experts, columns = len(groups.tokens), groups.num_experts, matrices.rows
    assert x.codes.dtype == w.codes.dtype == torch.float8_e4m3fn, "codes must be E4M3"
    assert (x.block, w.block) == ((1, FP8_BLOCK), (FP8_BLOCK, FP8_BLOCK)), f"{x.block} {w.block}"
    assert x.codes.stride(1) == w.codes.stride(1) == 1, "K must be contiguous"
    assert x.shape[0] == (len(groups.places) if by_token else rows), f"{x.shape[0]} rows of X"
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.codes.device)
    if not rows:
        return out
    tile = tile or TILES[memory_class(x.codes.device)][has_few_rows(rows, experts)]
    a_codes = whole_groups(x.codes, x.shape[0])
    a_scales = x.scales if x.scales.stride(0) == 1 else x.scales.mT.contiguous().mT
    _product_kernel[(most_tiles(rows, experts, tile.rows) * cdiv(columns, tile.columns),)](
        a_codes,
        w.codes,
        a_scales,
        w.scales,
        groups.tokens,
        groups.ends,
        out,
        columns,
        x.shape[1],
        a_codes.stride(0),
        w.codes.stride(0),
        matrices.codes,
        a_scales.stride(1),
        w.scales.stride(0),
        w.scales.stride(1),
        matrices.scales,
        experts,
        triton.next_power_of_2(experts),
        by_token,
        tile.rows,
        tile.columns,
        SIDE,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OPTIONS,
    )
    return out


def fp8_grouped_gradient(dy: Tensor, groups: Groups, scales: str) -> tuple[QTensor, TokenGroups]:
    """Return bfloat16 dY [R, N] quantized for DGrad, and along the rows of experts for WGrad."""
    rows = empty_row_groups(len(dy), dy.shape[1], FORMATS["e4m3"][0], dy.device)
    return rows, _quantized(dy, groups, False, rows, scales)


def quantized_input(x: Tensor, groups: Groups, by_token: bool, scales: str) -> TokenGroups:
    """Return X of `fp8_grouped_wgrad` in groups of 128 x 128."""
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
            groups.ends,
            row_codes,
            row_scales,
            codes,
            made.scales,
            features,
            x.stride(0),
            padded_rows(num_rows),
            codes.shape[1],
            experts,
            triton.next_power_of_2(experts),
            by_token,
            rows is None,
            **rule("e4m3", scales),
            num_warps=8 if rows is None else 16,
            **OPTIONS,
        )
    return made


def fp8_grouped_wgrad(
    dy: TokenGroups, x: Tensor, groups: Groups, by_token: bool, scales: str
) -> Tensor:
    """Return dW, bfloat16 [E * N, K]; zeros for experts without rows.

    dY is from `fp8_grouped_gradient`, X bfloat16 [T, K] if `by_token`, else [R, K].
    """
    return wgrad_product(dy, quantized_input(x, groups, by_token, scales), groups)


def wgrad_product(
    dy: TokenGroups, x: TokenGroups, groups: Groups, tile: Tile | None = None
) -> Tensor:
    """`fp8_grouped_wgrad` of X in groups of 128 x 128; `tile` changes no bits."""
    (rows, width), columns, experts = dy.codes.shape, x.codes.shape[0], groups.num_experts
    assert width == x.codes.shape[1], f"codes of {width} and {x.codes.shape[1]} rows"
    tile = tile or WGRAD[memory_class(dy.codes.device)]
    out = torch.empty(experts * rows, columns, dtype=torch.bfloat16, device=dy.codes.device)
    _wgrad_kernel[(experts * cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)](
        dy.codes,
        x.codes,
        dy.scales,
        x.scales,
        groups.ends,
        out,
        rows,
        columns,
        width,
        experts,
        triton.next_power_of_2(experts),
        tile.rows,
        tile.columns,
        SIDE,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OPTIONS,
    )
    return out
