"""The merging of an adapter into the weights of its base, and the loss when they are rounded.

A merged weight is W + s B A, made in FP32 from the base's own values and the adapter's master
weights. What is stored of it is rounded, and an adapter that changes a weight by less than a
rounding step does not change what is stored: `merging_losses` measures that for BF16 and for FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.models.adapter import LoRA, adapter_names
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.precision.adapter import AdapterShape
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import dequantize, quantize

_MEASURED_LINEARS = 28


class MergedWeights(Mapping[str, Tensor]):
    """The parameters of a base with an adapter merged in, float32, made when they are asked for.

    Args:
        masters: The whole master weights that were trained: A and B of the adapter, and parameters
            that take the place of the base's.
    """

    def __init__(
        self,
        config: ModelConfig,
        lora: LoRA,
        base: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._base, self._masters, self._device = base, masters, device
        self._names, self._stored = list(parameter_shapes(config)), set(base)
        self._shapes = lora.shapes(config)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._masters:
            return self._masters[name].detach()
        stored = name if name in self._stored else "embed.weight"  # of a head that is untied
        weight = self._base[stored].to(self._device, torch.float32)
        layer = name.removesuffix(".weight")
        return weight + self.change(layer) if layer in self._shapes else weight

    def change(self, layer: str) -> Tensor:
        """Return what the adapter adds to a linear layer's weight, float32 [N, K]."""
        a, b = (self._masters[n].detach().to(self._device) for n in adapter_names(layer))
        return dense_change(self._shapes[layer], a, b)

    @property
    def adapted(self) -> list[str]:
        """The names of the linear layers with an adapter."""
        return list(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def dense_change(shape: AdapterShape, a: Tensor, b: Tensor) -> Tensor:
    """Return s B A of every part in its rows, float32 [N, K].

    Args:
        a: The master weight A [P * r, K].
        b: The master weight B [rows of all parts, r].
    """
    change = torch.zeros(shape.num_rows, shape.num_columns, device=a.device)
    counts = [count for _, count in shape.parts]
    parts = zip(shape.parts, a.split(shape.rank), b.split(counts), strict=True)
    for (first, count), part_a, part_b in parts:
        change[first : first + count] = (shape.scale * part_b) @ part_a
    return change


@dataclass(frozen=True)
class MergingLoss:
    """The loss of an adapter's change when the merged weights are rounded to a format.

    Attributes:
        error: The norm of the difference between the change of the rounded weights and the
            adapter's change, over the norm of the latter; 1 where rounding leaves nothing of it.
        changed: The share of the stored numbers that the adapter changes.
    """

    error: float
    changed: float


def merging_losses(base: Mapping[str, Tensor], merged: MergedWeights) -> dict[str, MergingLoss]:
    """Return the losses of merging into BF16 and into FP8, by format; none where nothing changes.

    They are measured on linear layers from the first to the last, 28 at most.
    """
    step = max(1, -(-len(merged.adapted) // _MEASURED_LINEARS))
    sums = {format: torch.zeros(4, dtype=torch.float64) for format in ("bfloat16", "fp8")}
    for layer in merged.adapted[::step]:
        change = merged.change(layer)
        before = base[f"{layer}.weight"].to(change.device, torch.float32)
        for format, total in sums.items():
            left, left_stored = _rounded(before, format)
            right, right_stored = _rounded(before + change, format)
            error = (right - left - change).double().square().sum()
            differ = (right_stored != left_stored).sum()
            numbers = (error, change.double().square().sum(), differ, change.numel())
            total += torch.tensor([float(n) for n in numbers], dtype=torch.float64)
    losses = {}
    for format, (error, norm, differ, count) in ((f, t.tolist()) for f, t in sums.items()):
        if norm:
            losses[format] = MergingLoss((error / norm) ** 0.5, differ / count)
    return losses


def _rounded(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return a weight rounded to a format, as float32, and the stored numbers: of FP8 the codes."""
    if format == "bfloat16":
        rounded = weight.bfloat16().float()
        return rounded, rounded
    quantized = quantize(weight, (FP8_BLOCK, FP8_BLOCK))
    return dequantize(quantized), quantized.codes.view(torch.uint8)
