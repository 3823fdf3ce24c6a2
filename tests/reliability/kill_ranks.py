"""End single ranks of small runs, resume the runs, and compare with one that nobody disturbed.

    python tests/reliability/kill_ranks.py --points 20 --times 20 --out build/kill_ranks.json

A run of two ranks loses one: by SIGKILL at a named point of faults.py or at a random time. All its
processes have to be gone within seconds, and the console has to name the rank and its phase once.
Resumed, the run must end with the bits of the uncut one: metrics (but for times), rollouts, last
checkpoint, exported model.

Ranks are forks of this process, which has imported everything and computed nothing. It does what
torchrun does: it keeps the key-value store, and where a rank ends with an error, it sends SIGTERM
to the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import faults
import torch
from kill_and_resume import FROM_OUTSIDE, SMALL, check_same, fingerprint
from torch.distributed import TCPStore

import jetrl.distributed.shard_files  # here, once, and not in every fork
from jetrl.cli.main import main as command
from jetrl.distributed.peers import peers
from jetrl.training import Checkpoints

assert jetrl.distributed.shard_files  # which imports what writes checkpoints

LIMIT_S = 10.0  # from the end of one rank to the end of all
RUN_LIMIT_S = 120.0
SHUTDOWN_S = 30.0  # of torchrun, between SIGTERM and SIGKILL

# The points that rank 0 alone comes by; the others are met by both.
FIRST_ONLY = {
    *("before a rollouts file", "after a rollouts file", "in the middle of a metrics line"),
    *("after a metrics line", "checkpoint, after its rename", "checkpoint, before older ones go"),
    *("resuming, while lines are cut off", "making the run directory", "writing its settings"),
    *("exporting the model", "writing the report"),
}


@dataclass(frozen=True)
class Ended:
    """The end of a start of the program on several ranks."""

    codes: list[int]
    gone_s: float
    console: str
    at: float = 0.0

    @property
    def failed(self) -> bool:
        """True where a rank did not end with 0."""
        return any(self.codes)


def launch(
    arguments: list[str],
    log: Path,
    size: int = 2,
    prepare: Callable[[int], None] = lambda rank: None,
    outside: Callable[[list[int]], None] = lambda pids: None,
    restart: int = 0,
) -> Ended:
    """Run `jetrl ARGUMENTS` as several ranks, each in a fork of this process."""
    log.touch()
    before = log.stat().st_size
    with _agent_store(size) as port:
        pids = [_fork(rank, size, port, arguments, log, prepare, restart) for rank in range(size)]
        outside(pids)
        codes, first_end, last_end = _wait(pids)
    failed = any(codes.values())
    return Ended(
        [codes[pid] for pid in pids],
        last_end - first_end if failed else 0.0,
        log.read_bytes()[before:].decode(errors="replace"),
        last_end,
    )


def _wait(pids: list[int]) -> tuple[dict[int, int], float, float]:
    """Wait for all ranks as torchrun does; return their exit codes, and when they began to end."""
    codes: dict[int, int] = {}
    began, first_end, killed = time.monotonic(), 0.0, False
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        left = [pid for pid in pids if pid not in codes]
        if any(codes.values()) and not first_end:
            first_end = time.monotonic()
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        late = first_end and time.monotonic() - first_end > SHUTDOWN_S
        if (late or time.monotonic() - began > RUN_LIMIT_S) and not killed:
            killed = True
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return codes, first_end, time.monotonic()


def _fork(
    rank: int,
    size: int,
    port: int,
    arguments: list[str],
    log: Path,
    prepare: Callable[[int], None],
    restart: int,
) -> int:
    """Start one rank; return its process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
        }
        prepare(rank)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        code = command(arguments)
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        os._exit(99)


