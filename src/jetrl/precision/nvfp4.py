"""NVFP4: weights of a frozen base in 4.5 bits per value, and the order of their bytes on Hopper.

A value is an E2M1 code (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives) times an E4M3 scale per 16 values
along K, times one float32 scale of the matrix. Code times group scale is exact in BF16, so a
product with such a weight is Y = bfloat16(float32(X @ widened^T) * s), with X in BF16. The rule,
for a matrix with absolute maximum A and a group of 16 with absolute maximum a, each operation one
float32 rounding:

    s  = max(A, 2**-100) / (6 * 448)              one per matrix
    t  = e4m3(a / (6 * s)), at least 2**-9        one per group; 2**-9 is E4M3's smallest
    q  = e2m1(x / (t * s))                        round to nearest, ties to even codes, saturating
    x' = (q * t) * s                              the product in brackets is exact

A group of zeros has codes 0 and scale 2**-9. The sign of a value that rounds to zero is kept. If
any value is not finite, s is NaN, and all values come back as NaN.

In the order of Hopper's kernels (`hopper_order`) one load of 16 bytes gives a thread what it
unpacks for 32 rows and 128 values along K:

    rows      n = 32 unit + 8 w + g                            w < 4: warps, g < 8: lanes
    columns   k = 128 block + 16 q + 8 h + 2 t + p             q < 8: groups, h < 2, t < 4: lanes,
                                                               p < 2: halves of a register
    codes     int32 [unit, block, w, g, t, q / 2]              a word has 8 codes: q % 2, h, p
    scales    int32 [unit, block, w, g, q / 4]                 a word has 4 scales: q % 4

Each code's bits are placed so that few instructions make a BF16 of it (`CODE_BITS`): sign in bit
15, exponent and mantissa in bits 8 to 6, which reads as the code times 2**-126. A scale is kept as
5 bits of exponent and 3 of mantissa: shifted by 4 bits and added to `SCALE_OFFSET` it is the BF16
of the scale times 2**119. Their product is the widened value times `WIDENED_FACTOR`, exactly. A
scale of zero has no such form, so its group's codes become zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.precision.quantize import FORMATS, finite_maximum, row_parts

NVFP4_GROUP = 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAXIMUM = _VALUES[-1]
# Between neighbours, the value from which on the upper one is nearer, and whether that value itself
# goes up: a tie goes to the code that is even.
_TIES = tuple(
    ((low + high) / 2, code % 2 == 1)
    for code, (low, high) in enumerate(itertools.pairwise(_VALUES))
)
_SCALE_TYPE, _SCALE_MAXIMUM = FORMATS["e4m3"]
_SMALLEST_SCALE = 2.0**-9


@dataclass(frozen=True)
class NVFP4Tensor:
    """A matrix [N, K] in NVFP4, as checkpoints keep it.

    Attributes:
        codes: uint8 [N, K / 2], E2M1 codes, two to a byte: the value of even K in the lower bits.
        scales: float8_e4m3fn [N, K / 16], of the groups along K.
        scale: float32 [], of the matrix; values are multiplied by it. Or [P], one of each of P
            matrices that are stacked along N.
        rows: The rows of each of these P matrices; empty if `scale` is one.
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor
    rows: tuple[int, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 2))

    @property
    def row_scales(self) -> Tensor:
        """The scale of the matrix, float32 []; or that of each row, [N], if they differ."""
        if not self.rows:
            return self.scale
        return self.scale.repeat_interleave(torch.tensor(self.rows, device=self.scale.device))


def stacked_nvfp4(parts: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """Return matrices of one K, each with one scale, stacked along N: the same codes, copied."""
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales.view(torch.uint8) for part in parts]).view(_SCALE_TYPE)
    scale = torch.stack([part.scale for part in parts])
    if bool((scale == scale[0]).all()):
        return NVFP4Tensor(codes, scales, scale[0])
    return NVFP4Tensor(codes, scales, scale, tuple(len(part.codes) for part in parts))


