"""Block formats of four and eight bits in plain PyTorch: NVFP4, MXFP4, MXFP8.

The values of a block share a scale. There are no kernels that multiply such codes (Hopper has no
instruction for it), so products are emulated: a code times its scale has at most 8 significant bits
and is exact in BF16, and BF16 products read these values. The rule, for a block with absolute
maximum a, taken as 2**-100 if it is less, each operation one float32 rounding:

    A  = max(|x|), at least 2**-100     of the row if blocks are 1 x 16, of the matrix if 16 x 16
    s  = 2**e, the smallest with A <= 6 * 448 * s                                  NVFP4; else 1
    t  = e4m3(a / s / 6), at least 2**-9, the smallest of E4M3                     NVFP4
    t  = 2**(floor(log2 a) - 2)         larger values saturate, as in OCP MX 1.0   MXFP4
    t  = 2**e, the smallest with a <= 448 * t                                      MXFP8
    q  = the code nearest to x / (t * s), ties to even, saturating
    x' = bfloat16(q * (t * s))          exact, or Inf from 2**128 on

NVFP4's second scale may be any float32. Here it is a power of two, so that x' is exact, and one per
row, so that a token does not depend on its batch. A value that is not finite makes s or t, and so
all values of its row, matrix or block, NaN.

Stochastic rounding draws u in [0, 1) for each element from the counted bits of
`quantize.draw_bits`:

    t  rounded up, to E4M3 or to a power of two: no value saturates
    q  = low + (high - low if (x / (t * s) - low) / (high - low) > u else 0)     of adjacent codes

so the expectation of x' is x up to 2**-24 of the distance between codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl.precision.nvfp4 import e2m1_bytes, e2m1_values
from jetrl.precision.quantize import (
    FORMATS,
    draw_bits,
    finite_maximum,
    grouped,
    hadamard,
    power_of_two_above,
    row_parts,
    ungrouped,
)
from jetrl.randomness import derive_seed

BLOCK_ROTATION = 16  # values per Hadamard rotation of WGrad's operands
ROUNDING_BYTES = 48  # per value that is rounded: draws and float32 copies, at most
_E4M3_TYPE, _E4M3_MAXIMUM = FORMATS["e4m3"]


class Grid(NamedTuple):
    """The values of a small floating-point type.

    Attributes:
        mantissa: Bits of the fraction: values in [1, 2) are 2**-mantissa apart.
        lowest, highest: Exponents of the smallest normal value and of the maximum.
    """

    mantissa: int
    lowest: int
    highest: int
    maximum: float


E2M1 = Grid(mantissa=1, lowest=0, highest=2, maximum=6.0)
E4M3 = Grid(mantissa=3, lowest=-6, highest=8, maximum=_E4M3_MAXIMUM)
_SMALLEST_SCALE = 2.0 ** (E4M3.lowest - E4M3.mantissa)


class ScaleFormat(NamedTuple):
    """The format of scales.

    Attributes:
        choose: Returns t for a / s; with `up` no value of the block saturates.
        stored, loaded: Conversions to bytes and back.
        second: Whether a second scale, s, is a power of two.
    """

    choose: Callable[[Tensor, Grid, bool], Tensor]
    stored: Callable[[Tensor], Tensor]
    loaded: Callable[[Tensor], Tensor]
    second: bool


@dataclass(frozen=True)
class BlockFormat:
    """A block format; a table of all is in docs/precision.md.

    Attributes:
        codes: The values that codes have, as a grid.
        packed, unpacked: Conversions of codes [M, K] to bytes and back.
        bits: Bits per code, without its share of a scale.
        block: Rows and columns that share a scale; they divide a matrix.
    """

    words: str
    codes: Grid
    scales: ScaleFormat
    packed: Callable[[Tensor], Tensor]
    unpacked: Callable[[Tensor], Tensor]
    bits: int
    block: tuple[int, int]

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a code and its share of the block's scale; the second scale is not counted."""
        return self.bits / 8 + 1 / (self.block[0] * self.block[1])


