"""The backend of a device: the kernels that compute there, and what they promise.

Every operation has a reference in plain PyTorch: its specification, and what runs on a CPU. A
device with kernels has a table of them, `Arithmetic` for this package and `kernels.backend.Kernels`
for the rest: a module with these names. Public operations take the table of their tensor's device.
A table is imported with the first tensor of its device, since a CPU has no Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from jetrl.precision.quantize import FP8Format, QTensor

if TYPE_CHECKING:
    from jetrl.precision.adapter import AdapterWeight
    from jetrl.precision.nvfp4 import HopperNVFP4, NVFP4Tensor


class Arithmetic(Protocol):
    """A device's kernels, each with the bits of the public operation of its name."""

    # precision.gemm
    def fp8_matmul(self, a: QTensor, b: QTensor, out_dtype: torch.dtype, /) -> Tensor: ...
    def bf16_matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype, /) -> Tensor: ...
    def bf16_matmul_free(self, a: Tensor, b: Tensor, out_dtype: torch.dtype, /) -> Tensor: ...

    # precision.nvfp4
    def nvfp4_order(self, q: NVFP4Tensor, /) -> HopperNVFP4: ...
    def nvfp4_matmul(self, x: Tensor, w: HopperNVFP4, out_dtype: torch.dtype, /) -> Tensor: ...
    def nvfp4_dgrad(self, dy: Tensor, w: HopperNVFP4, /) -> Tensor: ...

    # precision.quantize, by the operands of a linear layer
    def quantize_rows(self, x: Tensor, format: FP8Format, scales: str, /) -> QTensor: ...
    def quantize_tokens(self, x: Tensor, format: FP8Format, scales: str, /) -> QTensor: ...
    def quantize_rows_and_tokens(
        self, x: Tensor, format: FP8Format, scales: str, /
    ) -> tuple[QTensor, QTensor]: ...
    def quantize_squares(self, x: Tensor, scales: str, /) -> QTensor: ...
    def quantize_weight(
        self, w: Tensor, format: FP8Format, scales: str, out: QTensor | None, /
    ) -> QTensor: ...
    def turned_weight(self, q: QTensor, /) -> QTensor: ...

    # precision.adapter
    def project_down(self, x: Tensor, down: Tensor, arrived: Tensor, /) -> Tensor: ...
    def project_up(self, y: Tensor, u: Tensor, up: Tensor, columns: Tensor, /) -> Tensor: ...
    def adapted_matmul(
        self, a: QTensor, values: Tensor, b: QTensor, adapter: AdapterWeight, /
    ) -> tuple[Tensor, Tensor]: ...
    def quantized_adapted_matmul(
        self, x: Tensor, b: QTensor, adapter: AdapterWeight, scales: str, /
    ) -> tuple[Tensor, Tensor]: ...
    def nvfp4_adapted_matmul(
        self, x: Tensor, w: HopperNVFP4, adapter: AdapterWeight, /
    ) -> tuple[Tensor, Tensor]: ...

    # precision.gradients
    def add_products(self, products: Tensor, total: Tensor | None, begun: bool, /) -> Tensor: ...


@dataclass(frozen=True)
class Backend:
    """A kind of device: how it computes, and what it promises.

    Attributes:
        arithmetic: The kernels of this package; None: the references are computed.
        fused: The dtype of activations for which a decoder layer's operations are fused; or None.
        stable_row_sums: Whether torch sums per row in the same order at any number of rows.
        logits_at_once: The float32 logits of one chunk of rows in training.
    """

    name: str
    arithmetic: Arithmetic | None
    fused: torch.dtype | None
    stable_row_sums: bool
    logits_at_once: int


REFERENCE = Backend("reference", None, None, stable_row_sums=True, logits_at_once=2**24)


@functools.cache
def _hopper() -> Backend:
    from jetrl.precision.hopper import operations

    return Backend("hopper", operations, torch.bfloat16, False, logits_at_once=2**27)


def backend_of(x: Tensor) -> Backend:
    return _hopper() if x.is_cuda else REFERENCE


def arithmetic_of(x: Tensor) -> Arithmetic | None:
    """Return the kernels of a tensor's device for this package; None: compute the reference."""
    return backend_of(x).arithmetic
