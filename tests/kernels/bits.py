"""Random numbers and their comparison, for the programs of the interpreter and for GPU tests."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random(*shape: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def different(found: Tensor, expected: Tensor) -> int:
    """Return the number of values with other bits, -1 for another dtype or shape; NaN are equal."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return -1
    dtype = _BITS[found.element_size()]
    nan = found.float().isnan() & expected.float().isnan()
    return int((~((found.view(dtype) == expected.view(dtype)) | nan)).sum())
