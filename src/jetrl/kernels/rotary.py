"""Rotary position embedding in the half-rotation layout of Llama and Qwen.

Source: Su et al., RoFormer (arXiv 2104.09864). Sampling and training read one table of angles.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_POSITIONS_AT_ONCE = 2**18  # angles in float64 take four times the room of the table


def rotary_table(
    inverse_frequencies: np.ndarray, max_positions: int, attention_factor: float = 1.0
) -> Tensor:
    """Return the cosines and sines of positions from 0 on, float32 [max_positions, 2, D/2].

    Args:
        inverse_frequencies: float64 [D/2], radians per position.
    """
    table = np.empty((max_positions, 2, len(inverse_frequencies)), np.float32)
    for start in range(0, max_positions, _POSITIONS_AT_ONCE):
        rows = np.arange(start, min(start + _POSITIONS_AT_ONCE, max_positions), dtype=np.float64)
        # In float64, rounded once at the end: an angle grows to thousands of turns.
        angles = np.outer(rows, inverse_frequencies)
        wide = attention_factor * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        table[start : start + len(rows)] = wide
    return torch.from_numpy(table)


def rotary(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Return x [T, H, D] rotated by its positions [T], in float32, rounded once to x's dtype.

    Args:
        table: float32 [max_positions, 2, D/2], from `rotary_table`.
    """
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
