"""Grouped BF16 products of experts in plain Triton, for compute capability 8.0 and later.

    FProp   rows of a group times its expert's matrix: `bf16_grouped_matmul`
    DGrad   the same with the transposed matrix: `bf16_grouped_dgrad`
    WGrad   the sum over a group's rows, added in float32: `add_bf16_grouped_wgrad`

`add_bf16_grouped_product` adds such products to rows of another matrix.

Grids, tiles and sizes of groups are as in `triton.grouped_int8`. Each sum is one float32 loop over
K, N or the rows of a group, in order. Tiles have 64 or 128 rows, so that a Hopper multiplies by
wgmma: a row has the same bits in a tile of either size, those of a dense layer in
`triton.float_tiles`. Transposed operands are transposed in shared memory, not copied.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.groups import Groups
from jetrl.precision.triton.grouped_int8 import (
    SIDE,
    has_few_rows,
    most_tiles,
    rows_of_tile,
    tiles_of_groups,
)
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.portable_int8 import (
    Tile,
    load_codes,
    memory_class,
    place,
    pointers,
    within,
)

# Tiles for many rows per expert and for few.
TILES = {
    "large": (Tile(128, 256, 64, 8, 3), Tile(64, 64, 64, 4, 6)),
    "small": (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4)),
}
WGRAD = {"large": Tile(128, 256, 64, 8, 3), "small": Tile(128, 128, 64, 8, 4)}


@triton.jit
def _product_kernel(
    x_ptr,
    w_ptr,
    tokens_ptr,
    ends_ptr,
    out_ptr,
    N,
    K,
    x_stride,
    w_expert,
    out_stride,
    experts,
    EXPERTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    TURNED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SIDE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute a tile of rows of one group, times its matrix: [N, K], or [K, N] if TURNED.

    ADDED: add it, rounded to the dtype of the output.
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
    sources = rows
    if BY_TOKEN:
        sources = tl.load(tokens_ptr + rows, mask=rows < end, other=0)
    along = tl.arange(0, DEPTH)
    a = pointers(x_ptr, sources, along, x_stride)
    matrix = w_ptr + expert.to(tl.int64) * w_expert
    b = pointers(matrix, along, columns, N) if TURNED else pointers(matrix, columns, along, K)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        x = load_codes(a, rows < end, K - k, EVEN)
        a += DEPTH
        if TURNED:
            w = tl.load(b, mask=within(along, K - k, columns, N), other=0.0)
            b += DEPTH * N
        else:
            w = load_codes(b, columns < N, K - k, EVEN).T
            b += DEPTH
        sums = tl.dot(x, w, sums)
    y = sums.to(out_ptr.dtype.element_ty)
    places = pointers(out_ptr, rows, columns, out_stride)
    mask = within(rows, end, columns, N)
    if ADDED:
        before = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        y = (before + y.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(places, y, mask=mask)


@triton.jit
def _wgrad_kernel(
    dy_ptr,
    x_ptr,
    tokens_ptr,
    ends_ptr,
    total_ptr,
    N,
    K,
    BY_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Add a tile of dW [N, K] of one expert to the total; nothing if it has no rows."""
    down = tl.cdiv(N, ROWS)
    across = tl.cdiv(K, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    if start == end:
        return
    m, n = place(tl.program_id(0) % (down * across), down, across, SIDE)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, DEPTH):
        along = first + tl.arange(0, DEPTH)
        sources = along
        if BY_TOKEN:
            sources = tl.load(tokens_ptr + along, mask=along < end, other=0)
        # Both are zeros past the end: zero times NaN would be NaN.
        dy = pointers(dy_ptr, along, rows, N)
        dy = tl.load(dy, mask=within(along, end, rows, N), other=0.0)
        x = pointers(x_ptr, sources, columns, K)
        x = tl.load(x, mask=within(along, end, columns, K), other=0.0)
        sums = tl.dot(dy.T, x, sums)
    places = pointers(total_ptr, expert.to(tl.int64) * N + rows, columns, K)
    mask = within(rows, N, columns, K)
    tl.store(places, tl.load(places, mask=mask, other=0.0) + sums, mask=mask)


