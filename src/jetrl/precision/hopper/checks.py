"""The checks that the Hopper kernels make of tensors before they take their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_matrix(operation: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that x is a CUDA matrix whose rows are contiguous; the rows may lie apart.

    Raises:
        ValueError: x is none.
    """
    if not x.is_cuda or x.dim() != 2 or x.dtype not in dtypes or x.stride(1) != 1:
        raise ValueError(
            f"{operation}: a CUDA matrix of {', '.join(map(str, dtypes))} with contiguous rows, "
            f"not {x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
        )


def check_tensor(
    operation: str, name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """Check that x is a contiguous CUDA tensor of one dtype and shape.

    Raises:
        ValueError: x is none.
    """
    fits = x.is_cuda and x.dtype == dtype and tuple(x.shape) == tuple(shape)
    if not fits or not x.is_contiguous():
        raise ValueError(
            f"{operation}: {name} is {_short(dtype)} {list(shape)}, contiguous and on the GPU, not "
            f"{_short(x.dtype)} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
