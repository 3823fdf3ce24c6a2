"""The linear layer: an FP32 master, its working copies, and three GEMMs in the plan's formats.

Forward in FP8 quantizes X in groups of 1 x 128 and multiplies by the FP8 weight. What it keeps for
backward is X in groups of 128 x 1 along tokens, made from the same BF16 values: one byte an element
and rounded once. Backward quantizes dY both ways, for DGrad and for WGrad. Gradients leave as BF16
(dX) and FP32 (dW, straight into the master). The quantizers are passed straight through.

A layer has at most two working copies, and one where both sides use the same format: the trainer
then multiplies by the very bytes that the sampler did.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.precision.gemm import bf16_matmul, fp8_matmul
from jetrl.precision.plan import FP8_BLOCK, Format, PrecisionPlan, Side
from jetrl.precision.quantize import QTensor, dequantize, quantize

Operand = QTensor | Tensor


def working_copy(master: Tensor, format: Format, plan: PrecisionPlan) -> Operand:
    """The weight [N, K] as GEMMs read it: FP8 in 128 x 128 groups, BF16, or the FP32 master."""
    if format == "fp8":
        return quantize(master.detach(), (FP8_BLOCK, FP8_BLOCK), scales=plan.scales)
    return master.detach().bfloat16() if format == "bf16" else master


class Linear(nn.Module):
    """y = x @ weight^T (+ bias), in the format of the side that calls.

    weight: FP32 master [N, K]. bias: FP32 master [N], added in the activations' dtype. name is the
    layer's place in the model, for messages.

    Raises:
        UserError: a dimension that is not a multiple of 128 where a side's format is FP8.
    """

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        formats: dict[Side, Format],
        plan: PrecisionPlan,
        out_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        if "fp8" in formats.values() and (out_features % FP8_BLOCK or in_features % FP8_BLOCK):
            raise UserError(
                f"layer {name}: FP8 needs dimensions that are multiples of {FP8_BLOCK}, and this "
                f"weight is [{out_features}, {in_features}]; use precision.preset=bf16"
            )
        self.name, self.plan, self.formats, self.out_dtype = name, plan, formats, out_dtype
        self.weight, self.bias = weight, bias
        self._copies: dict[Format, Operand] = {}
        self.requantize()

    def requantize(self) -> None:
        """Make the working copies from the master, as it now is."""
        self._copies = {
            f: working_copy(self.weight, f, self.plan) for f in set(self.formats.values())
        }

    def operand(self, side: Side) -> Operand:
        """The working copy that `side` multiplies by."""
        return self._copies[self.formats[side]]

    def forward(self, x: Tensor, side: Side) -> Tensor:
        """x [T, K] in the activations' dtype -> [T, N] in out_dtype."""
        if self.formats[side] == "fp32":
            return nn.functional.linear(x, self.weight, self.bias)
        y: Tensor = _LinearFunction.apply(
            x, self.weight, self.operand(side), self.plan, self.out_dtype
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _LinearFunction(torch.autograd.Function):
    """FProp, DGrad and WGrad around one working copy; the master only receives the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        weight: Operand,
        plan: PrecisionPlan,
        out_dtype: torch.dtype,
    ) -> Tensor:
        ctx.weight, ctx.plan, ctx.x_dtype = weight, plan, x.dtype
        if not isinstance(weight, QTensor):
            ctx.save_for_backward(x)
            return bf16_matmul(x, weight, out_dtype)
        if master.requires_grad:
            kept = quantize(x, (FP8_BLOCK, 1), scales=plan.scales)
            ctx.save_for_backward(kept.codes, kept.scales)
        return fp8_matmul(quantize(x, scales=plan.scales), weight, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, weight, plan = grads[0].bfloat16(), ctx.weight, ctx.plan
        if not isinstance(weight, QTensor):
            (x,) = ctx.saved_tensors
            dx, dw = _dense_gradients(dy, x, weight)
        else:
            codes, scales = ctx.saved_tensors
            x_kept = QTensor(codes, scales, (FP8_BLOCK, 1))
            if plan.grad_output == "bf16":
                dx, dw = _dense_gradients(dy, dequantize(x_kept), dequantize(weight))
            else:
                options = {"format": plan.grad_output, "scales": plan.scales}
                dy_rows = quantize(dy, (1, FP8_BLOCK), **options)
                dy_tokens = quantize(dy, (FP8_BLOCK, 1), **options)
                dx = fp8_matmul(dy_rows, weight.mT)
                dw = fp8_matmul(dy_tokens.mT, x_kept.mT, torch.float32)
        return dx.to(ctx.x_dtype), dw, None, None, None


def _dense_gradients(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dX (BF16) and dW (FP32) by plain float32 products: gradients need no bit agreement."""
    dy_wide = dy.float()
    return (dy_wide @ weight.float()).bfloat16(), dy_wide.mT @ x.float()
