"""A run that hangs is ended, in Python and inside C code, and leaves where it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.distributed.ranks import run_scripts

from jetrl import train
from jetrl.runs.attempts import read_status
from jetrl.runs.directory import RunDirectory
from jetrl.session.watchdog import ExitTimer, Watchdog
from jetrl.settings.sections import WatchdogSettings

TASK = """
import ctypes
from jetrl.session import watchdog
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
# The watchdog's clock stands still until a score hangs, so that no phase is too slow for it.
PROGRAM = """
import os, sys, time
from types import SimpleNamespace
from jetrl.session import watchdog

clock, timers = SimpleNamespace(now=0.0), []
watchdog.clock = clock
watchdog.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: clock.now})
watchdog.LAST_WORDS_S = SECONDS
end_later = watchdog.Watchdog._end_later

def noted(self, seconds, file):
    end_later(self, seconds, file)
    timers.append(seconds)

def wait_for_timer(longest):
    while not timers or timers[-1] > longest:  # the run may be here before the first timer is
        time.sleep(0.01)

watchdog.Watchdog._end_later, watchdog.wait_for_timer = noted, wait_for_timer
"""


def program(folder: Path, words: list[str], how: str, last_words_s: float) -> str:
    """Return the program of a run whose third step hangs in scoring."""
    task = folder / "mine.py"
    task.write_text(TASK.replace("HANG", how))
    words = ["train", "demo", *words, "task.options={}", f"task={task}:Hangs", "task.workers=0"]
    words += ["checkpoint.every=1", "watchdog.min_s=60", "watchdog.first_s=60"]
    argv = f"sys.argv = {['jetrl', *words, f'run.dir={folder}', 'run.name=run']}\n"
    main = "from jetrl.cli.main import main\nsys.exit(main())\n"
    return PROGRAM.replace("SECONDS", str(last_words_s)) + argv + main


def test_a_hang_in_c_code_is_ended_and_written_down(small_words: list[str], tmp_path: Path) -> None:
    hang = "watchdog.clock.now = 61.0; ctypes.CDLL(None).sleep(3600)"
    [ended] = run_scripts([program(tmp_path, small_words, hang, 600.0)], tmp_path)
    assert ended.code == 5, ended
    assert "stopped: hang in reward of step 3: no sign of life for 61.0 s" in ended.err
    run = tmp_path / "run"
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


def test_a_hang_that_keeps_the_interpreter_to_itself(
    small_words: list[str], tmp_path: Path
) -> None:
    """No thread of Python runs any more: timers that need none write the stacks and end it."""
    # Half a second is left of the 60, and the timers are set once more before it hangs.
    hang = "watchdog.clock.now = 59.5; watchdog.wait_for_timer(1.5); "
    hang += "ctypes.PyDLL(None).sleep(3600)"
    # A process of its own: a fork of a server has no timers that work without the lock.
    command = [sys.executable, "-c", program(tmp_path, small_words, hang, 1.0)]
    ended, run = subprocess.run(command, capture_output=True, check=False), tmp_path / "run"
    assert ended.returncode == (5 if sys.platform == "linux" else 1)
    assert 'mine.py", line 20 in score' in (run / "hang.txt").read_text()
    assert RunDirectory.open(run).state() == "interrupted", "it could not say how it ended"


def test_where_the_system_gives_no_timer_the_run_begins_all_the_same(
    small: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(timer: ExitTimer, code: int) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ExitTimer, "__init__", none_left)
    path = train(small("loop.steps=1")).run_path
    assert "would exit with code 1: [Errno 11]" in (path / "log.txt").read_text()
    assert not (path / "hang.txt").exists(), "a quiet run leaves no file"
    status = read_status(path)
    assert (status.phase, status.step) == ("", 1)


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
