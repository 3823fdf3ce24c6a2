"""Backward of QK norm, rotary embedding and key smoothing, with the bits of autograd on a CPU.

The reference is autograd of `models.layer.Rotary.heads`. For a head x of D bfloat16 values (a power
of two) with the gradient g of the rotated head, bfloat16, all float32 and each operation rounded:

    g = hadamard(g)              with smoothing: pairs D/2 apart first, then D/4, ..., 1, to the
                                 sum and the difference; then + 0, as autograd has no -0 here
    g = g * factor               2**exponent
    a = a' * cos + b' * sin      for halves a', b' of g; the sum is of two rounded products
    b = b' * cos - a' * sin
    g = a, b                     rounded to bfloat16: the gradient of the norm's output
    dx, dw = backward of `kernels.norm` with dy = g, rounded to bfloat16; without norms dx = g

dw is summed over the T * H rows of T tokens and H heads, heads of a token first: 128 rows in order,
then the blocks in order. It is rounded to bfloat16, like the weight that the reference reads.

A program has ROWS blocks of 128 rows and takes one row of each at a time, so each of its sums is in
order without a second pass over the gradients. A butterfly's other value is the integer sum of the
bits of both, minus those of its own: a shuffle, and no copy through shared memory.

Legend: T tokens, H query heads, G key-value heads, D head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.norm_triton import grid_factor, inverse_rms_of
from jetrl.precision.triton.grid import (
    SIGN,
    SUM_GRID,
    exponent_above,
    float_bits,
    grid_factors,
    grid_integers,
    mean_on_grid,
    of_bits,
    wide,
)
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.row_sums import BLOCK_ROWS, sum_in_order

# Values of both halves per program of one warp, by the least number of blocks: more programs for
# fewer tokens. Changes no bits.
_VALUES = {3072: 512, 1024: 256, 0: 128}


@triton.jit
def _butterfly(x, DISTANCE: tl.constexpr):
    """Return sums and differences of the values of x [R, N] that are DISTANCE apart."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    bits = tl.reshape(float_bits(x), (R, N // (2 * DISTANCE), 2, DISTANCE))
    # The sum of both integers modulo 2**32, minus the own one, is the other.
    both = tl.sum(bits, 2)
    other = both[:, :, None, :] - bits
    sign = tl.arange(0, 2) << 31  # of the second value
    own = bits ^ sign[None, None, :, None]
    y = of_bits(other) + of_bits(own)
    return tl.reshape(y, (R, N))


@triton.jit
def _hadamard(first, second, STAGES: tl.constexpr):
    """Return both halves [R, D/2] after the transposed Hadamard transform of each head."""
    difference = first - second
    first = first + second
    second = difference
    for stage in tl.static_range(STAGES):
        first = _butterfly(first, 1 << (STAGES - 1 - stage))
        second = _butterfly(second, 1 << (STAGES - 1 - stage))
    return first + 0.0, second + 0.0


@triton.jit
def _inverse_rms(first, second, D: tl.constexpr, EPS: tl.constexpr):
    """Return the inverse rms of each head, float32 [R], as `norm_triton` does for a row."""
    first_bits = float_bits(tl.abs(first))
    second_bits = float_bits(tl.abs(second))
    bits = tl.maximum(first_bits, second_bits)
    amax_bits = tl.max(bits, 1)
    factor = grid_factor(amax_bits)
    each = factor[:, None]
    # Adding 1.5 * 2**23 rounds to nearest even and leaves the integer in the low bits.
    one = float_bits(first * each + 12582912.0) - 0x4B400000
    two = float_bits(second * each + 12582912.0) - 0x4B400000
    one = one.to(tl.int64)
    two = two.to(tl.int64)
    total = tl.sum(one * one + two * two, 1)
    return inverse_rms_of(total, factor, amax_bits, D, EPS)


