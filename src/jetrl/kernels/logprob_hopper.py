"""Log-probs of chosen tokens on Hopper, from logits or straight from hidden states.

    z = logits / temperature,  m = max z,  lse = log(sum exp(z - m)),  logp = (z[chosen] - m) - lse

One program a row reads its logits once. Each lane keeps its own running (max, sum, sum of e * z)
over its quadruples of neighbouring columns; lanes are combined at the end. BLOCK and the number of
warps are pinned, so a row's bits depend on that row alone, and the sampler, which calls the same
`row_statistics`, gets the trainer's log-probs bit for bit. exp is the hardware's exp2 (relative
error near 2**-22); the sum of 151936 of them is within 1e-6 of the reference's exact one.

`lm_head_logprobs` never holds more float32 logits than one chunk of rows. Forward makes a chunk's
logits and reduces them; for backward it turns them into the gradient of each row's log-prob, in
BF16, while they are there. Backward has two GEMMs then, on rows that the incoming gradient scales.
With `recompute` nothing is kept, and backward makes the logits again: a third GEMM. Chunks change
no bit of a row either (`bf16_matmul_hopper`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.logit_chunks import rows_at_once
from jetrl.kernels.master_gradient import gradient_to_add_to
from jetrl.precision.hopper.gemm import bf16_matmul_hopper
from jetrl.precision.hopper.quantize import check_matrix

# Pinned: the bits of every log-prob depend on both.
BLOCK = 4096
NUM_WARPS = 8
LOG2_E = 1.4426950408889634
_CHUNK_GRADIENTS = 2**30  # of their gradients, BF16, that one GEMM reads


@triton.jit
def scaled_logits(row_ptr, columns, num_columns, temperature):
    """z float32, -inf outside. Temperature 1 skips a division that would change nothing."""
    z = tl.load(row_ptr + columns, mask=columns < num_columns, other=float("-inf"))
    if temperature != 1.0:
        z = tl.math.div_rn(z, tl.full(z.shape, 0.0, tl.float32) + temperature)
    return z


@triton.jit
def row_statistics(row_ptr, num_columns, temperature, BLOCK: tl.constexpr, LOG2_E: tl.constexpr):
    """(max z, lse, mean of z - max under the softmax), float32 scalars."""
    LANES: tl.constexpr = BLOCK // 4
    lane_max = tl.full([LANES], -1e30, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    lane_moment = tl.zeros([LANES], tl.float32)
    columns = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for start in tl.range(0, num_columns, BLOCK, num_stages=3):
        z = scaled_logits(row_ptr, start + columns, num_columns, temperature)
        larger = tl.maximum(lane_max, tl.max(z, 1))
        step = lane_max - larger
        kept = tl.math.exp2(step * LOG2_E)
        shifted = z - larger[:, None]
        mass = tl.math.exp2(shifted * LOG2_E)
        lane_moment = kept * (lane_moment + step * lane_sum)
        lane_moment += tl.sum(mass * tl.maximum(shifted, -1e30), 1)
        lane_sum = lane_sum * kept + tl.sum(mass, 1)
        lane_max = larger
    row_max = tl.max(lane_max, 0)
    step = lane_max - row_max
    kept = tl.math.exp2(step * LOG2_E)
    total = tl.sum(lane_sum * kept, 0)
    moment = tl.sum(kept * (lane_moment + step * lane_sum), 0)
    lse = tl.log(total.to(tl.float64)).to(tl.float32)
    return row_max, tl.where(total > 0.0, lse, float("nan")), tl.math.div_rn(moment, total)


@triton.jit
def _forward_kernel(
    logits_ptr,
    chosen_ptr,
    logprobs_ptr,
    entropy_ptr,
    max_ptr,
    lse_ptr,
    num_columns,
    temperature,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    row_max, lse, moment = row_statistics(row_ptr, num_columns, temperature, BLOCK, LOG2_E)
    chosen = tl.load(row_ptr + tl.load(chosen_ptr + row))
    tl.store(logprobs_ptr + row, (tl.math.div_rn(chosen, temperature) - row_max) - lse)
    tl.store(entropy_ptr + row, lse - moment)
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
    LOG2_E: tl.constexpr,
):
    row, block = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    columns = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    z = scaled_logits(row_ptr, columns, num_columns, temperature)
    share = tl.math.exp2(((z - tl.load(max_ptr + row)) - tl.load(lse_ptr + row)) * LOG2_E)
    chosen = tl.where(columns == tl.load(chosen_ptr + row), 1.0, 0.0)
    gradient = (chosen - share) * tl.math.div_rn(tl.load(grad_ptr + row), temperature)
    out = out_ptr + row.to(tl.int64) * num_columns + columns
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=columns < num_columns)


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`kernels.logprob.chosen_logprobs` on Hopper: (log-prob, entropy) float32 [R] of chosen int64
    [R] under softmax(logits / temperature), logits float32 [R, V], differentiable in the logits."""
    logprobs, entropy = _ChosenLogprobs.apply(logits, chosen, temperature)
    return logprobs, entropy


