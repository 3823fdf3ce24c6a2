"""`kernels.sampling` in Triton with the bits of its reference, for any GPU.

Blocks of a row are programs of their own, so sampling a few rows also fills the GPU:

    maxima   the largest logit of each block
    sums     integers of exp(z - max) of each block: on the grid of log-probs, and weights in int64;
             for a greedy row, the first maximum
    draw     one program per row: lse, the block in which the cumulative weight exceeds the target,
             and the token in it

With top_k or top_p, `sums` also writes the rounded masses, weights in units of 2**40. A program per
row finds the smallest weight to keep and how many of those equal to it, and `kept` sums the blocks
again. Sums are integers, so block sizes change no bits. A row whose largest logit is NaN or
infinite has a NaN lse and an arbitrary token. Temperatures are finite and not negative.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, float32, int64

from jetrl.kernels.portable.exact import exp_nonpositive, log_positive
from jetrl.kernels.portable.logprob import added_bits, divide, lane_columns
from jetrl.kernels.sampling_triton import temperature_of

_FEW_ROWS = 16
_BLOCKS = {True: (1024, 4), False: (4096, 8)}  # block and warps for few rows, and for many
_BOUND_BLOCK = 8192
_BOUND_WARPS = 32

_MASS_UNIT = tl.constexpr(2.0**-30)
_STEP_30 = tl.constexpr(1.5 * 2.0**-7)  # its last bit is 2**-30
_STEP_40 = tl.constexpr(1.5 * 2.0**-17)  # its last bit is 2**-40
_COARSE_30 = tl.constexpr(2**7)  # 2**-23 in units of 2**-30
_COARSE_40 = tl.constexpr(2**17)
_WEIGHT_ONE = tl.constexpr(2.0**40)
# Masses on the grid are 0 or at least 2**-40, so their bits minus those below it are keys that
# order them, at most 40 * 2**23 + 1.
_BELOW = tl.constexpr(((127 - 40) << 23) - 1)
_TOP_BIT = tl.constexpr(28)  # even, since each pass finds two bits of a key


@triton.jit
def _row_max(maxima_ptr, row, num_blocks, temperature, BLOCKS: tl.constexpr):
    """Return max z of a row; not finite if the row cannot be sampled."""
    blocks = tl.arange(0, BLOCKS)
    places = row * num_blocks + blocks
    inside = blocks < num_blocks
    maxima = tl.load(maxima_ptr + places, mask=inside, other=float("-inf"))
    largest = tl.max(maxima, 0)
    return divide(largest, temperature)


@triton.jit
def _maxima_kernel(logits_ptr, maxima_ptr, num_columns, num_blocks, BLOCK: tl.constexpr):
    """Write the largest logit of a block, infinite if one is NaN: float32 [R, num_blocks]."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    start = block * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    logits = tl.load(row_ptr + columns, mask=inside, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("inf"))
    to = row * num_blocks + block
    tl.store(maxima_ptr + to, tl.max(logits, 0))


@triton.jit
def _wide_sum(x):
    """Return the sum of int32 x [N, 4], below 2**29, as int64."""
    lanes = tl.sum(x, 1)
    return tl.sum(lanes.to(tl.int64), 0)


@triton.jit
def _sums_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    masses_ptr,
    sums_ptr,
    best_ptr,
    rounded_ptr,
    num_columns,
    num_blocks,
    FILTERED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a block: masses on the grid of log-probs, and weights, both int64 [R, num_blocks].

    For a greedy row it also writes the column of the first maximum, or num_columns, to best_ptr,
    int32 [R, num_blocks]; if FILTERED, the masses on the grid of weights, float32 [R, num_columns].
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    columns = lane_columns(BLOCK) + block * BLOCK
    inside = columns < num_columns
    start = row.to(tl.int64) * num_columns
    temperature, greedy = temperature_of(temperature_ptr, row)
    # Loads come before the reduction, whose barrier nothing passes.
    logits = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf"))
    row_max = _row_max(maxima_ptr, row, num_blocks, temperature, BLOCKS)
    z = divide(logits, temperature)
    shifted = z - row_max
    mass = exp_nonpositive(shifted)
    rest = mass - ((mass + 1.0) - 1.0)
    coarse = _wide_sum(added_bits(mass, 1.0))
    masses = coarse * _COARSE_30
    masses += _wide_sum(added_bits(rest, _STEP_30))
    weights = coarse * _COARSE_40
    weights += _wide_sum(added_bits(rest, _STEP_40))
    place = row * num_blocks + block
    tl.store(masses_ptr + place, masses)
    tl.store(sums_ptr + place, weights)
    if greedy:
        best = tl.where(shifted == 0.0, columns, num_columns)
        best = tl.min(best, 1)
        tl.store(best_ptr + place, tl.min(best, 0))
    if FILTERED:
        fine = (rest + _STEP_40) - _STEP_40
        rounded = (mass - rest) + fine
        tl.store(rounded_ptr + start + columns, rounded, mask=inside)


