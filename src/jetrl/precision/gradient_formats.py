"""The number formats of dY for a weight in codes, a record per value of precision.grad_output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from jetrl.precision.backend import arithmetic_of
from jetrl.precision.formats import BF16, INT8, GEMMInput
from jetrl.precision.int8 import int8_rows, int8_tokens
from jetrl.precision.quantize import FP8_BLOCK, FP8Format, QTensor, dequantize, quantize
from jetrl.settings.presets import DEFAULT_SCALES, ScaleRule


@dataclass(frozen=True)
class Gradient:
    """The format of dY for a weight in codes; this class leaves dY in BF16.

    Attributes:
        coded: Whether WGrad multiplies codes.
        integer: Whether the codes are INT8, which only INT8 weights can multiply.
    """

    words: str

    coded: ClassVar[bool] = False
    integer: ClassVar[bool] = False

    def rows(self, dy: Tensor, scales: ScaleRule) -> GEMMInput:
        """Return dY, bfloat16 [T, N], quantized for DGrad."""
        return dy

    def rows_and_tokens(
        self, dy: Tensor, scales: ScaleRule, widened: bool
    ) -> tuple[GEMMInput, GEMMInput]:
        """Return dY for DGrad and for WGrad; on a GPU `widened` makes the latter BF16 values."""
        return dy, dy


class _INT8Gradient(Gradient):
    coded = integer = True

    def rows(self, dy: Tensor, scales: ScaleRule) -> QTensor:
        return int8_rows(dy)

    def rows_and_tokens(
        self, dy: Tensor, scales: ScaleRule, widened: bool
    ) -> tuple[QTensor, QTensor]:
        return int8_rows(dy), int8_tokens(dy)


@dataclass(frozen=True)
class _FP8Gradient(Gradient):
    """E4M3 or E5M2. FP8 GEMMs of GPUs do not support E5M2, which is widened to BF16 there."""

    code: FP8Format

    coded = True

    def rows(self, dy: Tensor, scales: ScaleRule) -> GEMMInput:
        if (arithmetic := arithmetic_of(dy)) is None:
            return quantize(dy, (1, FP8_BLOCK), self.code, scales)
        return self._for_gpu(arithmetic.quantize_rows(dy, self.code, scales), len(dy))

    def rows_and_tokens(
        self, dy: Tensor, scales: ScaleRule, widened: bool
    ) -> tuple[GEMMInput, GEMMInput]:
        if (arithmetic := arithmetic_of(dy)) is None:
            rows = quantize(dy, (1, FP8_BLOCK), self.code, scales)
            return rows, quantize(dy, (FP8_BLOCK, 1), self.code, scales)
        rows, tokens = arithmetic.quantize_rows_and_tokens(dy, self.code, scales)
        by_token = _widened(tokens, len(dy)) if widened else tokens
        return self._for_gpu(rows, len(dy)), by_token

    def _for_gpu(self, rows: QTensor, num_tokens: int) -> GEMMInput:
        return _widened(rows, num_tokens) if self.code == "e5m2" else rows


def _widened(codes: QTensor, num_tokens: int) -> Tensor:
    """Return the values of codes as bfloat16 [T, N], without padding tokens."""
    return dequantize(codes)[:num_tokens].bfloat16()


GRADIENTS: dict[str, Gradient] = {
    "e4m3": _FP8Gradient("FP8 e4m3", "e4m3"),
    "e5m2": _FP8Gradient("FP8 e5m2", "e5m2"),
    INT8.name: _INT8Gradient(INT8.described_linear(DEFAULT_SCALES)),
    BF16.name: Gradient(BF16.words),
}