def lm_head_logprobs(
    hidden: Tensor,
    master: Tensor,
    weight: Tensor,
    chosen: Tensor,
    temperature: float,
    chunk_rows: int | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-prob, entropy) float32 [R] of chosen int64 [R] given hidden bfloat16 [R, D].

    weight: bfloat16 [V, D], the working copy of master float32 [V, D], which only receives the
    gradient, added to the one that is there in place (but where a hook wants to see it).
    Differentiable in hidden and master; entropy is not. chunk_rows: rows whose logits are held
    at a time; changes no bit of the results. recompute: do not keep the 2 R V bytes that spare
    backward one of three products.
    """
    check_matrix("lm_head_logprobs", hidden, (torch.bfloat16,))
    rows = chunk_rows or rows_at_once(weight.shape[0])
    keep = torch.is_grad_enabled() and not recompute
    logprobs, entropy = _HeadLogprobs.apply(
        hidden, master, weight.detach(), chosen, temperature, rows, keep
    )
    return logprobs, entropy


def _reduce(logits: Tensor, chosen: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """(log-prob, entropy, max, lse), float32 [R] each."""
    check_matrix("chosen_logprobs", logits, (torch.float32,))
    if chosen.shape != logits.shape[:1] or chosen.dtype != torch.int64:
        raise ValueError(f"chosen: int64 [{logits.shape[0]}], not {chosen.dtype} {chosen.shape}")
    if not logits.is_contiguous() or not temperature > 0:
        raise ValueError(f"chosen_logprobs: contiguous logits and temperature above 0, not "
                         f"strides {list(logits.stride())} and {temperature}")  # fmt: skip
    out = torch.empty(4, len(chosen), dtype=torch.float32, device=logits.device)
    if len(chosen):
        _forward_kernel[(len(chosen),)](
            logits,
            chosen,
            *out,
            logits.shape[1],
            temperature,
            BLOCK,
            LOG2_E,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return tuple(out)


def _logit_gradient(
    logits: Tensor,
    chosen: Tensor,
    row_max: Tensor,
    lse: Tensor,
    grad: Tensor,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """The gradient of the logits in `out` [R, V], given that of the log-probs: float32 [R]."""
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    if len(chosen):
        _backward_kernel[(len(chosen) * blocks,)](
            logits,
            chosen,
            row_max,
            lse,
            grad,
            out,
            logits.shape[1],
            blocks,
            temperature,
            BLOCK,
            LOG2_E,
            num_warps=NUM_WARPS,
        )
    return out


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, chosen: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, row_max, lse = _reduce(logits, chosen, temperature)
        ctx.save_for_backward(logits, chosen, row_max, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, chosen, row_max, lse = ctx.saved_tensors
        grad = grads[0].float().contiguous()
        gradient = _logit_gradient(
            logits, chosen, row_max, lse, grad, ctx.temperature, torch.empty_like(logits)
        )
        return gradient, None, None


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
    ) -> tuple[Tensor, Tensor]:
        results = torch.empty(4, len(chosen), dtype=torch.float32, device=hidden.device)
        kept = hidden.new_empty(len(chosen), len(weight)) if keep else None
        ones = torch.ones_like(results[0])
        for start in range(0, len(chosen), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = bf16_matmul_hopper(hidden[part], weight, torch.float32)
            parts = _reduce(logits, chosen[part], temperature)
            for whole, piece in zip(results, parts, strict=True):
                whole[part] = piece
            if kept is not None:
                _, _, row_max, lse = parts
                _logit_gradient(
                    logits, chosen[part], row_max, lse, ones[part], temperature, kept[part]
                )
            del logits
        logprobs, entropy, row_max, lse = results
        ctx.save_for_backward(hidden, weight, chosen, row_max, lse, kept)
        ctx.temperature, ctx.chunk_rows, ctx.master = temperature, chunk_rows, master
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, chosen, row_max, lse, kept = ctx.saved_tensors
        grad = grads[0].float().contiguous()
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = returned = None
        if ctx.needs_input_grad[1]:
            dweight, returned = gradient_to_add_to(ctx.master)
        ones = torch.ones_like(grad)
        rows = ctx.chunk_rows if kept is None else max(1, _CHUNK_GRADIENTS // len(weight))
        for start in range(0, len(chosen), rows):
            part = slice(start, start + rows)
            if kept is not None:
                gradient = kept[part]
            else:
                logits = bf16_matmul_hopper(hidden[part], weight, torch.float32)
                gradient = _logit_gradient(
                    logits, chosen[part], row_max[part], lse[part], ones[part], ctx.temperature,
                    torch.empty_like(logits, dtype=torch.bfloat16),
                )  # fmt: skip
                del logits
            scale = grad[part, None]
            if dhidden is not None:
                torch.mul(torch.mm(gradient, weight), scale, out=dhidden[part])
            if dweight is not None:
                scaled = (hidden[part] * scale).bfloat16()
                torch.ops.aten.addmm.dtype_out(
                    dweight, gradient.t(), scaled, torch.float32, out=dweight
                )
        return dhidden, returned, None, None, None, None, None
