"""Ctrl-C, SIGTERM and the time limit: what is finished, what is given up, and how the run ends."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import before_call

from jetrl import train
from jetrl.cli.main import main as jetrl
from jetrl.errors import Terminated, TimeLimitReached
from jetrl.runs.directory import RunDirectory
from jetrl.session import session as verbs
from jetrl.session import source
from jetrl.session import stop_signals as module
from jetrl.session.sampling import Scoring
from jetrl.session.stop_signals import StopSignals
from jetrl.training.checkpoint import CheckpointFolder, Checkpoints
from jetrl.training.checkpoint_files import check_intact
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer

Small, Same = Callable[..., Any], Callable[[Path, Path], bool]
ENDS: dict[int, Any] = {signal.SIGTERM: Terminated, signal.SIGINT: KeyboardInterrupt}


def signalled(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *numbers: int
) -> None:
    """Let signals arrive within the n-th call (from 1) of a method."""

    def arrive() -> None:
        for number in numbers:
            signal.raise_signal(number)

    before_call(owner, name, call, arrive, monkeypatch.setattr)


@contextlib.contextmanager
def raised_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *numbers: int
) -> Iterator[None]:
    """Signals that arrive within the n-th call of a method, and end the run."""
    with monkeypatch.context() as patch:
        signalled(patch, owner, name, call, *numbers)
        with pytest.raises(ENDS[numbers[0]]):
            yield


def saved(run: Path) -> list[int]:
    checkpoints = CheckpointFolder(run / "checkpoints")
    for step in checkpoints.steps():
        check_intact(checkpoints.path(step))
    return checkpoints.steps()


@pytest.mark.parametrize(
    "number, owner, name, done",
    [
        (signal.SIGTERM, source, "sample_prompts", 2),
        (signal.SIGTERM, Scoring, "own_samples", 2),
        (signal.SIGTERM, Trainer, "step", 3),
        (signal.SIGINT, source, "sample_prompts", 3),
        (signal.SIGINT, Trainer, "step", 3),
    ],
    ids=["term-sample", "term-score", "term-update", "int-sample", "int-update"],
)
def test_one_signal_leaves_a_checkpoint_and_the_run_goes_on(
    number: int,
    owner: Any,
    name: str,
    done: int,
    small: Small,
    same: Same,
    uncut: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the third step."""
    with raised_in(monkeypatch, owner, name, 3, number):
        train(small("report.enabled=true"))
    assert capsys.readouterr().out.count(f"stopped after step {done}: ") == 1
    run = RunDirectory.open(tmp_path / "run")
    assert [line["step"] for line in run.metrics("rl")] == list(range(1, done + 1))
    assert run.rollout_steps() == list(range(1, done + 1))
    assert saved(run.path)[-1] == done
    attempt = run.attempts()[-1]
    assert (attempt.state, run.state()) == ("interrupted", "interrupted")
    assert attempt.reason == ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")
    assert (run.path / "report.html").is_file()
    assert same(train(small(), resume=True).run_path, uncut)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_nobody_can_be_told_of(
    number: int, code: int, small_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jetrl train 2>&1 | tee train.log`: Ctrl-C ends tee as well."""
    reading, writing = os.pipe()
    os.close(reading)
    broken = io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True)
    monkeypatch.setattr(module, "_STDERR", writing)
    monkeypatch.setattr(sys, "stderr", broken)
    words = ["train", "demo", *small_words, f"run.dir={tmp_path}", "run.name=run"]
    signalled(monkeypatch, Trainer, "step", 2, number)
    assert jetrl(words) == code
    assert saved(tmp_path / "run")[-1] == 2
    assert RunDirectory.open(tmp_path / "run").state() == "interrupted"


@pytest.mark.parametrize(
    "word", ["rollout.oversample=0.5", "data.order=pass_rate", "algorithm.name=dapo"]
)
def test_a_step_given_up_leaves_nothing_in_what_is_carried_from_step_to_step(
    word: str, small: Small, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fourth step: the third has no checkpoint yet."""
    uncut = train(small(word, name="uncut"))
    with raised_in(monkeypatch, Scoring, "own_samples", 4, signal.SIGTERM):
        train(small(word))
    assert same(train(small(word), resume=True).run_path, uncut.run_path)


@pytest.mark.parametrize("number", ENDS)
def test_a_second_signal_leaves_at_once(
    number: int,
    small: Small,
    same: Same,
    uncut: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Leaving at once does not wait for a checkpoint that is being written: here it has been.
    with raised_in(monkeypatch, Trainer, "step", 4, number, number):
        train(small("checkpoint.background=false"))
    assert saved(tmp_path / "run") == [2], "no other checkpoint was begun"
    assert RunDirectory.open(tmp_path / "run").state() == "interrupted"
    assert same(train(small(), resume=True).run_path, uncut)


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_in_the_warm_up(
    number: int, small: Small, same: Same, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = ["sft.steps=5", "sft.until=none", "loop.steps=1", "sft.examples_per_step=4"]
    uncut = train(small(*warm, name="uncut"))
    with raised_in(monkeypatch, SftTrainer, "step", 3, number):
        train(small(*warm))
    assert CheckpointFolder(tmp_path / "run" / "checkpoints" / "sft").steps() == [2, 3]
    assert same(train(small(*warm), resume=True).run_path, uncut.run_path)


def test_a_signal_during_the_export_stops_nothing(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled(monkeypatch, verbs.TrainingRun, "export", 1, signal.SIGINT)
    assert train(small()).stopped == ""


def test_the_time_limit_leaves_a_checkpoint_and_says_so(
    small: Small, same: Same, uncut: Path, tmp_path: Path
) -> None:
    cut = train(small("run.max_hours=1e-9"))
    assert cut.steps == 1
    assert "run.max_hours" in cut.stopped
    assert saved(cut.run_path) == [1]
    words = ["train", "demo", f"run.dir={tmp_path}", "run.name=run", "--resume"]
    assert jetrl([*words, "run.max_hours=1e-9"]) == 75
    assert jetrl([*words, "run.max_hours=none"]) == 0
    assert same(tmp_path / "run", uncut)
    assert train(small("run.max_hours=1e-9", "loop.steps=1", name="done")).stopped == ""


def test_the_time_limit_counts_what_a_checkpoint_takes_to_write(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, seen = StopSignals.check_time, []

    def told(stops: StopSignals, step_s: float, ending_s: float) -> None:
        seen.append(ending_s)
        check(stops, step_s, ending_s)

    before_call(Checkpoints, "write", 1, lambda: time.sleep(0.2), monkeypatch.setattr)
    monkeypatch.setattr(StopSignals, "check_time", told)
    train(small("checkpoint.every=1", "checkpoint.background=false", "loop.steps=2"))
    assert seen[-1] > 0.4, "the last checkpoint and the export"


def test_the_time_limit_in_the_warm_up(small: Small, tmp_path: Path) -> None:
    warm = ["sft.steps=9", "sft.until=none", "loop.steps=1", "run.max_hours=1e-9"]
    with pytest.raises(TimeLimitReached, match="continue with --resume"):
        train(small(*warm))
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints" / "sft")
    assert checkpoints.steps() == [1]
    words = ["train", "demo", f"run.dir={tmp_path}", "run.name=run", "--resume"]
    assert jetrl(words) == 75
    assert checkpoints.steps() == [1, 2]
    assert jetrl([*words, "sft.steps=0", "run.max_hours=none"]) == 0  # ends the warm-up here
    assert len(RunDirectory.open(tmp_path / "run").metrics("sft")) == 2


def test_a_step_that_would_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    # The attempts before have their own limit; this one took 100 s to load its model.
    stops, other = (StopSignals(max_hours=1.0, elapsed_s=7200.0, began=900.0) for _ in "ab")
    for took in (800.0, 300.0, 300.0):
        now += took
        stops.check_time(took, 0.0)
        other.check_time(took, 0.0)
        assert stops.reason == ""
    other.check_time(300.0, 1301.0)  # with the last checkpoint and the export it would not
    assert other.reason.startswith("run.max_hours = 1.0: 2100 s are left, and a step took up to 80")
    now += 1300.0
    stops.check_time(1300.0, 0.0)
    assert stops.reason == "run.max_hours = 1.0: 800 s are left, and a step took up to 1300 s"
    assert stops.elapsed_s == 7200.0 + 2800.0
    stops.raise_signal()  # none did: it returns
