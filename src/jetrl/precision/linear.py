"""The linear layer: a quantized weight, and its three GEMMs in the formats of the plan.

In FP8, forward quantizes X in groups of 1 x 128 and multiplies by the FP8 weight. Backward
quantizes dY along both dimensions, for DGrad and WGrad, and X again in groups of 128 x 128, so the
layer saves only its BF16 input. dX is returned in BF16; dW is summed in FP32 by the model's
`Gradients`. Quantizers are straight-through for gradients. A low-rank adapter reads X before
quantization; the weight of its layer is frozen and has no WGrad.

Legend: T tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetrl.precision.adapter import adapter_gradients, add_adapter, project_down, project_up
from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.backend import arithmetic_of, has_defined_bits
from jetrl.precision.exact import sum_of_rows
from jetrl.precision.formats import INT8, DrawKey, GEMMInput, StoredWeight, TokenValues, format_of
from jetrl.precision.gemm import coded_matmul, free_matmul
from jetrl.precision.gradients import Gradients
from jetrl.precision.int8 import int8_tokens
from jetrl.precision.nvfp4 import OrderedNVFP4
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.precision.quantize import FP8_BLOCK, QTensor, quantize
from jetrl.precision.quantized_weight import QuantizedWeight


def quantize_input(x: Tensor, weight: StoredWeight, plan: PrecisionPlan) -> GEMMInput:
    """Return X [T, K] for FProp: codes if the weight's products multiply codes, else X itself."""
    return format_of(weight).input(x, plan.scales)


def quantize_for_wgrad(x: Tensor, plan: PrecisionPlan) -> QTensor:
    """Return X [T, K] quantized for WGrad, on a GPU padded with zeros.

    Groups are 128 x 128, or columns of 128 tokens if `wgrad_input` is 1x128.
    """
    if plan.backward_format is INT8:
        return int8_tokens(x)
    squares = plan.wgrad_input == "128x128"
    if (arithmetic := arithmetic_of(x)) is not None:
        if squares:
            return arithmetic.quantize_squares(x, plan.scales)
        return arithmetic.quantize_rows_and_tokens(x, "e4m3", plan.scales)[1]
    return quantize(x, (FP8_BLOCK, FP8_BLOCK if squares else 1), "e4m3", plan.scales)


def quantize_for_dgrad(
    dy: Tensor, weight: StoredWeight, plan: PrecisionPlan, key: DrawKey = ()
) -> GEMMInput:
    """Return dY, bfloat16 [T, N], for DGrad of a weight that has no WGrad."""
    format = format_of(weight)
    return plan.gradient.rows(dy, plan.scales) if format.coded else format.rows(dy, key)


def quantize_output_gradient(
    dy: Tensor, weight: StoredWeight, plan: PrecisionPlan, key: DrawKey = ()
) -> tuple[GEMMInput, GEMMInput | TokenValues]:
    """Return dY for DGrad and for WGrad, quantized in one pass on a GPU.

    Groups are 1 x 128 for DGrad and 128 x 1 for WGrad. For a BF16 weight both are dY itself.

    FP8 GEMMs of GPUs support only E4M3 and groups of 128 x 128. With other settings, which are for
    comparisons and need not be fast, codes are dequantized to BF16 for a BF16 product.

    `key` (`Gradients.draw_key`) is of stochastic rounding, which only emulated formats have.
    """
    if not (format := format_of(weight)).coded:
        return format.rows(dy, key), format.tokens(dy, key)
    return plan.gradient.rows_and_tokens(dy, plan.scales, plan.widens_wgrad)


class Linear(nn.Module):
    """A linear layer y = x @ weight^T + bias, in the format of the calling side.

    The layer is named after its quantized weight [N, K] in messages. `bias` is an FP32 master
    weight [N], added in the dtype of activations.
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
        """Return y [T, N] in `out_dtype`; x may be codes if there are no gradients or adapter."""
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
        return self.with_bias(self.product(x, side))

    def product(self, x: Tensor, side: Side) -> Tensor:
        """Return x @ weight^T [T, N] of a rounded weight."""
        weight, plan = self.operand(side), self.plan.on(side)
        return _LinearFunction.apply(x, self.weight, weight, plan, self.out_dtype, self.gradients)

    def with_bias(self, product: Tensor) -> Tensor:
        """Return a product [T, N] plus the bias, if any, in the dtype of the product."""
        if self.bias is None:
            return product
        if has_defined_bits(product) and self.bias.requires_grad:
            return _Biased.apply(product, self.bias)
        return product + self.bias.to(product.dtype)


class _Biased(torch.autograd.Function):
    """product [T, N] + bias [N], whose gradient is `sum_of_rows` of dY in float32."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        return product + bias.to(product.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows = grads[0].flatten(0, -2)
        if (arithmetic := arithmetic_of(rows)) is not None:
            return grads[0], arithmetic.sum_of_rows(rows.contiguous())
        return grads[0], sum_of_rows(rows)


def fprop(
    x: GEMMInput, weight: StoredWeight, plan: PrecisionPlan, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return Y = X @ weight^T, [T, N].

    X [T, K] is from `quantize_input`. `plan` is that of the calling side, which may fix the
    reduction order of BF16 products.
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

    x is X [T, K] from `quantize_input`; `values` is X before quantization, bfloat16 [T, K].
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
    """Return dX = dY @ weight, bfloat16 [T, K], of dY [T, N] in groups of 1 x 128 or in BF16.

    BF16 products have float32 sums in any order: gradients need not be batch-invariant.
    """
    return format_of(weight).dgrad(rows, weight)


def wgrad(
    tokens: GEMMInput | TokenValues, x: GEMMInput, master: Tensor, gradients: Gradients
) -> Tensor | None:
    """Add dW = dY^T @ X to a master weight's gradient [N, K]; return the gradient for autograd.

    `tokens` is dY [T, N] and `x` is X [T, K], both in codes along T or both in BF16. X of an
    emulated product is rounded here.
    """
    if isinstance(tokens, TokenValues):
        assert isinstance(x, Tensor), "X is rounded by the format of dY"
        return gradients.add_matmul(master, tokens.values, tokens.along_tokens(x))
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
        key = ctx.gradients.draw_key(ctx.master)
        if not ctx.needs_input_grad[1]:
            rows = quantize_for_dgrad(grads[0].bfloat16().contiguous(), weight, plan, key)
            dx = dgrad(rows, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
            return dx, None, None, None, None, None
        (x,) = ctx.saved_tensors
        # Both quantizations of dY are of the same BF16 values, as are those of X.
        dy = grads[0].bfloat16().contiguous()
        rows, tokens = quantize_output_gradient(dy, weight, plan, key)
        dx = dgrad(rows, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        # Forward's codes of X, in groups of 1 x 128, would not do: WGrad needs other groups.
        entered = quantize_for_wgrad(x, plan) if format_of(weight).coded else x
        dw = wgrad(tokens, entered, ctx.master, ctx.gradients)
        return dx, dw, None, None, None, None


class _AdaptedFunction(torch.autograd.Function):
    """A frozen linear layer and its adapter; `a` and `b` are inputs only for their gradients."""

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
        if has_defined_bits(dy):
            dx += free_matmul(du, ctx.adapter.down)
        else:
            dx.addmm_(du, ctx.adapter.down)
        return dx, da, db, None, None, None, None