@triton.jit
def _norm_backward(dfirst, dsecond, first, second, inverse, first_weight, second_weight):
    """Return both halves of dx, float32, and of dy * n, of R heads [R, D/2] with their norms."""
    D: tl.constexpr = 2 * first.shape[1]
    inverse = inverse[:, None]
    first = first * inverse
    second = second * inverse
    first_scaled = dfirst * first_weight
    second_scaled = dsecond * second_weight
    one = first_scaled * first
    two = second_scaled * second
    # Triton's -x is 0 - x, which keeps the sign of NaN.
    first_bits = float_bits(one)
    second_bits = float_bits(two)
    largest = tl.max(tl.maximum(first_bits, second_bits), 1)
    lowest = tl.max(tl.maximum(first_bits ^ SIGN, second_bits ^ SIGN), 1)
    amax_bits = tl.maximum(largest, lowest)
    exponent = exponent_above(amax_bits)
    factor, rest = grid_factors(exponent, SUM_GRID)
    factor = factor[:, None]
    rest = rest[:, None]
    one = grid_integers(one, factor, rest).to(tl.int64)
    two = grid_integers(two, factor, rest).to(tl.int64)
    total = tl.sum(one + two, 1)
    mean = mean_on_grid(total, exponent, largest, lowest, D)
    mean = mean[:, None]
    dx_first = inverse * (first_scaled - first * mean)
    dx_second = inverse * (second_scaled - second * mean)
    first = dfirst * first
    second = dsecond * second
    return dx_first, dx_second, first, second


