"""The side of the run: kernels are compiled by other processes while its block makes the model.

A file beside Triton's cached kernels, named for all that decides which kernels there are, says that
they were compiled, or why they were not. Where it does, nothing is started. It is also the lock: of
the ranks of a machine, and of all runs that share the cache, one has the kernels compiled and the
others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from jetrl.compiling.launches import Work
from jetrl.compiling.worker import run_apart
from jetrl.distributed.world import world
from jetrl.models.adapter import Adapter
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import PrecisionPlan

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_LIMIT_S = 120.0  # Several times what all kernels take on one core.
_SILENT_S = 5.0
_WAITING = (
    "compiling the GPU's kernels, as many at once as there are cores; what is compiled is kept in "
    "Triton's cache, and later runs of this model find it there"
)


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
        config: The model.
        plan: The precision plan.
        device: The device that the model is on.
        adapter: The model's adapter, or None.
        max_batch_size: The most sequences of a forward of decode.
        speculation: Whether decode verifies drafts.
    """
    there = torch.device(device).type == "cuda" and torch.cuda.is_available()
    if not there or importlib.util.find_spec("triton") is None:
        yield
        return
    lora = None if adapter is None else adapter.lora
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    with _compiled(Work(config, plan, lora, max_batch_size, multiprocessors, speculation)):
        yield


@contextlib.contextmanager
def _compiled(work: Work) -> Iterator[None]:
    """Have the kernels of a run compiled beside the block."""
    try:
        record = _record(work)
    except OSError as error:
        logger.debug("kernels are not compiled ahead: %s", error)
        yield
        return
    with record:
        if record.seek(0, os.SEEK_END):  # tried before
            yield
            return
        worker = _Worker(work) if _locked(record) else None
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
            record.write(json.dumps(report))
            record.flush()
            logger.debug("kernels compiled ahead: %s", report)


def _record(work: Work) -> IO[str]:
    """Return the file that says, once it has contents, how a run's kernels were compiled."""
    import triton

    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"jetrl-{_digest(work, triton.__version__)}.json", "a+", encoding="utf-8")


def _digest(work: Work, triton_version: str) -> str:
    """Return a name for all that decides which kernels a run has, and how they are compiled."""
    digest = hashlib.sha256(repr(work).encode())
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("TRITON_"))
    deep_gemm = importlib.util.find_spec("deep_gemm") is not None
    digest.update(repr((triton_version, torch.__version__, deep_gemm, settings)).encode())
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _locked(record: IO[str]) -> bool:
    """Return whether this process is now the one that has the kernels compiled."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
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
    """A copy of this process that has kernels compiled.

    Args:
        work: What decides which kernels are compiled.
    """

    def __init__(self, work: Work) -> None:
        self._answers, answers = os.pipe()
        with warnings.catch_warnings():
            # Python warns of threads, which a copy does not have. The copy waits for none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            run_apart(work, answers)
        os.close(answers)

    def report(self, began: float) -> Mapping[str, Any]:
        """Return what the copy says when all is compiled, or why it says nothing.

        Args:
            began: The time since which the run waits for it.
        """
        answer, said = b"", False
        while True:
            waited = time.monotonic() - began
            if waited > _LIMIT_S:
                return _failed(f"not done after {waited:.0f} s")
            if waited > _SILENT_S and not said and world().is_first:
                print(_WAITING, file=sys.stderr, flush=True)
                said = True
            if not select.select([self._answers], [], [], 0.5)[0]:
                continue
            part = os.read(self._answers, 2**16)
            if not part:
                break
            answer += part
        if not answer:
            return _failed("the process ended without a word")
        report: Mapping[str, Any] = json.loads(answer)
        for problem in report["failed"]:
            logger.debug("kernels compiled ahead: %s", problem)
        return {**report, "waited_s": round(time.monotonic() - began, 2)}

    def end(self) -> None:
        """End the copy and its own copies, wherever they are."""
        os.close(self._answers)
        for kill in (os.killpg, os.kill):  # The group is not there before the copy has begun.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
