"""The integer draw of `kernels.sampling` on Hopper, from a row's full distribution.

A row is the work of many programs, so that a few rows are drawn as fast as the GPU reads them. The
row's statistics are taken by lanes, each of four neighbouring columns of every block, which are
shared out among some programs; the trainer's one program has the same lanes (`lane_statistics`), so
log-probs have equal bits. Each of the next programs has a block's int64 weights, and leaves their
sum: integer sums are the same in any order, so for the same weights this picks the reference's
token. The last puts the lanes together and reads the one block in which the cumulative sum passes
the target. The weights come from the hardware's exp2, so they may differ from the CPU's in the last
bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.exponential_hopper import LOG2_E
from jetrl.kernels.logprob_hopper import (
    BLOCK,
    NUM_WARPS,
    lane_statistics,
    scaled_logits,
    statistics_of_lanes,
)
from jetrl.precision.hopper.launch import OVERLAPPED, let_next_start, wait_for_previous

WEIGHT_ONE = tl.constexpr(2.0**40)  # the weight of the most probable token
_LANES = 64  # of a program, of the BLOCK / 4 of a row: two warps


@triton.jit
def row_weights(row_ptr, columns, num_columns, temperature, row_max):
    """Return int64 weights, exp(z - max) * 2**40 rounded half to even; 0 outside the row.

    Args:
        row_ptr: float32 [num_columns], one row's logits.
        columns: int32, any shape: the columns.
    """
    z = scaled_logits(row_ptr, columns, num_columns, temperature)
    scaled = tl.math.exp2((z - row_max) * LOG2_E) * WEIGHT_ONE
    # Adding 1.5 * 2**23 rounds what is below 2**22; a float32 above that and below 2**23 may keep a
    # half, which the conversion cuts off, and is an integer from there on.
    magic = tl.full(scaled.shape, 12582912.0, tl.float32)
    return tl.where(scaled < 4194304.0, (scaled + magic) - magic, scaled).to(tl.int64)


@triton.jit
def find_block(sums_ptr, num_blocks, bits, BLOCKS: tl.constexpr):
    """Return the target, the block in which the cumulative sum passes it, and the sum before that.

    The target is `bits` of 2**53 parts of the total, as in `kernels.sampling.sample`.

    Args:
        sums_ptr: int64 [num_blocks], the sum of the weights of each block.
        bits: int64 in [0, 2**53).
        BLOCKS: a power of two, at least num_blocks.
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
def _temperature_of(temperature_ptr, row):
    """Return a row's divisor, and whether the row takes the most probable token."""
    given = tl.load(temperature_ptr + row)
    greedy = given == 0.0
    return tl.where(greedy, 1.0, given), greedy


