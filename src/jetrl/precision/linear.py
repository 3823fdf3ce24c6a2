"""The linear layer: an FP32 master, its working copies, and three GEMMs in the plan's formats.

Forward in FP8 quantizes X in groups of 1 x 128 and multiplies by the FP8 weight. Backward quantizes
dY both ways, for DGrad and for WGrad, and X once more, from the same BF16 values: in groups of
128 x 128, as the right operand of any product here is. So a linear keeps nothing that its input's
maker does not keep anyway. Gradients leave as BF16 (dX) and, added up in FP32, in the master's
`.grad` (dW). The quantizers are passed straight through.

A layer has at most two working copies, and one where both sides use the same format: the trainer
then multiplies by the very bytes that the sampler did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.precision.gemm import bf16_matmul, fp8_matmul
from jetrl.precision.hopper import hopper
from jetrl.precision.plan import FP8_BLOCK, Format, PrecisionPlan, Side
from jetrl.precision.quantize import QTensor, dequantize, quantize


@dataclass(frozen=True)
class FP8Weight:
    """A weight [N, K] as GEMMs read it: FP8 in 128 x 128 groups."""

    direct: QTensor

    @property
    def transposed(self) -> QTensor:
        """[K, N] as DGrad reads it: the same codes and scales. A GPU's GEMM wants the bytes in that
        order, so there they are turned when asked for and live for one product: kept, they would
        take as much memory as the weights."""
        if self.direct.codes.is_cuda:
            turned: QTensor = hopper("precision.hopper.quantize").turned_weight(self.direct)
            return turned
        return self.direct.mT


Operand = FP8Weight | Tensor
GEMMInput = QTensor | Tensor  # X or dY as a GEMM reads it: codes grouped 1 x 128, or BF16 values


def working_copy(
    master: Tensor, format: Format, plan: PrecisionPlan, into: Operand | None = None
) -> Operand:
    """The weight [N, K] as GEMMs read it: FP8 in 128 x 128 groups, BF16, or the FP32 master. On a
    GPU an earlier copy is overwritten in place, so that captured graphs stay valid."""
    weight = master.detach()
    if format == "fp32":
        return master
    if format == "bf16":
        return into.copy_(weight) if isinstance(into, Tensor) else weight.bfloat16()
    if weight.is_cuda:
        before = into.direct if isinstance(into, FP8Weight) else None
        kernel = hopper("precision.hopper.quantize").quantize_weight
        return FP8Weight(kernel(weight, scales=plan.scales, out=before))
    return FP8Weight(quantize(weight, (FP8_BLOCK, FP8_BLOCK), scales=plan.scales))


@dataclass(frozen=True)
class OutputGradient:
    """dY [T, N] as DGrad reads it and as WGrad does: 1 x 128 and 128 x 1 groups of the same BF16
    values, or twice those themselves."""

    rows: GEMMInput
    tokens: GEMMInput


def quantize_input(x: Tensor, plan: PrecisionPlan) -> QTensor:
    """X [T, K] as FProp reads it: groups of 1 x 128."""
    if x.is_cuda:
        on_gpu: QTensor = hopper("precision.hopper.quantize").quantize_rows(x, "e4m3", plan.scales)
        return on_gpu
    return quantize(x, (1, FP8_BLOCK), "e4m3", plan.scales)


def quantize_for_wgrad(x: Tensor, plan: PrecisionPlan) -> QTensor:
    """X [T, K] as WGrad reads it: groups of 128 x 128; on a GPU with zeros up to whole groups."""
    if x.is_cuda:
        on_gpu: QTensor = hopper("precision.hopper.quantize").quantize_squares(x, plan.scales)
        return on_gpu
    return quantize(x, (FP8_BLOCK, FP8_BLOCK), "e4m3", plan.scales)


def quantize_output_gradient(dy: Tensor, weight: Operand, plan: PrecisionPlan) -> OutputGradient:
    """dY BF16 [T, N] as the GEMMs of backward read it; on a GPU in one pass."""
    format = plan.grad_output
    if not isinstance(weight, FP8Weight) or format == "bf16":
        return OutputGradient(dy, dy)
    if dy.is_cuda:
        kernels = hopper("precision.hopper.quantize")
        return OutputGradient(*kernels.quantize_rows_and_tokens(dy, format, plan.scales))
    rows = quantize(dy, (1, FP8_BLOCK), format, plan.scales)
    return OutputGradient(rows, quantize(dy, (FP8_BLOCK, 1), format, plan.scales))


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
                f"weight is [{out_features}, {in_features}]; use precision.preset=bf16 "
                "(--plan bf16)"
            )
        self.name, self.plan, self.formats, self.out_dtype = name, plan, formats, out_dtype
        self.weight, self.bias = weight, bias
        self._copies: dict[Format, Operand] = {}
        self.requantize()

    def requantize(self) -> None:
        """Make the working copies from the master, as it now is."""
        self._copies = {
            f: working_copy(self.weight, f, self.plan, self._copies.get(f))
            for f in set(self.formats.values())
        }

    def release_master(self) -> None:
        """Keep what a forward of the training side reads, alone: the master's shape stays, its
        memory goes (not under fp32, which reads it), and so does the rollout side's own copy."""
        if "fp32" in self.formats.values():
            return
        shape, device = self.weight.shape, self.weight.device
        empty = torch.empty((), device=device).expand(shape)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._copies = {self.formats["train"]: self.operand("train")}

    def move(self, to: Callable[[Tensor], Tensor]) -> None:
        """Replace the working copies by what `to` makes of their tensors."""
        self._copies = {
            format: to(copy) if isinstance(copy, Tensor) else FP8Weight(_moved(copy.direct, to))
            for format, copy in self._copies.items()
        }

    def operand(self, side: Side) -> Operand:
        """The working copy that `side` multiplies by."""
        return self._copies[self.formats[side]]

    def weight_scales(self) -> list[Tensor]:
        """The scales of its FP8 working copy, if it has one."""
        copies = [copy for copy in self._copies.values() if isinstance(copy, FP8Weight)]
        return [copy.direct.scales for copy in copies]

    def forward(self, x: GEMMInput, side: Side) -> Tensor:
        """x [T, K] in the activations' dtype -> [T, N] in out_dtype. Without gradients x may also
        be given as the layer would quantize it, by the kernel that made it."""
        weight = self.operand(side)
        if isinstance(x, QTensor):
            assert not torch.is_grad_enabled(), f"{self.name}: codes of X leave nothing for WGrad"
            return self.add_bias(fprop(x, weight, self.plan, self.out_dtype))
        if self.formats[side] == "fp32":
            return nn.functional.linear(x, self.weight, self.bias)
        y: Tensor = _LinearFunction.apply(x, self.weight, weight, self.plan, self.out_dtype)
        return self.add_bias(y)

    def add_bias(self, y: Tensor) -> Tensor:
        """y + bias, in y's dtype, after the product has been rounded to it."""
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _moved(q: QTensor, to: Callable[[Tensor], Tensor]) -> QTensor:
    return dataclasses.replace(q, codes=to(q.codes), scales=to(q.scales))


