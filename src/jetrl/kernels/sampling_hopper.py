"""Sampling on Hopper: the draw of `kernels.draw_hopper`, and what top_k and top_p keep of a row.

They keep the weights above a threshold, and of those equal to it the first ones. The threshold is
the largest x for which enough weights, or weights of enough mass, are at least x, found two bits at
a time, a reading of the row each, and not by sorting. Weights are integers up to 2**40, so 21
readings find it exactly, whatever the vocabulary. One program has a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.draw_hopper import draw, find_block, row_weights
from jetrl.kernels.logprob_hopper import BLOCK, NUM_WARPS
from jetrl.precision.hopper.checks import check_matrix, check_tensor

# The highest bit of the largest weight; even, since two bits are found at a time.
_TOP_BIT = tl.constexpr(40)


@triton.jit
def _largest_bound(
    row_ptr, num_columns, num_blocks, temperature, row_max, needed, enabled,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest int64 x such that the weights >= x are enough; 0 unless enabled.

    Args:
        needed: float64, how many weights are enough, or with MASS what sum of weights.
        enabled: whether there is anything to find; a row that filters nothing reads nothing.
    """
    bound = tl.zeros([], tl.int64)
    shift = tl.zeros([], tl.int64) + _TOP_BIT
    # Two bits of the bound at a time, from the highest: one reading of the row tries the three
    # values that they may have beside 0, and the largest that still leaves enough is kept.
    while enabled & (shift >= 0):
        step = tl.zeros([], tl.int64) + 1 << shift
        first, second, third = bound + step, bound + 2 * step, bound + 3 * step
        reach_1 = tl.zeros([], tl.int64)
        reach_2 = tl.zeros([], tl.int64)
        reach_3 = tl.zeros([], tl.int64)
        for block in range(0, num_blocks):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            weights = row_weights(row_ptr, columns, num_columns, temperature, row_max)
            value = weights if MASS else tl.full(weights.shape, 1, tl.int64)
            reach_1 += tl.sum(tl.where(weights >= first, value, 0), 0)
            reach_2 += tl.sum(tl.where(weights >= second, value, 0), 0)
            reach_3 += tl.sum(tl.where(weights >= third, value, 0), 0)
        if reach_3.to(tl.float64) >= needed:
            bound = third
        elif reach_2.to(tl.float64) >= needed:
            bound = second
        elif reach_1.to(tl.float64) >= needed:
            bound = first
        shift -= 2
    return bound


