"""`kernels.logprob` in Triton with the bits of its references, for any GPU.

One program reads a row twice: for the maximum, then for the sums. The sums are integers on the grid
of the definition, so tiles and lanes change no bits. Backward is elementwise: it reads maximum and
total of each row, which forward saves.

A value x with |x| <= 1 becomes an integer without a conversion: x + 1 rounds it to 2**-23, the rest
plus 1.5 * 2**-7 rounds that to 2**-30, and the lowest bits of both sums are the integers. The first
is even in units of the second, so ties go to even as in one rounding.

A row whose largest logit is NaN or infinite has no softmax: all its results are NaN, as those of
the references. Temperatures are positive and finite.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.portable.exact import exp_nonpositive, log_positive

_BLOCK = 4096
_WARPS = 16
_GRADIENT_BLOCK = 2048
_GRADIENT_WARPS = 8
_MASS_UNIT = tl.constexpr(2.0**-30)
_STEP_30 = tl.constexpr(1.5 * 2.0**-7)  # its last bit is 2**-30
_COARSE_30 = tl.constexpr(2**7)  # 2**-23 in units of 2**-30


@triton.jit
def lane_columns(BLOCK: tl.constexpr):
    """Return columns 0 to BLOCK - 1, int32 [BLOCK / 4, 4]; a lane reads four neighbors."""
    lanes = tl.arange(0, BLOCK // 4)
    return lanes[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def divide(x, divisor):
    """Return x / divisor, rounded to nearest, of float32 x and a scalar."""
    if divisor != 1.0:
        divisors = tl.full(x.shape, 0.0, tl.float32) + divisor
        x = tl.math.div_rn(x, divisors)
    return x


@triton.jit
def added_bits(x, BASE: tl.constexpr):
    """Return x in units of the last bit of BASE, rounded half to even, int32.

    BASE is a power of two (0 <= x <= BASE) or 1.5 times one (3 |x| <= BASE).
    """
    base = tl.full([], BASE, tl.float32)
    total = x + base
    return total.to(tl.int32, bitcast=True) - base.to(tl.int32, bitcast=True)


@triton.jit
def _largest_logit(row_ptr, columns, num_columns, BLOCK: tl.constexpr):
    """Return the maximum of num_columns logits, infinite if one is NaN.

    Args:
        columns: int32 [N, 4], the columns of each lane in the first block of BLOCK.
    """
    largest = tl.full(columns.shape, float("-inf"), tl.float32)
    for start in range(0, num_columns, BLOCK):
        places = start + columns
        x = tl.load(row_ptr + places, mask=places < num_columns, other=float("-inf"))
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.where(largest == largest, largest, float("inf"))
    largest = tl.max(largest, 1)
    return tl.max(largest, 0)


@triton.jit
def _grid_sum(high, low, x, BASE: tl.constexpr):
    """Add the grid's integers of x [N, 4] to two sums per lane: int64, and int32 for the rest."""
    coarse = added_bits(x, BASE)
    rounded = (x + BASE) - BASE
    rest = x - rounded
    fine = added_bits(rest, _STEP_30)
    high += tl.sum(coarse, 1).to(tl.int64)
    low += tl.sum(fine, 1)
    return high, low


@triton.jit
def _total_of(high, low):
    """Return the sum of all lanes, float64."""
    units = tl.sum(high, 0) * _COARSE_30
    low = low.to(tl.int64)
    units += tl.sum(low, 0)
    return units.to(tl.float64) * _MASS_UNIT


