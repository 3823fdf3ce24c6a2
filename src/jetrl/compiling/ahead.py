"""The side of the run: kernels are compiled by other processes while its block makes the model.

Triton's kernels and DeepGEMM's are compiled apart, each into its library's own cache. A file in
that cache, named for all that decides which kernels there are, says that they were compiled, or why
they were not. Where it does, nothing is started: a kernel that failed is compiled by the run that
launches it, and is in the cache from then on. The file is also the lock: of the ranks of a machine,
and of all runs that share the cache, one has the kernels compiled and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from jetrl.compiling.launches import Work
from jetrl.compiling.products import affordable_processes, cache_folder, compile_products
from jetrl.compiling.worker import compile_all, run_apart
from jetrl.distributed.world import world
from jetrl.models.adapter import Adapter
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import PrecisionPlan

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
# Packages that hold DeepGEMM, as its authors and as SGLang's publish it.
_DEEP_GEMM = "deep-gemm", "sgl-deep-gemm"
_LIMIT_S = 120.0  # All kernels of a run take less on one core.
_SILENT_S = 5.0
_ENDING_S = 10.0  # A process that was killed frees its memory of the GPU in less.
_WAITING = (
    "waiting for {}'s kernels, which other processes compile side by side; they are kept in its "
    "cache, where later runs of this model find them"
)


@dataclass(frozen=True)
class Compiler:
    """A library that compiles a run's kernels, and how its cache is filled ahead of the run.

    Attributes:
        compile: Fills the cache with the kernels of a run and returns a report. It is called in a
            copy of the run's process that does nothing else.
    """

    name: str
    cache: Callable[[], Path]
    compile: Callable[[Work], dict[str, Any]]


def _triton_cache() -> Path:
    """Return the folder of Triton's cache."""
    import triton

    return Path(triton.knobs.cache.dir)


TRITON = Compiler("Triton", _triton_cache, compile_all)


@contextlib.contextmanager
def compiled_ahead(
    config: ModelConfig,
    plan: PrecisionPlan,
    device: str | torch.device,
    adapter: Adapter | None = None,
    max_batch_size: int = 256,
    speculation: bool = False,
) -> Iterator[None]:
    """Compile the kernels of a model's run beside the block, and wait for them at its end.

    Nothing is done on a CPU, or where it was done before. Whatever goes wrong, the run goes on, and
    compiles where it launches.

    Args:
        adapter: The model's adapter, or None.
    """
    there = torch.device(device).type == "cuda" and torch.cuda.is_available()
    if not there or importlib.util.find_spec("triton") is None:
        yield
        return
    lora = None
    if adapter is not None:
        config, lora = adapter.shape(config), adapter.lora
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    work = Work(config, plan, lora, max_batch_size, multiprocessors, speculation)
    with contextlib.ExitStack() as beside:
        for compiler in _compilers(work, torch.device(device)):
            beside.enter_context(_compiled(work, compiler))
        yield


def _compilers(work: Work, device: torch.device) -> list[Compiler]:
    """Return the libraries whose kernels a run compiles ahead on a GPU."""
    from jetrl.precision.hopper.gemm import deep_gemm_installed

    if not deep_gemm_installed():
        return [TRITON]
    index = torch.cuda.current_device() if device.index is None else device.index
    free, _ = torch.cuda.mem_get_info(index)
    most = affordable_processes(work, free, world().size)
    if most == 0:
        logger.debug(
            "kernels of DeepGEMM are not compiled ahead: the GPU has no room beside the weights"
        )
        return [TRITON]
    compile_on_it = partial(compile_products, device=f"cuda:{index}", most=most)
    return [TRITON, Compiler("DeepGEMM", cache_folder, compile_on_it)]


