"""`precision.int8_planes` in plain Triton, for GPUs of compute capability 8.0 and later.

Operands of INT8 tensor cores are contiguous along the sum. So DGrad and WGrad turn codes first, and
take slabs of the vocabulary, so that their temporaries stay near 200 MB at most:

    FProp   a program reads the planes of X and of W once, for three products
    DGrad   per slab: planes of dY * s_w; high plane of W, turned; products of blocks, in order
    WGrad   planes of X, turned; per slab: planes of dY * s_x, turned; products, rotated, added

Sums are int32. FProp and WGrad share `_sums_of_products`; S is rounded once, see `_rounded`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.quantize import ROTATION, SLAB_BYTES, Planes
from jetrl.precision.triton.layout import cdiv, round_up
from jetrl.precision.triton.portable_int8 import (
    OPTIONS,
    Tile,
    int8_dot,
    load_codes,
    load_scales,
    memory_class,
    place,
    pointers,
    rows_class,
    within,
)
from jetrl.precision.triton.quantize import abs_bits, scale_and_multiplier

# Tiles by the largest number of rows (0: more); the small ones fit in 99 KB of shared memory.
_LARGE_FPROP = {
    0: Tile(128, 128, 128, 8, 3),
    256: Tile(128, 128, 128, 8, 3),
    128: Tile(128, 128, 128, 8, 3),
    64: Tile(64, 128, 128, 4, 3),
    32: Tile(32, 64, 128, 4, 4),
    16: Tile(16, 64, 128, 4, 5),
}
_SMALL_FPROP = {
    0: Tile(128, 64, 64, 8, 4),
    256: Tile(128, 64, 64, 8, 4),
    128: Tile(128, 64, 64, 8, 4),
    64: Tile(64, 64, 64, 4, 4),
    32: Tile(32, 64, 128, 4, 4),
    16: Tile(16, 64, 128, 4, 4),
}
FPROP = {"large": _LARGE_FPROP, "small": _SMALL_FPROP}
DGRAD = {"large": Tile(128, 128, 128, 8, 3), "small": Tile(64, 128, 64, 8, 4)}
WGRAD = {"large": Tile(128, 128, 128, 8, 3), "small": Tile(128, 64, 64, 8, 3)}
BLOCK = 512  # tokens of a block of DGrad, by the definition
_DEEP = 128  # rows of a chunk are padded with zeros to a multiple
_TOP = tl.constexpr(32512.0)
_FLOOR = tl.constexpr(27 << 23)  # bits of 2**-100
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _rounded(high, low):
    """Return 256 * high + low, of int32, in float32 with one rounding.

    It is 65536 * top + rest, both exact in float32: top is below 2**23, rest below 2**16.
    """
    high += low >> 8
    rest = ((high & 255) << 8) | (low & 255)
    return (high >> 8).to(tl.float32) * 65536.0 + rest.to(tl.float32)


@triton.jit
def _rotated(x, GROUPS: tl.constexpr):
    """Return float32 [GROUPS, 64] rotated: `precision.quantize.rotate` of one block per group.

    The other value of a pair is the sum of both as integers, modulo 2**32, minus the own one: one
    shuffle if another thread holds it, and nothing else if not.
    """
    SIZE: tl.constexpr = GROUPS * 64
    second = (tl.arange(0, 2) == 1)[None, :, None]
    for stage in tl.static_range(6):
        pairs = tl.reshape(x, (SIZE >> (stage + 1), 2, 1 << stage))
        bits = pairs.to(tl.int32, bitcast=True)
        others = (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        # Not -pairs: Triton subtracts it from 0, and 0 - 0 is not -0.
        x = tl.reshape(others + tl.where(second, pairs * -1.0, pairs), (GROUPS, 64))
    return x * 0.125


@triton.jit
def _both_planes(ptr, first, columns, stride, plane, ROWS: tl.constexpr):
    """Return pointers [2 ROWS, C] to ROWS rows of the high plane, then of the low one, and rows.

    One product of both has one wait. Triton waits for each product of INT8 by wgmma.
    """
    places = tl.arange(0, 2 * ROWS)
    rows = first + places % ROWS
    of_plane = (places // ROWS).to(tl.int64) * plane
    return pointers(ptr, rows, columns, stride) + of_plane[:, None], rows


@triton.jit
def _sums_of_planes(sums):
    """Return the sums of the high and of the low plane, from those of both: [2 R, C]."""
    parts = tl.reshape(sums, (2, sums.shape[0] // 2, sums.shape[1]))
    return tl.split(tl.permute(parts, (1, 2, 0)))


@triton.jit
def _sums_of_products(
    a_high_ptr, a_low_ptr, b_high_ptr, b_low_ptr, rows, R, columns, C, K,
    DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return sums of high * high, and of high * low + low * high, of rows and columns over K.

    The matrices are [R, K] and [C, K].
    """
    along = tl.arange(0, DEPTH)
    a_high = pointers(a_high_ptr, rows, along, K)
    a_low = pointers(a_low_ptr, rows, along, K)
    b_high = pointers(b_high_ptr, columns, along, K)
    b_low = pointers(b_low_ptr, columns, along, K)
    highs = tl.zeros((rows.shape[0], columns.shape[0]), tl.int32)
    middle = tl.zeros((rows.shape[0], columns.shape[0]), tl.int32)
    for k in range(0, K, DEPTH):
        high = load_codes(a_high, rows < R, K - k, EVEN)
        low = load_codes(a_low, rows < R, K - k, EVEN)
        other_high = load_codes(b_high, columns < C, K - k, EVEN)
        other_low = load_codes(b_low, columns < C, K - k, EVEN)
        highs = int8_dot(high, other_high.T, highs)
        middle = int8_dot(high, other_low.T, middle)
        middle = int8_dot(low, other_high.T, middle)
        a_high += DEPTH
        a_low += DEPTH
        b_high += DEPTH
        b_low += DEPTH
    return highs, middle


