"""`kernels.logprob` in Triton, from logits or directly from hidden states.

One program per row reads its logits once. Each lane keeps a running maximum and running sums over
groups of four neighboring columns; lanes are combined at the end. BLOCK and the number of warps are
pinned, so the bits of a row depend only on that row, and the sampler, which splits the lanes of a
row over programs (`sampling_triton`), gets log-probs bitwise equal to the trainer's. exp uses the
hardware exp2 (relative error near 2**-22).

`lm_head_logprobs` materializes float32 logits for one chunk of rows at a time. Forward reduces them
and, for backward, turns them into the BF16 gradient of each row's log-prob. Backward then needs two
GEMMs; with `recompute` it needs a third for the logits, and nothing is saved. The chunk size
changes no bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.exponential_triton import LOG2_E
from jetrl.precision.backend import rows_at_once
from jetrl.precision.gemm import bf16_matmul
from jetrl.precision.gradients import Gradients
from jetrl.precision.triton.bf16 import pinned_bf16_reductions

# Pinned: the bits of log-probs depend on both.
BLOCK = 4096
NUM_WARPS = 8
_CHUNK_GRADIENTS = 2**30  # BF16 logit gradients per GEMM in backward


@triton.jit
def scaled_logits(row_ptr, columns, num_columns, temperature):
    """Return z = logits / temperature at columns, int32 [...], with -inf outside the row."""
    z = tl.load(row_ptr + columns, mask=columns < num_columns, other=float("-inf"))
    if temperature != 1.0:
        z = tl.math.div_rn(z, tl.full(z.shape, 0.0, tl.float32) + temperature)
    return z


@triton.jit
def lane_statistics(row_ptr, columns, num_columns, temperature, BLOCK: tl.constexpr):
    """Return each lane's max z, and its sums of e = exp(z - max), e (z - max) and e (z - max)^2.

    A lane reads four neighboring columns per block, one 16-byte load, and is independent of the
    other lanes. `columns`, int32 [L, 4], are the columns of each lane in the first block.
    """
    # Each lane keeps its own running maximum, so the loop has no reduction across lanes, which
    # would need a barrier.
    lane_max = tl.full([columns.shape[0]], -1e30, tl.float32)  # finite: -inf - -inf would be NaN
    lane_sum = tl.zeros([columns.shape[0]], tl.float32)
    lane_moment = tl.zeros([columns.shape[0]], tl.float32)
    lane_square = tl.zeros([columns.shape[0]], tl.float32)
    for start in tl.range(0, num_columns, BLOCK, num_stages=3):
        z = scaled_logits(row_ptr, start + columns, num_columns, temperature)
        # For a larger maximum, rescale the sums by exp(step) and shift the origin of the moments.
        larger = tl.maximum(lane_max, tl.max(z, 1))
        step = lane_max - larger
        kept = tl.math.exp2(step * LOG2_E)
        shifted = z - larger[:, None]
        mass = tl.math.exp2(shifted * LOG2_E)
        lane_square = shifted_square(lane_sum, lane_moment, lane_square, step, kept)
        lane_moment = kept * (lane_moment + step * lane_sum)
        finite = tl.maximum(shifted, -1e30)  # 0 * -inf would be NaN
        lane_moment += tl.sum(mass * finite, 1)
        lane_square += tl.sum(mass * finite * finite, 1)
        lane_sum = lane_sum * kept + tl.sum(mass, 1)
        lane_max = larger
    return lane_max, lane_sum, lane_moment, lane_square


@triton.jit
def shifted_square(lane_sum, lane_moment, lane_square, step, kept):
    """Return sums of e (z - max)^2 after the maximum grew by -step; kept = exp(step)."""
    # Multiply by kept first: the square of a large step overflows float32, and kept is then 0.
    return kept * lane_square + kept * step * (2.0 * lane_moment + step * lane_sum)


@triton.jit
def statistics_of_lanes(lane_max, lane_sum, lane_moment, lane_square):
    """Return max z, lse, and the mean and variance of z - max from a row's lanes [BLOCK / 4].

    BLOCK, the number of warps and the lane layout fix the order of these sums.
    """
    row_max = tl.max(lane_max, 0)
    step = lane_max - row_max
    kept = tl.math.exp2(step * LOG2_E)
    total = tl.sum(lane_sum * kept, 0)
    moment = tl.sum(kept * (lane_moment + step * lane_sum), 0)
    square = tl.sum(shifted_square(lane_sum, lane_moment, lane_square, step, kept), 0)
    # Without a positive total (a row of -inf or NaN) the softmax is undefined: signal it by NaN.
    lse = tl.log(total.to(tl.float64)).to(tl.float32)
    mean = tl.math.div_rn(moment, total)
    variance = tl.maximum(tl.math.div_rn(square, total) - mean * mean, 0.0)
    return row_max, tl.where(total > 0.0, lse, float("nan")), mean, variance


@triton.jit
def row_statistics(row_ptr, num_columns, temperature, BLOCK: tl.constexpr):
    """Return max z, lse, and the mean and variance of z - max, float32 scalars, in one pass."""
    columns = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    lane_max, lane_sum, lane_moment, lane_square = lane_statistics(
        row_ptr, columns, num_columns, temperature, BLOCK
    )
    return statistics_of_lanes(lane_max, lane_sum, lane_moment, lane_square)


@triton.jit
def _forward_kernel(
    logits_ptr,
    chosen_ptr,
    logprobs_ptr,
    entropy_ptr,
    variance_ptr,
    max_ptr,
    lse_ptr,
    num_columns,
    temperature,
    BLOCK: tl.constexpr,
):
    """Write log-prob and moments of a row, and, for backward, max z and lse."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    row_max, lse, mean, variance = row_statistics(row_ptr, num_columns, temperature, BLOCK)
    # In the sampler's order: (z - max) - lse.
    chosen = tl.load(row_ptr + tl.load(chosen_ptr + row))
    tl.store(logprobs_ptr + row, (tl.math.div_rn(chosen, temperature) - row_max) - lse)
    tl.store(entropy_ptr + row, lse - mean)
    tl.store(variance_ptr + row, variance)
    tl.store(max_ptr + row, row_max)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _backward_kernel(
    logits_ptr,
    chosen_ptr,
    max_ptr,
    lse_ptr,
    grad_ptr,
    out_ptr,
    num_columns,
    column_blocks,
    temperature,
    BLOCK: tl.constexpr,
):
    """Write the gradient of BLOCK logits of a row: (one_hot(chosen) - softmax) * dlogp / t.

    Reads max z and lse per row, float32 [R]; writes float32 or bfloat16 [R, num_columns].
    """
    row, block = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    columns = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    z = scaled_logits(row_ptr, columns, num_columns, temperature)
    # The statistics of the row are known, so its blocks are independent.
    share = tl.math.exp2(((z - tl.load(max_ptr + row)) - tl.load(lse_ptr + row)) * LOG2_E)
    chosen = tl.where(columns == tl.load(chosen_ptr + row), 1.0, 0.0)
    gradient = (chosen - share) * tl.math.div_rn(tl.load(grad_ptr + row), temperature)
    out = out_ptr + row.to(tl.int64) * num_columns + columns
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=columns < num_columns)


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`kernels.logprob.chosen_logprobs` in Triton."""
    return _ChosenLogprobs.apply(logits, chosen, temperature)


def _all_kept(logits: Tensor, _: Tensor) -> Tensor:
    return logits


def lm_head_logprobs(
    hidden: Tensor,
    master: Tensor,
    weight: Tensor,
    chosen: Tensor,
    temperature: float,
    chunk_rows: int | None = None,
    recompute: bool = False,
    *,
    gradients: Gradients,
    kept: Callable[[Tensor, Tensor], Tensor] = _all_kept,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of chosen tokens and moments, like `chosen_logprobs`, from hidden states.

    Args:
        hidden: bfloat16 [R, D], differentiable.
        master: float32 [V, D], master weight of the head, which only receives the gradient.
        weight: bfloat16 [V, D], the rounded master weight, read by the GEMMs.
        chosen: int64 [R], token ids.
        chunk_rows: rows whose logits are materialized at a time; changes no bits.
        recompute: whether backward recomputes the logits. Otherwise forward saves their gradients,
            2 R V bytes, and backward needs two GEMMs instead of three.
        kept: returns logits of (logits, chosen) with -inf for excluded tokens.
    """

    def row_logits(hidden: Tensor, chosen: Tensor) -> Tensor:
        logits = bf16_matmul(hidden, weight.detach(), torch.float32)
        return kept(logits, chosen)

    rows = chunk_rows or rows_at_once(weight.shape[0])
    keep = torch.is_grad_enabled() and not recompute
    return _HeadLogprobs.apply(
        hidden, master, weight.detach(), chosen, temperature, rows, keep, gradients, row_logits
    )


