"""`kernels.norm` in plain Triton, with the bits of its references: RMSNorm, squares of gradients.

The forward is the kernel of `norm_triton`, which has these bits. The backward, of T rows of D:

    rows      one program per row                 dx, with the sum over the row in int64
    blocks    128 rows, a part of the columns     their sum of dy * n, row after row
    in_order  a part of the columns               dweight, block after block

It reads dy and x twice, since a program for the columns has to follow 128 rows in order.

`block_squares` reads gradients twice as well: once for the maximum of each block, which decides its
grid, and once for the squares on that grid, which int64 adds in any order.

All sums but those of dweight are sums of integers (`precision.triton.grid`), so tiles and warps
change no bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.norm_triton import NormFunction
from jetrl.precision.exact import factor_bits
from jetrl.precision.triton.grid import (
    INFINITY_BITS,
    SIGN,
    SUM_GRID,
    exponent_above,
    float_bits,
    grid_factors,
    grid_integers,
    grid_unit,
    mean_on_grid,
    of_bits,
    wide,
)
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.row_sums import BLOCK_ROWS, sum_of_rows

_ROW_VALUES = 1024  # values per warp of a row
_PIECE, _MOST_PIECES, _STEP = 2**14, 1024, 2048  # values per program of `block_squares`


@triton.jit
def _rows_kernel(
    dy_ptr, x_ptr, weight_ptr, inverse_ptr, dresidual_ptr, dx_ptr,
    HAS_RESIDUAL: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write dx of one row, bfloat16 [T, D], plus dresidual if HAS_RESIDUAL."""
    row = tl.program_id(0)
    columns = tl.arange(0, PADDED)
    mask = columns < D
    places = row.to(tl.int64) * D + columns
    dy = wide(dy_ptr + places, mask)
    x = wide(x_ptr + places, mask)
    weight = wide(weight_ptr + columns, mask)
    inverse = tl.load(inverse_ptr + row)
    # Columns past the row would be NaN if its inverse rms is not finite.
    normed = tl.where(mask, x * inverse, 0.0)
    scaled = dy * weight
    # The rms depends on all values of the row; its gradient removes the component along x.
    product = scaled * normed
    # Triton's -x is 0 - x, which keeps the sign of NaN.
    bits = float_bits(product)
    largest = tl.max(bits, 0)
    lowest = tl.max(bits ^ SIGN, 0)
    exponent = exponent_above(tl.maximum(largest, lowest))
    first, second = grid_factors(exponent, SUM_GRID)
    whole = grid_integers(product, first, second)
    total = tl.sum(whole.to(tl.int64), 0)
    mean = mean_on_grid(total, exponent, largest, lowest, D)
    along = normed * mean
    dx = inverse * (scaled - along)
    dx = dx.to(tl.bfloat16)
    if HAS_RESIDUAL:
        # Autograd adds two bfloat16 gradients of x, so dx is rounded before the sum as well.
        dresidual = wide(dresidual_ptr + places, mask)
        # By its bits, or LLVM adds in bfloat16.
        bits = dx.to(tl.int16, bitcast=True).to(tl.int32)
        dx = of_bits(bits << 16) + dresidual
        dx = dx.to(tl.bfloat16)
    tl.store(dx_ptr + places, dx, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.norm.rms_norm` of bfloat16 x [..., D] and weight [D], differentiable in both."""
    return NormFunction.apply(x, weight, eps, rms_norm_backward)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    dresidual: Tensor | None = None,
    sums: None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of an RMSNorm's input, bfloat16 [T, D], and weight, float32 [D].

    The gradient of the weight is rounded to bfloat16, like the weight that the reference reads.

    Args:
        dy: bfloat16 [T, D] contiguous, gradient of the norm's output.
        x: bfloat16 [T, D] contiguous, input of the norm.
        weight: bfloat16 [D].
        inverse_rms: float32 [T], saved by forward.
        dresidual: bfloat16 [T, D], gradient that bypasses the norm: added to dx in bfloat16.
    """
    num_rows, width = x.shape
    assert dy.shape == x.shape, f"{dy.shape} {x.shape}"
    assert weight.shape == (width,), f"{weight.shape}"
    assert inverse_rms.numel() == num_rows, f"{inverse_rms.shape}"
    residual = x if dresidual is None else dresidual
    assert residual.shape == x.shape, f"{residual.shape}"
    for tensor in (dy, x, weight, residual):
        assert tensor.dtype == torch.bfloat16, f"{tensor.dtype}"
        assert tensor.is_contiguous(), f"strides {tensor.stride()}"
    dx = torch.empty_like(x)
    if num_rows:
        padded = triton.next_power_of_2(width)
        warps = max(1, padded // _ROW_VALUES)
        _rows_kernel[(num_rows,)](
            dy, x, weight, inverse_rms, residual, dx,
            dresidual is not None, width, padded,
            num_warps=min(16, warps), enable_fp_fusion=False,
        )  # fmt: skip
    return dx, sum_of_rows(dy, x, inverse_rms)


@triton.jit
def _maxima_kernel(x_ptr, maxima_ptr, num_values, block_values, piece, STEP: tl.constexpr):
    """Write the largest bits of |x| of a piece of a block, int32 [blocks, pieces]."""
    block = tl.program_id(0)
    first = tl.program_id(1) * piece
    begin = block.to(tl.int64) * block_values
    last = tl.minimum(first + piece, block_values)
    end = tl.minimum(begin + last, num_values)
    bits = tl.zeros([STEP], tl.int32)
    for start in range(0, piece, STEP):
        places = begin + first + start + tl.arange(0, STEP)
        x = wide(x_ptr + places, places < end)
        size = float_bits(x) & 0x7FFFFFFF
        bits = tl.maximum(bits, size)
    place = block * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima_ptr + place, tl.max(bits, 0))


@triton.jit(do_not_specialize=["pieces"])
def _squares_kernel(
    x_ptr, maxima_ptr, sums_ptr, num_values, block_values, piece, pieces,
    BITS: tl.constexpr, LAST_BITS: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the squares of a piece of a block on the block's grid, int64 [blocks, pieces]."""
    block = tl.program_id(0)
    first = tl.program_id(1) * piece
    begin = block.to(tl.int64) * block_values
    last = tl.minimum(first + piece, block_values)
    end = tl.minimum(begin + last, num_values)
    numbers = tl.arange(0, PIECES)
    pieces_of_block = block * pieces + numbers
    maxima = tl.load(maxima_ptr + pieces_of_block, mask=numbers < pieces, other=0)
    exponent = exponent_above(tl.max(maxima, 0))
    last_block = tl.num_programs(0) - 1
    bits = tl.where(block == last_block, LAST_BITS, BITS)
    one, two = grid_factors(exponent, bits)
    total = tl.zeros([STEP], tl.int64)
    for start in range(0, piece, STEP):
        places = begin + first + start + tl.arange(0, STEP)
        x = wide(x_ptr + places, places < end)
        whole = grid_integers(x, one, two)
        whole = whole.to(tl.int64)
        total += whole * whole
    place = block * pieces + tl.program_id(1)
    tl.store(sums_ptr + place, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pieces"])
def _scaled_kernel(
    maxima_ptr, sums_ptr, out_ptr, pieces,
    BITS: tl.constexpr, LAST_BITS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Add the pieces of a block and scale them from grid units, float64 [blocks]."""
    block = tl.program_id(0)
    numbers = tl.arange(0, PIECES)
    mask = numbers < pieces
    places = block * pieces + numbers
    maxima = tl.load(maxima_ptr + places, mask=mask, other=0)
    amax_bits = tl.max(maxima, 0)
    sums = tl.load(sums_ptr + places, mask=mask, other=0)
    total = tl.sum(sums, 0)
    last_block = tl.num_programs(0) - 1
    bits = tl.where(block == last_block, LAST_BITS, BITS)
    exponent = exponent_above(amax_bits)
    unit = grid_unit(exponent, bits)
    squares = total.to(tl.float64) * unit * unit
    # Integers cannot represent NaN or Inf.
    special = tl.where(amax_bits > INFINITY_BITS, float("nan"), float("inf"))
    special = special.to(tl.float64)
    squares = tl.where(amax_bits >= INFINITY_BITS, special, squares)
    tl.store(out_ptr + block, squares)


def block_squares(x: Tensor) -> Tensor:
    """Return `kernels.norm.block_squares` as on a CPU, float64 [ceil(N / 128), 1].

    Args:
        x: float32 [N, K], contiguous.
    """
    assert (x.dtype, x.ndim) == (torch.float32, 2), f"{x.dtype} {x.shape}"
    assert x.is_contiguous(), f"strides {x.stride()}"
    blocks = cdiv(len(x), BLOCK_ROWS)
    out = torch.empty(blocks, 1, dtype=torch.float64, device=x.device)
    if not x.numel():
        return out.zero_()
    # The last block has other bits if it has fewer rows.
    block_values = min(len(x), BLOCK_ROWS) * x.shape[1]
    bits = factor_bits(block_values)
    last_values = x.numel() - (blocks - 1) * block_values
    last_bits = factor_bits(last_values)
    pieces = min(_MOST_PIECES, cdiv(block_values, _PIECE))
    steps = cdiv(cdiv(block_values, pieces), _STEP)
    piece = steps * _STEP
    padded = triton.next_power_of_2(pieces)
    maxima = torch.empty(blocks, pieces, dtype=torch.int32, device=x.device)
    sums = torch.empty(blocks, pieces, dtype=torch.int64, device=x.device)
    grid = blocks, pieces
    size = x.numel()
    _maxima_kernel[grid](
        x, maxima, size, block_values, piece, _STEP, num_warps=4, enable_fp_fusion=False
    )
    _squares_kernel[grid](
        x, maxima, sums, size, block_values, piece, pieces, bits, last_bits, padded, _STEP,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _scaled_kernel[(blocks,)](
        maxima, sums, out, pieces, bits, last_bits, padded, num_warps=1, enable_fp_fusion=False
    )
    return out
