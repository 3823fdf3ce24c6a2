"""Captured CUDA graphs: the host launches many kernels at once.

A graph reads and writes fixed addresses. Work must not read values on the host, and its Python runs
only during the capture: what a replay should change must be in a tensor that the graph reads.
Graphs of one `GraphCapture` share a memory pool, so they must not run at the same time.

`captures_updates` is the rule of `train.graphs`, for `training.graphs` and for the memory plan.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.memory.device import DeviceBytes
from jetrl.models.attention import Attention
from jetrl.models.decoder import BLOCKS, MIXERS
from jetrl.models.dense import DenseBlock
from jetrl.models.families import ModelConfig, num_parameters
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.sections import TrainSettings


class NotCapturedError(UserError):
    """`train.graphs` is on, and the updates cannot be captured."""


Replay = Callable[[], None]
Result = TypeVar("Result")

_MOST_PARAMETERS = 1_000_000_000  # of a model that `auto` captures; larger ones keep a GPU busy


def captures_updates(
    train: TrainSettings, config: ModelConfig, plan: PrecisionPlan, gpus: int, frozen: bool
) -> bool:
    """Return whether updates on a Hopper GPU are captured as graphs, per `train.graphs`.

    `frozen` is whether the base is frozen, under an adapter.

    Raises NotCapturedError if it is "on" and the updates cannot be captured.
    """
    if train.graphs == "off":
        return False
    problem = ""
    if gpus > 1:
        problem = "several GPUs exchange gradients during a backward"
    elif frozen:
        problem = "adapters are not captured"
    elif train.tower != "frozen":
        problem = f"train.tower = {train.tower} is not captured"
    elif train.activation_checkpointing:
        problem = "train.activation_checkpointing computes layers again in backward"
    elif plan.defined or plan.reads_masters or plan.emulated:
        problem = f"updates under precision.preset = {plan.name} are not captured"
    elif any(
        (MIXERS[type(layer.mixer)], BLOCKS[type(layer.block)]) != (Attention, DenseBlock)
        for layer in config.layers
    ):
        problem = f"layers of {config.architecture} are not captured"
    if train.graphs == "auto":
        return (
            not problem
            and has_same_bits(config, plan)
            and num_parameters(config) <= _MOST_PARAMETERS
        )
    if problem:
        raise NotCapturedError(f"train.graphs = on: {problem}; use train.graphs=auto, or off")
    return True


def has_same_bits(config: ModelConfig, plan: PrecisionPlan) -> bool:
    """Return whether graphs of updates have the bits of eager updates (`training.graphs`)."""
    count = config.num_layers
    coded = all(plan.linear_format("train", layer, count).coded for layer in range(count))
    return coded and plan.gradient.coded and not plan.widens_wgrad


class GraphPool:
    """CUDA graphs and their memory pool, freed in the right order.

    Torch aborts the process if graphs outlive their pool, or if a pool is freed while memory is
    allocated in another one; Python collects cycles in any order, at any moment. So a finalizer,
    `close`, owns the pool: it waits for the device, resets the graphs, and then frees the pool, if
    need be at the end of `pool_in_use`.
    """

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.pools = [torch.cuda.MemPool()]
        self.close = weakref.finalize(self, _free_graphs, self.graphs, self.pools)


_pools_in_use: list[torch.cuda.MemPool] = []
_closed_meanwhile: list[tuple[list[torch.cuda.CUDAGraph], list[torch.cuda.MemPool]]] = []


@contextlib.contextmanager
def pool_in_use(pool: torch.cuda.MemPool) -> Iterator[None]:
    """Around work that allocates in a pool: those closed meanwhile are freed at its end."""
    _pools_in_use.append(pool)
    try:
        yield
    finally:
        _pools_in_use.pop()
        while _closed_meanwhile and not _pools_in_use:
            graphs, pools = _closed_meanwhile.pop()
            _free_graphs(graphs, pools)


def _free_graphs(graphs: list[torch.cuda.CUDAGraph], pools: list[torch.cuda.MemPool]) -> None:
    """Wait for the device, reset all graphs, then free the pools."""
    if _pools_in_use:
        _closed_meanwhile.append((graphs, pools))
        return
    # After an error or Ctrl-C, graphs may still run, and torch waits only for the stream of their
    # capture before it frees their memory.
    if graphs:
        torch.cuda.synchronize()
    while graphs:
        graphs.pop().reset()
    pools.clear()


class GraphCapture:
    """Captures work on a GPU, in one memory pool, which is counted as held memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = GraphPool()
        self._held = DeviceBytes(device)
        self._before = 0

    def close(self) -> None:
        self._pool.close()
        self._held.bytes = 0

    def begin(self) -> None:
        """Wait for the device and free its cached memory before captures."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._before = _without_tensors(self._device)

    def end(self) -> None:
        """Count the memory that the captures since `begin` keep."""
        self._held.bytes += max(0, _without_tensors(self._device) - self._before)

    def warm_up(self, work: Callable[[], Result]) -> Result:
        """Run work once: it compiles kernels, and allocates in the pool what a capture will use.

        Out of memory during a capture would leave torch's allocator unusable.
        """
        stream = _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        pool = self._pool.pools[0]
        with pool_in_use(pool), torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            result = work()
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def capture(self, work: Callable[[], object]) -> Replay:
        """Capture work, which does not run, and return the function that runs it."""
        graph = torch.cuda.CUDAGraph()
        self._pool.graphs.append(graph)
        # Other threads may call the driver during the capture: watchdog, checkpoint writer.
        mode, pool = "thread_local", self._pool.pools[0]
        captured = torch.cuda.graph(
            graph, cast(Any, pool.id), _capture_stream(), capture_error_mode=mode
        )
        with pool_in_use(pool), captured:
            work()
        return graph.replay

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory that does not keep it allocated in the pool.

        So later captures can use the memory as well; its contents last until they are replayed.
        """
        return torch.as_tensor(_Memory(tensor), device=self._device).view(tensor.dtype)


class _Memory:
    """The address and shape of a contiguous tensor, as 16-bit or 32-bit integers."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "an alias has the layout of its tensor"
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": {2: "<i2", 4: "<i4"}[tensor.itemsize],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the one stream for captures; memory of a pool is bound to its stream."""
    return torch.cuda.Stream()


def _without_tensors(device: torch.device) -> int:
    """Return the bytes that torch has reserved but no tensor uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
