"""NVFP4 weights in memory as the Hopper kernels read them: other bytes for the same numbers.

A kernel multiplies 64 rows of a weight by 16 values along K at once (wgmma), and each thread holds
certain elements of these. Codes lie in the order in which threads take them, so that one load of 16
bytes gives a thread all that it unpacks for 32 rows and 128 values along K:

    rows      n = 32 unit + 8 w + g                            w < 4: warps, g < 8: lanes
    columns   k = 128 block + 16 q + 8 h + 2 t + p             q < 8: groups, h < 2, t < 4: lanes,
                                                               p < 2: halves of a register
    codes     int32 [unit, block, w, g, t, q / 2]              a word has 8 codes: q % 2, h, p
    scales    int32 [unit, block, w, g, q / 4]                 a word has 4 scales: q % 4

Within a word the code (q % 2, h) of each half p is placed so that few instructions make the 16 bits
of a BF16 of it: sign in bit 15, the two bits of the exponent and the one of the mantissa in bits 8
to 6 (`CODE_BITS`). Read as BF16 this is the code times 2**-126.

A sum over K is one chain of products in a weight of many rows, whose programs fill a GPU. In one of
up to `NARROW` rows it is cut into two or four parts, the sums of which are added in order
(`parts_of`): a product waits some 33 cycles for the one before it, and in decode the parts are made
side by side.

A scale, which is never negative, is kept as 5 bits of exponent and 3 of mantissa, without E4M3's
subnormal numbers: shifted by 4 bits and added to `SCALE_OFFSET` it is the BF16 of the scale times
2**119. The product with the code is then the widened value times `WIDENED_FACTOR`, exactly. A scale
of zero has no such form: its group's codes become zeros.

Sums are multiplied by one factor, that of the matrix; or, where several matrices with scales of
their own are stacked, by that of the row (`RowFactors`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.precision.nvfp4 import NVFP4_GROUP, NVFP4Tensor, unpacked_codes

FEW_ROWS = 256  # of X: up to so many a product unpacks the codes itself
UNIT = 32  # rows of a weight whose codes lie together
BLOCK = 128  # values along K whose codes lie together
WIDENED_FACTOR = 2.0**-7
NARROW = 8448  # rows of a weight
ROWS_AT_ONCE = 4096  # of X: of so many there are float32 sums while parts are added
SCALED_ROWS_AT_ONCE = ROWS_AT_ONCE // 4  # and where one part is multiplied by scales of its rows
_TWO_PARTS = 8192  # columns; more have four
_PART_STEP = 2 * BLOCK  # a part begins where a stage of the kernels may begin
SCALE_OFFSET = (119 + 127 - 10) << 7
# By (q % 2, h): which bits of a half of a word are sign, upper and lower bit of the exponent, and
# mantissa. The first three differ by a shift; the fourth has what they leave.
CODE_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


@dataclass(frozen=True)
class RowFactors:
    """The factors of a weight whose rows belong to several matrices with scales of their own.

    Attributes:
        ranges: The first row, the row behind the last one, and the factor, of each matrix.
        of_rows: float32 [N], the factor of each row, on the device.
    """

    ranges: tuple[tuple[int, int, float], ...]
    of_rows: Tensor


@dataclass(frozen=True)
class HopperNVFP4:
    """A weight [N, K] in NVFP4, in the order of the kernels; 4.5 bits a value.

    Attributes:
        codes: int32 [N / 32 * K / 128 * 16, 32], as above; a unit's rows follow each other.
        scales: int32 [N / 32, K / 128 * 64], as above.
        factor: The matrix's scale over `WIDENED_FACTOR`, or those of its rows: sums of products are
            multiplied by it.
        shape: [N, K].
    """

    codes: Tensor
    scales: Tensor
    factor: float | RowFactors
    shape: torch.Size


def parts_of(n: int, k: int) -> tuple[int, int]:
    """Return in how many parts a sum over K is made, and the columns of each but the last.

    There are one, two or four parts.
    """
    if n > NARROW:
        return 1, k
    wanted = 2 if k <= _TWO_PARTS else 4
    columns = -(-k // (wanted * _PART_STEP)) * _PART_STEP
    return -(-k // columns), columns


def hopper_order(q: NVFP4Tensor) -> HopperNVFP4:
    """Return a weight in the order of the kernels, on its device.

    Args:
        q: [N, K], N a multiple of 32 and K of 128, with scales that are finite and not negative.

    Raises:
        ValueError: Other dimensions.
    """
    num_rows, num_columns = q.shape
    if num_rows % UNIT or num_columns % BLOCK:
        raise ValueError(
            f"NVFP4's kernels need rows in multiples of {UNIT} and columns of {BLOCK}, not "
            f"{list(q.shape)}"
        )
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
    return HopperNVFP4(codes.view(-1, 32), scales, _factor(q), q.shape)


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
    codes = unpacked_codes(q).masked_fill_(zero, 0).int()
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