@triton.jit
def _forward_kernel(
    logits_ptr, chosen_ptr, temperature_ptr, out_ptr, num_columns, BLOCK: tl.constexpr
):
    """Write log-prob, entropy, variance, max z and total of a row to out_ptr, float32 [5, R]."""
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature = tl.load(temperature_ptr + row)
    columns = lane_columns(BLOCK)
    largest = _largest_logit(row_ptr, columns, num_columns, BLOCK)
    row_max = divide(largest, temperature)

    mass_high = tl.zeros([BLOCK // 4], tl.int64)
    mass_low = tl.zeros([BLOCK // 4], tl.int32)
    mean_high = mass_high
    mean_low = mass_low
    square_high = mass_high
    square_low = mass_low
    # Backward through the row: its end is still in the L2 cache.
    last = tl.cdiv(num_columns, BLOCK) - 1
    for block in range(0, last + 1):
        places = (last - block) * BLOCK + columns
        inside = places < num_columns
        logits = tl.load(row_ptr + places, mask=inside, other=float("-inf"))
        z = divide(logits, temperature)
        shifted = z - row_max
        mass = exp_nonpositive(shifted)
        mass_high, mass_low = _grid_sum(mass_high, mass_low, mass, 1.0)
        # exp is 0 below -87, so any bound below that is as good as the definition's -1e30.
        bounded = tl.maximum(shifted, -88.0)
        weighted = mass * bounded  # between -1/e and 0
        mean_high, mean_low = _grid_sum(mean_high, mean_low, weighted, 1.5)
        square = weighted * bounded
        square_high, square_low = _grid_sum(square_high, square_low, square, 1.0)

    total = _total_of(mass_high, mass_low)
    finite = tl.abs(row_max) < float("inf")
    total = tl.where(finite, total, float("nan"))
    tl.store(out_ptr + 3 * rows + row, row_max)
    tl.store(out_ptr + 4 * rows + row, total.to(tl.float32))
    lse = log_positive(total)
    mean = _total_of(mean_high, mean_low) / total
    variance = _total_of(square_high, square_low) / total
    variance -= mean * mean
    variance = tl.where(variance < 0.0, 0.0, variance)
    entropy = lse - mean
    chosen = tl.load(chosen_ptr + row)
    z = divide(tl.load(row_ptr + chosen), temperature)
    logprob = z - row_max
    logprob -= lse.to(tl.float32)
    tl.store(out_ptr + row, logprob)
    tl.store(out_ptr + rows + row, entropy.to(tl.float32))
    tl.store(out_ptr + 2 * rows + row, variance.to(tl.float32))


@triton.jit
def _gradient_kernel(
    logits_ptr,
    chosen_ptr,
    temperature_ptr,
    softmax_ptr,
    grad_ptr,
    out_ptr,
    num_rows,
    num_columns,
    column_blocks,
    BLOCK: tl.constexpr,
):
    """Write the gradient of BLOCK logits of a row; softmax_ptr holds max z and total, [2, R]."""
    row = tl.program_id(0) // column_blocks
    block = tl.program_id(0) % column_blocks
    start = block * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = row.to(tl.int64) * num_columns + columns
    temperature = tl.load(temperature_ptr + row)
    row_max = tl.load(softmax_ptr + row)
    total = tl.load(softmax_ptr + num_rows + row)
    chosen = tl.load(chosen_ptr + row)
    grad = tl.load(grad_ptr + row)
    logits = tl.load(logits_ptr + places, mask=inside, other=float("-inf"))
    z = divide(logits, temperature)
    mass = exp_nonpositive(z - row_max)
    share = divide(mass, total)
    is_chosen = columns == chosen
    # Times -1, since 0 - share has another sign for a share of 0.
    others = share * -1.0
    gradient = tl.where(is_chosen, 1.0 - share, others)
    gradient *= divide(grad, temperature)
    tl.store(out_ptr + places, gradient, mask=inside)


def _reduce(logits: Tensor, chosen: Tensor, temperature: Tensor) -> Tensor:
    """Return log-prob, entropy, variance, max z and total of each row, [5, R]."""
    rows, vocabulary = logits.shape
    assert (logits.dtype, logits.is_contiguous()) == (torch.float32, True)
    assert (chosen.dtype, chosen.shape) == (torch.int64, (rows,))
    assert (temperature.dtype, temperature.shape) == (torch.float32, (rows, 1))
    out = torch.empty(5, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _forward_kernel[(rows,)](
            logits,
            chosen.contiguous(),
            temperature.contiguous(),
            out,
            vocabulary,
            _BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return out


def exact_logits_gradient(
    logits: Tensor, chosen: Tensor, temperature: Tensor, softmax: Tensor, grad: Tensor
) -> Tensor:
    """`kernels.logprob.logits_gradient_ref`, bitwise equal: float32 [R, V]."""
    rows, vocabulary = logits.shape
    assert (grad.dtype, grad.shape) == (torch.float32, (rows,))
    out = torch.empty_like(logits)
    blocks = triton.cdiv(vocabulary, _GRADIENT_BLOCK)
    if rows:
        _gradient_kernel[(rows * blocks,)](
            logits,
            chosen.contiguous(),
            temperature.contiguous(),
            softmax.contiguous(),
            grad.contiguous(),
            out,
            rows,
            vocabulary,
            blocks,
            _GRADIENT_BLOCK,
            num_warps=_GRADIENT_WARPS,
            enable_fp_fusion=False,
        )
    return out


def exact_logprobs(
    logits: Tensor, chosen: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.logprob.exact_logprobs`, bitwise equal to its reference."""
    results = _reduce(logits, chosen, temperature)
    return results[0], results[1:3], results[3:]


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`kernels.logprob.chosen_logprobs`, bitwise equal to its references."""
    per_row = logits.new_full((len(chosen), 1), temperature)
    return _ChosenLogprobs.apply(logits, chosen, per_row)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, chosen: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        results = _reduce(logits, chosen, temperature)
        logprobs = results[0]
        moments = results[1:3]
        ctx.save_for_backward(logits, chosen, temperature, results[3:])
        ctx.mark_non_differentiable(moments)
        return logprobs, moments

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, chosen, temperature, softmax = ctx.saved_tensors
        return exact_logits_gradient(logits, chosen, temperature, softmax, grads[0]), None, None
