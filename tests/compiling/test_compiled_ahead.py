"""Kernels that are compiled ahead are those that launches ask for, and nothing depends on them."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it is there on Linux alone")

from jetrl.compiling import ahead, compiled_ahead
from jetrl.compiling.launches import Work, graph_rows
from jetrl.models.families import ModelConfig
from jetrl.models.shapes import SHAPES
from jetrl.precision import PrecisionPlan

LISTED = Path(__file__).with_name("listed_kernels.py")


def work(plan: str = "unified") -> Work:
    return Work(ModelConfig.from_hf(SHAPES["tiny"]), PrecisionPlan.preset(plan), None, 8, 132)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "shape, plan, options",
    [
        ("qwen3-8b", "unified", {"speculation": True}),
        ("qwen3-0.6b", "jet", {"speculation": True, "max_batch_size": 8}),
        ("llama3.1-8b", "mixed", {"max_batch_size": 100}),
        ("qwen3-8b", "unified", {"rank": 8, "base": "nvfp4"}),
    ],
    ids=str,
)
def test_launches_of_other_sizes_ask_for_no_other_kernels(
    shape: str, plan: str, options: dict[str, int | str | bool]
) -> None:
    """A process goes through the listed launches, then through many of other sizes."""
    request = json.dumps({"shape": shape, "plan": plan, **options})
    done = subprocess.run(
        [sys.executable, str(LISTED), request], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["listed"] > 30
    assert found["others"] > 15  # launches of other sizes
    assert found["missing"] == []
    assert (found["products"] > 10) == ("base" not in options)  # sizes that DeepGEMM computes


def test_graph_rows_reach_the_largest_batch() -> None:
    assert list(graph_rows(1)) == [8]
    assert list(graph_rows(65)) == [8, 16, 32, 64, 96]


def test_a_failing_copy_fails_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ahead, "run_apart", lambda *_: os._exit(3))
    with caplog.at_level(logging.DEBUG), ahead._compiled(work(), ahead.TRITON):
        pass
    assert "the process ended without a word" in caplog.text
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    monkeypatch.setattr(ahead, "_Worker", None)
    with ahead._compiled(work(), ahead.TRITON):  # does not wait for a copy that would fail again
        pass


def test_half_an_answer_and_a_full_disk_fail_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answer_half(_: object, answers: int) -> None:
        os.write(answers, b'{"kernels": 3, "fai')
        os._exit(0)

    def no_space(*_: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(ahead, "run_apart", answer_half)
    with caplog.at_level(logging.DEBUG), ahead._compiled(work(), ahead.TRITON):
        monkeypatch.setattr(os, "write", no_space)
    assert "the process ended without a word" in caplog.text
    assert next(cache.glob("jetrl-*.json")).read_text() == ""  # the next run tries again


def test_what_was_compiled_before_starts_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Work] = []

    class Worker:
        def __init__(self, work: Work, _: object) -> None:
            starts.append(work)

        def report(self, _: float) -> dict[str, int]:
            return {"kernels": 3}

        def end(self) -> None:
            pass

    monkeypatch.setattr(ahead, "_Worker", Worker)
    for plan in ("unified", "unified", "jet", "unified"):
        with ahead._compiled(work(plan), ahead.TRITON):
            pass
    assert [begun.plan.name for begun in starts] == ["unified", "jet"]
    assert len(list(cache.glob("jetrl-*.json"))) == 2


def test_without_file_locks_nobody_waits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with ahead._record(work(), ahead.TRITON) as record:
        assert ahead._locked(record)


def test_one_of_two_processes_compiles_and_the_other_waits(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ahead._record(work(), ahead.TRITON) as first,
        ahead._record(work(), ahead.TRITON) as second,
    ):
        assert ahead._locked(first)
        assert not ahead._locked(second)
        first.write("{}")
        first.flush()
        ahead._wait_for_turn(second, time.monotonic())  # does not wait for the lock
    monkeypatch.setattr(ahead, "_Worker", None)
    with ahead._compiled(work(), ahead.TRITON):
        pass


def test_no_copy_survives_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(*_: object) -> None:
        os.setsid()
        time.sleep(1000)

    monkeypatch.setattr(ahead, "run_apart", sleep)
    began: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: began.append(fork()) or began[-1])
    with pytest.raises(KeyError), ahead._compiled(work(), ahead.TRITON):
        raise KeyError
    with pytest.raises(ProcessLookupError):
        os.kill(began[0], 0)
    assert next(cache.glob("jetrl-*.json")).read_text() == ""  # the next run tries again


def test_runs_on_a_cpu_need_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import jetrl.session.building"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_on_a_cpu_nothing_is_done(cache: Path) -> None:
    done = work()
    with compiled_ahead(done.config, done.plan, "cpu"):
        pass
    assert list(cache.iterdir()) == []
