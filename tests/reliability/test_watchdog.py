"""A run that hangs is ended, in Python and inside C code, and leaves where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl import train
from jetrl.runs import RunDirectory
from jetrl.runs.attempts import StatusFile, read_status
from jetrl.session.watchdog import ExitTimer, Watchdog
from jetrl.settings.sections import WatchdogSettings

TASK = """
import ctypes
import __main__ as run
from jetrl.tasks import Task
from jetrl.types import Prompt

class Hangs(Task):
    alphabet = "0123456789+="
    scored = 0

    def prompts(self, split):
        return [Prompt(id=str(i), text=f"{i}+{i}=", answer=str(2 * i)) for i in range(20)]

    def self_test(self):
        return []

    def score(self, prompt, completion):
        Hangs.scored += 1
        if Hangs.scored > 40:
            HANG
        return float(len(completion) % 3)
"""
SMALL = [
    "sft.steps=0",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "eval.every=0",
    "checkpoint.every=1",
    "loop.steps=9",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
    "task.workers=0",
    "watchdog.min_s=60",
    "watchdog.first_s=60",
]
# The watchdog's clock stands still until a score hangs, so that no phase is too slow for it.
PROGRAM = """
import sys, time
from types import SimpleNamespace
import jetrl.session.watchdog as watchdog

now, timers = 0.0, []
watchdog.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: now})
watchdog.LAST_WORDS_S, watchdog.STACKS_S = float(sys.argv.pop(1)), float(sys.argv.pop(1))
end_later = watchdog.Watchdog._end_later

def noted(self, seconds, file):
    end_later(self, seconds, file)
    timers.append(seconds)

def wait_for_timer(longest):
    while timers[-1] > longest:
        time.sleep(0.01)

watchdog.Watchdog._end_later = noted
"""
TRAIN = "from jetrl.cli.main import main\nsys.exit(main())\n"


def run_that_hangs(folder: Path, how: str, last_words_s: float) -> tuple[int, str, Path]:
    """Return exit code, standard error and directory of a run whose third step hangs in scoring."""
    task = folder / "mine.py"
    task.write_text(TASK.replace("HANG", how))
    command = [sys.executable, "-c", PROGRAM + TRAIN, str(last_words_s), "5", "train", "demo"]
    command += [*SMALL, f"task={task}:Hangs", f"run.dir={folder}", "run.name=run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, folder / "run"


def test_a_hang_in_c_code_is_ended_and_written_down(tmp_path: Path) -> None:
    hang = "run.now = 61.0; ctypes.CDLL(None).sleep(3600)"
    code, errors, run = run_that_hangs(tmp_path, hang, last_words_s=600.0)
    assert code == 5, errors
    assert "stopped: hang in reward of step 3: no sign of life for 61.0 s" in errors
    text = (run / "hang.txt").read_text()
    assert "hang in reward of step 3" in text
    assert 'mine.py", line 20 in score' in text
    assert "session.py" in text
    assert "sequences: 0, of these 0 finished" in text
    opened = RunDirectory.open(run)
    assert opened.state() == "failed"
    assert "hang in reward of step 3" in opened.attempts()[-1].reason
    status = read_status(run)
    assert (status.phase, status.step) == ("reward", 3)
    assert (run / "checkpoints" / "step_000002" / "manifest.json").is_file()


def test_a_hang_that_keeps_the_interpreter_to_itself(tmp_path: Path) -> None:
    """No thread of Python runs any more: timers that need none write the stacks and end it."""
    # Half a second is left of the 60, and the timers are set once more before it hangs.
    hang = "run.now = 59.5; run.wait_for_timer(1.5); ctypes.PyDLL(None).sleep(3600)"
    code, _, run = run_that_hangs(tmp_path, hang, last_words_s=1.0)
    assert code == (5 if ExitTimer.is_there() else 1)
    assert 'mine.py", line 20 in score' in (run / "hang.txt").read_text()
    assert RunDirectory.open(run).state() == "interrupted", "it could not say how it ended"


LAST_WORDS = """
import os
from pathlib import Path
from jetrl.settings.sections import WatchdogSettings

def say_it(why):
    if timers[-1] != 600.0:
        os._exit(99)
    dog._end_later(0.1, dog._file)  # the time for it passes
    time.sleep(3600)

dog = watchdog.Watchdog(WatchdogSettings(), Path(sys.argv[1]) / "hang.txt", list, say_it)
dog.__enter__()
now = 3601.0
time.sleep(3600)
"""


def test_last_words_that_hang_are_cut_off(tmp_path: Path) -> None:
    """The report about a hang may itself hang, with the interpreter's lock or without."""
    command = [sys.executable, "-c", PROGRAM + LAST_WORDS, "600", "0.1", str(tmp_path)]
    code = subprocess.run(command, check=False).returncode
    assert code == (5 if ExitTimer.is_there() else 1)
    assert "hang in between phases of step 0" in (tmp_path / "hang.txt").read_text()


def test_where_the_system_gives_no_timer_the_run_begins_all_the_same(
    small: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none_left(timer: ExitTimer, code: int) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ExitTimer, "__init__", none_left)
    monkeypatch.setattr(ExitTimer, "is_there", lambda: True)
    train(small("loop.steps=1"))
    assert "would end with code 1: [Errno 11]" in (tmp_path / "run" / "log.txt").read_text()


def test_a_quiet_run_leaves_no_file(small: Callable) -> None:
    result = train(small("loop.steps=1"))
    assert not (result.run_path / "hang.txt").exists()
    status = json.loads((result.run_path / "status.json").read_text())
    assert (status["phase"], status["step"], status["pid"]) == ("", 1, os.getpid())


def test_the_limit_is_learnt_from_phases_that_ended(tmp_path: Path, monkeypatch) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("jetrl.session.watchdog.time", clock)
    settings = WatchdogSettings(enabled=False, factor=4.0, min_s=10.0, first_s=100.0)
    watchdog = Watchdog(settings, tmp_path / "hang.txt", list, print)
    assert watchdog.limit_s("rollout") == 100.0
    for silences in ([2.0, 1.0], [5.0, 0.5], [0.1]):  # between signs of life
        watchdog.begin("rollout", 1)
        for silence in silences:
            now += silence
            watchdog.beat()
        assert watchdog.limit_s("update") == 100.0
        watchdog.end("rollout", sum(silences))
    assert watchdog.limit_s("rollout") == 20.0
    watchdog.begin("update", 1)
    now += 0.5
    watchdog.end("update", 0.5)
    assert watchdog.limit_s("update") == 10.0
    watchdog.begin("checkpoint", 1)
    watchdog.end("checkpoint", 0.0)
    assert watchdog.limit_s("checkpoint") == 100.0, "a disk may be slower the next time"


def test_status_is_overwritten_in_place(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    file = StatusFile(tmp_path)
    size = None
    for step, phase in enumerate(["rollout", "a-rather-long-phase-name", "x"]):
        began = time.time()
        file.begin(phase, step)
        status = read_status(tmp_path)
        assert (status.phase, status.step, status.pid) == (phase, step, os.getpid())
        assert began <= status.time <= time.time()
        assert size in (None, (tmp_path / "status.json").stat().st_size)
        size = (tmp_path / "status.json").stat().st_size
    file.end("x", 1.0)
    assert (read_status(tmp_path).phase, read_status(tmp_path).step) == ("", 2)
    file.close()
    (tmp_path / "status.json").write_text("{")
    assert read_status(tmp_path) is None
