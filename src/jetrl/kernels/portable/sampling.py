"""`kernels.sampling` in Triton with the bits of its reference, for any GPU.

Blocks of a row are programs of their own, so sampling a few rows also fills the GPU:

    maxima   the largest logit of each block
    sums     integers of exp(z - max) of each block: on the grid of log-probs, and weights in int64;
             for a greedy row, the first maximum
    draw     one program per row: lse, the block in which the cumulative weight exceeds the target,
             and the token in it

Filters write -inf over excluded logits first: `rounded` writes masses on the grid of weights, and a
program per row finds the smallest weight to keep and how many of those equal to it, `bounds`, and
another applies them, `exclude`. Sums are integers, so block sizes change no bits. A row whose
largest logit is NaN or infinite has a NaN lse and an arbitrary token. Temperatures are finite and
not negative.
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
from jetrl.kernels.sampling_triton import check_rows, temperature_of

_FEW_ROWS = 16
_BLOCKS = {True: (1024, 4), False: (4096, 8)}  # block and warps for few rows, and for many
_BOUND_BLOCK = 8192
_BOUND_WARPS = 32
_EXCLUDE_BLOCK = 8192
_EXCLUDE_WARPS = 16
_ROUNDED_AT_ONCE = 2**24  # masses on the grid of weights that are held while filtering

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
    num_columns,
    num_blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a block: masses on the grid of log-probs, and weights, both int64 [R, num_blocks].

    For a greedy row it also writes the column of the first maximum, or num_columns, to best_ptr,
    int32 [R, num_blocks].
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


@triton.jit
def _block_weights(logits_ptr, row, columns, num_columns, temperature, row_max):
    """Return int64 weights at columns, 0 outside the row."""
    inside = columns < num_columns
    places = row.to(tl.int64) * num_columns + columns
    logits = tl.load(logits_ptr + places, mask=inside, other=float("-inf"))
    z = divide(logits, temperature)
    mass = exp_nonpositive(z - row_max)
    high = added_bits(mass, 1.0)
    rest = mass - ((mass + 1.0) - 1.0)
    weights = high.to(tl.int64) * _COARSE_40
    weights += added_bits(rest, _STEP_40)
    return weights


@triton.jit
def _rounded_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    rounded_ptr,
    num_columns,
    num_blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write exp(z - max) of a block on the grid of weights, float32 [R, num_columns]."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    start = block * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = row.to(tl.int64) * num_columns + columns
    temperature, _ = temperature_of(temperature_ptr, row)
    logits = tl.load(logits_ptr + places, mask=inside, other=float("-inf"))
    row_max = _row_max(maxima_ptr, row, num_blocks, temperature, BLOCKS)
    z = divide(logits, temperature)
    mass = exp_nonpositive(z - row_max)
    rest = mass - ((mass + 1.0) - 1.0)
    fine = (rest + _STEP_40) - _STEP_40
    rounded = (mass - rest) + fine
    tl.store(rounded_ptr + places, rounded, mask=inside)


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
def _bounds(rounded_ptr, columns, num_columns, top_p, top_k, BLOCK: tl.constexpr):
    """Return the smallest key that top_k and top_p keep, int32, and how many tokens with it."""
    bound = tl.zeros([], tl.int32)
    limit = tl.zeros([], tl.int64) + num_columns
    needed = tl.full([], float("inf"), tl.float64)
    if (top_k > 0) & (top_k < num_columns):
        # The key of the top_k-th token, and how many of its ties are among them.
        bound, count = _largest_bound(
            rounded_ptr, columns, num_columns, top_k.to(tl.float64), False, BLOCK
        )
        limit = top_k - count
    next_key = bound + 1
    above, _, _ = _reach(
        rounded_ptr, columns, num_columns, next_key, next_key, next_key, True, BLOCK
    )
    if top_p < 1.0:
        # A fraction of the weight that top_k left. If the weights above the bound of top_k reach
        # it, the bound rises, and top_k excludes none of the ties with it.
        total = above + limit * _weight_of(bound)
        # The first token is always kept: its weight is 2**40, and nothing is before it.
        needed = tl.maximum(top_p * total.to(tl.float64), 0.5)
        by_mass, heavier = _largest_bound(rounded_ptr, columns, num_columns, needed, True, BLOCK)
        if by_mass > bound:
            bound = by_mass
            above = heavier
            limit = tl.zeros([], tl.int64) + num_columns
    return bound, _ties_kept(_weight_of(bound), above, limit, needed)


@triton.jit
def _bounds_kernel(
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    maxima_ptr,
    rounded_ptr,
    bound_ptr,
    ties_ptr,
    num_columns,
    num_blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the results of `_bounds`, int32 [R] each; -1 tokens for a row that is not filtered."""
    row = tl.program_id(0)
    temperature, greedy = temperature_of(temperature_ptr, row)
    row_max = _row_max(maxima_ptr, row, num_blocks, temperature, BLOCKS)
    tl.store(ties_ptr + row, -1)
    if (greedy == 0) & (tl.abs(row_max) < float("inf")):
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        top_k = tl.load(top_k_ptr + row)
        row_ptr = rounded_ptr + row.to(tl.int64) * num_columns
        bound, ties = _bounds(row_ptr, lane_columns(BLOCK), num_columns, top_p, top_k, BLOCK)
        tl.store(bound_ptr + row, bound)
        tl.store(ties_ptr + row, ties.to(tl.int32))