def quantize_nvfp4(x: Tensor) -> NVFP4Tensor:
    """Return a matrix [N, K] in NVFP4, K a multiple of 16; the same on every device."""
    assert x.dtype.is_floating_point, f"{x.dtype}"
    assert x.shape[1] % NVFP4_GROUP == 0, f"{list(x.shape)}"
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    floored = finite_maximum(torch.maximum(-low, high).float())
    scale = floored / floored.new_tensor(_MAXIMUM * _SCALE_MAXIMUM)
    codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], x.shape[1] // NVFP4_GROUP, dtype=_SCALE_TYPE, device=x.device)
    for rows in row_parts(x):
        codes[rows], scales[rows] = _quantize_rows(x[rows].float(), scale)
    return NVFP4Tensor(codes, scales, scale)


def _quantize_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed codes and the scales of float32 rows, under the matrix's scale."""
    groups = x.unflatten(1, (-1, NVFP4_GROUP))
    # Tensor by tensor: with a Python number torch multiplies by a rounded reciprocal instead.
    amax = groups.abs().amax(2) / (scale * _MAXIMUM)
    scales = amax.clamp(_SMALLEST_SCALE, _SCALE_MAXIMUM).to(_SCALE_TYPE)
    codes = groups / (scales.float() * scale)[:, :, None]
    return e2m1_bytes(codes.flatten(1)), scales


def e2m1_codes(x: Tensor) -> Tensor:
    """Return the E2M1 codes nearest to float32 values, uint8 0 to 15; ties to even, NaN is 0."""
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for tie, goes_up in _TIES:
        codes += magnitude >= tie if goes_up else magnitude > tie
    return codes | torch.signbit(x).to(torch.uint8) << 3


def e2m1_bytes(x: Tensor) -> Tensor:
    """Return the nearest codes of float32 [N, K], uint8 [N, K / 2]: even columns in lower bits."""
    codes = e2m1_codes(x)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def e2m1_values(packed: Tensor) -> Tensor:
    """Return the values of packed codes, float32 [N, K]."""
    table = torch.tensor(_VALUES + tuple(-value for value in _VALUES), device=packed.device)
    codes = unpacked_codes(packed)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def unpacked_codes(packed: Tensor) -> Tensor:
    """Return the E2M1 codes of bytes [N, K / 2] one to a byte, uint8 [N, K]."""
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1)


def widened(q: NVFP4Tensor) -> Tensor:
    """Return codes times group scales, bfloat16 [N, K]; exact, without the matrix's scale."""
    return (e2m1_values(q.codes) * q.scales.float().repeat_interleave(NVFP4_GROUP, 1)).bfloat16()


def dequantize_nvfp4(q: NVFP4Tensor) -> Tensor:
    """Return float32 [N, K]: the widened values times their matrix's scale, one float32 product."""
    return widened(q).float() * q.row_scales[..., None]


FEW_ROWS = 256  # of X: up to so many a product unpacks the codes itself
UNIT = 32  # rows of a weight whose codes lie together
BLOCK = 128  # values along K whose codes lie together
WIDENED_FACTOR = 2.0**-7
NARROW = 8448  # rows of a weight
ROWS_AT_ONCE = 4096  # of X: of so many there are float32 sums while parts are added
SCALED_ROWS_AT_ONCE = ROWS_AT_ONCE // 4  # and if one part is multiplied by scales of its rows
_TWO_PARTS = 8192  # columns; more have four
_PART_STEP = 2 * BLOCK  # a part begins where a stage of the kernels may begin
SCALE_OFFSET = (119 + 127 - 10) << 7
# By (q % 2, h): which bits of a half of a word are sign, upper and lower bit of the exponent, and
# mantissa. The first three differ by a shift; the fourth has what they leave.
CODE_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


@dataclass(frozen=True)
class RowFactors:
    """The factors of a weight whose rows belong to several matrices with scales of their own.

    `ranges` has each matrix's first row, the row behind its last one, and its factor; `of_rows` is
    the factor of each row, float32 [N], on the device.
    """

    ranges: tuple[tuple[int, int, float], ...]
    of_rows: Tensor


@dataclass(frozen=True)
class OrderedNVFP4:
    """An NVFP4 weight [N, K], 4.5 bits per value, laid out as its device's kernels read it.

    Attributes:
        codes: On Hopper int32 [N / 32 * K / 128 * 16, 32], as above; a unit's rows follow each
            other.
        scales: On Hopper int32 [N / 32, K / 128 * 64], as above.
        factor: The matrix's scale over `WIDENED_FACTOR`, or those of its rows: sums of products are
            multiplied by it.
        shape: [N, K].
    """

    codes: Tensor
    scales: Tensor
    factor: float | RowFactors
    shape: torch.Size


