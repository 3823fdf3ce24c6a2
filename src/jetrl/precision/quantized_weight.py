"""The quantized weights of a layer: a master weight, rounded to what GEMMs and norms read.

Only here is a weight rounded. There is one tensor for each rounding that a side asks for, and only
one if both ask for the same: the trainer then multiplies by the very bytes that the sampler did.
After an update they are overwritten in place: captured CUDA graphs read them by address.

In a run of several processes each rank rounds the rows of a master weight that it owns, and
receives the rest of the quantized weight, which is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import gather_rows
from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.int8 import int8_rows
from jetrl.precision.nvfp4 import NVFP4Tensor, NVFP4Weight, quantize_nvfp4
from jetrl.precision.nvfp4_products import in_device_order
from jetrl.precision.plan import FP8_BLOCK, PrecisionPlan, Rounding, Side
from jetrl.precision.quantize import (
    FORMATS,
    QTensor,
    dequantize,
    dithered_bf16,
    empty_int8_rows,
    quantize,
)
from jetrl.settings.presets import LinearFormat, ScaleRule


@dataclass(frozen=True)
class WeightOfCodedInputs:
    """A bfloat16 weight [N, K] that multiplies X as FP8 codes would say X: for comparisons."""

    values: Tensor


StoredWeight = QTensor | NVFP4Weight | Tensor  # FP8 in 128 x 128 groups, INT8 rows, NVFP4, or BF16
_HALF_GROUP = 64  # values of an FP8 group, at least; INT8 rotates so many
Operand = StoredWeight | WeightOfCodedInputs


def operand_tensors(weight: Operand) -> list[Tensor]:
    """Return the tensors of a quantized weight: codes and scales, or the weight itself."""
    if isinstance(weight, QTensor | NVFP4Weight):
        return [weight.codes, weight.scales]
    return [weight.values if isinstance(weight, WeightOfCodedInputs) else weight]


class QuantizedWeight:
    """A master weight together with its roundings to the formats that the two sides read.

    Args:
        master: FP32, [N, K] for a linear layer or [D] for a norm; with a shard this rank's rows.
        shard: The division of the weight's rows among ranks; None if this rank has all.
        sides: The sides whose roundings are kept.
        codes: The weight if it is in NVFP4 already; of `master` only the shape is read.

    Attributes:
        fixed: Whether the weight is never rounded again; only fp32 then reads values of `master`.
        noise: float32, added to the master weight before it is rounded; None: nothing.

    Raises:
        UserError: A side reads FP8 or INT8, and a dimension is not a multiple of 64, or NVFP4, and
            one is not of 128, or the weight is trained or has a value that is not finite.
    """

    def __init__(
        self,
        name: str,
        master: nn.Parameter,
        formats: Mapping[Side, LinearFormat],
        plan: PrecisionPlan,
        shard: Shard | None = None,
        sides: Collection[Side] = ("rollout", "train"),
        fixed: bool = False,
        codes: NVFP4Tensor | None = None,
    ) -> None:
        self.name, self.master, self.formats = name, master, formats
        self.shard, self.fixed = shard, fixed
        self.noise: Tensor | None = None
        self._roundings = {side: plan.rounding(side, format) for side, format in formats.items()}
        num_rows = len(master) if shard is None else shard.num_rows
        self.shape = torch.Size((num_rows, *master.shape[1:]))
        kept = {self._roundings[side] for side in sides}
        read = set(formats.values()) - {"fp32", "bf16"}
        coded = next((name for name in ("nvfp4", "int8") if name in read), "fp8").upper()
        multiple = FP8_BLOCK if coded == "NVFP4" else _HALF_GROUP
        if read and any(n % multiple for n in self.shape):
            odd = any(n % _HALF_GROUP for n in self.shape)
            remedy = "precision.preset=bf16" if odd else "precision.base=fp8"
            raise UserError(
                f"layer {name}: {coded} needs dimensions that are multiples of {multiple}, not "
                f"{list(self.shape)}; use {remedy}"
            )
        if coded == "NVFP4" and not fixed:
            raise UserError(
                f"layer {name}: precision.base=nvfp4 is for weights that are not trained; "
                "train an adapter (adapter.kind=lora), or leave precision.base unset"
            )
        self._stored: dict[Rounding, StoredWeight]
        if codes is not None:
            assert fixed, "a weight with codes has no master weight"
            assert kept == {Rounding("nvfp4")}, "codes are read as they are"
            self._stored = dict.fromkeys(kept, in_device_order(codes))
        else:
            make = self._rounded if shard is None else self._empty
            self._stored = {rounding: make(rounding) for rounding in sorted(kept)}
        if shard is not None and codes is None:
            self.requantize()
        if fixed and Rounding("fp32") not in kept:
            empty = torch.empty((), device=master.device).expand(master.shape)
            self.master = nn.Parameter(empty, requires_grad=False)

    def operand(self, side: Side) -> Operand:
        weight = self._stored[self._roundings[side]]
        if self.formats[side] == "fp8_activations":
            assert isinstance(weight, Tensor), "only X is coded"
            return WeightOfCodedInputs(weight)
        return weight

    def requantize(self) -> None:
        """Round the master weight again in place; of a divided one every rank rounds its rows."""
        assert not self.fixed, f"{self.name}: a fixed weight has no master weight to round"
        for rounding, earlier in self._stored.items():
            self._rounded(rounding, earlier if self.shard is None else _own(earlier, self.shard))
        if self.shard is None:
            return
        for weight in self._stored.values():
            if isinstance(weight, QTensor):
                gather_rows(_with_padding(weight.codes), self.shard.counts())
                gather_rows(_with_padding(weight.scales), self.shard.counts(weight.block[0]))
            else:
                assert isinstance(weight, Tensor), "a weight in NVFP4 is whole on every rank"
                gather_rows(weight, self.shard.counts())

    def fp8_scales(self) -> list[Tensor]:
        """Return the scales of each quantized copy of this weight; none if all are BF16 or FP32."""
        return [w.scales for w in self._stored.values() if isinstance(w, QTensor)]

    def tensors(self) -> list[Tensor]:
        return [t for weight in self._stored.values() for t in operand_tensors(weight)]

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that forwards read by what `moved` makes of the tensor."""
        for rounding, weight in self._stored.items():
            if isinstance(weight, QTensor | NVFP4Weight):
                codes, scales = moved(weight.codes), moved(weight.scales)
                self._stored[rounding] = replace(weight, codes=codes, scales=scales)
            else:
                self._stored[rounding] = moved(weight)

    def _empty(self, rounding: Rounding) -> StoredWeight:
        """Return the whole weight in a rounding, not filled yet."""
        assert rounding.format != "fp32", "a weight that is read as it is cannot be divided"
        if rounding.format == "int8":
            return empty_int8_rows(self.shape[0], self.shape[1], self.master.device)
        if rounding.format != "fp8":
            return torch.empty(self.shape, dtype=torch.bfloat16, device=self.master.device)
        (rows, columns), device, dtype = self.shape, self.master.device, FORMATS["e4m3"][0]
        if (arithmetic := arithmetic_of(self.master)) is not None:
            return arithmetic.empty_weight(rows, columns, dtype, device)
        blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        scales = torch.empty(blocks, dtype=torch.float32, device=device)
        codes = torch.empty(rows, columns, dtype=dtype, device=device)
        return QTensor(codes, scales, (FP8_BLOCK, FP8_BLOCK))

    def _rounded(self, rounding: Rounding, into: StoredWeight | None = None) -> StoredWeight:
        """Return the master weight in a rounding, written over `into` if that is given."""
        weight = self.master.detach()
        if self.noise is not None:
            assert rounding.format != "fp32", "a master weight that is read has no room for noise"
            weight = weight + self.noise
        if not weight.numel():  # a rank that owns no row
            assert into is not None, "a whole weight has rows"
            return into
        if rounding.format == "fp32":
            return self.master
        if weight.is_meta:  # of a model that is checked before its weights are read
            return self._empty(rounding)
        if rounding.format == "nvfp4":
            quantized = quantize_nvfp4(weight)
            if not quantized.scale.isfinite():
                raise UserError(
                    f"layer {self.name}: the weight has values that are NaN or Inf, which NVFP4 "
                    "cannot keep; fix the model's files, or leave precision.base unset"
                )
            return in_device_order(quantized)
        if rounding.through_bf16:
            weight = weight.bfloat16().float()
        if rounding.format == "int8":
            return int8_rows(weight, into if isinstance(into, QTensor) else None)
        if rounding.format == "fp8_weights":
            weight = dequantize(_fp8(weight, rounding.scales))
        if rounding.dithered and weight.dim() > 1:
            arithmetic = arithmetic_of(weight)
            dither = dithered_bf16 if arithmetic is None else arithmetic.dithered_bf16
            weight = dither(weight, self.name, self.shard.first_row if self.shard else 0)
        if rounding.format != "fp8":
            return into.copy_(weight) if isinstance(into, Tensor) else weight.bfloat16()
        return _fp8(weight, rounding.scales, into)


