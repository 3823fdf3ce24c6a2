"""Fixtures that share the memory of the GPU among processes, and the record of a run."""

from __future__ import annotations

import datetime
import fcntl
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.precision.backend import HOPPER, accelerator

sys.path.insert(0, str(Path(__file__).parent))  # small_models.py

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "test-gpu.txt"
KERNELS = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
BEGAN = pytest.StashKey[float]()
CACHED = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hopper") and accelerator() is not HOPPER:
        pytest.skip(f"needs {HOPPER.gpus}")


@pytest.hookimpl(trylast=True)  # of the tests that `-m` leaves
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests in each of the equal parts that `--dist worksteal` makes."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = in_parts(items, processes)


def in_parts(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return tests in an order whose equal parts take about as long, the longest tests first."""
    seconds = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("long"))}
    parts: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for item in sorted(seconds, key=seconds.__getitem__, reverse=True):
        min(parts, key=lambda part: sum(seconds[x] for x in part)).append(item)
    others = [item for item in items if item not in seconds]
    ordered: list[pytest.Item] = []
    for index, part in enumerate(parts):
        size = (len(items) - len(ordered)) // (processes - index)  # as xdist cuts them
        missing = max(0, size - len(part))
        ordered += part + others[:missing]
        del others[:missing]
    return ordered + others


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Return to the GPU what a test leaves in torch's pools: other processes share it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    """The module of kernels that a test module names: only a GPU's installation can import it."""
    return pytest.importorskip(request.module.KERNELS)


@pytest.fixture
def one_large_test_at_a_time() -> Iterator[None]:
    """Wait until no other process runs a test that needs several GiB of the GPU."""
    lock = Path(tempfile.gettempdir()) / f"jetrl-large-gpu-tests-{os.getuid()}.lock"
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


def pytest_configure(config: pytest.Config) -> None:
    """Note when the tests begin, and how many kernels Triton's cache on disk holds by then."""
    config.stash[BEGAN] = time.monotonic()
    config.stash[CACHED] = cached_kernels()


def cached_kernels() -> int:
    return sum(1 for _ in KERNELS.iterdir()) if KERNELS.is_dir() else 0


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the record of a run of GPU tests, and write it to `RESULTS`, ready to be committed."""
    from benchmarks.harness import versions

    outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    reports = {outcome: terminalreporter.stats.get(outcome, []) for outcome in outcomes}
    counts = {outcome: len(found) for outcome, found in reports.items() if found}
    ids = [report.nodeid for found in reports.values() for report in found]
    if "JETRL_TESTS_WITHIN" in os.environ or not any(x.startswith("tests/gpu/") for x in ids):
        return
    seconds = time.monotonic() - config.stash[BEGAN]
    workers = getattr(config.option, "numprocesses", None) or 1
    result = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    cached = f"{config.stash[CACHED]} before, {cached_kernels()} after"
    found, described = versions(), output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    packages = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "sgl-deep-gemm"))
    commit = os.environ.get("COMMIT") or described or "unknown"
    lines = [
        f"PYTHONPATH=src python3 -m pytest {' '.join(config.invocation_params.args)}",
        f"{device()}, {packages}",
        f"{datetime.date.today()}, commit {commit}, {workers} processes",
        f"{result} in {seconds:.0f} s; kernels in Triton's cache on disk: {cached}",
        *(f"{what}: {report.nodeid}" for what in ("failed", "error") for report in reports[what]),
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    terminalreporter.section("record of this run")
    for line in lines:
        terminalreporter.write_line(line)
    name = RESULTS.relative_to(ROOT)
    terminalreporter.write_line(f"to keep it: cp {name} benchmarks/results/DEVICE/{RESULTS.name}")


def device() -> str:
    """Return how many GPUs of which name there are, and their driver."""
    listing = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpus = listing.splitlines() or ["no GPU, none"]
    name, driver = gpus[0].rsplit(", ", 1)
    return f"{'one' if len(gpus) == 1 else len(gpus)} {name}, driver {driver}"


def output(*command: str) -> str:
    """Return what a command prints, nothing if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