@dataclass(frozen=True)
class Blocks:
    """A matrix [M, K] in codes.

    Attributes:
        codes: float32 [M, K], values of the format's grid.
        scales: float32 [M / rows, K / columns], t of each block.
        second: float32 [M, 1] or [1, 1], s.
    """

    codes: Tensor
    scales: Tensor
    second: Tensor
    format: BlockFormat

    @property
    def values(self) -> Tensor:
        """The values x', bfloat16 [M, K]."""
        rows = self.scales.repeat_interleave(self.format.block[0], 0) * self.second
        groups = self.codes.unflatten(1, (-1, self.format.block[1])) * rows[:, :, None]
        return groups.flatten(1).bfloat16()

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return bytes: codes uint8 [M, K * bits / 8], scales uint8, and s."""
        return self.format.packed(self.codes), self.format.scales.stored(self.scales), self.second

    @staticmethod
    def unpack(packed: tuple[Tensor, Tensor, Tensor], format: BlockFormat) -> Blocks:
        codes, scales, second = packed
        return Blocks(format.unpacked(codes), format.scales.loaded(scales), second, format)


def quantize_blocks(
    x: Tensor, format: BlockFormat, draws: Tensor | None = None, second: Tensor | None = None
) -> Blocks:
    """Return x [M, K], any floating dtype, in codes; blocks divide both dimensions.

    Args:
        draws: For stochastic rounding, float32 [M, K] in [0, 1); None rounds to nearest.
        second: s, if not computed from x.
    """
    assert x.shape[0] % format.block[0] == x.shape[1] % format.block[1] == 0, f"{list(x.shape)}"
    if second is None:
        second = second_scales(x, format)
    groups = grouped(x.float(), format.block)
    amax = finite_maximum(groups.abs().amax((-3, -1), keepdim=True))
    shared = second[:, :, None, None]
    scales = format.scales.choose(amax / shared, format.codes, draws is not None)
    divided = groups / (scales * shared)
    codes = on_grid(divided, format.codes, None if draws is None else grouped(draws, format.block))
    return Blocks(ungrouped(codes), scales.squeeze(-1).squeeze(-2), second, format)


def second_scales(x: Tensor, format: BlockFormat) -> Tensor:
    """Return s, float32: [M, 1] of rows in blocks of 1 x K, else [1, 1]."""
    if not format.scales.second:
        return x.new_ones((1, 1), dtype=torch.float32)
    if format.block[0] == 1:
        amax = x.abs().amax(1, keepdim=True)
    else:
        low, high = x.aminmax()
        amax = torch.maximum(-low, high).view(1, 1)
    return power_of_two_above(
        over(finite_maximum(amax.float()), format.codes.maximum * _E4M3_MAXIMUM)
    )


def on_grid(x: Tensor, grid: Grid, draws: Tensor | None = None) -> Tensor:
    """Return float32 values rounded to a grid, to nearest even or by draws; NaN stays NaN."""
    step = _step(x, grid)
    ratio = x / step  # exact
    if draws is None:
        whole = ratio.round()
    else:
        low = ratio.floor()
        whole = low + (ratio - low > draws)
    return (whole * step).clamp(-grid.maximum, grid.maximum)


def uniform_draws(
    key: tuple[int | str, ...], rows: range, columns: int, device: torch.device
) -> Tensor:
    """Return numbers in [0, 1) for rows of a matrix, float32: a function of key and element."""
    seed = derive_seed(*key) % 2**32 - 2**31
    bits = draw_bits(rows.start * columns, len(rows) * columns, seed, device)
    return ((bits & 0xFFFFFF).float() * 2.0**-24).view(len(rows), columns)


def block_values(
    x: Tensor, format: BlockFormat, key: tuple[int | str, ...] | None = None, rotated: bool = False
) -> Tensor:
    """Return the values of x [M, K] in a format, bfloat16 [M, K].

    Args:
        key: For stochastic rounding, the name of the draws; None rounds to nearest.
        rotated: Whether x is rotated first (`block_rotation`).
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    whole = None if format.block[0] == 1 else second_scales(x, format)
    for rows in row_parts(x, multiple=16):
        part = block_rotation(x[rows]) if rotated else x[rows]
        numbers = range(rows.start, rows.stop)
        draws = None if key is None else uniform_draws(key, numbers, x.shape[1], x.device)
        out[rows] = quantize_blocks(part, format, draws, whole).values
    return out