@triton.jit
def _block_weights(
    logits_ptr, rounded_ptr, row, columns, num_columns, temperature, row_max, FILTERED: tl.constexpr
):
    """Return int64 weights at columns, 0 outside the row, and, if FILTERED, their keys."""
    inside = columns < num_columns
    places = row.to(tl.int64) * num_columns + columns
    if FILTERED:
        rounded = tl.load(rounded_ptr + places, mask=inside, other=0.0)
        weights = rounded * _WEIGHT_ONE
        return weights.to(tl.int64), _key(rounded)
    else:
        logits = tl.load(logits_ptr + places, mask=inside, other=float("-inf"))
        z = divide(logits, temperature)
        mass = exp_nonpositive(z - row_max)
        high = added_bits(mass, 1.0)
        rest = mass - ((mass + 1.0) - 1.0)
        weights = high.to(tl.int64) * _COARSE_40
        weights += added_bits(rest, _STEP_40)
        return weights, high


@triton.jit
def _key(rounded):
    """Return int32 keys that order masses on the grid of weights as they are; 0 for 0."""
    bits = rounded.to(tl.int32, bitcast=True)
    return tl.maximum(bits - _BELOW, 0)


@triton.jit
def _weight_of(key):
    """Return the int64 weight of a key."""
    bits = key + _BELOW
    weight = bits.to(tl.float32, bitcast=True) * _WEIGHT_ONE
    weight = tl.where(key > 0, weight, 0.0)
    return weight.to(tl.int64)