def fprop(
    x: GEMMInput, weight: Operand, plan: PrecisionPlan, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """X [T, K] @ weight [N, K]^T -> [T, N]; X is what `weight` needs, codes or BF16."""
    if isinstance(weight, FP8Weight):
        assert isinstance(x, QTensor), "an FP8 weight multiplies codes"
        return fp8_matmul(x, weight.direct, out_dtype)
    assert isinstance(x, Tensor), "a BF16 weight multiplies BF16 values"
    return bf16_matmul(x, weight, out_dtype, plan.exact)


def dgrad(dy: OutputGradient, weight: Operand) -> Tensor:
    """dX BF16 [T, K]. A product of BF16 values has float32 sums in any order: gradients need no
    agreement of bits."""
    rows = dy.rows
    if isinstance(rows, QTensor):
        assert isinstance(weight, FP8Weight), "codes of dY multiply an FP8 weight"
        return fp8_matmul(rows, weight.transposed)
    w = dequantize(weight.direct) if isinstance(weight, FP8Weight) else weight
    if rows.is_cuda:
        return rows @ w.bfloat16()
    return (rows.float() @ w.float()).bfloat16()


def wgrad(dy: OutputGradient, x: GEMMInput, master: Tensor) -> Tensor | None:
    """dW [N, K] for autograd to hand to the master, or None where it has been added to the
    gradient that the master already has.

    x: X [T, K] in 128 x 128 groups under an FP8 weight, BF16 values under another. A product of
    codes is rounded to BF16; the gradient and its sum are FP32. So a master's gradient is for
    `backward()`: `torch.autograd.grad` finds none once there is a `.grad`. A master with a hook
    gets every gradient from autograd, so that the hook sees it.
    """
    total = master.grad if not master._backward_hooks else None
    tokens = dy.tokens
    if isinstance(tokens, QTensor):
        assert isinstance(x, QTensor), "codes of dY multiply codes of X"
        gradient = _add_product(fp8_matmul(tokens.mT, x.mT), total)
    else:
        values = dequantize(x)[: len(tokens)] if isinstance(x, QTensor) else x
        gradient = _dense_wgrad(tokens, values, total)
    return gradient if total is None else None


def _add_product(product: Tensor, total: Tensor | None) -> Tensor:
    """total + product, in place; FP32 [N, K] of a BF16 product."""
    if product.is_cuda:
        on_gpu: Tensor = hopper("precision.hopper.add").add_product(product, total)
        return on_gpu
    return product.float() if total is None else total.add_(product)


def _dense_wgrad(dy: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
    """total + dY^T X, in place, FP32. x: BF16 or dequantized, which BF16 does not hold exactly on a
    GPU."""
    if dy.is_cuda:
        x = x.bfloat16()
        if total is None:
            return torch.mm(dy.mT, x, out_dtype=torch.float32)
        return torch.ops.aten.addmm.dtype_out(total, dy.mT, x, torch.float32, out=total)
    product = dy.float().mT @ x.float()
    return product if total is None else total.add_(product)


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
        ctx.save_for_backward(x)
        ctx.master, ctx.weight, ctx.plan = master, weight, plan
        entered = quantize_input(x, plan) if isinstance(weight, FP8Weight) else x
        return fprop(entered, weight, plan, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, plan = ctx.weight, ctx.plan
        dy = quantize_output_gradient(grads[0].bfloat16().contiguous(), weight, plan)
        dx = dgrad(dy, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            entered = quantize_for_wgrad(x, plan) if isinstance(weight, FP8Weight) else x
            dw = wgrad(dy, entered, ctx.master)
        return dx, dw, None, None, None