def _fp8(weight: Tensor, scales: ScaleRule, into: StoredWeight | None = None) -> QTensor:
    """Return float32 [N, K] in FP8, written over `into` if that is given."""
    earlier = into if isinstance(into, QTensor) else None
    if (arithmetic := arithmetic_of(weight)) is not None:
        return arithmetic.quantize_weight(weight, "e4m3", scales, earlier)
    quantized = quantize(weight, (FP8_BLOCK, FP8_BLOCK), scales=scales)
    if earlier is None:
        return quantized
    earlier.codes.copy_(quantized.codes)
    earlier.scales.copy_(quantized.scales)
    return earlier


def _own(whole: StoredWeight, shard: Shard) -> StoredWeight:
    """Return the rows of a quantized weight that this rank owns, sharing memory."""
    if isinstance(whole, Tensor):
        return whole[shard.own_rows]
    assert isinstance(whole, QTensor), "a weight in NVFP4 is whole on every rank"
    blocks = slice(*(-(-n // whole.block[0]) for n in (shard.first_row, shard.own_rows.stop)))
    return replace(whole, codes=whole.codes[shard.own_rows], scales=whole.scales[blocks])


def _with_padding(x: Tensor) -> Tensor:
    """Return codes or scales [N, K] with the padding that follows each row in memory."""
    return x.as_strided((len(x), x.stride(0)), (x.stride(0), 1))
