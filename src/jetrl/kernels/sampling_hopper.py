"""Sampling on Hopper: the integer draw of `kernels.sampling`, one program a row.

A row is read three times (after the first from the cache): its statistics, just as the trainer
takes them (`row_statistics`: equal bits of log-probs); the int64 weights, summed for each block;
and the one block in which the cumulative sum passes the target. Integer sums are the same in any
order, so for the same weights this picks the reference's token. The weights themselves come from
the hardware's exp2, so they may differ from the CPU's in the last bits.

top_k and top_p keep the weights above a threshold, and of those equal to it the first ones. The
threshold is the largest x for which enough weights, or weights of enough mass, are at least x,
found two bits at a time, a reading of the row each, and not by sorting.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.logprob_hopper import BLOCK, LOG2_E, NUM_WARPS, row_statistics, scaled_logits
from jetrl.precision.hopper.quantize import check_matrix

_WEIGHT_ONE = 2.0**40
_TOP_BITS = 40  # of the largest weight


@triton.jit
def _weights(
    row_ptr, columns, num_columns, temperature, row_max, LOG2_E: tl.constexpr, ONE: tl.constexpr
):
    """int64 round(exp(z - max) * 2**40), half to even; 0 outside."""
    z = scaled_logits(row_ptr, columns, num_columns, temperature)
    scaled = tl.math.exp2((z - row_max) * LOG2_E) * ONE
    magic = tl.full(scaled.shape, 12582912.0, tl.float32)  # 1.5 * 2**23: rounds below 2**22
    return tl.where(scaled < 4194304.0, (scaled + magic) - magic, scaled).to(tl.int64)


@triton.jit
def _find_block(sums_ptr, num_blocks, total, bits):
    """(target, block, sum before it): the target is `bits` (of 2**53) of the total, and the block
    the one in which the cumulative sum passes it."""
    wanted = bits.to(tl.float64) * (2.0**-53) * total.to(tl.float64)
    target = tl.minimum(wanted.to(tl.int64), total - 1)
    before = tl.zeros([], tl.int64)
    place = 0
    for block in range(0, num_blocks):
        part = tl.load(sums_ptr + block)
        skip = (before + part <= target) & (block == place)
        before += tl.where(skip, part, 0)
        place += tl.where(skip, 1, 0)
    return target, place, before


@triton.jit
def _sample_kernel(
    logits_ptr,
    bits_ptr,
    temperature_ptr,
    tokens_ptr,
    logprobs_ptr,
    max_ptr,
    lse_ptr,
    sums_ptr,
    num_columns,
    num_blocks,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
    ONE: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    given = tl.load(temperature_ptr + row)
    greedy = given == 0.0
    temperature = tl.where(greedy, 1.0, given)
    row_max, lse, _ = row_statistics(row_ptr, num_columns, temperature, BLOCK, LOG2_E)
    tl.store(max_ptr + row, row_max)
    tl.store(lse_ptr + row, lse)

    total = tl.zeros([], tl.int64)
    best = num_columns
    for block in tl.range(0, num_blocks, num_stages=3):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
        if greedy:
            z = scaled_logits(row_ptr, columns, num_columns, temperature)
            best = tl.minimum(best, tl.min(tl.where(z == row_max, columns, num_columns), 0))
        part = tl.sum(weights, 0)
        tl.store(sums_ptr + row * num_blocks + block, part)
        total += part

    token = best
    if not greedy:
        tl.debug_barrier()
        target, place, before = _find_block(
            sums_ptr + row * num_blocks, num_blocks, total, tl.load(bits_ptr + row)
        )
        columns = place * BLOCK + tl.arange(0, BLOCK)
        weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
        passed = (before + tl.cumsum(weights, 0) <= target) & (columns < num_columns)
        token = place * BLOCK + tl.sum(passed.to(tl.int32), 0)
    token = tl.minimum(token, num_columns - 1)
    z = tl.math.div_rn(tl.load(row_ptr + token), temperature)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, (z - row_max) - lse)


@triton.jit
def _largest_bound(
    row_ptr, num_columns, num_blocks, temperature, row_max, needed, enabled,
    MASS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """The largest int64 x such that the weights >= x are `needed` (float64) or more, in number or
    in mass; 0 unless enabled."""
    found = tl.zeros([], tl.int64)
    shift = tl.zeros([], tl.int64) + TOP
    while enabled & (shift >= 0):
        step = tl.zeros([], tl.int64) + 1 << shift
        first, second, third = found + step, found + 2 * step, found + 3 * step
        reach_1 = tl.zeros([], tl.int64)
        reach_2 = tl.zeros([], tl.int64)
        reach_3 = tl.zeros([], tl.int64)
        for block in range(0, num_blocks):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
            value = weights if MASS else tl.full(weights.shape, 1, tl.int64)
            reach_1 += tl.sum(tl.where(weights >= first, value, 0), 0)
            reach_2 += tl.sum(tl.where(weights >= second, value, 0), 0)
            reach_3 += tl.sum(tl.where(weights >= third, value, 0), 0)
        if reach_3.to(tl.float64) >= needed:
            found = third
        elif reach_2.to(tl.float64) >= needed:
            found = second
        elif reach_1.to(tl.float64) >= needed:
            found = first
        shift -= 2
    return found


@triton.jit
def _above(
    row_ptr, num_columns, num_blocks, temperature, row_max, bound,
    BLOCK: tl.constexpr, LOG2_E: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """(number, mass) of the weights above a bound, and the mass of all, int64."""
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    for block in range(0, num_blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
        above = weights > bound
        count += tl.sum(above.to(tl.int64), 0)
        mass += tl.sum(tl.where(above, weights, 0), 0)
        total += tl.sum(weights, 0)
    return count, mass, total


@triton.jit
def _kept(weights, columns, num_columns, bound, ties_before, limit, mass_above, needed):
    """(weights with those left out at 0, which equal the bound): the first `limit` of these are
    kept, as long as what comes before them is less than `needed`."""
    ties = (weights == bound) & (columns < num_columns)
    rank = ties_before + tl.cumsum(ties.to(tl.int64), 0) - 1
    before = (mass_above + rank * bound).to(tl.float64)
    keep = (weights > bound) | (ties & (rank < limit) & (before < needed))
    return tl.where(keep, weights, 0), ties


@triton.jit
def _filtered_kernel(
    logits_ptr,
    bits_ptr,
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    tokens_ptr,
    logprobs_ptr,
    max_ptr,
    lse_ptr,
    sums_ptr,
    ties_ptr,
    num_columns,
    num_blocks,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
    ONE: tl.constexpr,
):
    """Draws again, among what top_k and top_p keep, for rows with temperature above 0."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature = tl.load(temperature_ptr + row)
    row_max = tl.load(max_ptr + row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row)
    if temperature != 0.0:
        by_count = (top_k > 0) & (top_k < num_columns)
        bound = _largest_bound(
            row_ptr, num_columns, num_blocks, temperature, row_max, top_k.to(tl.float64), by_count,
            False, TOP, BLOCK, LOG2_E, ONE,
        )  # fmt: skip
        count, mass, total = _above(
            row_ptr, num_columns, num_blocks, temperature, row_max, bound, BLOCK, LOG2_E, ONE
        )
        limit = tl.where(by_count, top_k - count, num_columns)
        total = tl.where(by_count, mass + limit * bound, total)
        needed = tl.where(top_p < 1.0, top_p * total.to(tl.float64), float("inf"))
        by_mass = _largest_bound(
            row_ptr, num_columns, num_blocks, temperature, row_max, needed, top_p < 1.0,
            True, TOP, BLOCK, LOG2_E, ONE,
        )  # fmt: skip
        if by_mass > bound:
            bound = by_mass
            limit = num_columns.to(tl.int64)
            _, mass, _ = _above(
                row_ptr, num_columns, num_blocks, temperature, row_max, bound, BLOCK, LOG2_E, ONE
            )

        total = tl.zeros([], tl.int64)
        ties_before = tl.zeros([], tl.int64)
        for block in range(0, num_blocks):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
            kept, ties = _kept(
                weights, columns, num_columns, bound, ties_before, limit, mass, needed
            )
            part = tl.sum(kept, 0)
            tl.store(sums_ptr + row * num_blocks + block, part)
            tl.store(ties_ptr + row * num_blocks + block, ties_before)
            total += part
            ties_before += tl.sum(ties.to(tl.int64), 0)
        tl.debug_barrier()
        target, place, before = _find_block(
            sums_ptr + row * num_blocks, num_blocks, total, tl.load(bits_ptr + row)
        )
        columns = place * BLOCK + tl.arange(0, BLOCK)
        weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
        # Past the last block only for a row without a softmax, which draws nothing.
        ties_before = tl.load(ties_ptr + row * num_blocks + tl.minimum(place, num_blocks - 1))
        kept, _ = _kept(weights, columns, num_columns, bound, ties_before, limit, mass, needed)
        passed = (before + tl.cumsum(kept, 0) <= target) & (columns < num_columns)
        token = tl.minimum(place * BLOCK + tl.sum(passed.to(tl.int32), 0), num_columns - 1)
        z = tl.math.div_rn(tl.load(row_ptr + token), temperature)
        tl.store(tokens_ptr + row, token.to(tl.int64))
        tl.store(logprobs_ptr + row, (z - row_max) - tl.load(lse_ptr + row))