@triton.jit
def _reach(
    rounded_ptr,
    columns,
    num_columns,
    first,
    second,
    third,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return number, or WEIGHT, of the tokens with keys of at least `first`, `second`, `third`."""
    reach_1 = tl.zeros([BLOCK // 4], tl.int64)
    reach_2 = tl.zeros([BLOCK // 4], tl.int64)
    reach_3 = tl.zeros([BLOCK // 4], tl.int64)
    for start in range(0, num_columns, BLOCK):
        places = start + columns
        rounded = tl.load(rounded_ptr + places, mask=places < num_columns, other=0.0)
        key = _key(rounded)
        value = tl.full(key.shape, 1, tl.int32)
        if WEIGHT:
            value = (rounded * _WEIGHT_ONE).to(tl.int64)
        from_first = tl.where(key >= first, value, 0)
        from_second = tl.where(key >= second, value, 0)
        from_third = tl.where(key >= third, value, 0)
        reach_1 += tl.sum(from_first, 1)
        reach_2 += tl.sum(from_second, 1)
        reach_3 += tl.sum(from_third, 1)
    return tl.sum(reach_1, 0), tl.sum(reach_2, 0), tl.sum(reach_3, 0)


@triton.jit
def _largest_bound(
    rounded_ptr, columns, num_columns, needed, WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest key such that the tokens from it on are enough, and what is above it.

    Enough is a number of tokens, or a WEIGHT, of at least `needed`. The key is 0 if even all
    positive weights are not enough.
    """
    bound = tl.zeros([], tl.int32)
    above = tl.zeros([], tl.int64)
    one = tl.full([], 1, tl.int32)
    shift = one * _TOP_BIT
    # Two bits per pass, from the highest: the largest of three bounds that still reaches enough.
    # What the next larger one reaches is above the bound in the end.
    while shift >= 0:
        step = one << shift
        first = bound + step
        second = first + step
        third = second + step
        reach_1, reach_2, reach_3 = _reach(
            rounded_ptr, columns, num_columns, first, second, third, WEIGHT, BLOCK
        )
        if reach_3.to(tl.float64) >= needed:
            bound = third
        elif reach_2.to(tl.float64) >= needed:
            bound = second
            above = reach_3
        elif reach_1.to(tl.float64) >= needed:
            bound = first
            above = reach_2
        else:
            above = reach_1
        shift -= 2
    return bound, above


@triton.jit
def _ties_kept(weight, above, limit, needed):
    """Return how many tokens of one weight are kept: `limit`, while the weight before is too small.

    Args:
        above: int64, the sum of larger weights.
        needed: float64.
    """
    low = tl.zeros([], tl.int64)
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        before = (middle - 1) * weight
        before += above
        if before.to(tl.float64) < needed:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _bounds_kernel(
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    sums_ptr,
    rounded_ptr,
    bound_ptr,
    ties_ptr,
    num_columns,
    num_blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the smallest kept key, int32 [R], and the number of kept tokens with it, int64 [R]."""
    row = tl.program_id(0)
    columns = lane_columns(BLOCK)
    row_ptr = rounded_ptr + row.to(tl.int64) * num_columns
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row)
    bound = tl.zeros([], tl.int32)
    above = tl.zeros([], tl.int64)
    limit = tl.zeros([], tl.int64) + num_columns
    needed = tl.full([], float("inf"), tl.float64)
    sampled = tl.load(temperature_ptr + row) != 0.0
    by_count = (top_k > 0) & (top_k < num_columns)
    if sampled & by_count:
        # The key of the top_k-th token, and how many of its ties are among them.
        bound, count = _largest_bound(
            row_ptr, columns, num_columns, top_k.to(tl.float64), False, BLOCK
        )
        limit = top_k - count
        next_key = bound + 1
        above, _, _ = _reach(
            row_ptr, columns, num_columns, next_key, next_key, next_key, True, BLOCK
        )
    if sampled & (top_p < 1.0):
        # A fraction of the weight that top_k left. If the weights above the bound of top_k reach
        # it, the bound rises, and top_k excludes none of the ties with it.
        blocks = tl.arange(0, BLOCKS)
        places = row * num_blocks + blocks
        sums = tl.load(sums_ptr + places, mask=blocks < num_blocks, other=0)
        of_top_k = above + limit * _weight_of(bound)
        total = tl.where(by_count, of_top_k, tl.sum(sums, 0))
        # The first token is always kept: its weight is 2**40, and nothing is before it.
        needed = tl.maximum(top_p * total.to(tl.float64), 0.5)
        by_mass, heavier = _largest_bound(row_ptr, columns, num_columns, needed, True, BLOCK)
        if by_mass > bound:
            bound = by_mass
            above = heavier
            limit = tl.zeros([], tl.int64) + num_columns
    ties = _ties_kept(_weight_of(bound), above, limit, needed)
    tl.store(bound_ptr + row, bound)
    tl.store(ties_ptr + row, ties)


@triton.jit
def _kept_kernel(
    rounded_ptr, bound_ptr, sums_ptr, ties_ptr, num_columns, num_blocks, BLOCK: tl.constexpr
):
    """Write the sum of weights above the bound and the number of ties, int64 [R, num_blocks]."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    start = block * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    place = rounded_ptr + row.to(tl.int64) * num_columns + columns
    rounded = tl.load(place, mask=inside, other=0.0)
    key = _key(rounded)
    bound = tl.load(bound_ptr + row)
    weights = (rounded * _WEIGHT_ONE).to(tl.int64)
    weights = tl.where(key > bound, weights, 0)
    ties = (key == bound) & inside
    ties = ties.to(tl.int64)
    to = row * num_blocks + block
    tl.store(sums_ptr + to, tl.sum(weights, 0))
    tl.store(ties_ptr + to, tl.sum(ties, 0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    bits_ptr,
    temperature_ptr,
    maxima_ptr,
    masses_ptr,
    sums_ptr,
    best_ptr,
    rounded_ptr,
    bound_ptr,
    kept_ptr,
    ties_ptr,
    tokens_ptr,
    out_ptr,
    num_columns,
    num_blocks,
    FILTERED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the token of a row, int64 [R], and its log-prob and lse, float32 [2, R]."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    places = row * num_blocks + blocks
    inside = blocks < num_blocks
    temperature, greedy = temperature_of(temperature_ptr, row)
    # Loads come before the reductions, whose barriers nothing passes.
    masses = tl.load(masses_ptr + places, mask=inside, other=0)
    sums = tl.load(sums_ptr + places, mask=inside, other=0)
    bits = tl.load(bits_ptr + row)
    row_max = _row_max(maxima_ptr, row, num_blocks, temperature, BLOCKS)
    mass = tl.sum(masses, 0).to(tl.float64) * _MASS_UNIT
    finite = tl.abs(row_max) < float("inf")
    mass = tl.where(finite, mass, float("nan"))
    lse = log_positive(mass).to(tl.float32)
    if greedy:
        best = tl.load(best_ptr + places, mask=inside, other=num_columns)
        token = tl.min(best, 0)
    else:
        if FILTERED:
            # Of the ties with the bound, the first `kept` in token order.
            bound = tl.load(bound_ptr + row)
            kept = tl.load(kept_ptr + row)
            ties = tl.load(ties_ptr + places, mask=inside, other=0)
            ties_before = tl.cumsum(ties, 0) - ties
            taken = tl.maximum(kept - ties_before, 0)
            taken = tl.minimum(taken, ties)
            sums += taken * _weight_of(bound)
        total = tl.sum(sums, 0)
        share = bits.to(tl.float64) * (2.0**-53)
        product = share * total.to(tl.float64)
        target = tl.minimum(product.to(tl.int64), total - 1)
        passed = tl.cumsum(sums, 0) <= target
        passed = passed & inside
        before = tl.where(passed, sums, 0)
        before = tl.sum(before, 0)
        # Without a finite softmax no block may exceed the target.
        block = tl.sum(passed.to(tl.int32), 0)
        block = tl.minimum(block, num_blocks - 1)

        start = block * BLOCK
        columns = start + tl.arange(0, BLOCK)
        weights, key = _block_weights(
            logits_ptr, rounded_ptr, row, columns, num_columns, temperature, row_max, FILTERED
        )
        if FILTERED:
            tie = (key == bound) & (columns < num_columns)
            number = tl.where(blocks == block, ties_before, 0)
            number = tl.sum(number, 0)
            number += tl.cumsum(tie.to(tl.int64), 0)
            tie = tie & (number <= kept)
            allowed = tie | (key > bound)
            weights = tl.where(allowed, weights, 0)
        cumulative = before + tl.cumsum(weights, 0)
        skipped = (cumulative <= target) & (columns < num_columns)
        skipped = skipped.to(tl.int32)
        token = start + tl.sum(skipped, 0)
    token = tl.minimum(token, num_columns - 1)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    z = divide(tl.load(row_ptr + token), temperature)
    logprob = z - row_max
    logprob -= lse
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(out_ptr + row, logprob)
    tl.store(out_ptr + tl.num_programs(0) + row, lse)


def sample(
    logits: Tensor, bits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.sampling.sample`, bitwise equal to its reference."""
    rows, vocabulary = logits.shape
    for x, dtype in ((bits, int64), (temperature, float32), (top_p, float32), (top_k, int64)):
        assert (x.dtype, x.shape, x.is_contiguous()) == (dtype, (rows,), True)
    assert (logits.dtype, logits.is_contiguous()) == (float32, True)
    device = logits.device
    few = rows <= _FEW_ROWS
    block, warps = _BLOCKS[few]
    blocks = triton.cdiv(vocabulary, block)
    padded = triton.next_power_of_2(blocks)
    tokens = torch.empty(rows, dtype=int64, device=device)
    out = torch.empty(2, rows, dtype=float32, device=device)
    if not rows:
        return tokens, out[0], out[1]
    maxima = torch.empty(rows, blocks, dtype=float32, device=device)
    masses, sums, ties = torch.empty(3, rows, blocks, dtype=int64, device=device)
    best = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    rounded = torch.empty_like(logits) if filtered else maxima
    bound = torch.empty(rows, dtype=torch.int32, device=device)
    kept = torch.empty(rows, dtype=int64, device=device)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    _maxima_kernel[rows, blocks](logits, maxima, vocabulary, blocks, block, **options)
    _sums_kernel[rows, blocks](
        logits,
        temperature,
        maxima,
        masses,
        sums,
        best,
        rounded,
        vocabulary,
        blocks,
        filtered,
        padded,
        block,
        **options,
    )
    if filtered:
        _bounds_kernel[(rows,)](
            temperature,
            top_p,
            top_k,
            sums,
            rounded,
            bound,
            kept,
            vocabulary,
            blocks,
            padded,
            _BOUND_BLOCK,
            num_warps=_BOUND_WARPS,
            enable_fp_fusion=False,
        )
        _kept_kernel[rows, blocks](rounded, bound, sums, ties, vocabulary, blocks, block, **options)
    _draw_kernel[(rows,)](
        logits,
        bits,
        temperature,
        maxima,
        masses,
        sums,
        best,
        rounded,
        bound,
        kept,
        ties,
        tokens,
        out,
        vocabulary,
        blocks,
        filtered,
        padded,
        block,
        **options,
    )
    return tokens, out[0], out[1]