@triton.jit
def _sample_lanes_kernel(
    logits_ptr, temperature_ptr, lanes_ptr, num_columns, stride, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Take the statistics of LANES lanes of one row.

    Args:
        logits_ptr: float32 [R, num_columns].
        temperature_ptr: float32 [R], 0 for the most probable token.
        lanes_ptr: float32 [R, BLOCK / 4, 4], written: each lane's maximum and sum, and no more.
        stride: from one row of lanes to the next, as of `_lane_stride`.
    """
    row = tl.program_id(0)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    let_next_start()
    wait_for_previous()
    temperature, _ = _temperature_of(temperature_ptr, row)
    lane_max, lane_sum, _, _ = lane_statistics(
        logits_ptr + row.to(tl.int64) * num_columns, lanes[:, None] * 4 + tl.arange(0, 4)[None, :],
        num_columns, temperature, BLOCK,
    )  # fmt: skip
    places = lanes_ptr + row.to(tl.int64) * stride + lanes * 4
    tl.store(places, lane_max)
    tl.store(places + 1, lane_sum)


@triton.jit
def _load_lanes(lanes_ptr, row, stride, BLOCK: tl.constexpr):
    """Return what `_sample_lanes_kernel` left of a row, in the layout in which one program has it.

    A lane's four words are its four columns of a block there: so they are read, and two are taken.
    A sum that is NaN becomes -inf here; of either a row's total is not positive.
    """
    words = tl.arange(0, 4)[None, :]
    places = tl.arange(0, BLOCK // 4)[:, None] * 4 + words
    left = tl.load(lanes_ptr + row.to(tl.int64) * stride + places)
    lane_max = tl.max(tl.where(words == 0, left, float("-inf")), 1)
    return lane_max, tl.max(tl.where(words == 1, left, float("-inf")), 1)


@triton.jit
def _sample_blocks_kernel(
    logits_ptr, temperature_ptr, lanes_ptr, sums_ptr, best_ptr, num_columns, num_blocks, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the weights of one block of a row, and find the first column of a greedy row's maximum.

    Args:
        logits_ptr, temperature_ptr, lanes_ptr: as of `_sample_lanes_kernel`.
        sums_ptr: int64 [R, num_blocks], written.
        best_ptr: int32 [R, num_blocks], written for greedy rows; num_columns without a maximum.
        stride: as of `_sample_lanes_kernel`.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    let_next_start()
    wait_for_previous()
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature, greedy = _temperature_of(temperature_ptr, row)
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
    logits_ptr, bits_ptr, temperature_ptr, lanes_ptr, sums_ptr, best_ptr, tokens_ptr, logprobs_ptr,
    max_ptr, lse_ptr, num_columns, num_blocks, stride, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw one row's token.

    Args:
        logits_ptr, temperature_ptr, lanes_ptr: as of `_sample_lanes_kernel`.
        bits_ptr: int64 [R], random bits; -1 gives an arbitrary token within the row.
        sums_ptr, best_ptr: as `_sample_blocks_kernel` left them.
        tokens_ptr: int64 [R], written.
        logprobs_ptr: float32 [R], written.
        max_ptr, lse_ptr: float32 [R], written: max z, and the log-sum-exp above it.
        stride: as of `_sample_lanes_kernel`.
        BLOCKS: a power of two, at least num_blocks.
    """
    row = tl.program_id(0)
    let_next_start()
    wait_for_previous()
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    temperature, greedy = _temperature_of(temperature_ptr, row)
    lane_max, lane_sum = _load_lanes(lanes_ptr, row, stride, BLOCK)
    nothing = tl.zeros_like(lane_sum)
    row_max, lse, _, _ = statistics_of_lanes(lane_max, lane_sum, nothing, nothing)
    tl.store(max_ptr + row, row_max)
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

    # A row without a softmax draws nothing: its token stays within the row and is not used.
    token = tl.minimum(token, num_columns - 1)
    z = tl.math.div_rn(tl.load(row_ptr + token), temperature)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, (z - row_max) - lse)


def _lane_stride(vocabulary: int) -> int:
    """Return from one row of lanes to the next, aligned just where rows of logits are.

    Triton gives a thread four neighbouring words to load only where it knows them to be aligned,
    by a size that is a multiple of 16. On that depends which thread has which lane, and with it the
    order of the sums over lanes: it is to be the one in which a single program has them.
    """
    return BLOCK if vocabulary % 16 == 0 else BLOCK + 1


def draw(
    logits: Tensor, bits: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, log-probs, max z, lse, and room for the sums of blocks, int64 [R, blocks].

    Args:
        logits: float32 [R, V].
        bits: int64 [R].
        temperature: float32 [R].
    """
    rows, vocabulary = logits.shape
    device, blocks = logits.device, triton.cdiv(vocabulary, BLOCK)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, row_max, lse = torch.empty(3, rows, dtype=torch.float32, device=device)
    stride = _lane_stride(vocabulary)
    lanes = torch.empty(rows * stride, dtype=torch.float32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    best = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    if rows:
        _sample_lanes_kernel[rows, BLOCK // 4 // _LANES](
            logits, temperature, lanes, vocabulary, stride, BLOCK, _LANES,
            num_warps=_LANES // 32, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
        _sample_blocks_kernel[rows, blocks](
            logits, temperature, lanes, sums, best, vocabulary, blocks, stride, BLOCK,
            num_warps=NUM_WARPS, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
        _sample_draw_kernel[(rows,)](
            logits, bits, temperature, lanes, sums, best, tokens, logprobs, row_max, lse,
            vocabulary, blocks, stride, triton.next_power_of_2(blocks), BLOCK,
            num_warps=NUM_WARPS, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
    return tokens, logprobs, row_max, lse, sums