def bf16_grouped_matmul(
    x: Tensor,
    w: Tensor,
    groups: Groups,
    by_token: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """Return Y [R, N]: row r is X's row times the matrix of its expert; w is [E * N, K].

    Both are bfloat16; X is [T, K] if `by_token`, else [R, K]. `tile` changes no bits.
    """
    matrices = w.unflatten(0, (groups.num_experts, -1))
    shape = len(groups.tokens), matrices.shape[1]
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    _product(out, x, matrices, groups, by_token=by_token, tile=tile)
    return out


def bf16_grouped_dgrad(dy: Tensor, w: Tensor, groups: Groups, tile: Tile | None = None) -> Tensor:
    """Return dX, bfloat16 [R, K], of dY [R, N] and the weight [E * N, K], both bfloat16."""
    out = torch.empty(len(dy), w.shape[1], dtype=torch.bfloat16, device=dy.device)
    matrices = w.unflatten(0, (groups.num_experts, -1))
    _product(out, dy, matrices, groups, turned=True, tile=tile)
    return out


def add_bf16_grouped_product(
    out: Tensor, x: Tensor, matrices: Tensor, groups: Groups, turned: bool
) -> None:
    """Add rows of x times the matrices of their experts, rounded to bfloat16, to `out` [R, N].

    All are bfloat16, also columns of tensors: x [R, K] and matrices [E, N, K], or [E, K, N] if
    `turned`.
    """
    _product(out, x, matrices, groups, turned=turned, added=True)


def _product(
    out: Tensor,
    x: Tensor,
    w: Tensor,
    groups: Groups,
    *,
    by_token: bool = False,
    turned: bool = False,
    added: bool = False,
    tile: Tile | None = None,
) -> None:
    """Write or add rows of x times the matrices w [E, N, K], or [E, K, N] if `turned`."""
    (rows, columns), experts, k = out.shape, groups.num_experts, x.shape[1]
    shape = (experts, k, columns) if turned else (experts, columns, k)
    assert w.shape == shape, f"matrices {w.shape}, not {shape}"
    assert x.dtype == w.dtype == torch.bfloat16, f"values of {x.dtype} and {w.dtype}"
    assert x.stride(1) == out.stride(1) == 1, f"strides {x.stride()} and {out.stride()}"
    assert w.stride()[1:] == (shape[2], 1), f"strides {w.stride()}"
    assert len(x) == (len(groups.places) if by_token else rows), f"{len(x)} rows of X"
    if not rows:
        return
    tile = tile or TILES[memory_class(x.device)][has_few_rows(rows, experts)]
    _product_kernel[(most_tiles(rows, experts, tile.rows) * cdiv(columns, tile.columns),)](
        x,
        w,
        groups.tokens,
        groups.ends,
        out,
        columns,
        k,
        x.stride(0),
        w.stride(0),
        out.stride(0),
        experts,
        triton.next_power_of_2(experts),
        by_token,
        turned,
        added,
        tile.rows,
        tile.columns,
        tile.depth,
        SIDE,
        k % tile.depth == 0,
        **tile.options,
    )


def add_bf16_grouped_wgrad(
    total: Tensor, dy: Tensor, x: Tensor, groups: Groups, by_token: bool, tile: Tile | None = None
) -> None:
    """Add dW to `total`, float32 [E * N, K], of bfloat16 dY [R, N] and X.

    X is [T, K] if `by_token`, else [R, K]. `tile` changes no bits.
    """
    rows, columns, experts = dy.shape[1], x.shape[1], groups.num_experts
    assert total.shape == (experts * rows, columns), f"{total.shape}: {experts} of {rows}"
    assert total.dtype == torch.float32, f"sums in {total.dtype}"
    for operand in (total, dy, x):
        assert operand.is_contiguous(), f"strides {operand.stride()}"
    assert dy.dtype == x.dtype == torch.bfloat16, f"values of {dy.dtype} and {x.dtype}"
    assert len(x) == (len(groups.places) if by_token else len(dy)), f"{len(x)} rows of X"
    tile = tile or WGRAD[memory_class(x.device)]
    _wgrad_kernel[(experts * cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)](
        dy,
        x,
        groups.tokens,
        groups.ends,
        total,
        rows,
        columns,
        by_token,
        tile.rows,
        tile.columns,
        tile.depth,
        SIDE,
        **tile.options,
    )
