"""DeepGEMM's kernels of a run, compiled by a few processes that compute its products.

DeepGEMM compiles a kernel with nvcc where a product first needs it, one after the other. So a few
processes (`products_worker`) compute the run's products beforehand, each a share of the sizes, and
so fill DeepGEMM's cache on disk, where the run finds the kernels. The cache is made for several
processes: each kernel is compiled in a folder of its own, which then gets its final name by one
rename; where another process was first, its folder stays.

DeepGEMM chooses the kernel by how tiles cover the result: by its rows, then by its columns, and
hardly by the operands' common dimension. Two weights at the same rows often share a kernel, so one
process has all products of a number of rows, and seldom compiles what another one is compiling.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from jetrl.compiling.launches import Work
from jetrl.compiling.worker import MOST_TOLD, end_with_parent, list_launches
from jetrl.memory.plan import adapter_bytes, quantized_bytes, trained_parameters
from jetrl.models.families import parameter_shapes

Size = tuple[int, int, int]  # Rows of the left operand, rows of the weight, columns of both.

_MOST_PROCESSES = 8
# What each may take of the GPU's memory: a CUDA context, half a GiB, and operands and result
# of one product, 0.7 GiB in an update of Qwen3-32B.
_PROCESS_BYTES = 3 * 2**29
_WORKER = Path(__file__).with_name("products_worker.py")


def cache_folder() -> Path:
    """Return the folder in which DeepGEMM keeps its compiled kernels."""
    return Path(os.environ.get("DG_JIT_CACHE_DIR") or os.path.expanduser("~/.deep_gemm"))


def affordable_processes(work: Work, free: int, cards: int) -> int:
    """Return how many processes have room on a GPU into which the weights are read meanwhile.

    Args:
        work: The model whose weights are read. All its parameters are taken to be trained, or its
            adapter; where none are, there is more room.
        free: Free bytes of the GPU before the weights are read.
    """
    config, plan, lora = work.config, work.plan, work.lora
    weights = 4 * trained_parameters(config, cards, lora)
    weights += quantized_bytes(config, plan) + adapter_bytes(config, plan, lora)
    # A matrix that is read is on the GPU as it was stored, in 16 bits, and in FP32.
    read = 6 * max(map(math.prod, parameter_shapes(config).values()))
    return max(0, min(_MOST_PROCESSES, (free - weights - read) // _PROCESS_BYTES))


def compile_products(work: Work, device: str, most: int = _MOST_PROCESSES) -> dict[str, Any]:
    """Have DeepGEMM's kernels of a run compiled, and return a report once all processes have ended.

    The process that calls it is of no other use then.

    Args:
        most: The most processes that compute them at a time; no more than there are cores.
    """
    began = time.monotonic()
    sizes: dict[Size, None] = {}
    failed = list_launches(work, lambda _: None, lambda *size: sizes.setdefault(size))
    listed_s = time.monotonic() - began
    before = _cached_kernels()
    shares = shared_out(sizes, min(most, len(os.sched_getaffinity(0))))
    processes = [_started(share, device) for share in shares]
    for process in processes:
        printed, _ = process.communicate()
        if process.returncode:
            failed.append(
                f"a process that computes products ended with {process.returncode}: "
                f"{printed[-MOST_TOLD:]}"
            )
    return {
        "kernels": _cached_kernels() - before,
        "products": len(sizes),
        "processes": len(processes),
        "failed": failed,
        "listed_s": round(listed_s, 2),
        "seconds": round(time.monotonic() - began, 2),
    }


def shared_out(sizes: Iterable[Size], most: int) -> list[list[Size]]:
    """Return the sizes that each process computes: all of a number of rows go to one."""
    of_rows: dict[int, list[Size]] = {}
    for size in sizes:
        of_rows.setdefault(size[0], []).append(size)
    groups = list(of_rows.values())
    return [
        list(chain.from_iterable(groups[first::most])) for first in range(min(most, len(groups)))
    ]


def _started(share: Iterable[Size], device: str) -> subprocess.Popen[str]:
    """Start a process that computes products."""
    importable = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", str(_WORKER), device, *("x".join(map(str, size)) for size in share)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": importable},
        preexec_fn=end_with_parent,
    )


def _cached_kernels() -> int:
    """Return the number of kernels in DeepGEMM's cache."""
    return sum(1 for _ in cache_folder().glob("cache/kernel.*"))
