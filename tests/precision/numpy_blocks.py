"""Block formats by NumPy, block by block: independent of the code under test."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from jetrl.precision.block_formats import MXFP4, MXFP8, BlockFormat

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([k / 8 * 2.0**-6 for k in range(8)] + [
    (1 + k / 8) * 2.0**e for e in range(-6, 9) for k in range(8)
])[:-1]  # the last pattern is NaN  # fmt: skip


def nearest(magnitudes: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the nearest values of a grid; of two the one with an even place."""
    x = np.minimum(magnitudes.astype(np.float64), grid[-1])
    high = np.searchsorted(grid, x).clip(1)
    below, above = x - grid[high - 1], grid[high] - x
    up = (above < below) | ((above == below) & (high % 2 == 0))
    return grid[np.where(up, high, high - 1)]


def power_above(x: float) -> float:
    fraction, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)


def scale_of(a: np.float32, s: float, format: BlockFormat) -> float:
    if format is MXFP4:
        return math.ldexp(1.0, math.frexp(float(a))[1] - 1 - 2)
    if format is MXFP8:
        return power_above(float(a / F32(448)))
    ratio = np.array(a / F32(s) / F32(6))
    return float(max(nearest(ratio, E4M3), E4M3[1]))


def second_of(values: np.ndarray, format: BlockFormat) -> float:
    if format in (MXFP4, MXFP8):
        return 1.0
    largest = np.maximum(np.abs(values).max(), F32(2.0**-100))
    return power_above(float(largest / F32(6 * 448))) if np.isfinite(largest) else math.nan


@np.errstate(all="ignore")
def by_numpy(x: Tensor, format: BlockFormat) -> Tensor:
    """Return the values of a matrix, block by block."""
    values, (rows, columns) = x.float().numpy(), format.block
    out = np.empty_like(values)
    grid = E4M3 if format is MXFP8 else E2M1
    of_matrix = second_of(values, format)
    for row in range(0, len(values), rows):
        s = of_matrix if rows > 1 else second_of(values[row], format)
        for column in range(0, values.shape[1], columns):
            place = (slice(row, row + rows), slice(column, column + columns))
            block = values[place]
            a = np.maximum(np.abs(block).max(), F32(2.0**-100))
            if not np.isfinite(a) or math.isnan(s):
                out[place] = np.nan
                continue
            scale = F32(scale_of(a, s, format) * s)
            codes = np.copysign(nearest(np.abs(block / scale), grid), block)
            out[place] = codes.astype(F32) * scale
    return torch.from_numpy(out).bfloat16()