def sample(
    logits: Tensor, bits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.sampling.sample` on Hopper: the same arguments and results."""
    check_matrix("sample", logits, (torch.float32,))
    rows, vocabulary = logits.shape
    for name, x, dtype in (
        ("bits", bits, torch.int64),
        ("temperature", temperature, torch.float32),
        ("top_p", top_p, torch.float32),
        ("top_k", top_k, torch.int64),
    ):
        if x.shape != (rows,) or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name}: {dtype} [{rows}], not {x.dtype} {list(x.shape)}")
    device, blocks = logits.device, triton.cdiv(vocabulary, BLOCK)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, row_max, lse = torch.empty(3, rows, dtype=torch.float32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    if rows:
        _sample_kernel[(rows,)](
            logits,
            bits,
            temperature,
            tokens,
            logprobs,
            row_max,
            lse,
            sums,
            vocabulary,
            blocks,
            BLOCK,
            LOG2_E,
            _WEIGHT_ONE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    if filtered and rows:
        _filtered_kernel[(rows,)](
            logits,
            bits,
            temperature,
            top_p,
            top_k,
            tokens,
            logprobs,
            row_max,
            lse,
            sums,
            torch.empty_like(sums),
            vocabulary,
            blocks,
            _TOP_BITS,
            BLOCK,
            LOG2_E,
            _WEIGHT_ONE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return tokens, logprobs, lse
