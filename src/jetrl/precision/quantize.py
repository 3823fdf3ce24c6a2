"""The one quantizer: the rule and constants for all FP8 and INT8 codes in jetrl.

For a group of values with absolute maximum `a` (float32, from the values as they are):

    a  = max(|x|), at least 2**-100      a zero group has codes 0 and a finite scale
    s  = a / 448                         float32, IEEE division; stored
    r  = 448 / a                         float32, IEEE division; used
    q  = float8_e4m3fn(x * r)            float32 product, round to nearest even, saturating
    x' = float32(q) * s

`pow2` scales round s up to a power of two and use r = 1 / s. E5M2 (optional, for gradients) has
57344 instead of 448. A non-finite value becomes a NaN code; it is never clamped.

INT8 has 127 instead of 448, and

    q  = int8(x * r)                     float32 product, round to nearest, ties to even

Integers have no NaN, so a NaN product becomes code 0. But a non-finite value makes the scale of its
group NaN or Inf, so all values of the group are dequantized to NaN.

In the `int8` plan, a Hadamard rotation is applied to both operands along K first (`rotate`). It
does not change their product, and it spreads an outlier over 64 values, so that INT8 suits all of
them. A row along K is one group (`precision.int8`).

Groups of the operands of an FP8 product along K: 1 x 128 on the left (X in FProp, dY in DGrad, and
dY along tokens, 128 x 1, in WGrad), 128 x 128 on the right (the weight, which can be transposed
without rounding, and X in WGrad). Keys and values have one group per token and head.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from jetrl.settings.presets import DEFAULT_SCALES, ScaleRule

FP8Format = Literal["e4m3", "e5m2"]
CodeFormat = FP8Format | Literal["int8"]
INT8_CODES: Final = "int8"

FORMATS: dict[str, tuple[torch.dtype, float]] = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
    INT8_CODES: (torch.int8, 127.0),
}
AMAX_FLOOR = 2.0**-100
FP8_BLOCK = 128  # values of a group of FP8 codes
ROTATION = 64  # values per Hadamard rotation
VALUES_AT_ONCE = 2**24  # values that are rounded together, so that float32 copies stay small
SLAB_BYTES = 2**25  # of an operand of DGrad and WGrad in planes, on a GPU


@dataclass(frozen=True)
class QTensor:
    """A matrix, or a batch of matrices, as codes with a scale for each group of values.

    Attributes:
        codes: float8_e4m3fn (or float8_e5m2, or int8) [..., M, K].
        scales: float32 [..., ceil(M/bm), ceil(K/bk)].
        block: (bm, bk), the rows and columns of a group of values that share a scale.
        rotated: Whether values were rotated before quantization, along their groups: whole rows,
            or whole columns of a transpose.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    rotated: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the codes."""
        return self.codes.shape

    @property
    def mT(self) -> QTensor:  # noqa: N802  (torch's own name for a transpose of the last two)
        """The transpose, with the same codes and scales."""
        turned = (self.block[1], self.block[0])
        return QTensor(self.codes.mT, self.scales.mT, turned, self.rotated)


@dataclass(frozen=True)
class Planes:
    """Integers 256 * high + low, int8 [M, K] each, with a scale per row, float32 [M, 1].

    `precision.int8_planes` defines them.
    """

    high: Tensor
    low: Tensor
    scales: Tensor

    @staticmethod
    def empty(rows: int, k: int, device: torch.device) -> Planes:
        """Return uninitialized integers [rows, K]."""
        high, low = (torch.empty(rows, k, dtype=torch.int8, device=device) for _ in range(2))
        return Planes(high, low, torch.empty(rows, 1, device=device))

    @property
    def shape(self) -> torch.Size:
        """The shape of a plane."""
        return self.high.shape

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.high, self.low, self.scales

    def rows(self, which: slice | Tensor) -> Planes:
        """Return some rows, by a slice or by indices; those of a slice are views."""
        return Planes(self.high[which], self.low[which], self.scales[which])

    def codes(self) -> Tensor:
        """Return the integers as float64 [M, K]."""
        return 256.0 * codes_as_float64(self.high) + codes_as_float64(self.low)


def quantize(
    x: Tensor,
    block: tuple[int, int] = (1, 128),
    format: CodeFormat = "e4m3",
    scales: ScaleRule = DEFAULT_SCALES,
) -> QTensor:
    """Return x as codes and scales, in groups over its last two dimensions.

    Args:
        x: bfloat16, float16 or float32 [..., M, K].
        block: The rows and columns of a group; the last groups are smaller if M and K are not
            multiples.
        scales: "fp32" for float32 scales, "pow2" for powers of two.

    Raises:
        ValueError: fewer than two dimensions, or a dtype that is not floating point.
    """
    if x.dim() < 2 or not x.dtype.is_floating_point or x.element_size() < 2:
        raise ValueError(f"quantize takes [..., M, K] of bf16/fp16/fp32, not {x.dtype} {x.shape}")
    dtype, maximum = FORMATS[format]
    # The stored scale, and the multiplier: each is the result of one division.
    groups = grouped(x.float(), block)
    amax = groups.abs().amax(dim=(-3, -1), keepdim=True)
    amax = torch.maximum(amax, amax.new_tensor(AMAX_FLOOR))
    # Divide by a tensor: for a Python number torch multiplies by a rounded reciprocal.
    top = amax.new_tensor(maximum)
    stored = amax / top
    if scales == "pow2":
        stored = power_of_two_above(stored)
        multiplier = stored.reciprocal()  # exact for a power of two
    else:
        multiplier = top / amax
    # Rounding may exceed the maximum, so saturate. NaN passes the clamp.
    codes = (groups * multiplier).clamp(-maximum, maximum)
    codes = ungrouped(codes)[..., : x.shape[-2], : x.shape[-1]]
    if dtype == torch.int8:
        codes = codes.nan_to_num(nan=0.0).round()  # conversion to int8 would truncate
    return QTensor(codes.to(dtype), stored.squeeze(-1).squeeze(-2), block)


def dequantize(q: QTensor | Planes) -> Tensor:
    """Return float32 [..., M, K]: each code times its group's scale, and rotated back."""
    if isinstance(q, Planes):
        return rotate(q.codes().float() * q.scales)
    groups = grouped(q.codes.float(), q.block)
    values = groups * q.scales[..., :, None, :, None]
    values = ungrouped(values)[..., : q.shape[-2], : q.shape[-1]]
    if not q.rotated:
        return values
    return rotate(values) if q.block[0] == 1 else rotate(values.mT).mT