@contextlib.contextmanager
def _agent_store(size: int) -> Iterator[int]:
    """Keep a key-value store in another process, as torchrun does, and yield the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    ready, begun = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            store = TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False)
            os.close(begun)
            signal.pause()
            del store
        finally:
            os._exit(0)
    os.close(begun)
    os.read(ready, 1)  # nothing, when the other end is closed
    os.close(ready)
    try:
        yield port
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ends_at(point: str, victim: int, occurrence: int, place: Path) -> Callable[[int], None]:
    """Return what lets one rank write down its phase and end by SIGKILL, at a point."""

    def prepare(rank: int) -> None:
        if rank == victim:
            faults.die = lambda: _die(place)
            faults.arm(point, occurrence)

    return prepare


def raises_at(
    point: str, victim: int, occurrence: int, error: BaseException
) -> Callable[[int], None]:
    """Return what lets one rank raise an error at a point."""

    def prepare(rank: int) -> None:
        if rank == victim:
            faults.fail(point, occurrence, error)

    return prepare


def _die(place: Path) -> None:
    """Write down where this rank is, and end it."""
    status = getattr(peers(), "_status", None)
    place.write_text("" if status is None else replace(status, awaits="").place)
    os.kill(os.getpid(), signal.SIGKILL)


def after(seconds: float, victim: int, number: signal.Signals) -> Callable[[list[int]], None]:
    """Return what sends a signal to one rank after some seconds, if it still runs."""

    def outside(pids: list[int]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, pids[victim], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.002)
        os.kill(pids[victim], number)

    return outside


def check_end(ended: Ended, victim: int, place: str, run: Path) -> None:
    """Check how a run ended that lost a rank."""
    others = [code for rank, code in enumerate(ended.codes) if rank != victim]
    # A rank may be killed when the others have nothing to do any more, or nothing yet.
    problems = []
    if ended.gone_s > LIMIT_S:
        problems.append(f"all were gone after {ended.gone_s:.1f} s")
    named = re.findall(rf"rank {victim} is gone \(.*\); it was last (.*)", ended.console)
    if len(named) != 1 or (place and place not in named[0]):
        problems.append(f"the console names {named}, and not {place!r} once")
    if set(others) != {5}:
        problems.append(f"the other ranks ended with {others}")
    if "Traceback" in ended.console:
        problems.append("a traceback on the console")
    checkpoints = Checkpoints(run / "checkpoints")
    for step in checkpoints.steps():
        Checkpoints.check(checkpoints.path(step))
    if problems:
        raise SystemExit(f"{'; '.join(problems)}:\n{ended.console[-3000:]}")


def kill_ranks(
    folder: Path, points: int, times: int, seed: int, size: int
) -> list[dict[str, object]]:
    """Kill a rank so many times, resume and compare each run; return a record of each kill."""
    rng = random.Random(seed)
    log = folder / "console.txt"
    base = ["train", "demo", *SMALL, f"run.dir={folder}"]
    began = time.monotonic()
    uncut = launch([*base, "run.name=uncut"], log, size)
    took = time.monotonic() - began
    if uncut.failed:
        raise SystemExit(f"the uncut run failed:\n{log.read_text()[-3000:]}")
    expected = fingerprint(folder / "uncut")
    # More points than asked for: some are not met by several ranks, or not by the rank drawn.
    others = rng.sample(sorted(faults.POINTS), len(faults.POINTS))
    todo = [*(others.pop() for _ in range(min(points, len(others)))), *[FROM_OUTSIDE] * times]
    rng.shuffle(todo)
    missed: Counter[str] = Counter()
    done: list[dict[str, object]] = []
    number = 0
    while todo:
        number += 1
        name, run = f"cut-{number}", folder / f"cut-{number}"
        words = [*base, f"run.name={name}"]
        for _ in range(rng.randint(2, 4)):
            if not todo:
                break
            point = todo.pop()
            resume = ["--resume"] if (run / "config.toml").is_file() else []
            victim = 0 if point in FIRST_ONLY else rng.randrange(size)
            place = folder / "place.txt"
            place.unlink(missing_ok=True)
            if point == FROM_OUTSIDE:
                kill = after(rng.uniform(0.3, took), victim, signal.SIGKILL)
                ended = launch([*words, *resume], log, size, outside=kill)
            else:
                occurrence = 1 if point in faults.ONCE else rng.choice((1, 1, 2, 3))
                prepare = ends_at(point, victim, occurrence, place)
                ended = launch([*words, *resume], log, size, prepare)
            if -signal.SIGKILL not in ended.codes:
                if ended.failed:
                    raise SystemExit(f"{name} ended with {ended.codes}:\n{ended.console[-3000:]}")
                missed[point] += 1  # the run was over before
                again = missed[point] < 3 or point == FROM_OUTSIDE
                todo.insert(0, point if again or not others else others.pop())
                break
            check_end(ended, victim, place.read_text() if place.exists() else "", run)
            done.append({"rank": victim, "moment": point, "gone_s": round(ended.gone_s, 2)})
            print(f"{len(done):3}  {ended.gone_s:5.2f} s  rank {victim}  {point}", flush=True)
        resume = ["--resume"] if (run / "config.toml").is_file() else []
        last = launch([*words, *resume], log, size)
        if last.failed:
            raise SystemExit(f"{name}, resumed, ended with {last.codes}:\n{last.console[-3000:]}")
        check_same(name, fingerprint(run), expected)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--points", type=int, default=20, help="kills at named points")
    parser.add_argument("--times", type=int, default=20, help="kills at random times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = kill_ranks(Path(folder), args.points, args.times, args.seed, args.ranks)
    gone = [float(str(kill["gone_s"])) for kill in done]
    print(
        f"{len(done)} kills of one of {args.ranks} ranks: all gone after {max(gone):.1f} s at "
        "most; every run ended as the uncut one, bit for bit"
    )
    if args.out is not None:
        record = {
            "command": f"python tests/reliability/kill_ranks.py --points {args.points} "
            f"--times {args.times} --seed {args.seed} --ranks {args.ranks}",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "ranks": args.ranks,
            "kills": len(done),
            "longest_gone_s": max(gone),
            "mean_gone_s": round(sum(gone) / len(gone), 2),
            "same_bits": True,
            "seconds": round(time.monotonic() - began),
            "each": done,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
