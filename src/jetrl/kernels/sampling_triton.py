"""`kernels.sampling` in Triton.

Many programs share a row, so sampling a few rows runs at memory bandwidth. Row statistics use the
same lanes as the trainer's single program (`lane_statistics`), so log-probs are bitwise equal. Then
each program sums the int64 weights of one block, and a last kernel reads the block in which the
cumulative sum exceeds the target. Weights use the hardware exp2 and may differ from the CPU
reference in the last bits.

Filters are a kernel of their own, of one program per row. top_k and top_p keep the weights above a
threshold and the first of those equal to it. The threshold is the largest x for which enough
weights, or enough mass, are at least x. It is found without sorting, two bits per pass over the
row; weights are at most 2**40, so 21 passes are exact.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, float32, int64

from jetrl.kernels.exponential_triton import LOG2_E
from jetrl.kernels.logprob_triton import (
    BLOCK,
    NUM_WARPS,
    lane_statistics,
    scaled_logits,
    statistics_of_lanes,
)
from jetrl.precision.triton.launch import let_next_start, overlapped, wait_for_previous

WEIGHT_ONE = tl.constexpr(2.0**40)  # weight of the most probable token
_LANES = 64  # lanes per program (two warps), of BLOCK / 4 lanes per row


@triton.jit
def row_weights(row_ptr, columns, num_columns, temperature, row_max):
    """Return int64 weights, exp(z - max) * 2**40 rounded half to even; 0 outside the row."""
    z = scaled_logits(row_ptr, columns, num_columns, temperature)
    scaled = tl.math.exp2((z - row_max) * LOG2_E) * WEIGHT_ONE
    # Adding 1.5 * 2**23 rounds values below 2**22. From 2**22 to 2**23 a float32 may have a
    # fraction of 1/2, which the conversion truncates; larger ones are integers.
    magic = tl.full(scaled.shape, 12582912.0, tl.float32)
    return tl.where(scaled < 4194304.0, (scaled + magic) - magic, scaled).to(tl.int64)


@triton.jit
def find_block(sums_ptr, num_blocks, bits, BLOCKS: tl.constexpr):
    """Return the target, the block in which the cumulative sum exceeds it, and the sum before that.

    The target is bits / 2**53 (bits in [0, 2**53)) times the sum of sums_ptr, int64 [num_blocks].
    """
    blocks = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + blocks, mask=blocks < num_blocks, other=0)
    total = tl.sum(sums, 0)
    product = bits.to(tl.float64) * (2.0**-53) * total.to(tl.float64)
    target = tl.minimum(product.to(tl.int64), total - 1)
    skipped = (tl.cumsum(sums, 0) <= target) & (blocks < num_blocks)
    place = tl.sum(skipped.to(tl.int32), 0)
    return target, place, tl.sum(tl.where(skipped, sums, 0), 0)


@triton.jit
def temperature_of(temperature_ptr, row):
    """Return the temperature of a row (1 if greedy), and whether the row is greedy."""
    given = tl.load(temperature_ptr + row)
    greedy = given == 0.0
    return tl.where(greedy, 1.0, given), greedy


@triton.jit
def _sample_lanes_kernel(
    logits_ptr,
    temperature_ptr,
    lanes_ptr,
    num_columns,
    stride,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write maximum and sum for LANES lanes of one row, float32 [R, BLOCK / 4, 4]."""
    row = tl.program_id(0)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    let_next_start()
    wait_for_previous()
    temperature, _ = temperature_of(temperature_ptr, row)
    lane_max, lane_sum, _, _ = lane_statistics(
        logits_ptr + row.to(tl.int64) * num_columns,
        lanes[:, None] * 4 + tl.arange(0, 4)[None, :],
        num_columns,
        temperature,
        BLOCK,
    )
    places = lanes_ptr + row.to(tl.int64) * stride + lanes * 4
    tl.store(places, lane_max)
    tl.store(places + 1, lane_sum)