@contextlib.contextmanager
def _compiled(work: Work, compiler: Compiler) -> Iterator[None]:
    """Have a library's kernels of a run compiled beside the block."""
    try:
        record = _record(work, compiler)
    except OSError as error:
        logger.debug("kernels of %s are not compiled ahead: %s", compiler.name, error)
        yield
        return
    with record:
        if record.seek(0, os.SEEK_END):  # tried before
            yield
            return
        worker = _Worker(work, compiler) if _locked(record) else None
        try:
            yield
            began = time.monotonic()
            if worker is None:
                _wait_for_turn(record, began)
            report = None if worker is None else worker.report(began)
        finally:
            if worker is not None:
                worker.end()
        if report is not None:
            with contextlib.suppress(OSError):  # On a full disk the next run compiles again.
                os.write(record.fileno(), json.dumps(report).encode())
            logger.debug("kernels of %s compiled ahead: %s", compiler.name, report)


def _record(work: Work, compiler: Compiler) -> IO[str]:
    """Return the file that says, once it has contents, how a run's kernels were compiled."""
    import triton

    folder = compiler.cache()
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"jetrl-{_digest(work, triton.__version__)}.json", "a+", encoding="utf-8")


def _digest(work: Work, triton_version: str) -> str:
    """Return a name for all that decides which kernels a run has, and how they are compiled."""
    digest = hashlib.sha256(repr(work).encode())
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith(("TRITON_", "DG_")))
    versions = triton_version, torch.__version__, _installed(_DEEP_GEMM)
    digest.update(repr((*versions, settings)).encode())
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _installed(distributions: Iterable[str]) -> list[str]:
    found = []
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name}=={importlib.metadata.version(name)}")
    return found


def _locked(record: IO[str]) -> bool:
    """Return whether this process is now the one that has the kernels compiled."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: each process compiles for itself
        return True
    return True


def _wait_for_turn(record: IO[str], began: float) -> None:
    """Wait until the process that has the kernels compiled is done, or has ended."""
    while not _locked(record) and not record.seek(0, os.SEEK_END):
        if time.monotonic() - began > _LIMIT_S:
            return
        time.sleep(0.1)


def _failed(reason: str) -> Mapping[str, Any]:
    """Return the report of a copy that says nothing; later runs do not wait for another one."""
    return {"kernels": 0, "failed": [reason]}


class _Worker:
    """A copy of this process that has kernels compiled."""

    def __init__(self, work: Work, compiler: Compiler) -> None:
        self._name = compiler.name
        self._answers, answers = os.pipe()
        with warnings.catch_warnings():
            # Python warns of threads, which a copy does not have. The copy waits for none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            run_apart(partial(compiler.compile, work), answers)
        os.close(answers)

    def report(self, began: float) -> Mapping[str, Any]:
        """Return what the copy says when all is compiled, or why it says nothing."""
        answer, said = b"", False
        while True:
            waited = time.monotonic() - began
            if waited > _LIMIT_S:
                return _failed(f"not done after {waited:.0f} s")
            if waited > _SILENT_S and not said and world().is_first:
                print(_WAITING.format(self._name), file=sys.stderr, flush=True)
                said = True
            if not select.select([self._answers], [], [], 0.5)[0]:
                continue
            part = os.read(self._answers, 2**16)
            if not part:
                break
            answer += part
        try:
            report: Mapping[str, Any] = json.loads(answer)
        except ValueError:  # It was killed before it began to write, or while it did.
            return _failed("the process ended without a word")
        for problem in report["failed"]:
            logger.debug("kernels of %s compiled ahead: %s", self._name, problem)
        return {**report, "waited_s": round(time.monotonic() - began, 2)}

    def end(self) -> None:
        """End the copy and all processes that it started, and wait until they have ended."""
        os.close(self._answers)
        for kill in (os.killpg, os.kill):  # The group is not there before the copy has begun.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        began = time.monotonic()
        while _is_alive(self._process) and time.monotonic() - began < _ENDING_S:
            time.sleep(0.05)


def _is_alive(group: int) -> bool:
    """Return whether any process of a group has not ended."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # Processes end while they are listed.
            state, _, of = status.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False
