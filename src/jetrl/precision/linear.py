"""The linear layer: a quantized weight, and three GEMMs around it in the plan's formats.

Forward in FP8 quantizes X in groups of 1 x 128 and multiplies by the FP8 weight. Backward quantizes
dY both ways, for DGrad and WGrad, and X again from the same BF16 values, in groups of 128 x 128: a
linear saves only its input. Gradients leave as BF16 (dX), and by the model's `Gradients`, which
sums dW in FP32. Quantizers pass gradients straight through. A low-rank adapter reads X before it is
quantized; its layer's weight is frozen and gets no WGrad.

Legend: T tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetrl.precision.adapter import adapter_gradients, add_adapter, project_down, project_up
from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.formats import INT8, GEMMInput, StoredWeight, format_of
from jetrl.precision.gemm import coded_matmul, free_matmul
from jetrl.precision.gradients import Gradients
from jetrl.precision.int8 import int8_tokens
from jetrl.precision.nvfp4 import OrderedNVFP4
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.precision.quantize import FP8_BLOCK, QTensor, quantize
from jetrl.precision.quantized_weight import QuantizedWeight


def quantize_input(x: Tensor, weight: StoredWeight, plan: PrecisionPlan) -> GEMMInput:
    """Return X [T, K] as FProp reads it: codes next to a weight in codes, else its values."""
    return format_of(weight).input(x, plan.scales)


def quantize_for_wgrad(x: Tensor, plan: PrecisionPlan) -> QTensor:
    """Return X [T, K] as WGrad reads it, on a GPU filled up with zeros.

    The groups are squares of 128 x 128, or with `wgrad_input` 1x128 columns of 128 tokens.
    """
    if plan.backward_format is INT8:
        return int8_tokens(x)
    squares = plan.wgrad_input == "128x128"
    if (arithmetic := arithmetic_of(x)) is not None:
        if squares:
            return arithmetic.quantize_squares(x, plan.scales)
        return arithmetic.quantize_rows_and_tokens(x, "e4m3", plan.scales)[1]
    return quantize(x, (FP8_BLOCK, FP8_BLOCK if squares else 1), "e4m3", plan.scales)


def quantize_for_dgrad(dy: Tensor, weight: StoredWeight, plan: PrecisionPlan) -> GEMMInput:
    """Return dY, bfloat16 [T, N], as DGrad reads it, for a weight that gets no gradient."""
    return plan.gradient.rows(dy, plan.scales) if format_of(weight).coded else dy


def quantize_output_gradient(
    dy: Tensor, weight: StoredWeight, plan: PrecisionPlan
) -> tuple[GEMMInput, GEMMInput]:
    """Return dY as DGrad and as WGrad read it, of the same BF16 values; on a GPU from one pass.

    Groups are 1 x 128 for DGrad and 128 x 1 for WGrad; next to a BF16 weight both are the values.

    A GPU's FP8 GEMMs take only E4M3 and squares of 128 x 128. The codes of other settings become
    the BF16 values that they stand for, rounded once more (to 8 significant bits, while a code has
    3 or 4), and a BF16 product follows: for comparisons, whose speed does not matter.
    """
    if not format_of(weight).coded:
        return dy, dy
    return plan.gradient.rows_and_tokens(dy, plan.scales, plan.widens_wgrad)


class Linear(nn.Module):
    """A linear layer y = x @ weight^T + bias, in the format of the side that calls.

    The name of the quantized weight [N, K] is the layer's, for messages. `bias` is the FP32 master
    weight [N], added in the activations' dtype.
    """

    def __init__(
        self,
        quantized: QuantizedWeight,
        bias: nn.Parameter | None,
        plan: PrecisionPlan,
        out_dtype: torch.dtype,
        gradients: Gradients,
        adapter: AdapterWeight | None = None,
    ) -> None:
        super().__init__()
        self.name, self.plan, self.out_dtype = quantized.name, plan, out_dtype
        self.quantized, self.gradients = quantized, gradients
        self.weight, self.bias, self.adapter = quantized.master, bias, adapter

    def operand(self, side: Side) -> StoredWeight:
        return self.quantized.operand(side)

    def forward(self, x: GEMMInput, side: Side) -> Tensor:
        """Return y [T, N] in `out_dtype`; x may be codes, without gradients and adapter."""
        weight, plan = self.operand(side), self.plan.on(side)
        if isinstance(x, QTensor):
            assert not torch.is_grad_enabled(), f"{self.name}: codes of X leave nothing for WGrad"
            assert self.adapter is None, f"{self.name}: an adapter reads the values behind codes"
            return self.with_bias(fprop(x, weight, plan, self.out_dtype))
        if self.quantized.formats[side].reads_masters:
            whole = nn.functional.linear(x, self.weight, self.bias)
            return whole if self.adapter is None else add_adapter(whole, x, self.adapter)
        if self.adapter is not None:
            a, b = self.adapter.a, self.adapter.b
            whole = _AdaptedFunction.apply(x, a, b, weight, plan, self.bias, self.adapter)
            return whole
        y: Tensor = _LinearFunction.apply(
            x, self.weight, weight, plan, self.out_dtype, self.gradients
        )
        return self.with_bias(y)

    def with_bias(self, product: Tensor) -> Tensor:
        """Return a product [T, N] plus the layer's bias, if it has one, in the product's dtype."""
        return product if self.bias is None else product + self.bias.to(product.dtype)


def fprop(
    x: GEMMInput, weight: StoredWeight, plan: PrecisionPlan, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return Y = X @ weight^T, [T, N].

    X [T, K] is as the weight needs it: codes next to FP8, BF16 values next to BF16. `plan` is that
    of the side that calls, which may pin the order of a BF16 product's sums.
    """
    format = format_of(weight)
    return format.fprop(x, weight, out_dtype, pinned=plan.pinned, scales=plan.scales)


