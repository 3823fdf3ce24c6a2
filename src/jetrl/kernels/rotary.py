"""Rotary position embedding in the half-rotation layout of Llama and Qwen.

Source: Su et al., RoFormer (arXiv 2104.09864). Sampling and training share one table of angles:

    table[p] = float32(attention_factor * cos_and_sin(p * inverse_frequencies))         in float64
    rotary   = first * cos - second * sin, second * cos + first * sin                   in float32
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetrl.precision.angles import cos_and_sin
from jetrl.precision.quantize import hadamard

_POSITIONS_AT_ONCE = 2**9  # so that the float64 temporaries stay in a processor's cache


def rotary_table(
    inverse_frequencies: np.ndarray, max_positions: int, attention_factor: float = 1.0
) -> Tensor:
    """Return cosines and sines for positions from 0, float32 [max_positions, 2, D/2].

    Args:
        inverse_frequencies: float64 [D/2], radians per position.
    """
    table = np.empty((max_positions, 2, len(inverse_frequencies)), np.float32)
    for start in range(0, max_positions, _POSITIONS_AT_ONCE):
        rows = np.arange(start, min(start + _POSITIONS_AT_ONCE, max_positions), dtype=np.float64)
        # In float64, rounded once at the end, since angles grow to thousands of turns.
        angles = np.outer(rows, inverse_frequencies)
        wide = attention_factor * np.stack(cos_and_sin(angles), axis=1)
        table[start : start + len(rows)] = wide
    return torch.from_numpy(table)


def rotary(x: Tensor, positions: Tensor, table: Tensor, exponents: Tensor | None = None) -> Tensor:
    """Return x [T, H, D] rotated by positions [T], in float32, rounded once to the dtype of x.

    Args:
        table: float32 [max_positions, 2, R/2], from `rotary_table`. If R is below D, only the first
            R channels of a head are rotated.
        exponents: int8 [H, D/2] for `smooth`, or None for no smoothing.
    """
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    half = table.shape[-1]
    # Not tensor_split: its backward adds zeros, which turns -0 to 0.
    sizes = (half, half, x.shape[-1] - 2 * half)
    first, second, rest = x.float().split(sizes, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return (turned if exponents is None else smooth(turned, exponents)).to(x.dtype)


def smooth(x: Tensor, exponents: Tensor) -> Tensor:
    """Return float32 heads x [T, H, D] scaled by 2**exponents, then Hadamard-rotated.

    The Hadamard matrix has entries 1 and -1, in blocks of the largest power of two that divides D.
    Channels i and i + D/2, a rotary pair if all of a head is rotated, share one exponent.

    Args:
        exponents: int8 [H, D/2], from `models.key_smoothing.head_exponents`.
    """
    factors = (exponents.repeat(1, 2).int() + 127 << 23).view(torch.float32)
    return hadamard(x * factors, x.shape[-1] & -x.shape[-1])