def _reduce(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Return log-prob, entropy, variance, max z and lse per row, float32 [5, R]."""
    assert (logits.dtype, logits.is_contiguous()) == (torch.float32, True)
    assert (chosen.dtype, chosen.shape) == (torch.int64, logits.shape[:1])
    assert temperature > 0
    out = torch.empty(5, len(chosen), dtype=torch.float32, device=logits.device)
    if len(chosen):
        logprob, entropy, variance, largest, lse = out
        _forward_kernel[(len(chosen),)](
            logits,
            chosen,
            logprob,
            entropy,
            variance,
            largest,
            lse,
            logits.shape[1],
            temperature,
            BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def _logit_gradient(
    logits: Tensor, chosen: Tensor, softmax: Tensor, grad: Tensor, temperature: float, out: Tensor
) -> Tensor:
    """Fill out [R, V] with the gradient of the logits; softmax holds max z and lse, [2, R]."""
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    if len(chosen):
        largest, lse = softmax
        _backward_kernel[(len(chosen) * blocks,)](
            logits,
            chosen,
            largest,
            lse,
            grad,
            out,
            logits.shape[1],
            blocks,
            temperature,
            BLOCK,
            num_warps=NUM_WARPS,
        )
    return out


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, chosen: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        results = _reduce(logits, chosen, temperature)
        logprobs, moments = results[0], results[1:3]
        ctx.save_for_backward(logits, chosen, results[3:])
        ctx.temperature = temperature
        ctx.mark_non_differentiable(moments)
        return logprobs, moments

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, chosen, softmax = ctx.saved_tensors
        grad, out = grads[0].float().contiguous(), torch.empty_like(logits)
        return _logit_gradient(logits, chosen, softmax, grad, ctx.temperature, out), None, None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor,
        weight: Tensor,
        chosen: Tensor,
        temperature: float,
        chunk_rows: int,
        keep: bool,
        gradients: Gradients,
        row_logits: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        # Reduce the logits of each chunk and, unless recomputing, save the gradient of each row's
        # log-prob, which backward scales by the incoming gradient.
        results = torch.empty(5, len(chosen), dtype=torch.float32, device=hidden.device)
        kept = hidden.new_empty(len(chosen), len(weight)) if keep else None
        ones = torch.ones_like(results[0])
        for start in range(0, len(chosen), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = row_logits(hidden[rows], chosen[rows])
            results[:, rows] = reduced = _reduce(logits, chosen[rows], temperature)
            if kept is not None:
                _logit_gradient(
                    logits, chosen[rows], reduced[3:], ones[rows], temperature, kept[rows]
                )
            del logits  # free them before the next chunk
        logprobs, moments = results[0], results[1:3]
        ctx.save_for_backward(hidden, weight, chosen, results[3:], kept)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.master, ctx.gradients, ctx.row_logits = master, gradients, row_logits
        ctx.mark_non_differentiable(moments)
        return logprobs, moments

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, chosen, softmax, kept = ctx.saved_tensors
        grad = grads[0].float().contiguous()
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = returned = None
        if ctx.needs_input_grad[1]:
            dweight, returned = ctx.gradients.buffer(ctx.master)
        chunk_rows = ctx.chunk_rows if kept is None else max(1, _CHUNK_GRADIENTS // len(weight))
        for start in range(0, len(chosen), chunk_rows):
            rows = slice(start, start + chunk_rows)
            if kept is not None:
                gradient = kept[rows]
            else:
                logits = ctx.row_logits(hidden[rows], chosen[rows])
                gradient = _logit_gradient(
                    logits,
                    chosen[rows],
                    softmax[:, rows],
                    torch.ones_like(grad[rows]),
                    ctx.temperature,
                    torch.empty_like(logits, dtype=torch.bfloat16),
                )
                del logits
            # `gradient` is for a unit gradient of the log-prob. The incoming gradient scales the
            # rows of the smaller matrices instead: after the first GEMM, before the second.
            scale = grad[rows, None]
            if dhidden is not None:
                with pinned_bf16_reductions():  # the K split of cuBLAS depends on the GPU
                    torch.mul(torch.mm(gradient, weight), scale, out=dhidden[rows])
            if dweight is not None:
                scaled = (hidden[rows] * scale).bfloat16()
                torch.ops.aten.addmm.dtype_out(
                    dweight, gradient.t(), scaled, torch.float32, out=dweight
                )
        return dhidden, returned, None, None, None, None, None, None, None