def empty_int8_rows(rows: int, k: int, device: torch.device) -> QTensor:
    """Return uninitialized codes [rows, K] of rotated values with a scale per row."""
    codes = torch.empty(rows, k, dtype=torch.int8, device=device)
    return QTensor(codes, torch.empty(rows, 1, device=device), (1, k), rotated=True)


def rotate(x: Tensor) -> Tensor:
    """Return x [..., K] times the Hadamard matrix of 64, divided by 8, in blocks along K: float32.

    The matrix is its own inverse. K is a multiple of 64.
    """
    return hadamard(x.float(), ROTATION) * ROTATION**-0.5


def hadamard(x: Tensor, width: int) -> Tensor:
    """Return float32 x [..., K] times the Hadamard matrix of 1 and -1, in blocks along K.

    Stages add and subtract pairs of values, first those 1 apart, then 2, up to width / 2, so the
    bits are the same on every device. `width`, a power of two, is that of a block and divides K.
    """
    y = x.unflatten(-1, (-1, width))
    for _ in range(width.bit_length() - 1):
        # Each stage brings the pairs of the next one side by side.
        even, odd = y[..., ::2], y[..., 1::2]
        y = torch.cat([even + odd, even - odd], -1)
    return y.flatten(-2)


def codes_as_float64(codes: Tensor) -> Tensor:
    """Return the exact values of codes as float64, by table: eight times faster than a cast."""
    indices = codes.view(torch.uint8).flatten().int()
    return _values_of(codes.dtype, codes.device).index_select(0, indices).view(codes.shape)


@functools.cache
def _values_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the value of each of the 256 codes of a format, float64 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).double().to(device)


def grouped(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [..., M, K] as [..., M/bm, bm, K/bk, bk], padded with zeros up to whole groups."""
    rows, columns = block
    pad_rows, pad_columns = -x.shape[-2] % rows, -x.shape[-1] % columns
    if pad_rows or pad_columns:
        x = torch.nn.functional.pad(x, (0, pad_columns, 0, pad_rows))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def ungrouped(groups: Tensor) -> Tensor:
    """Return [..., M/bm, bm, K/bk, bk] as [..., M, K]."""
    return groups.flatten(-4, -3).flatten(-2, -1)


def power_of_two_above(scale: Tensor) -> Tensor:
    """Return the smallest powers of two that are not below float32 scales; NaN and Inf stay."""
    mantissa, exponent = torch.frexp(scale)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    rounded = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(torch.isfinite(scale), rounded, scale)


def dithered_bf16(x: Tensor, name: str, first_row: int = 0) -> Tensor:
    """Round float32 [M, K] to BF16, up or down by a draw that is fixed for each place.

    A value between two BF16 values goes to the upper one with a probability of its distance from
    the lower one. So a value on BF16's grid stays, and a change far smaller than the grid's step
    moves some of many values, on average by the change. Rounding to nearest moves none of them.

    `name` is the matrix, whose draws are its own; x begins with its row `first_row`.
    """
    rounded = torch.empty_like(x, dtype=torch.bfloat16)
    for rows in row_parts(x):
        part = x[rows].contiguous()
        begin = (first_row + rows.start) * part.shape[1]
        key = zlib.crc32(name.encode()) - (1 << 31)
        draws = draw_bits(begin, part.numel(), key, x.device)
        own = part.view(torch.int32)
        bits = own + (draws & 0xFFFF).view(part.shape)
        # A sum could carry out of a NaN's fraction, and its upper half alone may be Inf.
        bits = torch.where(part.isnan(), own | 0x400000, bits)
        rounded[rows] = (bits & -0x10000).view(torch.float32)
    return rounded


def row_parts(x: Tensor, multiple: int = 1, at_once: int = VALUES_AT_ONCE) -> Iterator[slice]:
    """Yield slices of rows of x [M, K], in order, of about `at_once` values.

    The number of rows of each but the last is a multiple of `multiple`.
    """
    step = max(multiple, at_once // max(x.shape[1], 1) // multiple * multiple)
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def finite_maximum(amax: Tensor) -> Tensor:
    """Return float32 maxima of absolute values, at least the floor; NaN if not finite."""
    return amax.clamp(min=AMAX_FLOOR) + (amax - amax)


def draw_bits(begin: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return random bits, int32 [count], of the places from `begin` on, by an int32 key."""
    draws = torch.arange(begin, begin + count, device=device).int() ^ key
    for factor, shift in ((-1640531535, 15), (-2048144777, 13), (-1028477379, 16)):
        draws = draws * factor
        draws ^= (draws >> shift) & ((1 << 32 - shift) - 1)
    return draws
