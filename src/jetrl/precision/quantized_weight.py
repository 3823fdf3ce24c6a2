"""The quantized weights of a layer: a master weight, rounded to what GEMMs and norms read.

This is the one place where a weight is rounded. A quantized weight has one tensor for each format
that a side of the flow asks for, and one alone where both sides ask for the same: the trainer then
multiplies by the very bytes that the sampler did. After an update of the master weight they are
overwritten in place, on every device: captured CUDA graphs read them by address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.precision.plan import FP8_BLOCK, Format, ScaleRule, Side
from jetrl.precision.quantize import QTensor, quantize

_FP8_GROUPS = (FP8_BLOCK, FP8_BLOCK)


@dataclass(frozen=True)
class FP8Weight:
    """A weight [N, K] as GEMMs read it: FP8 in 128 x 128 groups.

    Attributes:
        direct: Codes [N, K] with their scales, as FProp reads them.
    """

    direct: QTensor

    @property
    def transposed(self) -> QTensor:
        """The weight [K, N] as DGrad reads it: the same codes and scales.

        A GPU's GEMM wants the bytes in that order. They are turned for one product and dropped:
        kept, they would take as much memory as the weights.
        """
        if self.direct.codes.is_cuda:
            from jetrl.precision.hopper.quantize import turned_weight

            return turned_weight(self.direct)
        return self.direct.mT


Operand = FP8Weight | Tensor


class QuantizedWeight:
    """A master weight together with its roundings to the formats that the two sides read.

    Args:
        name: The layer that reads the roundings, for messages.
        master: The FP32 master weight, [N, K] for a linear layer or [D] for a norm.
        formats: The format that each side reads.
        scales: The rule for the scales of FP8 codes.
        frozen: Keep what the training side's forward reads, and not the master weight's memory.

    Attributes:
        master: The master weight; of a frozen one the shape alone (but under fp32, which reads it).

    Raises:
        UserError: A side reads FP8, and a dimension is not a multiple of 128.
    """

    def __init__(
        self,
        name: str,
        master: nn.Parameter,
        formats: Mapping[Side, Format],
        scales: ScaleRule = "fp32",
        frozen: bool = False,
    ) -> None:
        self.name, self.master, self.formats, self.scales = name, master, formats, scales
        kept = {formats["train"]} if frozen else set(formats.values())
        if "fp8" in formats.values() and any(size % FP8_BLOCK for size in master.shape):
            raise UserError(
                f"layer {name}: FP8 needs dimensions that are multiples of {FP8_BLOCK}, and this "
                f"weight is {list(master.shape)}; use precision.preset=bf16 (--plan bf16)"
            )
        self._by_format = {format: self._rounded(format) for format in kept}
        if frozen and "fp32" not in kept:
            empty = torch.empty((), device=master.device).expand(master.shape)
            self.master = nn.Parameter(empty, requires_grad=False)

    def operand(self, side: Side) -> Operand:
        """Return the rounding that a side reads."""
        return self._by_format[self.formats[side]]

    def requantize(self) -> None:
        """Round the master weight again, into the tensors that are there."""
        for format, earlier in self._by_format.items():
            self._rounded(format, earlier)

    def fp8_scales(self) -> list[Tensor]:
        """Return the scales of the FP8 rounding, if there is one."""
        return [w.direct.scales for w in self._by_format.values() if isinstance(w, FP8Weight)]

    def tensors(self) -> list[Tensor]:
        """Return every tensor that forwards read."""
        tensors: list[Tensor] = []
        for weight in self._by_format.values():
            if isinstance(weight, FP8Weight):
                tensors += [weight.direct.codes, weight.direct.scales]
            else:
                tensors.append(weight)
        return tensors

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that forwards read by what `moved` makes of the tensor."""
        for format, weight in self._by_format.items():
            if isinstance(weight, FP8Weight):
                codes, scales = moved(weight.direct.codes), moved(weight.direct.scales)
                direct = dataclasses.replace(weight.direct, codes=codes, scales=scales)
                self._by_format[format] = FP8Weight(direct)
            else:
                self._by_format[format] = moved(weight)

    def _rounded(self, format: Format, into: Operand | None = None) -> Operand:
        """Return the master weight in a format, written over `into` where that is given."""
        weight = self.master.detach()
        if format == "fp32":
            return self.master
        if format == "bf16":
            return into.copy_(weight) if isinstance(into, Tensor) else weight.bfloat16()
        earlier = into.direct if isinstance(into, FP8Weight) else None
        if weight.is_cuda:
            from jetrl.precision.hopper.quantize import quantize_weight

            return FP8Weight(quantize_weight(weight, scales=self.scales, out=earlier))
        quantized = quantize(weight, _FP8_GROUPS, scales=self.scales)
        if earlier is None:
            return FP8Weight(quantized)
        earlier.codes.copy_(quantized.codes)
        earlier.scales.copy_(quantized.scales)
        return FP8Weight(earlier)
