"""The soak: a long run with everything going wrong, beside one with fewer faults, to the same bits.

    python tests/reliability/soak.py --steps 1000 --seed 0

Faults of both runs, at places that depend on the data alone: a checker that crashes (one completion
in 600) and hangs (one in 3000), and NaN in a gradient (every 97th step; train.on_nonfinite=skip).
Faults of the one run, at random: SIGKILL, from outside and at the points of faults.py; a full disk
in a metrics line, a rollouts file, a checkpoint; SIGTERM and Ctrl-C; the time limit. After each it
is resumed.

Checked at the end: every step is there once, with its metrics and rollouts; metrics, rollouts and
weights of the two runs are the same, bit for bit; and the run that nobody cut did not grow: its
resident size, by the slope over its last two thirds, and its open files, threads and processes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import faults
import numpy as np
from kill_and_resume import Attempt, check_same, fingerprint, forked

from jetrl.runs.directory import RunDirectory
from jetrl.session import Session

POISON_EVERY, POISON_AT = 97, 13
MAX_GROWTH_MIB = 16.0  # over all steps looked at: less than one copy of the run's tensors
MAX_MORE = 4  # of open files, threads, processes, between thirds of the run
# A score may take far longer than a sum does, since the machine may be busy.
MORE = """
    sft.steps=60 sft.until=none sft.examples_per_step=16 eval.prompts=8 eval.every=50 train.lr=4e-4
    train.on_nonfinite=skip checkpoint.every=10 checkpoint.keep_best=1 task.workers=1
    task.timeout_s=60 run.device=cpu