def parts_of(n: int, k: int) -> tuple[int, int]:
    """Return the parts of a sum over K (1, 2 or 4), and the columns of each part but the last."""
    if n > NARROW:
        return 1, k
    wanted = 2 if k <= _TWO_PARTS else 4
    columns = -(-k // (wanted * _PART_STEP)) * _PART_STEP
    return -(-k // columns), columns


def hopper_order(q: NVFP4Tensor) -> OrderedNVFP4:
    """Return a weight in the order of Hopper's kernels, on its device.

    N is a multiple of 32, K of 128; scales are finite and not negative.
    """
    num_rows, num_columns = q.shape
    assert num_rows % UNIT == num_columns % BLOCK == 0, f"{list(q.shape)}"
    units, blocks = num_rows // UNIT, num_columns // BLOCK
    codes = torch.empty(units, blocks * 512, dtype=torch.int32, device=q.codes.device)
    scales = torch.empty(units, blocks * 64, dtype=torch.int32, device=q.codes.device)
    # A unit's words take eight times its bytes while they are made: so many units at a time.
    step = max(1, 2**25 // (UNIT * num_columns))
    for start in range(0, units, step):
        rows = slice(start * UNIT, (start + step) * UNIT)
        part = NVFP4Tensor(q.codes[rows], q.scales[rows], q.scale)
        codes[start : start + step] = _code_words(part, blocks)
        scales[start : start + step] = _scale_words(part, blocks)
    return OrderedNVFP4(codes.view(-1, 32), scales, _factor(q), q.shape)


def _factor(q: NVFP4Tensor) -> float | RowFactors:
    """Return what sums of products with a weight in the kernels' order are multiplied by."""
    if not q.rows:
        return float(q.scale) / WIDENED_FACTOR
    ends = list(itertools.accumulate(q.rows))
    factors = [scale / WIDENED_FACTOR for scale in q.scale.tolist()]
    ranges = tuple(zip([0, *ends[:-1]], ends, factors, strict=True))
    return RowFactors(ranges, q.row_scales / WIDENED_FACTOR)


def _code_words(q: NVFP4Tensor, blocks: int) -> Tensor:
    """Return the words of the codes of some units, int32 [units, blocks * 512]."""
    zero = (q.scales.float() == 0).repeat_interleave(NVFP4_GROUP, 1)
    codes = unpacked_codes(q.codes).masked_fill_(zero, 0).int()
    # [unit, w, g, block, q / 2, q % 2, h, t, p], and the bits of a code from its sign on.
    codes = codes.view(-1, 4, 8, blocks, 4, 2, 2, 4, 2)
    halves = torch.zeros_like(codes[:, :, :, :, :, 0, 0])
    for place, positions in enumerate(CODE_BITS):
        code = codes[:, :, :, :, :, place // 2, place % 2]
        for bit, position in zip((3, 2, 1, 0), positions, strict=True):
            halves |= (code >> bit & 1) << position
    words = halves[..., 0] | halves[..., 1] << 16
    return words.permute(0, 3, 1, 2, 5, 4).flatten(1)


def _scale_words(q: NVFP4Tensor, blocks: int) -> Tensor:
    """Return the words of the scales of some units, int32 [units, blocks * 64]."""
    mantissa, exponent = torch.frexp(q.scales.float())  # in [0.5, 1), so one more than usual
    fields = (exponent + 9) * 8 + ((mantissa * 16).int() - 8)
    fields = torch.where(mantissa == 0, 0, fields)
    fields = fields.view(-1, 4, 8, blocks, 2, 4)  # [unit, w, g, block, q / 4, q % 4]
    words = fields[..., 0] | fields[..., 1] << 8 | fields[..., 2] << 16 | fields[..., 3] << 24
    return words.permute(0, 3, 1, 2, 4).flatten(1)


# As checkpoints keep a weight, or in the order of a GPU's kernels.
NVFP4Weight = NVFP4Tensor | OrderedNVFP4
