"""Kernels are compiled ahead by children that launch what a run launches; nothing needs them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it is there on Linux alone")

from jetrl.models.adapter import LoRA
from jetrl.models.families import SHAPES, ModelConfig, parameter_shapes
from jetrl.precision import PrecisionPlan
from jetrl.session import compiling
from jetrl.session.compiling import Work, compiled_ahead

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


@pytest.mark.parametrize("left", [KeyError, None])
def test_none_is_left_after_an_error_or_too_long_a_time(
    left: type[Exception] | None,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHILD", "import time; time.sleep(1000)")
    monkeypatch.setattr(compiling, "_LIMIT_S", 0.2)
    try:
        with compiling._compiled(WORK, "cuda:0", 2):
            if left is not None:
                raise left
    except KeyError:
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


def test_a_child_ends_with_its_parent_and_a_cpu_needs_no_triton(
    tmp_path: Path, wait_until: Any
) -> None:
    program = (
        "import sys, time\nsys.modules['triton'] = None\nimport jetrl.session.building\n"
        "from jetrl.session import compiling\nimport subprocess\n"
        "sys.executable = sys.argv[1]\nprint(compiling._started(None, 'cpu', 0, 1).pid)"
    )
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", program, str(sleeper)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    status = Path("/proc", done.stdout.strip(), "status")
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


@pytest.mark.parametrize("room, most", [(-1, 0), (0.9, 0), (2, 2), (2.9, 2), (40, 8)])
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


def test_the_small_model_has_the_widths_of_the_large_one() -> None:
    config = ModelConfig.from_hf(SHAPES["qwen3-8b"])
    small = compiling._small(replace(WORK, config=config)).config
    assert (small.num_layers, small.vocab_size % 128) == (2, config.vocab_size % 128)
    layers = [name for name in parameter_shapes(small) if ".layers." in name]
    assert all(parameter_shapes(small)[name] == parameter_shapes(config)[name] for name in layers)
    assert sum(map(math.prod, parameter_shapes(small).values())) < 0.5e9


def test_on_a_cpu_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiled_ahead(WORK.config, WORK.plan, "cpu"):
        pass
    assert list(tmp_path.iterdir()) == []
    assert not torch.cuda.is_initialized()