"""
SETTINGS = [*faults.SMALL, f"task.name={faults.TASK}:Soak", *MORE.split()]
OUTCOMES = {0: "finished", 6: "disk full", 75: "time limit", 130: "Ctrl-C", 143: "SIGTERM"}
OUTCOMES[-signal.SIGTERM] = "SIGTERM, which met no handler any more"


def note_held(file: Path) -> None:
    """Write bytes of memory, open files, threads and child processes after every step."""
    record = Session.record

    def noted(self: Any, step: Any) -> None:
        record(self, step)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        held = [pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))]
        threads = list(Path("/proc/self/task").iterdir())
        children = sum(len((thread / "children").read_text().split()) for thread in threads)
        with open(file, "a", encoding="ascii") as lines:
            print(step.number, *held, len(threads), children, file=lines)

    Session.record = noted  # type: ignore[method-assign]


def memory_growth_mib(file: Path) -> float:
    """Growth over the last two thirds of the steps, by the slope of a straight line."""
    steps, sizes = np.loadtxt(file).T[:2]
    later = steps > steps[-1] / 3
    slope = np.polyfit(steps[later], sizes[later], 1)[0]
    return float(slope * (steps[-1] - steps[-1] / 3) / 2**20)


def held_more(file: Path) -> dict[str, int]:
    """Return the most that was held in the last third of the steps, less the most in the first."""
    counts = np.loadtxt(file)[:, 2:]
    third = len(counts) // 3
    more = counts[-third:].max(axis=0) - counts[:third].max(axis=0)
    return dict(zip(("open files", "threads", "processes"), map(int, more), strict=True))


class Chaos:
    """Attempts at a run, each with a fault of its own."""

    def __init__(self, base: list[str], folder: Path, seed: int, pace_s: float) -> None:
        self._base, self._log = base, folder / "chaos.txt"
        self._run = folder / "chaos"
        self._rng = random.Random(seed)
        self._pace_s = pace_s  # seconds that an attempt may go on undisturbed
        self.ends: Counter[str] = Counter()

    def finish(self) -> None:
        """Start the run again and again until it comes to its end."""
        over = False
        while not over:
            resume = ["--resume"] if (self._run / "config.toml").is_file() else []
            fault = self._rng.choice(["kill", "kill", "point", "disk", "signal", "time"])
            ended = getattr(self, f"_{fault}")([*self._base, "run.name=chaos", *resume])
            if not ended.killed and ended.code not in OUTCOMES:
                text = self._log.read_text(encoding="utf-8")[-3000:]
                raise SystemExit(
                    f"an attempt with fault {fault!r} ended with {ended.code}:\n{text}"
                )
            self.ends["SIGKILL" if ended.killed else OUTCOMES[ended.code]] += 1
            over = ended.code == 0 and not ended.killed

    def _start(self, words: list[str], *prepare: Any, kill_after_s: float | None = None) -> Attempt:
        def all_of_it() -> None:
            faults.poison(POISON_EVERY, POISON_AT)
            for call in prepare:
                call()

        return forked(words, self._log, all_of_it, kill_after_s)

    def _kill(self, words: list[str]) -> Attempt:
        return self._start(words, kill_after_s=self._rng.uniform(0, 2 * self._pace_s))

    def _point(self, words: list[str]) -> Attempt:
        point, occurrence = self._rng.choice(list(faults.POINTS)), self._rng.randint(1, 200)
        occurrence = 1 if point in faults.ONCE else occurrence
        # It may never come by there: then it is killed where it is.
        after = self._rng.uniform(self._pace_s, 3 * self._pace_s)
        return self._start(words, lambda: faults.arm(point, occurrence), kill_after_s=after)

    def _disk(self, words: list[str]) -> Attempt:
        point, occurrence = self._rng.choice(list(faults.DISK_POINTS)), self._rng.randint(1, 40)
        return self._start(words, lambda: faults.fill_disk(point, occurrence))

    def _signal(self, words: list[str]) -> Attempt:
        number = self._rng.choice([signal.SIGTERM, signal.SIGINT])
        after = self._rng.uniform(0.5 * self._pace_s, 2 * self._pace_s)

        def send_once_handled() -> None:
            while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                time.sleep(0.01)  # the run has not begun: on a busy machine that takes a while
            os.kill(os.getpid(), number)

        def send() -> None:
            timer = threading.Timer(after, send_once_handled)
            timer.daemon = True
            timer.start()

        return self._start(words, send)

    def _time(self, words: list[str]) -> Attempt:
        return self._start([*words, f"run.max_hours={self._pace_s / 3600}"])


def soak(folder: Path, steps: int, seed: int, pace_s: float) -> None:
    """Make both runs, compare them, and print what happened."""
    began = time.monotonic()
    base = ["train", "demo", *SETTINGS, f"run.dir={folder}"]
    base += [f"loop.steps={steps}", "run.max_hours=none"]
    held, log = folder / "held.txt", folder / "quiet.txt"
    quiet = os.fork()
    if quiet == 0:

        def prepare() -> None:
            faults.poison(POISON_EVERY, POISON_AT)
            note_held(held)

        os._exit(forked([*base, "run.name=quiet"], log, prepare).code & 0xFF)
    chaos = Chaos(base, folder, seed, pace_s)
    chaos.finish()
    _, status = os.waitpid(quiet, 0)
    if status:
        raise SystemExit(f"the undisturbed run failed:\n{log.read_text()[-3000:]}")
    check(folder, steps)
    growth, more = memory_growth_mib(held), held_more(held)
    lines = RunDirectory.open(folder / "quiet").metrics("rl")
    print(f"{steps} steps, {time.monotonic() - began:.0f} s; the two runs have the same bits")
    for name in ("reward/failures", "policy/skipped_updates"):
        print(f"  {sum(line.get(name, 0) for line in lines):6.0f}  {name}, in both runs")
    for end, count in sorted(chaos.ends.items()):
        print(f"  {count:6}  attempts that ended with: {end}")
    print(f"memory of the undisturbed run: {growth:+.1f} MiB over its last two thirds")
    print("held more in its last third than in its first: " + str(more))
    if growth > MAX_GROWTH_MIB:
        raise SystemExit(f"memory grows: more than {MAX_GROWTH_MIB:g} MiB")
    # A checkpoint on its way is a thread and two files; a worker that is replaced, a process less.
    if max(more.values()) > MAX_MORE:
        raise SystemExit(f"open files, threads or processes grow: {more}")


def check(folder: Path, steps: int) -> None:
    """Assert that the run that was cut misses nothing and differs in nothing from the other."""
    run = RunDirectory.open(folder / "chaos")
    found = [line["step"] for line in run.metrics("rl")]
    if found != list(range(steps + 1)):
        raise SystemExit(f"steps of metrics.jsonl: {len(found)}, {found[:3]} ... {found[-3:]}")
    if run.rollout_steps() != list(range(1, steps + 1)):
        raise SystemExit(f"{len(run.rollout_steps())} files of rollouts")
    check_same("chaos", fingerprint(folder / "chaos"), fingerprint(folder / "quiet"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pace", type=float, default=4.0, metavar="S", help="seconds an attempt goes on"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        soak(Path(name), args.steps, args.seed, args.pace)