@triton.jit
def _exclude_kernel(
    logits_ptr,
    min_p_ptr,
    chosen_ptr,
    rounded_ptr,
    bound_ptr,
    ties_ptr,
    num_columns,
    BLOCK: tl.constexpr,
):
    """Write -inf over the logits that the filters of a row exclude, except the chosen one."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * num_columns
    ties_kept = tl.load(ties_ptr + row)
    if ties_kept >= 0:
        bound = tl.load(bound_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        chosen = tl.load(chosen_ptr + row)
        # Of the ties with the bound, the first in token order.
        ties_before = tl.zeros([], tl.int32)
        for first in range(0, num_columns, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < num_columns
            rounded = tl.load(rounded_ptr + start + columns, mask=inside, other=0.0)
            key = _key(rounded)
            tie = (key == bound) & inside
            number = ties_before + tl.cumsum(tie.to(tl.int32), 0)
            kept = (key > bound) | (tie & (number <= ties_kept))
            # The largest mass is 1, and min_p a fraction of it.
            kept = (kept & (rounded >= min_p)) | (columns == chosen)
            excluded = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(logits_ptr + start + columns, excluded, mask=inside & (kept == 0))
            ties_before += tl.sum(tie.to(tl.int32), 0)


@triton.jit
def _draw_kernel(
    logits_ptr,
    bits_ptr,
    temperature_ptr,
    maxima_ptr,
    masses_ptr,
    sums_ptr,
    best_ptr,
    tokens_ptr,
    out_ptr,
    num_columns,
    num_blocks,
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
        weights = _block_weights(logits_ptr, row, columns, num_columns, temperature, row_max)
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


def exclude_tokens(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, chosen: Tensor
) -> Tensor:
    """`kernels.allowed_tokens.exclude_tokens` in place, bitwise equal to its reference."""
    rows, vocabulary = logits.shape
    check_rows(logits, floats=(temperature, top_p, min_p), integers=(top_k, chosen))
    at_once = max(1, _ROUNDED_AT_ONCE // vocabulary)
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        of_rows = logits[part]
        block, warps = _BLOCKS[len(of_rows) <= _FEW_ROWS]
        blocks = triton.cdiv(vocabulary, block)
        padded = triton.next_power_of_2(blocks)
        maxima = torch.empty(len(of_rows), blocks, dtype=float32, device=logits.device)
        rounded = torch.empty_like(of_rows)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        grid = (len(of_rows), blocks)
        _maxima_kernel[grid](of_rows, maxima, vocabulary, blocks, block, **options)
        _rounded_kernel[grid](
            of_rows,
            temperature[part],
            maxima,
            rounded,
            vocabulary,
            blocks,
            padded,
            block,
            **options,
        )
        bound, ties = torch.empty(2, len(of_rows), dtype=torch.int32, device=logits.device)
        _bounds_kernel[(len(of_rows),)](
            temperature[part],
            top_p[part],
            top_k[part],
            maxima,
            rounded,
            bound,
            ties,
            vocabulary,
            blocks,
            padded,
            _BOUND_BLOCK,
            num_warps=_BOUND_WARPS,
            enable_fp_fusion=False,
        )
        _exclude_kernel[(len(of_rows),)](
            of_rows,
            min_p[part],
            chosen[part],
            rounded,
            bound,
            ties,
            vocabulary,
            _EXCLUDE_BLOCK,
            num_warps=_EXCLUDE_WARPS,
            enable_fp_fusion=False,
        )
    return logits


def sample(logits: Tensor, bits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.sampling.sample`, bitwise equal to its reference."""
    rows, vocabulary = logits.shape
    check_rows(logits, floats=(temperature,), integers=(bits,))
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
    masses, sums = torch.empty(2, rows, blocks, dtype=int64, device=device)
    best = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    _maxima_kernel[rows, blocks](logits, maxima, vocabulary, blocks, block, **options)
    _sums_kernel[rows, blocks](
        logits,
        temperature,
        maxima,
        masses,
        sums,
        best,
        vocabulary,
        blocks,
        padded,
        block,
        **options,
    )
    _draw_kernel[(rows,)](
        logits,
        bits,
        temperature,
        maxima,
        masses,
        sums,
        best,
        tokens,
        out,
        vocabulary,
        blocks,
        padded,
        block,
        **options,
    )
    return tokens, out[0], out[1]