@triton.jit
def _above(
    row_ptr, num_columns, num_blocks, temperature, row_max, bound,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the number and the mass of the weights above a bound, and the mass of all, int64."""
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    for block in range(0, num_blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        weights = row_weights(row_ptr, columns, num_columns, temperature, row_max)
        above = weights > bound
        count += tl.sum(above.to(tl.int64), 0)
        mass += tl.sum(tl.where(above, weights, 0), 0)
        total += tl.sum(weights, 0)
    return count, mass, total


@triton.jit
def _kept(weights, columns, num_columns, bound, ties_before, limit, mass_above, needed):
    """Return the weights of a block with 0 for each token that is excluded, and which are ties.

    Weights above the bound stay. Those equal to it, the ties, go by token id as in the reference:
    the first `limit` stay, as long as the mass before each is less than `needed`.

    Args:
        weights, columns: int64 and int32 [BLOCK].
        bound: int64, the threshold.
        ties_before: int64, ties in the blocks before.
        limit: int64, how many ties top_k keeps.
        mass_above: int64, the mass of the weights above the bound.
        needed: float64, the mass that top_p asks for.
    """
    ties = (weights == bound) & (columns < num_columns)
    rank = ties_before + tl.cumsum(ties.to(tl.int64), 0) - 1
    before = (mass_above + rank * bound).to(tl.float64)
    keep = (weights > bound) | (ties & (rank < limit) & (before < needed))
    return tl.where(keep, weights, 0), ties


@triton.jit
def _filtered_kernel(
    logits_ptr, bits_ptr, temperature_ptr, top_p_ptr, top_k_ptr,
    tokens_ptr, logprobs_ptr, max_ptr, lse_ptr, sums_ptr, ties_ptr, num_columns, num_blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw one row's token again, among what top_k and top_p keep, unless its temperature is 0.

    Args:
        logits_ptr, bits_ptr, temperature_ptr, max_ptr, lse_ptr: as of `draw_hopper`'s draw.
        top_p_ptr: float32 [R], 1 for off.
        top_k_ptr: int64 [R], 0 for off.
        tokens_ptr, logprobs_ptr: int64 and float32 [R], written over the first draw.
        sums_ptr, ties_ptr: int64 [R, num_blocks], room for the kept weights of each block, and for
            the ties before it.
        BLOCKS: a power of two, at least num_blocks.
    """
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature = tl.load(temperature_ptr + row)
    row_max = tl.load(max_ptr + row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row)
    if temperature != 0.0:
        # top_k: the weight of the k-th token, and how many of the ties with it are among the k.
        by_count = (top_k > 0) & (top_k < num_columns)
        bound = _largest_bound(
            row_ptr, num_columns, num_blocks, temperature, row_max, top_k.to(tl.float64), by_count,
            False, BLOCK,
        )  # fmt: skip
        count, mass, total = _above(
            row_ptr, num_columns, num_blocks, temperature, row_max, bound, BLOCK
        )
        limit = tl.where(by_count, top_k - count, num_columns)

        # top_p: its share of what top_k leaves. Where that needs only weights above top_k's bound,
        # the bound rises, and top_k excludes none of the ties any more.
        total = tl.where(by_count, mass + limit * bound, total)
        needed = tl.where(top_p < 1.0, top_p * total.to(tl.float64), float("inf"))
        by_mass = _largest_bound(
            row_ptr, num_columns, num_blocks, temperature, row_max, needed, top_p < 1.0,
            True, BLOCK,
        )  # fmt: skip
        if by_mass > bound:
            bound = by_mass
            limit = num_columns.to(tl.int64)
            _, mass, _ = _above(
                row_ptr, num_columns, num_blocks, temperature, row_max, bound, BLOCK
            )

        # The draw, as in `kernels.draw_hopper`, of the weights that are kept.
        ties_before = tl.zeros([], tl.int64)
        for block in range(0, num_blocks):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            weights = row_weights(row_ptr, columns, num_columns, temperature, row_max)
            kept, ties = _kept(
                weights, columns, num_columns, bound, ties_before, limit, mass, needed
            )
            tl.store(sums_ptr + row * num_blocks + block, tl.sum(kept, 0))
            tl.store(ties_ptr + row * num_blocks + block, ties_before)
            ties_before += tl.sum(ties.to(tl.int64), 0)
        tl.debug_barrier()  # every warp sees the sums
        bits = tl.load(bits_ptr + row)
        target, place, before = find_block(sums_ptr + row * num_blocks, num_blocks, bits, BLOCKS)
        columns = place * BLOCK + tl.arange(0, BLOCK)
        weights = row_weights(row_ptr, columns, num_columns, temperature, row_max)
        # Past the last block only for a row without a softmax, which draws nothing.
        ties_before = tl.load(ties_ptr + row * num_blocks + tl.minimum(place, num_blocks - 1))
        kept, _ = _kept(weights, columns, num_columns, bound, ties_before, limit, mass, needed)
        passed = (before + tl.cumsum(kept, 0) <= target) & (columns < num_columns)
        token = tl.minimum(place * BLOCK + tl.sum(passed.to(tl.int32), 0), num_columns - 1)

        # Its log-prob is that of the full distribution: what the trainer computes.
        z = tl.math.div_rn(tl.load(row_ptr + token), temperature)
        tl.store(tokens_ptr + row, token.to(tl.int64))
        tl.store(logprobs_ptr + row, (z - row_max) - tl.load(lse_ptr + row))


def sample(
    logits: Tensor, bits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `kernels.sampling.sample` returns, on Hopper: tokens, log-probs and lse.

    Args:
        logits: float32 [R, V].
        bits: int64 [R].
        temperature: float32 [R].
        top_p: float32 [R].
        top_k: int64 [R].
        filtered: whether any row uses top_p or top_k.
    """
    check_matrix("sample", logits, (torch.float32,))
    rows, vocabulary = logits.shape
    check_tensor("sample", "logits", logits, torch.float32, [rows, vocabulary])
    check_tensor("sample", "bits", bits, torch.int64, [rows])
    check_tensor("sample", "temperature", temperature, torch.float32, [rows])
    check_tensor("sample", "top_p", top_p, torch.float32, [rows])
    check_tensor("sample", "top_k", top_k, torch.int64, [rows])
    tokens, logprobs, row_max, lse, sums = draw(logits, bits, temperature)
    if filtered and rows:
        blocks = sums.shape[1]
        _filtered_kernel[(rows,)](
            logits, bits, temperature, top_p, top_k, tokens, logprobs, row_max, lse,
            sums, torch.empty_like(sums), vocabulary, blocks,
            triton.next_power_of_2(blocks), BLOCK,
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return tokens, logprobs, lse