@triton.jit
def _planes(x):
    """Return the high and low plane, int8, of float32 x times its multiplier."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -_TOP), _TOP), 0.0)
    codes = (x + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS
    high = (codes + 128) >> 8
    return high.to(tl.int8), (codes - (high << 8)).to(tl.int8)


@triton.jit
def _row_kernel(x_ptr, high_ptr, low_ptr, scales_ptr, row_stride, D, WIDTH: tl.constexpr):
    """Rotate a row and store its planes."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
    x = tl.reshape(_rotated(tl.reshape(x, (WIDTH // 64, 64)), WIDTH // 64), (WIDTH,))
    scale, multiplier = scale_and_multiplier(tl.max(abs_bits(x), 0), _TOP, _FLOOR, False)
    high, low = _planes(x * multiplier)
    tl.store(high_ptr + row * D + columns, high, mask=columns < D)
    tl.store(low_ptr + row * D + columns, low, mask=columns < D)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["R"])
def _fprop_kernel(
    x_high_ptr,
    x_low_ptr,
    w_high_ptr,
    w_low_ptr,
    x_scales_ptr,
    w_scales_ptr,
    out_ptr,
    R,
    V,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute a tile of logits; programs of the same columns are neighbors and share W in L2."""
    down = tl.cdiv(R, ROWS)
    rows = tl.program_id(0) % down * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // down * COLUMNS + tl.arange(0, COLUMNS)
    highs, middle = _sums_of_products(
        x_high_ptr, x_low_ptr, w_high_ptr, w_low_ptr, rows, R, columns, V, D, DEPTH, EVEN
    )
    # S is 256 times what is rounded, and a power of two changes no rounding.
    s = load_scales(w_scales_ptr, columns, V) * 256.0
    t = load_scales(x_scales_ptr, rows, R)
    y = _rounded(highs, middle) * s[None, :] * t[:, None]
    mask = within(rows, R, columns, V)
    tl.store(pointers(out_ptr, rows, columns, V), y, mask=mask)


@triton.jit(do_not_specialize=["M"])  # N is, so that loads are of 16 bytes
def _turn_kernel(x_ptr, out_ptr, M, N, row_stride, out_stride, SIZE: tl.constexpr):
    """Transpose a tile of int8 [M, N] to [N, out_stride], with zeros past M."""
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    places = pointers(x_ptr, rows, columns, row_stride)
    x = tl.load(places, mask=within(rows, M, columns, N), other=0)
    places = pointers(out_ptr, columns, rows, out_stride)
    tl.store(places, x.T, mask=within(columns, N, rows, out_stride))


@triton.jit(do_not_specialize=["R", "left"])
def _block_planes_kernel(
    dy_ptr,
    w_scales_ptr,
    planes_ptr,
    scales_ptr,
    R,
    left,
    row_stride,
    slab,
    plane,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the planes of dY * 256 s_w of one block of tokens, with zeros past `left` tokens."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = within(rows, R, tokens, left)
    places = pointers(dy_ptr, rows, tokens, row_stride)
    s = load_scales(w_scales_ptr, tokens, left) * 256.0
    x = tl.load(places, mask=mask, other=0.0) * s[None, :]
    scale, multiplier = scale_and_multiplier(tl.max(abs_bits(x), 1), _TOP, _FLOOR, False)
    high, low = _planes(x * multiplier[:, None])
    places = pointers(planes_ptr, rows, tokens, slab)
    tl.store(places, high, mask=(rows < R)[:, None])
    tl.store(places + plane, low, mask=(rows < R)[:, None])
    tl.store(scales_ptr + rows * (slab // BLOCK) + tl.program_id(1), scale, mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def _dgrad_kernel(
    planes_ptr,
    scales_ptr,
    w_ptr,
    total_ptr,
    R,
    D,
    slab,
    plane,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the blocks of a slab to a tile of the total, in order; W is turned, [D, slab]."""
    m, n = place(tl.program_id(0), tl.cdiv(R, ROWS), tl.cdiv(D, COLUMNS), 8)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    along = tl.arange(0, DEPTH)
    a, both_rows = _both_planes(planes_ptr, m * ROWS, along, slab, plane, ROWS)
    b = pointers(w_ptr, columns, along, slab)
    places = pointers(total_ptr, rows, columns, D)
    mask = within(rows, R, columns, D)
    total = tl.load(places, mask=mask, other=0.0)
    scales = scales_ptr + rows * (slab // BLOCK)
    for _ in tl.range(0, slab, BLOCK, flatten=True):
        sums = tl.zeros((2 * ROWS, COLUMNS), tl.int32)
        for _k in range(0, BLOCK, DEPTH):
            x = load_codes(a, both_rows < R, 0, True)
            w = load_codes(b, columns < D, 0, True)
            sums = int8_dot(x, w.T, sums)
            a += DEPTH
            b += DEPTH
        highs, lows = _sums_of_planes(sums)
        s = tl.load(scales, mask=rows < R, other=0.0)
        total += (highs * 256 + lows).to(tl.float32) * s[:, None]
        scales += 1
    tl.store(places, total, mask=mask)


@triton.jit
def _rotate_kernel(x_ptr, out_ptr, D, WIDTH: tl.constexpr):
    """Rotate a row of float32 [R, D], and round it to bfloat16."""
    columns = tl.arange(0, WIDTH)
    places = tl.program_id(0).to(tl.int64) * D + columns
    x = tl.load(x_ptr + places, mask=columns < D, other=0.0)
    x = tl.reshape(_rotated(tl.reshape(x, (WIDTH // 64, 64)), WIDTH // 64), (WIDTH,))
    tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=columns < D)


@triton.jit
def _scaled(dy_ptr, x_scales_ptr, rows, R, columns, tokens, row_stride):
    """Load dY * s_x of some rows and tokens, zeros outside."""
    mask = within(rows, R, columns, tokens)
    dy = tl.load(pointers(dy_ptr, rows, columns, row_stride), mask=mask, other=0.0)
    return dy * load_scales(x_scales_ptr, rows, R)[:, None]


@triton.jit(do_not_specialize=["R", "tokens"])
def _token_planes_kernel(
    dy_ptr,
    x_scales_ptr,
    high_ptr,
    low_ptr,
    scales_ptr,
    R,
    tokens,
    row_stride,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store the planes of dY * s_x of tokens along the rows, [tokens, depth], zeros past R."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < tokens
    bits = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, R, ROWS):
        rows = first + tl.arange(0, ROWS)
        x = _scaled(dy_ptr, x_scales_ptr, rows, R, columns, tokens, row_stride)
        bits = tl.maximum(bits, tl.max(abs_bits(x), 0))
    scale, multiplier = scale_and_multiplier(bits, _TOP, _FLOOR, False)
    tl.store(scales_ptr + columns, scale, mask=inside)
    for first in range(0, depth, ROWS):
        rows = first + tl.arange(0, ROWS)
        x = _scaled(dy_ptr, x_scales_ptr, rows, R, columns, tokens, row_stride)
        high, low = _planes(x * multiplier[None, :])
        tl.store(pointers(high_ptr, columns, rows, depth), high.T, mask=inside[:, None])
        tl.store(pointers(low_ptr, columns, rows, depth), low.T, mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _wgrad_kernel(
    high_ptr,
    low_ptr,
    scales_ptr,
    x_high_ptr,
    x_low_ptr,
    total_ptr,
    tokens,
    D,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Add a tile of dW of a slab; planes of dY are [tokens, depth], those of X [D, depth]."""
    m, n = place(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.cdiv(D, COLUMNS), 8)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    # The total, in groups of a rotation, is loaded while the products run.
    GROUPS: tl.constexpr = ROWS * COLUMNS // 64
    group = tl.arange(0, GROUPS)
    row = group // (COLUMNS // 64)
    column = group % (COLUMNS // 64) * 64
    total_ptr += (m * ROWS).to(tl.int64) * D + n * COLUMNS
    places = total_ptr + (row * D + column)[:, None] + tl.arange(0, 64)[None, :]
    inside = (row < tokens - m * ROWS) & (column < D - n * COLUMNS)
    total = tl.load(places, mask=inside[:, None], other=0.0)
    highs, middle = _sums_of_products(
        high_ptr, low_ptr, x_high_ptr, x_low_ptr, rows, tokens, columns, D, depth, DEPTH, True
    )
    s = load_scales(scales_ptr, rows, tokens) * 256.0  # as in FProp
    dw = _rounded(highs, middle) * s[:, None]
    dw = _rotated(tl.reshape(dw, (GROUPS, 64)), GROUPS)
    tl.store(places, total + dw, mask=inside[:, None])


def planes_of_rows(x: Tensor, out: Planes | None = None) -> Planes:
    """`precision.int8_planes.planes_of_rows`."""
    rows, width = x.shape
    assert (x.stride(1), width % ROTATION) == (1, 0), f"{x.shape}, strides {x.stride()}"
    out = Planes.empty(rows, width, x.device) if out is None else out
    assert out.shape == x.shape, f"planes {out.shape} of {x.shape}"
    assert all(part.is_contiguous() for part in out.tensors()), f"strides {out.high.stride()}"
    if rows:
        padded = triton.next_power_of_2(width)
        _row_kernel[(rows,)](
            x,
            out.high,
            out.low,
            out.scales,
            x.stride(0),
            width,
            padded,
            num_warps=max(1, min(8, padded // 512)),
            **OPTIONS,
        )
    return out


def planes_fprop(x: Planes, w: Planes) -> Tensor:
    """`precision.int8_planes.planes_fprop`."""
    (rows, width), vocabulary = x.shape, w.shape[0]
    assert w.high.stride() == (width, 1), f"planes of W [V, {width}], {w.high.stride()}"
    assert width <= 65536, f"int32 sums over {width} values"
    out = torch.empty(rows, vocabulary, device=x.high.device)
    tile = FPROP[memory_class(x.high.device)][rows_class(rows)]
    if rows:
        _fprop_kernel[(cdiv(rows, tile.rows) * cdiv(vocabulary, tile.columns),)](
            x.high,
            x.low,
            w.high,
            w.low,
            x.scales,
            w.scales,
            out,
            rows,
            vocabulary,
            width,
            tile.rows,
            tile.columns,
            tile.depth,
            width % tile.depth == 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **OPTIONS,
        )
    return out


def _slabs(vocabulary: int, codes: int, unit: int) -> Iterator[slice]:
    """Yield slabs of about equal size, multiples of `unit` tokens of `codes` codes each."""
    most = max(unit, SLAB_BYTES // codes // unit * unit)
    size = round_up(cdiv(vocabulary, cdiv(vocabulary, most)), unit)
    for start in range(0, vocabulary, size):
        yield slice(start, start + size)


def _turned(x: Tensor, depth: int) -> Tensor:
    """Return int8 [M, N] transposed, [N, depth], with zeros past M."""
    rows, columns = x.shape
    out = torch.empty(columns, depth, dtype=torch.int8, device=x.device)
    _turn_kernel[(cdiv(depth, 128), cdiv(columns, 128))](
        x, out, rows, columns, x.stride(0), depth, 128, num_warps=8
    )
    return out


def planes_dgrad(dy: Tensor, w: Planes) -> Tensor:
    """`precision.int8_planes.planes_dgrad`."""
    (rows, vocabulary), width = dy.shape, w.shape[1]
    assert dy.stride(1) == 1, f"strides {dy.stride()}"
    total = torch.zeros(rows, width, device=dy.device)
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=dy.device)
    if rows:
        for slab in _slabs(vocabulary, max(rows, width), BLOCK):
            _add_slab(total, dy[:, slab], w.high[slab], w.scales[slab])
        padded = triton.next_power_of_2(width)
        warps = max(1, min(8, padded // 512))
        _rotate_kernel[(rows,)](total, out, width, padded, num_warps=warps, **OPTIONS)
    return out


def _add_slab(total: Tensor, dy: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Add the products of a slab's blocks to the rotated dX."""
    (rows, width), tokens, device = total.shape, dy.shape[1], dy.device
    padded = round_up(tokens, BLOCK)
    both = torch.empty(2, rows, padded, dtype=torch.int8, device=device)
    block_scales = torch.empty(rows, padded // BLOCK, device=device)
    _block_planes_kernel[(cdiv(rows, 8), padded // BLOCK)](
        dy,
        scales,
        both,
        block_scales,
        rows,
        tokens,
        dy.stride(0),
        padded,
        both.stride(0),
        8,
        BLOCK,
        num_warps=4,
        **OPTIONS,
    )
    tile = DGRAD[memory_class(device)]
    _dgrad_kernel[(cdiv(rows, tile.rows) * cdiv(width, tile.columns),)](
        both,
        block_scales,
        _turned(codes, padded),
        total,
        rows,
        width,
        padded,
        both.stride(0),
        tile.rows,
        tile.columns,
        tile.depth,
        BLOCK,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OPTIONS,
    )


def add_planes_wgrad(total: Tensor, dy: Tensor, x: Planes) -> None:
    """`precision.int8_planes.add_planes_wgrad`."""
    rows, vocabulary = dy.shape
    assert rows <= 65536, f"int32 sums over {rows} rows"
    assert total.is_contiguous(), f"strides {total.stride()}"
    if not rows:
        return
    depth = round_up(rows, _DEEP)
    high = _turned(x.high, depth)
    low = _turned(x.low, depth)
    for slab in _slabs(vocabulary, depth, _DEEP):
        _add_tokens(total[slab], dy[:, slab], x.scales, high, low)


def _add_tokens(total: Tensor, dy: Tensor, x_scales: Tensor, x_high: Tensor, x_low: Tensor) -> None:
    """Add dW of the tokens of a slab."""
    (tokens, width), depth, device = total.shape, x_high.shape[1], dy.device
    high, low = (torch.empty(tokens, depth, dtype=torch.int8, device=device) for _ in range(2))
    scales = torch.empty(tokens, device=device)
    _token_planes_kernel[(cdiv(tokens, 32),)](
        dy,
        x_scales,
        high,
        low,
        scales,
        len(dy),
        tokens,
        dy.stride(0),
        depth,
        _DEEP,
        32,
        num_warps=4,
        **OPTIONS,
    )
    tile = WGRAD[memory_class(device)]
    _wgrad_kernel[(cdiv(tokens, tile.rows) * cdiv(width, tile.columns),)](
        high,
        low,
        scales,
        x_high,
        x_low,
        total,
        tokens,
        width,
        depth,
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OPTIONS,
    )