def block_rotation(x: Tensor) -> Tensor:
    """Return x [M, K] times the Hadamard matrix of 16, divided by 4, in blocks along K: float32.

    The matrix is its own inverse, so a product of two rotated operands is unchanged.
    """
    return hadamard(x.float(), BLOCK_ROTATION) * BLOCK_ROTATION**-0.5


def over(x: Tensor, divisor: float) -> Tensor:
    """Divide with one rounding: for a Python number torch multiplies by a rounded reciprocal."""
    return x / x.new_full((), divisor)


def _exponents(x: Tensor) -> Tensor:
    """Return the biased exponents of float32 values, int32."""
    return x.view(torch.int32) >> 23 & 255


def _power(exponents: Tensor) -> Tensor:
    return (exponents << 23).view(torch.float32)


def _step(x: Tensor, grid: Grid) -> Tensor:
    """Return the distance of a grid's values around float32 values; a power of two."""
    exponents = _exponents(x).clamp(grid.lowest + 127, grid.highest + 127)
    return _power(exponents - grid.mantissa)


def _e4m3_scale(amax: Tensor, codes: Grid, up: bool) -> Tensor:
    ratio = over(amax, codes.maximum)
    step = _step(ratio, E4M3)
    scales = (ratio / step).ceil() * step if up else on_grid(ratio, E4M3)
    return scales.clamp(_SMALLEST_SCALE, E4M3.maximum)


def _power_below(amax: Tensor, codes: Grid, up: bool) -> Tensor:
    if up:
        return _power_above(amax, codes, up)
    return torch.where(amax.isnan(), amax, _power(_exponents(amax) - codes.highest))


def _power_above(amax: Tensor, codes: Grid, up: bool) -> Tensor:
    return power_of_two_above(over(amax, codes.maximum))


def _e4m3_stored(values: Tensor) -> Tensor:
    return values.to(_E4M3_TYPE).view(torch.uint8)


def _e4m3_loaded(stored: Tensor) -> Tensor:
    return stored.view(_E4M3_TYPE).float()


def _e8m0_stored(scales: Tensor) -> Tensor:
    return _exponents(scales).to(torch.uint8)


def _e8m0_loaded(stored: Tensor) -> Tensor:
    return torch.where(stored == 255, torch.nan, _power(stored.int()))


_IN_E4M3 = ScaleFormat(_e4m3_scale, _e4m3_stored, _e4m3_loaded, second=True)
_FLOOR = ScaleFormat(_power_below, _e8m0_stored, _e8m0_loaded, second=False)
_CEILING = _FLOOR._replace(choose=_power_above)

NVFP4_ROWS = BlockFormat(
    "NVFP4 1 x 16", E2M1, _IN_E4M3, e2m1_bytes, e2m1_values, bits=4, block=(1, 16)
)
NVFP4_SQUARES = BlockFormat(
    "NVFP4 16 x 16", E2M1, _IN_E4M3, e2m1_bytes, e2m1_values, bits=4, block=(16, 16)
)
MXFP4 = BlockFormat("MXFP4", E2M1, _FLOOR, e2m1_bytes, e2m1_values, bits=4, block=(1, 32))
MXFP8 = BlockFormat("MXFP8", E4M3, _CEILING, _e4m3_stored, _e4m3_loaded, bits=8, block=(1, 32))
BLOCK_FORMATS = (NVFP4_ROWS, NVFP4_SQUARES, MXFP4, MXFP8)