def adapted_fprop(
    x: GEMMInput,
    values: Tensor,
    weight: StoredWeight,
    plan: PrecisionPlan,
    bias: Tensor | None,
    adapter: AdapterWeight,
) -> tuple[Tensor, Tensor]:
    """Return Y with bias and adapter added, bfloat16 [T, N], and u, bfloat16 [T, P * R].

    x is X [T, K] as of `fprop`, `values` is X before it was quantized, bfloat16 [T, K].
    """
    arithmetic = arithmetic_of(values) if bias is None else None
    if arithmetic is not None and format_of(weight).grouped:
        assert isinstance(x, QTensor), "an FP8 weight multiplies codes"
        assert isinstance(weight, QTensor), "an FP8 weight is codes"
        return arithmetic.adapted_matmul(x, values, weight, adapter)
    if arithmetic is not None and isinstance(weight, OrderedNVFP4):
        return arithmetic.nvfp4_adapted_matmul(values, weight, adapter)
    y = fprop(x, weight, plan)
    if bias is not None:
        y += bias.to(y.dtype)
    u = project_down(values, adapter)
    return project_up(y, u, adapter), u


def dgrad(rows: GEMMInput, weight: StoredWeight) -> Tensor:
    """Return dX = dY @ weight, bfloat16 [T, K], of dY [T, N] in 1 x 128 groups or in BF16.

    A product of BF16 values has float32 sums in any order: gradients need no agreement of bits.
    """
    return format_of(weight).dgrad(rows, weight)


def wgrad(tokens: GEMMInput, x: GEMMInput, master: Tensor, gradients: Gradients) -> Tensor | None:
    """Add dW = dY^T @ X to a master weight's gradient [N, K]; return what autograd is handed.

    `tokens` is dY [T, N] in groups of 128 x 1, or BF16 values. X [T, K] is in 128 x 128 groups next
    to an FP8 weight, else BF16 values.
    """
    if isinstance(tokens, QTensor):
        assert isinstance(x, QTensor), "codes of dY multiply codes of X"
        return gradients.add(master, coded_matmul(tokens.mT, x.mT))
    return gradients.add_matmul(master, tokens, x)


class _LinearFunction(torch.autograd.Function):
    """FProp, DGrad and WGrad around one quantized weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        weight: StoredWeight,
        plan: PrecisionPlan,
        out_dtype: torch.dtype,
        gradients: Gradients,
    ) -> Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        ctx.dtype, ctx.master, ctx.gradients = x.dtype, master, gradients
        ctx.weight, ctx.plan = weight, plan
        entered = quantize_input(x, weight, plan)
        return fprop(entered, weight, plan, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, plan = ctx.weight, ctx.plan
        if not ctx.needs_input_grad[1]:
            rows = quantize_for_dgrad(grads[0].bfloat16().contiguous(), weight, plan)
            dx = dgrad(rows, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
            return dx, None, None, None, None, None
        (x,) = ctx.saved_tensors
        # Both forms of dY come from the same BF16 values, as both of X do.
        dy = grads[0].bfloat16().contiguous()
        rows, tokens = quantize_output_gradient(dy, weight, plan)
        dx = dgrad(rows, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        # X is quantized here rather than kept: forward's groups of 1 x 128 are only FProp's.
        entered = quantize_for_wgrad(x, plan) if format_of(weight).coded else x
        dw = wgrad(tokens, entered, ctx.master, ctx.gradients)
        return dx, dw, None, None, None, None


class _AdaptedFunction(torch.autograd.Function):
    """A frozen linear layer and its adapter, whose master weights are inputs for gradients only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        weight: StoredWeight,
        plan: PrecisionPlan,
        bias: Tensor | None,
        adapter: AdapterWeight,
    ) -> Tensor:
        arithmetic = arithmetic_of(x) if bias is None else None
        if arithmetic is not None and format_of(weight).grouped:
            assert isinstance(weight, QTensor), "an FP8 weight is codes"
            y, u = arithmetic.quantized_adapted_matmul(x, weight, adapter, plan.scales)
        else:
            entered = quantize_input(x, weight, plan)
            y, u = adapted_fprop(entered, x, weight, plan, bias, adapter)
        ctx.save_for_backward(x, u)
        ctx.weight, ctx.plan, ctx.adapter = weight, plan, adapter
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, u = ctx.saved_tensors
        dy = grads[0].bfloat16().contiguous()
        dx = dgrad(quantize_for_dgrad(dy, ctx.weight, ctx.plan), ctx.weight)
        da, db, du = adapter_gradients(dy, x, u, ctx.adapter)
        if arithmetic_of(dy) is None:
            dx += free_matmul(du, ctx.adapter.down)
        else:
            dx.addmm_(du, ctx.adapter.down)
        return dx, da, db, None, None, None, None
