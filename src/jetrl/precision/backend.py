"""The backend of a device: its kernels and their guarantees.

Every operation has a reference in plain PyTorch, which is its specification and runs on a CPU. A
GPU has two tables of kernels: `Arithmetic` for this package, `kernels.backend.Kernels` for other
packages. A table is a module with these names. Public operations look up the table of their
tensor's device; it is imported on first use, since a machine without a GPU may lack Triton.

No other code depends on the kind of GPU. To support a new one, add a record to `BACKENDS` with two
tables of kernels; some kernels may be those of Hopper. A table must have every name, including
NVFP4 and adapters. Attention always uses the table, even if `fused` is None; KV pages have 64
tokens, query tiles 192 queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.precision import hopper
from jetrl.precision.quantize import FP8Format, Planes, QTensor

if TYPE_CHECKING:
    from jetrl.precision.adapter_weight import AdapterWeight
    from jetrl.precision.nvfp4 import NVFP4Tensor, OrderedNVFP4

# fmt: off


class Arithmetic(Protocol):
    """The kernels of a device, named after public operations, with the bits of their references."""

    # precision.gemm
    def fp8_matmul(self, a: QTensor, b: QTensor, out_dtype: torch.dtype, /) -> Tensor: ...
    def bf16_matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype, /) -> Tensor: ...
    def bf16_matmul_free(self, a: Tensor, b: Tensor, out_dtype: torch.dtype, /) -> Tensor: ...

    # precision.int8
    def int8_rows(self, x: Tensor, out: QTensor | None, /) -> QTensor: ...
    def int8_tokens(self, x: Tensor, /) -> QTensor: ...
    def int8_turned(self, w: QTensor, /) -> QTensor: ...
    def int8_squares_turned(self, w: QTensor, /) -> QTensor: ...
    def int8_matmul(self, a: QTensor, b: QTensor, out_dtype: torch.dtype, /) -> Tensor: ...

    # precision.int8_planes
    def planes_of_hidden(self, x: Tensor, /) -> Planes: ...
    def planes_fprop(self, x: Planes, w: QTensor, /) -> Tensor: ...
    def planes_dgrad(self, dy: Tensor, w: QTensor, /) -> Tensor: ...
    def add_planes_wgrad(self, total: Tensor, dy: Tensor, x: Planes, /) -> None: ...

    # precision.nvfp4
    def nvfp4_order(self, q: NVFP4Tensor, /) -> OrderedNVFP4: ...
    def nvfp4_matmul(self, x: Tensor, w: OrderedNVFP4, out_dtype: torch.dtype, /) -> Tensor: ...
    def nvfp4_dgrad(self, dy: Tensor, w: OrderedNVFP4, /) -> Tensor: ...

    # precision.quantize, by the operands of a linear layer
    def quantize_rows(self, x: Tensor, format: FP8Format, scales: str, /) -> QTensor: ...
    def quantize_rows_and_tokens(self, x: Tensor, format: FP8Format, scales: str,
                                 /) -> tuple[QTensor, QTensor]: ...
    def quantize_squares(self, x: Tensor, scales: str, /) -> QTensor: ...
    def quantize_weight(self, w: Tensor, format: FP8Format, scales: str, out: QTensor | None,
                        /) -> QTensor: ...
    def turned_weight(self, q: QTensor, /) -> QTensor: ...
    def dithered_bf16(self, x: Tensor, name: str, first_row: int, /) -> Tensor: ...
    def empty_weight(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device,
                     /) -> QTensor: ...

    # precision.adapter
    def project_down(self, x: Tensor, down: Tensor, arrived: Tensor, /) -> Tensor: ...
    def project_up(self, y: Tensor, u: Tensor, up: Tensor, columns: Tensor, /) -> Tensor: ...
    def adapted_matmul(self, a: QTensor, values: Tensor, b: QTensor, adapter: AdapterWeight,
                       /) -> tuple[Tensor, Tensor]: ...
    def quantized_adapted_matmul(self, x: Tensor, b: QTensor, adapter: AdapterWeight, scales: str,
                                 /) -> tuple[Tensor, Tensor]: ...
    def nvfp4_adapted_matmul(self, x: Tensor, w: OrderedNVFP4, adapter: AdapterWeight,
                             /) -> tuple[Tensor, Tensor]: ...

    # precision.gradients
    def add_products(self, products: Tensor, total: Tensor | None, begun: bool, /) -> Tensor: ...


# fmt: on


@dataclass(frozen=True, eq=False)
class Backend:
    """A kind of device: the GPUs that it supports, its kernels and their guarantees.

    Attributes:
        table: Imports the kernels of this package.
        fused: The dtype of activations with fused decoder layers; None if none are fused.
        logits_at_once: Number of float32 logits per chunk of rows in training.
        gpus, capabilities: The supported GPUs, in words and as CUDA compute capabilities.
        head_dims, max_group: Limits of attention: head sizes, and query heads per key head.
        dtypes: The storage dtypes of supported number formats.
        shared_memory: Bytes of shared memory per thread block.
        multiprocessors: Number of SMs, by which products are tiled.
        integer_attention: Whether attention has kernels for INT8 queries.
    """

    name: str
    table: Callable[[], Arithmetic | None]
    fused: torch.dtype | None
    logits_at_once: int
    gpus: str = ""
    capabilities: tuple[tuple[int, int], ...] = ()
    head_dims: tuple[int, ...] = ()
    max_group: int = 0
    dtypes: tuple[torch.dtype, ...] = ()
    shared_memory: int = 0
    multiprocessors: int = 0
    integer_attention: bool = False

    @functools.cached_property
    def arithmetic(self) -> Arithmetic | None:
        """The kernels for this package; None if references are used."""
        return self.table()

    def check_attention(self, head_dim: int, group: int) -> None:
        """Raise a UserError if no kernel supports heads with `group` query heads per key head."""
        if head_dim not in self.head_dims or group > self.max_group:
            sizes = " or ".join(map(str, self.head_dims))
            raise UserError(
                f"the GPU's attention takes head_dim {sizes} and at most {self.max_group} query "
                f"heads a key head, not {head_dim} and {group}; use run.device=cpu, or the fp32 "
                "preset"
            )

    def check_integer_attention(self) -> None:
        """Raise a UserError if no kernel takes INT8 queries."""
        if not self.integer_attention:
            raise UserError(
                f"{self.gpus} has no kernels for attention with INT8 queries; use run.device=cpu, "
                "or another precision.preset"
            )

    def check_formats(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise a UserError that names the formats whose dtypes no kernel supports."""
        missing = [words for words, dtype in dtypes.items() if dtype not in self.dtypes]
        if missing:
            raise UserError(
                f"{self.gpus} has no kernels for {' and '.join(missing)}; use another "
                "precision.preset, or run.device=cpu"
            )


