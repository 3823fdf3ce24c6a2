"""The quantized weight of a layer: a master weight, rounded to the formats of both sides.

Weights are rounded only here. If both sides use the same rounding, they share one tensor, so the
trainer multiplies by the same bytes as the sampler. Updates overwrite the tensors in place, because
captured CUDA graphs read them by address.

With several processes, each rank rounds the rows of the master weight that it owns and gathers the
other rows: quantized weights are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import gather_rows, whole_tensor
from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.formats import FP8, FP32, NVFP4, Format, Rounding, StoredWeight
from jetrl.precision.nvfp4 import NVFP4Tensor, NVFP4Weight
from jetrl.precision.nvfp4_products import in_device_order
from jetrl.precision.plan import Side
from jetrl.precision.quantize import Planes, QTensor, dithered_bf16


def operand_tensors(weight: StoredWeight) -> list[Tensor]:
    """Return the tensors of a quantized weight: codes and scales, or the weight itself."""
    if isinstance(weight, Planes):
        return list(weight.tensors())
    if isinstance(weight, QTensor | NVFP4Weight):
        return [weight.codes, weight.scales]
    return [weight]


class QuantizedWeight:
    """A master weight and its roundings to the formats of the two sides.

    Args:
        master: FP32, [N, K] for a linear layer or [D] for a norm; this rank's rows if divided.
        formats: The format on each side.
        roundings: The roundings (`PrecisionPlan.rounding`) to store, of the sides that are used.
        shard: The division of the weight's rows among ranks; None if it is not divided.
        codes: The weight in NVFP4, if the files store it so; `master` then has only a shape.

    Attributes:
        fixed: Whether the weight is frozen and never rounded again. Its master weight is freed,
            except under the fp32 plan.
        noise: float32, added to the master weight before rounding; None: no noise.

    Raises:
        UserError: A dimension is not a multiple of 64 (FP8, INT8) or of 128 (NVFP4), or an NVFP4
            weight is trained or not finite.
    """

    def __init__(
        self,
        name: str,
        master: nn.Parameter,
        formats: Mapping[Side, Format],
        roundings: Mapping[Side, Rounding],
        shard: Shard | None = None,
        fixed: bool = False,
        codes: NVFP4Tensor | None = None,
    ) -> None:
        self.name, self.master, self.formats = name, master, formats
        self.shard, self.fixed = shard, fixed
        self.noise: Tensor | None = None
        self._roundings = roundings
        num_rows = len(master) if shard is None else shard.num_rows
        self.shape = torch.Size((num_rows, *master.shape[1:]))
        kept = set(roundings.values())
        strictest = max(formats.values(), key=lambda format: (format.multiple, format.words))
        if any(n % strictest.multiple for n in self.shape):
            odd = any(n % FP8.multiple for n in self.shape)
            remedy = "precision.preset=bf16" if odd else "precision.base=fp8"
            raise UserError(
                f"layer {name}: {strictest.words} needs dimensions that are multiples of "
                f"{strictest.multiple}, not {list(self.shape)}; use {remedy}"
            )
        if strictest.frozen and not fixed:
            raise UserError(
                f"layer {name}: precision.base=nvfp4 is for weights that are not trained; "
                "train an adapter (adapter.kind=lora), or leave precision.base unset"
            )
        self._stored: dict[Rounding, StoredWeight]
        if codes is not None:
            assert fixed, "a weight with codes has no master weight"
            assert kept == {Rounding(NVFP4)}, "codes are read as they are"
            self._stored = dict.fromkeys(kept, in_device_order(codes))
        else:
            make = self._rounded if shard is None else self._empty
            self._stored = {rounding: make(rounding) for rounding in sorted(kept, key=_by_name)}
        if shard is not None and codes is None:
            self.requantize()
        if fixed and Rounding(FP32) not in kept:
            empty = torch.empty((), device=master.device).expand(master.shape)
            self.master = nn.Parameter(empty, requires_grad=False)

    def operand(self, side: Side) -> StoredWeight:
        weight = self._stored[self._roundings[side]]
        return self.formats[side].operand(weight)

    def requantize(self) -> None:
        """Round the master weight again, in place; with a shard, all ranks must call this."""
        assert not self.fixed, f"{self.name}: a fixed weight has no master weight to round"
        for rounding, earlier in self._stored.items():
            divided = None if rounding.format.whole else self.shard
            self._rounded(rounding, earlier if divided is None else _own(earlier, divided))
        if self.shard is None:
            return
        for rounding, weight in self._stored.items():
            if rounding.format.whole:
                continue
            if isinstance(weight, QTensor):
                gather_rows(_with_padding(weight.codes), self.shard.counts())
                gather_rows(_with_padding(weight.scales), self.shard.counts(weight.block[0]))
                continue
            assert isinstance(weight, Tensor | Planes), "a weight in NVFP4 is whole on every rank"
            for part in operand_tensors(weight):
                gather_rows(part, self.shard.counts())

    def fp8_scales(self) -> list[Tensor]:
        """Return the scales of this weight's roundings to codes."""
        return [w.scales for w in self._stored.values() if isinstance(w, QTensor | Planes)]

    def tensors(self) -> list[Tensor]:
        return [t for weight in self._stored.values() for t in operand_tensors(weight)]

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that forwards read by `moved(tensor)`."""
        for rounding, weight in self._stored.items():
            if isinstance(weight, Planes):
                self._stored[rounding] = Planes(
                    moved(weight.high), moved(weight.low), moved(weight.scales)
                )
            elif isinstance(weight, QTensor | NVFP4Weight):
                codes, scales = moved(weight.codes), moved(weight.scales)
                self._stored[rounding] = replace(weight, codes=codes, scales=scales)
            else:
                self._stored[rounding] = moved(weight)

    def _empty(self, rounding: Rounding) -> StoredWeight:
        """Return the whole weight in a rounding, uninitialized."""
        return rounding.format.empty(self.shape, self.master)

    def _rounded(self, rounding: Rounding, into: StoredWeight | None = None) -> StoredWeight:
        """Return the master weight in a rounding, written to `into` if given."""
        if rounding.format.reads_masters:
            assert self.noise is None, "noise would change the master weight"
            return self.master
        weight = self.master.detach()
        if rounding.format.whole and self.shard is not None:
            weight = whole_tensor(weight, self.shard)
        if self.noise is not None:
            weight = weight + self.noise
        if not weight.numel():  # a rank that owns no row
            assert into is not None, "a whole weight has rows"
            return into
        if weight.is_meta:  # the model is checked before its weights are read
            return self._empty(rounding)
        if rounding.through_bf16:
            weight = weight.bfloat16().float()
        if rounding.dithered and weight.dim() > 1:
            arithmetic = arithmetic_of(weight)
            dither = dithered_bf16 if arithmetic is None else arithmetic.dithered_bf16
            weight = dither(weight, self.name, self.shard.first_row if self.shard else 0)
        if rounding.format.frozen and not torch.stack(weight.aminmax()).isfinite().all():
            raise UserError(
                f"layer {self.name}: the weight has values that are NaN or Inf, which NVFP4 cannot "
                "keep; fix the model's files, or leave precision.base unset"
            )
        return rounding.format.round(weight, rounding.scales, into)


def _by_name(rounding: Rounding) -> tuple[str, str, bool, bool]:
    """Return a sort key."""
    return rounding.format.name, rounding.scales, rounding.through_bf16, rounding.dithered


def _own(whole: StoredWeight, shard: Shard) -> StoredWeight:
    """Return a view of the rows of a quantized weight that this rank owns."""
    if isinstance(whole, Tensor):
        return whole[shard.own_rows]
    if isinstance(whole, Planes):
        return whole.rows(shard.own_rows)
    assert isinstance(whole, QTensor), "a weight in NVFP4 is whole on every rank"
    first, end = (-(-row // whole.block[0]) for row in (shard.first_row, shard.own_rows.stop))
    return replace(whole, codes=whole.codes[shard.own_rows], scales=whole.scales[first:end])


def _with_padding(x: Tensor) -> Tensor:
    """Return a view of codes or scales [N, K] that includes the padding of each row in memory."""
    return x.as_strided((len(x), x.stride(0)), (x.stride(0), 1))