@triton.jit
def _load_lanes(lanes_ptr, row, stride, BLOCK: tl.constexpr):
    """Return the lane maxima and sums of a row in the single-program layout; -inf for a NaN sum."""
    # In that layout a lane has four words, one per column: read all four and use two. A sum of
    # -inf instead of NaN still makes the total of the row not positive.
    words = tl.arange(0, 4)[None, :]
    places = tl.arange(0, BLOCK // 4)[:, None] * 4 + words
    left = tl.load(lanes_ptr + row.to(tl.int64) * stride + places)
    lane_max = tl.max(tl.where(words == 0, left, float("-inf")), 1)
    return lane_max, tl.max(tl.where(words == 1, left, float("-inf")), 1)


@triton.jit
def _sample_blocks_kernel(
    logits_ptr,
    temperature_ptr,
    lanes_ptr,
    sums_ptr,
    best_ptr,
    num_columns,
    num_blocks,
    stride,
    BLOCK: tl.constexpr,
):
    """Sum the weights of a block of a row; for a greedy row, also find its first maximum.

    Writes sums_ptr, int64 [R, num_blocks], and for greedy rows best_ptr, int32 [R, num_blocks],
    which is num_columns for a block without the row maximum.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    let_next_start()
    wait_for_previous()
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature, greedy = temperature_of(temperature_ptr, row)
    lane_max, _ = _load_lanes(lanes_ptr, row, stride, BLOCK)
    row_max = tl.max(lane_max, 0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    weights = row_weights(row_ptr, columns, num_columns, temperature, row_max)
    tl.store(sums_ptr + row * num_blocks + block, tl.sum(weights, 0))
    if greedy:
        z = scaled_logits(row_ptr, columns, num_columns, temperature)
        best = tl.min(tl.where(z == row_max, columns, num_columns), 0)
        tl.store(best_ptr + row * num_blocks + block, best)


@triton.jit
def _sample_draw_kernel(
    logits_ptr,
    bits_ptr,
    temperature_ptr,
    lanes_ptr,
    sums_ptr,
    best_ptr,
    tokens_ptr,
    logprobs_ptr,
    lse_ptr,
    num_columns,
    num_blocks,
    stride,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    let_next_start()
    wait_for_previous()
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature, greedy = temperature_of(temperature_ptr, row)
    lane_max, lane_sum = _load_lanes(lanes_ptr, row, stride, BLOCK)
    nothing = tl.zeros_like(lane_sum)
    row_max, lse, _, _ = statistics_of_lanes(lane_max, lane_sum, nothing, nothing)
    tl.store(lse_ptr + row, lse)
    if greedy:
        blocks = tl.arange(0, BLOCKS)
        best = tl.load(
            best_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=num_columns
        )
        token = tl.min(best, 0)
    else:
        bits = tl.load(bits_ptr + row)
        target, place, before = find_block(sums_ptr + row * num_blocks, num_blocks, bits, BLOCKS)
        columns = place * BLOCK + tl.arange(0, BLOCK)
        weights = row_weights(row_ptr, columns, num_columns, temperature, row_max)
        passed = (before + tl.cumsum(weights, 0) <= target) & (columns < num_columns)
        token = place * BLOCK + tl.sum(passed.to(tl.int32), 0)

    # Without a finite softmax the token is not used, but must be in range.
    token = tl.minimum(token, num_columns - 1)
    z = tl.math.div_rn(tl.load(row_ptr + token), temperature)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, (z - row_max) - lse)


def _lane_stride(vocabulary: int) -> int:
    """Return the row stride of lanes, divisible by 16 if and only if the stride of logits is."""
    # Triton loads four neighboring words per thread only if the stride is a multiple of 16, so that
    # they are aligned. That determines the thread of each lane, and so the order of sums over
    # lanes, which must match the single program.
    return BLOCK if vocabulary % 16 == 0 else BLOCK + 1


# Highest bit of the largest weight; even, since each pass finds two bits.
_TOP_BIT = tl.constexpr(40)


@triton.jit
def _largest_bound(
    row_ptr,
    num_columns,
    num_blocks,
    temperature,
    row_max,
    needed,
    enabled,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest int64 x whose weights >= x are enough (count or MASS), 0 if disabled."""
    bound = tl.zeros([], tl.int64)
    shift = tl.zeros([], tl.int64) + _TOP_BIT
    # Find two bits of the bound per pass, from the highest: try the three nonzero values and keep
    # the largest that still leaves enough.
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
def _sums_above(row_ptr, num_columns, num_blocks, temperature, row_max, bound, BLOCK: tl.constexpr):
    """Return count and mass of the weights above a bound, and the total mass, int64."""
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
def _finite_max(row_ptr, num_columns, num_blocks, temperature, BLOCK: tl.constexpr):
    """Return the largest z of a row, not finite if the row has no finite softmax."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(0, num_blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        z = scaled_logits(row_ptr, columns, num_columns, temperature)
        largest = tl.maximum(largest, tl.where(z == z, z, float("inf")))
    return tl.max(largest, 0)


@triton.jit
def _exclude_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    min_p_ptr,
    chosen_ptr,
    num_columns,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Write -inf over the logits that the filters of a row exclude, except the chosen one."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature, greedy = temperature_of(temperature_ptr, row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row)
    row_max = _finite_max(row_ptr, num_columns, num_blocks, temperature, BLOCK)
    if (greedy == 0) & (tl.abs(row_max) < float("inf")):
        # top_k: find the weight of the k-th token and the number of its ties among the top k.
        by_count = (top_k > 0) & (top_k < num_columns)
        bound = _largest_bound(
            row_ptr,
            num_columns,
            num_blocks,
            temperature,
            row_max,
            top_k.to(tl.float64),
            by_count,
            False,
            BLOCK,
        )
        count, mass, total = _sums_above(
            row_ptr, num_columns, num_blocks, temperature, row_max, bound, BLOCK
        )
        limit = tl.where(by_count, top_k - count, num_columns)

        # top_p: a fraction of the mass that top_k left. If weights above the top_k bound suffice,
        # raise the bound; top_k then excludes none of the ties.
        total = tl.where(by_count, mass + limit * bound, total)
        # The first token is always kept: its weight is 2**40, and nothing is before it.
        needed = tl.maximum(top_p * total.to(tl.float64), 0.5)
        needed = tl.where(top_p < 1.0, needed, float("inf"))
        by_mass = _largest_bound(
            row_ptr, num_columns, num_blocks, temperature, row_max, needed, top_p < 1.0, True, BLOCK
        )
        if by_mass > bound:
            bound = by_mass
            limit = num_columns.to(tl.int64)
            _, mass, _ = _sums_above(
                row_ptr, num_columns, num_blocks, temperature, row_max, bound, BLOCK
            )

        # Ties are kept in token-id order, as in the reference: the first `limit`, while the mass
        # before each is less than `needed`. min_p is a fraction of the largest weight, 2**40.
        least = tl.load(min_p_ptr + row).to(tl.float64) * WEIGHT_ONE
        chosen = tl.load(chosen_ptr + row)
        ties_before = tl.zeros([], tl.int64)
        for block in range(0, num_blocks):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < num_columns
            weights = row_weights(row_ptr, columns, num_columns, temperature, row_max)
            ties = (weights == bound) & inside
            rank = ties_before + tl.cumsum(ties.to(tl.int64), 0) - 1
            before = (mass + rank * bound).to(tl.float64)
            keep = (weights > bound) | (ties & (rank < limit) & (before < needed))
            keep = (keep & (weights.to(tl.float64) >= least)) | (columns == chosen)
            excluded = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(row_ptr + columns, excluded, mask=inside & (keep == 0))
            ties_before += tl.sum(ties.to(tl.int64), 0)


def check_rows(logits: Tensor, floats: tuple[Tensor, ...], integers: tuple[Tensor, ...]) -> None:
    """Check float32 logits [R, V], and float32 and int64 tensors [R]; all are contiguous."""
    assert (logits.dtype, logits.is_contiguous()) == (float32, True), f"{logits.dtype}"
    for x, dtype in [*((x, float32) for x in floats), *((x, int64) for x in integers)]:
        found = (x.dtype, x.shape, x.is_contiguous())
        assert found == (dtype, logits.shape[:1], True), f"{found}"


def exclude_tokens(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, chosen: Tensor
) -> Tensor:
    """`kernels.allowed_tokens.exclude_tokens` in Triton, in place."""
    rows, vocabulary = logits.shape
    check_rows(logits, floats=(temperature, top_p, min_p), integers=(top_k, chosen))
    if rows:
        _exclude_kernel[(rows,)](
            logits,
            temperature,
            top_p,
            top_k,
            min_p,
            chosen,
            vocabulary,
            triton.cdiv(vocabulary, BLOCK),
            BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return logits


def sample(logits: Tensor, bits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.sampling.sample` in Triton."""
    rows, vocabulary = logits.shape
    check_rows(logits, floats=(temperature,), integers=(bits,))
    device, blocks = logits.device, triton.cdiv(vocabulary, BLOCK)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, lse = torch.empty(2, rows, dtype=torch.float32, device=device)
    stride = _lane_stride(vocabulary)
    lanes = torch.empty(rows * stride, dtype=torch.float32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    best = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    if not rows:
        return tokens, logprobs, lse
    _sample_lanes_kernel[rows, BLOCK // 4 // _LANES](
        logits,
        temperature,
        lanes,
        vocabulary,
        stride,
        BLOCK,
        _LANES,
        num_warps=_LANES // 32,
        enable_fp_fusion=False,
        **overlapped(),
    )
    _sample_blocks_kernel[rows, blocks](
        logits,
        temperature,
        lanes,
        sums,
        best,
        vocabulary,
        blocks,
        stride,
        BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **overlapped(),
    )
    _sample_draw_kernel[(rows,)](
        logits,
        bits,
        temperature,
        lanes,
        sums,
        best,
        tokens,
        logprobs,
        lse,
        vocabulary,
        blocks,
        stride,
        triton.next_power_of_2(blocks),
        BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **overlapped(),
    )
    return tokens, logprobs, lse