def _hopper() -> Arithmetic:
    from jetrl.precision.hopper import operations

    return operations


REFERENCE = Backend("reference", lambda: None, None, logits_at_once=2**24)
HOPPER = Backend(
    "hopper",
    _hopper,
    fused=torch.bfloat16,
    logits_at_once=2**27,
    gpus="a Hopper card (9.0: H100, H200)",
    capabilities=((9, 0),),
    head_dims=(64, 128),
    max_group=16,
    dtypes=(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8),
    shared_memory=hopper.SHARED_MEMORY,
    multiprocessors=hopper.MULTIPROCESSORS,
)
BACKENDS = (HOPPER,)  # of GPUs; plans for another machine assume the first
SUPPORTED = " or ".join(backend.gpus for backend in BACKENDS)
_selected = "auto"


def select_backend(name: str) -> None:
    """Select the backend of this process's GPUs by name; "auto" detects it (`run.backend`)."""
    global _selected
    _selected = name
    backend_for.cache_clear()


def accelerator(device: torch.device | None = None) -> Backend | None:
    """Return the backend that supports a GPU, by default the current one; None if none does."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    return next((b for b in BACKENDS if capability in b.capabilities), None)


@functools.cache
def backend_for(device: torch.device) -> Backend:
    """Return the backend of a device. Raises UserError if jetrl has no kernels for it."""
    if device.type == "cuda" and torch.cuda.is_available():
        if _selected == REFERENCE.name:
            return REFERENCE
        if (backend := accelerator(device)) is not None:
            return backend
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; FP8 on "
            f"the GPU needs {SUPPORTED}; use run.device=cpu, or run.backend=reference (slow)"
        )
    if device.type not in ("cpu", "meta"):
        raise UserError(f"device {device}: not there; use run.device=cpu")
    return REFERENCE


def has_kernels(device: torch.device) -> bool:
    """Return whether a device runs kernels, not the references."""
    return backend_for(device) is not REFERENCE


def backend_of(x: Tensor) -> Backend:
    """Return the backend of a tensor's device."""
    return backend_for(x.device) if x.is_cuda else REFERENCE


def arithmetic_of(x: Tensor) -> Arithmetic | None:
    """Return the kernels of a tensor's device for this package; None if it has none."""
    return backend_of(x).arithmetic


def rows_at_once(vocabulary: int) -> int:
    """Return the number of rows of logits that lm_head computes at once on a GPU (2 GiB)."""
    return max(64, 2**29 // vocabulary // 64 * 64)  # the GEMM has tiles of 64 rows