@triton.jit(do_not_specialize=["num_tokens", "q_programs", "q_blocks"])
def _heads_kernel(
    dq_ptr, dk_ptr, qkv_ptr, dqkv_ptr, positions_ptr, table_ptr, q_weight_ptr, k_weight_ptr,
    exponents_ptr, sums_ptr, num_tokens, q_programs, q_blocks,
    H: tl.constexpr, G: tl.constexpr, NORM: tl.constexpr, SMOOTH: tl.constexpr, D: tl.constexpr,
    STAGES: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dqkv of query or key heads, rows of ROWS blocks, and their sums, [blocks, D]."""
    HALF: tl.constexpr = D // 2
    WIDTH: tl.constexpr = (H + 2 * G) * D
    program = tl.program_id(0)
    pairs = tl.arange(0, HALF)
    grad_ptr = dq_ptr
    weight_ptr = q_weight_ptr
    count = H
    first_head = 0
    first_sum = 0
    if program >= q_programs:
        program -= q_programs
        grad_ptr = dk_ptr
        weight_ptr = k_weight_ptr
        count = G
        first_head = H
        first_sum = q_blocks
    blocks = program * ROWS + tl.arange(0, ROWS)
    if NORM:
        first_weight = tl.load(weight_ptr + pairs)
        first_weight = first_weight.to(tl.float32)[None, :]
        second_weight = tl.load(weight_ptr + HALF + pairs)
        second_weight = second_weight.to(tl.float32)[None, :]
    first_total = tl.zeros([ROWS, HALF], tl.float32)
    second_total = tl.zeros([ROWS, HALF], tl.float32)
    # Row i of each block, of a token and a head.
    row = blocks * 128
    token = row // count
    head = row % count
    for _ in range(tl.minimum(num_tokens * count, 128)):
        inside = token < num_tokens
        mask = inside[:, None]
        token64 = token.to(tl.int64)
        source = (token64 * count + head) * D
        source = source[:, None] + pairs[None, :]
        column = first_head + head
        place = token64 * WIDTH + column * D
        place = place[:, None] + pairs[None, :]
        dfirst = wide(grad_ptr + source, mask)
        dsecond = wide(grad_ptr + source + HALF, mask)
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        angle = position * D
        angle = angle[:, None] + pairs[None, :]
        cosine = tl.load(table_ptr + angle)
        sine = tl.load(table_ptr + angle + HALF)
        if SMOOTH:
            places = column * HALF
            places = places[:, None] + pairs[None, :]
            exponents = tl.load(exponents_ptr + places)
            exponents = exponents.to(tl.int32) + 127
            factors = of_bits(exponents << 23)
            dfirst, dsecond = _hadamard(dfirst, dsecond, STAGES)
            dfirst = dfirst * factors
            dsecond = dsecond * factors
        # Rotate back: the inverse of a rotation is its transpose.
        turned = dsecond * cosine - dfirst * sine
        dfirst = dfirst * cosine + dsecond * sine
        dfirst = dfirst.to(tl.bfloat16)
        dsecond = turned.to(tl.bfloat16)
        if NORM:
            first = wide(qkv_ptr + place, mask)
            second = wide(qkv_ptr + place + HALF, mask)
            # Rows past the end add zeros.
            inverse = _inverse_rms(first, second, D, EPS)
            inverse = tl.where(inside, inverse, 0.0)
            dfirst = dfirst.to(tl.float32)
            dsecond = dsecond.to(tl.float32)
            dfirst, dsecond, first_part, second_part = _norm_backward(
                dfirst, dsecond, first, second, inverse, first_weight, second_weight
            )
            first_total += first_part
            second_total += second_part
            dfirst = dfirst.to(tl.bfloat16)
            dsecond = dsecond.to(tl.bfloat16)
        tl.store(dqkv_ptr + place, dfirst, mask=mask)
        tl.store(dqkv_ptr + place + HALF, dsecond, mask=mask)
        head += 1
        token = tl.where(head == count, token + 1, token)
        head = tl.where(head == count, 0, head)
    if NORM:
        used = row < num_tokens * count
        mask = used[:, None]
        places = (first_sum + blocks).to(tl.int64) * D
        places = places[:, None] + pairs[None, :]
        tl.store(sums_ptr + places, first_total, mask=mask)
        tl.store(sums_ptr + places + HALF, second_total, mask=mask)


def qk_norm_rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, positions: Tensor, table: Tensor,
    norms: tuple[Tensor, Tensor] | None, eps: float, exponents: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of qkv, bfloat16, and of both norm weights, float32 [D] or None.

    Args:
        dq: bfloat16 [T, H, D], gradient of the rotated queries.
        dk: bfloat16 [T, G, D], straight-through gradient of the stored keys; dv likewise.
        qkv: bfloat16 [T, (H + 2G) * D], input of the forward.
        positions: int64 [T].
        table: float32 [positions, 2, D/2], from `rotary_table`.
        norms: bfloat16 [D] of the query and key norms, or None without norms.
        exponents: int8 [H + G, D/2] of the forward's smoothing, or None.
    """
    tokens, heads, size = dq.shape
    groups = dk.shape[1]
    for x in (dq, dk, dv, qkv):
        assert x.dtype == torch.bfloat16, f"{x.dtype}"
        assert x.is_contiguous(), f"strides {x.stride()}"
    for x in (positions, table):
        assert x.is_contiguous(), f"strides {x.stride()}"
    width = (heads + 2 * groups) * size
    assert dk.shape == (tokens, groups, size), f"{dk.shape}"
    assert dv.shape == dk.shape, f"{dv.shape}"
    assert qkv.shape == (tokens, width), f"{qkv.shape}"
    assert size == triton.next_power_of_2(size), f"heads of {size}"
    assert (table.dtype, table.shape[1:]) == (torch.float32, (2, size // 2)), f"{table.shape}"
    assert (positions.dtype, positions.shape) == (torch.int64, (tokens,)), f"{positions.shape}"
    if exponents is not None:
        assert exponents.dtype == torch.int8, f"{exponents.dtype}"
        assert exponents.is_contiguous(), f"strides {exponents.stride()}"
        assert exponents.shape == (heads + groups, size // 2), f"{exponents.shape}"
    dqkv = torch.empty_like(qkv)
    dqkv.view(tokens, -1, size)[:, heads + groups :] = dv
    q_blocks = cdiv(tokens * heads, BLOCK_ROWS)
    k_blocks = cdiv(tokens * groups, BLOCK_ROWS)
    blocks = q_blocks + k_blocks
    sums = torch.empty(blocks, size, dtype=torch.float32, device=qkv.device)
    if tokens:
        values = next(v for least, v in _VALUES.items() if blocks >= least)
        rows = max(1, values // size)
        q_programs = cdiv(q_blocks, rows)
        k_programs = cdiv(k_blocks, rows)
        # A kernel cannot take None, so any tensor is a placeholder for unused arguments.
        q_weight, k_weight = norms or (qkv, qkv)
        smooth = exponents is not None
        factors = qkv if exponents is None else exponents
        stages = size.bit_length() - 2
        _heads_kernel[(q_programs + k_programs,)](
            dq, dk, qkv, dqkv, positions, table, q_weight, k_weight, factors, sums,
            tokens, q_programs, q_blocks,
            heads, groups, norms is not None, smooth, size, stages, eps, rows,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    if norms is None:
        return dqkv, None, None
    dq_norm = sum_in_order(sums[:q_blocks], rounded=True)
    dk_norm = sum_in_order(sums[q_blocks:], rounded=True)
    return dqkv, dq_norm, dk_norm
