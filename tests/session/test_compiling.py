"""Kernels are compiled ahead by children that launch what a run launches; nothing needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="it is there on Linux alone")

from benchmarks.shapes import SHAPES

from jetrl.models.adapter import LoRA
from jetrl.models.families import ModelConfig
from jetrl.precision import PrecisionPlan
from jetrl.session import compiling
from jetrl.session.compiling import Work

UNIFIED = PrecisionPlan.preset("unified")
WORK = Work(ModelConfig.from_hf(SHAPES["tiny"]), UNIFIED, None, 8)


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The children that are started, each of which sleeps for a moment and fails."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: Any) -> subprocess.Popen[bytes]:
        code = os.environ.get("CHILD", "import time; time.sleep(0.1); raise SystemExit(1)")
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return started[-1]

    monkeypatch.setattr(compiling, "_started", start)
    return started


def test_a_run_starts_them_once_and_waits(children: list[subprocess.Popen[bytes]]) -> None:
    for plan in ("unified", "unified", "jet", "unified"):
        with compiling._compiled(replace(WORK, plan=PrecisionPlan.preset(plan)), "cuda:0", 2):
            pass
    assert [child.poll() for child in children] == [1, 1, 1, 1]  # two plans, two children each


def test_none_is_left_after_an_error_or_too_long_a_time(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD", "import time; time.sleep(1000)")
    with pytest.raises(KeyError), compiling._compiled(WORK, "cuda:0", 1):
        raise KeyError
    monkeypatch.setattr(compiling, "_LIMIT_S", 0.2)
    with compiling._compiled(WORK, "cuda:0", 1):
        pass
    assert [child.poll() for child in children] == [-9, -9]


def test_one_of_two_processes_has_them_and_the_other_waits(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling._record(WORK) as first, compiling._record(WORK) as second:
        assert compiling._locked(first)
        assert not compiling._locked(second)
        monkeypatch.setattr(compiling, "_LIMIT_S", 0.2)
        with compiling._compiled(WORK, "cuda:0", 2):
            pass
    assert children == []


def test_a_child_ends_with_its_parent(
    tmp_path: Path, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    said = tmp_path / "pid"
    parent = os.fork()
    if parent == 0:
        said.write_text(str(compiling._started(WORK, "cpu", 0, 1).pid))
        os._exit(0)
    os.waitpid(parent, 0)
    status = Path("/proc", said.read_text(), "status")
    # The init process reaps it, which not every container has.
    wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text())


@pytest.mark.parametrize("lora", [None, LoRA(8, 32.0)])
def test_the_launches_are_those_of_a_run(
    lora: LoRA | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_LENGTHS", (1, 5, 20))
    monkeypatch.setattr(compiling, "_ROWS", (1, 8))
    work = replace(WORK, lora=lora, speculation=True)
    policy = compiling.small_policy(work, "cpu")
    for launch in compiling.launches(policy, work):
        launch()
    assert policy.config.num_layers == 2


@pytest.mark.parametrize("room, most", [(-1, 0), (2.9, 2), (40, 8)])
def test_there_are_as_many_children_as_the_weights_leave_room_for(
    room: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-8B: FP32 master weights, FP8 linear layers, and BF16 embedding and head."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    work = replace(WORK, config=ModelConfig.from_hf(SHAPES["qwen3-8b"]))
    linears = 36 * 4096 * (6144 + 4096 + 3 * 12288)
    vocabulary = 151936 * 4096
    weights = 4 * (linears + 2 * vocabulary) + linears + 4 * vocabulary
    small = 64 * 2**20  # scales, norms, and the table of rotary positions
    free = weights + small + 6 * vocabulary + int(room * compiling.child_bytes(work))
    assert compiling.affordable(work, free, gpus=1) == most
    assert compiling.affordable(work, free, gpus=2) >= most
