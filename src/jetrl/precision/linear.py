"""The linear layer: an FP32 master, its working copies, and three GEMMs in the plan's formats.

Forward in FP8 quantizes X in groups of 1 x 128 and multiplies by the FP8 weight. What it keeps for
backward is X in groups of 128 x 1 along tokens, made from the same BF16 values: one byte an element
and rounded once. Backward quantizes dY both ways, for DGrad and for WGrad. Gradients leave as BF16
(dX) and FP32 (dW, straight into the master). The quantizers are passed straight through.

A layer has at most two working copies, and one where both sides use the same format: the trainer
then multiplies by the very bytes that the sampler did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.precision.gemm import bf16_matmul, fp8_matmul
from jetrl.precision.hopper import hopper
from jetrl.precision.plan import FP8_BLOCK, Format, PrecisionPlan, Side
from jetrl.precision.quantize import FP8Format, QTensor, dequantize, quantize


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
            turned: QTensor = hopper("precision.quantize_hopper").turned_weight(self.direct)
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
        kernel = hopper("precision.quantize_hopper").quantize_weight
        return FP8Weight(kernel(weight, scales=plan.scales, out=before))
    return FP8Weight(quantize(weight, (FP8_BLOCK, FP8_BLOCK), scales=plan.scales))


def quantize_for_gemm(
    x: Tensor, plan: PrecisionPlan, format: FP8Format = "e4m3", tokens: bool = True
) -> tuple[QTensor, QTensor | None]:
    """x [T, K] in groups of 1 x 128, and in groups of 128 x 1 (None unless `tokens`).

    Both are made from the values as they are; on a GPU in one pass."""
    if x.is_cuda:
        kernels = hopper("precision.quantize_hopper")
        if tokens:
            both: tuple[QTensor, QTensor] = kernels.quantize_rows_and_tokens(x, format, plan.scales)
            return both
        return kernels.quantize_rows(x, format, plan.scales), None
    rows = quantize(x, (1, FP8_BLOCK), format, plan.scales)
    return rows, quantize(x, (FP8_BLOCK, 1), format, plan.scales) if tokens else None


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
        keep = torch.is_grad_enabled()
        y: Tensor = _LinearFunction.apply(x, self.weight, weight, self.plan, self.out_dtype, keep)
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


def gradients(
    dy: Tensor | tuple[QTensor, QTensor], kept: GEMMInput, weight: Operand, plan: PrecisionPlan
) -> tuple[Tensor, Tensor]:
    """(dX BF16 [T, K], dW FP32 [N, K]).

    dy: BF16 [T, N], or its 1 x 128 and 128 x 1 groups where a kernel has made them already. kept:
    X as forward kept it, 128 x 1 groups under an FP8 weight and BF16 under another.
    """
    if not isinstance(weight, FP8Weight):
        assert isinstance(dy, Tensor)
        assert isinstance(kept, Tensor)
        return _dense_gradients(dy, kept, weight)
    assert isinstance(kept, QTensor)
    if isinstance(dy, Tensor):
        if plan.grad_output == "bf16":
            x = dequantize(kept)[: len(dy)]
            return _dense_gradients(dy, x, dequantize(weight.direct))
        rows, tokens = quantize_for_gemm(dy, plan, plan.grad_output)
        assert tokens is not None
    else:
        rows, tokens = dy
    dx = fp8_matmul(rows, weight.transposed)
    return dx, fp8_matmul(tokens.mT, kept.mT, torch.float32)


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
        keep: bool,
    ) -> Tensor:
        ctx.weight, ctx.plan, ctx.x_dtype = weight, plan, x.dtype
        if not isinstance(weight, FP8Weight):
            ctx.save_for_backward(x)
            return fprop(x, weight, plan, out_dtype)
        rows, kept = quantize_for_gemm(x, plan, tokens=keep)
        if kept is not None:
            ctx.save_for_backward(kept.codes, kept.scales)
        return fprop(rows, weight, plan, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = kept_input(ctx.saved_tensors)
        dy = grads[0].bfloat16().contiguous()
        dx, dw = gradients(dy, kept, ctx.weight, ctx.plan)
        return dx.to(ctx.x_dtype), dw, None, None, None, None


def kept_input(saved: Sequence[Tensor]) -> GEMMInput:
    """X from what was saved for backward: (values) or (codes, scales) of 128 x 1 groups."""
    return saved[0] if len(saved) == 1 else QTensor(saved[0], saved[1], (FP8_BLOCK, 1))


def _dense_gradients(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dX (BF16) and dW (FP32) by plain products with float32 sums: gradients need no bit agreement.
    dy is BF16; x and weight are BF16 or dequantized, which BF16 does not hold exactly on a GPU."""
    if dy.is_cuda:
        dx = dy @ weight.bfloat16()
        return dx, torch.mm(dy.mT, x.bfloat16(), out_dtype=torch.float32)
    dy_wide = dy.float()
    return (dy_wide @ weight.float()).bfloat16(), dy_wide.mT @ x.float()
