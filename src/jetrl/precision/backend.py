"""The backend of a device: its kernels and their guarantees.

Every operation has a reference in plain PyTorch, which is its specification and runs on a CPU. A
GPU has two tables of kernels: `Arithmetic` for this package, `kernels.backend.Kernels` for other
packages. A table is a module with these names. Public operations look up the table of their
tensor's device; it is imported on first use, since a machine without a GPU may lack Triton.

A process uses one backend per kind of GPU (`select_backend`). Plans whose operations are defined
for every machine (`PrecisionPlan.defined`) have backends of their own, whose kernels all have the
bits of the references: HOPPER_DEFINED and TRITON_DEFINED. Their tables lack what such plans refuse.
Under other plans the kernels of HOPPER and TRITON agree between sampler and trainer, each with bits
of its own.

No other code depends on the kind of GPU. To support a new one, add a record to `BACKENDS` with two
tables of kernels; some kernels may be those of Hopper. Attention always uses the table, even if
`fused` is None; KV pages have 64 tokens, query tiles 192 queries.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.precision import hopper
from jetrl.precision.quantize import FP8Format, Planes, QTensor

if TYPE_CHECKING:
    from jetrl.precision.adapter_weight import AdapterWeight
    from jetrl.precision.groups import Groups, TokenGroups
    from jetrl.precision.nvfp4 import NVFP4Tensor, OrderedNVFP4

# fmt: off


class _OfAllPlans(Protocol):
    # precision.int8
    def int8_rows(self, x: Tensor, out: QTensor | None, /) -> QTensor: ...
    def int8_tokens(self, x: Tensor, /) -> QTensor: ...
    def int8_turned(self, w: QTensor, experts: int, /) -> QTensor: ...
    def int8_matmul(self, a: QTensor, b: QTensor, out_dtype: torch.dtype, /) -> Tensor: ...

    # precision.quantize
    def empty_weight(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device,
                     /) -> QTensor: ...

    # precision.experts
    def group_rows(self, chosen: Tensor, num_experts: int, /) -> Groups: ...
    def int8_grouped_matmul(self, x: QTensor, w: QTensor, groups: Groups, by_token: bool,
                            out_dtype: torch.dtype, /) -> Tensor: ...
    def add_int8_grouped_wgrad(self, total: Tensor, begun: bool, dy: Tensor, x: Tensor,
                               groups: Groups, by_token: bool, /) -> None: ...
    def sum_slots(self, rows: Tensor, groups: Groups, /) -> Tensor: ...
    def combine(self, y: Tensor, weights: Tensor, groups: Groups, /) -> Tensor: ...
    def combine_backward(self, dout: Tensor, y: Tensor, weights: Tensor, groups: Groups,
                         /) -> tuple[Tensor, Tensor]: ...

    # precision.gradients
    def add_products(self, products: Tensor, total: Tensor | None, begun: bool, /) -> Tensor: ...


class _OfDefinedPlans(_OfAllPlans, Protocol):
    # precision.int8_planes
    def planes_of_rows(self, x: Tensor, out: Planes | None, /) -> Planes: ...
    def planes_fprop(self, x: Planes, w: Planes, /) -> Tensor: ...
    def planes_dgrad(self, dy: Tensor, w: Planes, /) -> Tensor: ...
    def add_planes_wgrad(self, total: Tensor, dy: Tensor, x: Planes, /) -> None: ...

    # precision.exact
    def sum_of_rows(self, x: Tensor, /) -> Tensor: ...


class _OfOtherPlans(_OfAllPlans, Protocol):
    # precision.gemm
    def fp8_matmul(self, a: QTensor, b: QTensor, out_dtype: torch.dtype, /) -> Tensor: ...
    def bf16_matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype, /) -> Tensor: ...
    def bf16_matmul_free(self, a: Tensor, b: Tensor, out_dtype: torch.dtype, /) -> Tensor: ...

    # precision.int8
    def int8_squares_turned(self, w: QTensor, experts: int, /) -> QTensor: ...

    # precision.experts
    def bf16_grouped_matmul(self, x: Tensor, w: Tensor, groups: Groups, by_token: bool,
                            out_dtype: torch.dtype, /) -> Tensor: ...
    def bf16_grouped_dgrad(self, dy: Tensor, w: Tensor, groups: Groups, /) -> Tensor: ...
    def add_bf16_grouped_product(self, out: Tensor, x: Tensor, matrices: Tensor, groups: Groups,
                                 turned: bool, /) -> None: ...
    def add_bf16_grouped_wgrad(self, total: Tensor, dy: Tensor, x: Tensor, groups: Groups,
                               by_token: bool, /) -> None: ...
    def fp8_grouped_matmul(self, x: QTensor, w: QTensor, groups: Groups, by_token: bool,
                           /) -> Tensor: ...
    def fp8_grouped_gradient(self, dy: Tensor, groups: Groups, scales: str,
                             /) -> tuple[QTensor, TokenGroups]: ...
    def fp8_grouped_dgrad(self, dy: QTensor, w: QTensor, groups: Groups, /) -> Tensor: ...
    def add_fp8_grouped_wgrad(self, total: Tensor, begun: bool, dy: TokenGroups, x: Tensor,
                              groups: Groups, by_token: bool, scales: str, /) -> None: ...

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

    # precision.saved
    def save_codes(self, x: Tensor, q: QTensor, /) -> None: ...
    def load_values(self, q: QTensor, out: Tensor, /) -> None: ...

    # precision.adapter
    def project_down(self, x: Tensor, down: Tensor, arrived: Tensor, /) -> Tensor: ...
    def project_up(self, y: Tensor, u: Tensor, up: Tensor, columns: Tensor, /) -> Tensor: ...
    def adapted_matmul(self, a: QTensor, values: Tensor, b: QTensor, adapter: AdapterWeight,
                       /) -> tuple[Tensor, Tensor]: ...
    def quantized_adapted_matmul(self, x: Tensor, b: QTensor, adapter: AdapterWeight, scales: str,
                                 /) -> tuple[Tensor, Tensor]: ...
    def nvfp4_adapted_matmul(self, x: Tensor, w: OrderedNVFP4, adapter: AdapterWeight,
                             /) -> tuple[Tensor, Tensor]: ...


class Arithmetic(_OfDefinedPlans, _OfOtherPlans, Protocol):
    """The kernels of a device, named after public operations, with the bits of their references.

    A table has those for plans that are defined for every machine, or those for other plans.
    """


# fmt: on


@dataclass(frozen=True, eq=False)
class Backend:
    """A kind of device: the GPUs that it supports, its kernels and their guarantees.

    Attributes:
        table: Imports the kernels of this package.
        kernels: Key of the kernels for other packages in `kernels.backend.TABLES`.
        fused: The dtype of activations with fused decoder layers; None if none are fused.
        logits_at_once: Number of float32 logits per chunk of rows in training.
        gpus, capabilities: The supported GPUs, in words and as CUDA compute capabilities.
        head_dims, max_group: Limits of attention: head sizes, and query heads per key head.
        dtypes: The storage dtypes of supported number formats.
        shared_memory: Bytes of shared memory per thread block.
        multiprocessors: Number of SMs, by which products are tiled.
        defined: Whether every operation has the bits of its reference, and attention INT8 queries.
        adapters: Whether its tables have the products of adapters.
    """

    name: str
    table: Callable[[], _OfDefinedPlans | _OfOtherPlans | None]
    fused: torch.dtype | None
    logits_at_once: int
    kernels: str = ""
    gpus: str = ""
    capabilities: tuple[tuple[int, int], ...] = ()
    head_dims: tuple[int, ...] = ()
    max_group: int = 0
    dtypes: tuple[torch.dtype, ...] = ()
    shared_memory: int = 0
    multiprocessors: int = 0
    defined: bool = False
    adapters: bool = False

    @functools.cached_property
    def arithmetic(self) -> Arithmetic | None:
        """The kernels for this package; None if references are used."""
        return cast(Arithmetic | None, self.table())

    def check_attention(self, head_dim: int, group: int) -> None:
        """Raise a UserError if no kernel supports heads with `group` query heads per key head."""
        if head_dim not in self.head_dims or group > self.max_group:
            sizes = " or ".join(map(str, self.head_dims))
            raise UserError(
                f"the GPU's attention takes head_dim {sizes} and at most {self.max_group} query "
                f"heads a key head, not {head_dim} and {group}; use run.device=cpu, or the fp32 "
                "preset"
            )

    def check_plan(self, defined: bool, integer_attention: bool) -> None:
        """Raise a UserError if no kernel supports a plan with these properties of its class."""
        if self.defined != defined:
            raise UserError(
                "this process has selected a GPU's kernels of another precision plan: call "
                f"jetrl.precision.backend.select_backend(defined={defined}) before the plan is used"
            )
        if integer_attention and not self.defined:
            raise UserError(
                f"these kernels of {self.gpus} have no attention with INT8 queries: use "
                "precision.preset = integer"
            )

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether there are kernels for a storage dtype; references take all."""
        return self.kernels == "" or dtype in self.dtypes

    def check_formats(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise a UserError that names the formats whose dtypes no kernel supports."""
        missing = [words for words, dtype in dtypes.items() if not self.takes(dtype)]
        if missing:
            raise UserError(
                f"{self.gpus} has no kernels for {' and '.join(missing)}; use another "
                "precision.preset, or run.device=cpu"
            )


def _hopper() -> _OfOtherPlans:
    from jetrl.precision.hopper import operations

    return operations


def _hopper_defined() -> _OfDefinedPlans:
    from jetrl.precision.hopper import defined

    return defined


def _triton() -> _OfOtherPlans:
    from jetrl.precision.triton import operations

    # Without NVFP4, which is refused.
    return cast(_OfOtherPlans, operations)


def _triton_defined() -> _OfDefinedPlans:
    from jetrl.precision.triton import defined

    return defined


REFERENCE = Backend(
    "reference", lambda: None, None, logits_at_once=2**24, defined=True, adapters=True
)
HOPPER = Backend(
    "hopper",
    _hopper,
    fused=torch.bfloat16,
    logits_at_once=2**27,
    kernels="hopper",
    gpus="a Hopper card (9.0: H100, H200)",
    capabilities=((9, 0),),
    head_dims=(64, 128),
    max_group=16,
    dtypes=(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8),
    shared_memory=hopper.SHARED_MEMORY,
    multiprocessors=hopper.MULTIPROCESSORS,
    adapters=True,
)
HOPPER_DEFINED = replace(
    HOPPER,
    table=_hopper_defined,
    kernels="portable",
    dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16),  # two planes: int16
    defined=True,
    adapters=False,
)
TRITON = replace(
    HOPPER,
    name="triton",
    table=_triton,
    kernels="triton",
    gpus="an NVIDIA card from 8.9 on (RTX 40 and later)",
    capabilities=((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)),
    dtypes=(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8),
    shared_memory=99 * 2**10,
    multiprocessors=0,
)
TRITON_AMPERE = replace(
    TRITON,
    gpus="an NVIDIA card from 8.0 to 8.7 (A100, RTX 30)",
    capabilities=((8, 0), (8, 6), (8, 7)),
    dtypes=(torch.float32, torch.bfloat16, torch.int8),
)
TRITON_DEFINED = replace(
    HOPPER_DEFINED,
    name="triton",
    table=_triton_defined,
    gpus="an NVIDIA card from 8.0 on (A100, RTX 30 and later)",
    capabilities=TRITON_AMPERE.capabilities + TRITON.capabilities,
    shared_memory=TRITON.shared_memory,
    multiprocessors=0,
)
# Plans for another machine assume Hopper.
BACKENDS = (HOPPER, HOPPER_DEFINED, TRITON, TRITON_AMPERE, TRITON_DEFINED)
SUPPORTED = TRITON_DEFINED.gpus


@dataclass(frozen=True)
class _Selection:
    """The backend that was asked for, and whether for a plan that is defined on every machine."""

    name: str = "auto"
    defined: bool = False

    def of(self, capability: tuple[int, int] | None) -> Backend | None:
        """Return the backend of a GPU (None: of any) for the plan; None without kernels for it."""
        fitting = [b for b in BACKENDS if capability is None or capability in b.capabilities]
        fitting = [b for b in fitting if b.defined == self.defined]
        return next((b for b in fitting if self.name in ("auto", b.name)), None)


_selection = _Selection()


def select_backend(name: str = "auto", *, defined: bool = False) -> None:
    """Select the backend of this process's GPUs by its name in `run.backend`; "auto" detects it.

    `defined`: for a plan with `PrecisionPlan.defined`.
    """
    global _selection
    _selection = _Selection(name, defined)
    backend_for.cache_clear()


@contextlib.contextmanager
def kept_backend() -> Iterator[None]:
    """Restore this process's selection of a backend at the end of the block."""
    before = _selection
    try:
        yield
    finally:
        select_backend(before.name, defined=before.defined)


@contextlib.contextmanager
def selected_backend(name: str | None = "auto", *, defined: bool = False) -> Iterator[None]:
    """`select_backend` within the block; `name` None: the one selected before."""
    with kept_backend():
        select_backend(_selection.name if name is None else name, defined=defined)
        yield


def accelerator(device: torch.device | None = None) -> Backend | None:
    """Return the backend of a GPU, by default the current one; None if none supports it."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return _selection.of(torch.cuda.get_device_capability(device))


def backend_elsewhere(defined: bool) -> Backend:
    """Return the selected backend of a GPU of another machine; "auto" assumes Hopper."""
    return _Selection(_selection.name, defined).of(None) or REFERENCE


@functools.cache
def backend_for(device: torch.device) -> Backend:
    """Return the backend of a device. Raises UserError if jetrl has no kernels for it."""
    if device.type == "cuda" and torch.cuda.is_available():
        if _selection.name == REFERENCE.name:
            return REFERENCE
        if (backend := accelerator(device)) is not None:
            return backend
        if torch.version.hip is not None:
            raise UserError(
                f"{torch.cuda.get_device_name(device)}: jetrl has kernels for NVIDIA GPUs only; "
                "use run.device=cpu, or run.backend=reference (slow)"
            )
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; jetrl "
            f"supports {SUPPORTED}; use run.device=cpu, or run.backend=reference (slow)"
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


def has_defined_bits(x: Tensor) -> bool:
    """Return whether operations on a tensor's device have the bits of their references."""
    return backend_of(x).defined


def arithmetic_of(x: Tensor) -> Arithmetic | None:
    """Return the kernels of a tensor's device for this package; None if it has none."""
    return backend_of(x).arithmetic


def rows_at_once(vocabulary: int) -> int:
    """Return the number of rows of logits that lm_head computes at once on a GPU (2 GiB)."""
    return max(64, 2**29 // vocabulary // 64 * 64)  # the GEMM has tiles of 64 rows
