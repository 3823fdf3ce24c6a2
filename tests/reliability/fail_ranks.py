"""Let one of two ranks fail in every way, resume each run, and compare with one nobody disturbed.

    python tests/reliability/fail_ranks.py --out build/fail_ranks.json
    python tests/reliability/fail_ranks.py --device cuda --out build/fail_ranks.json

A rank is killed at named points of faults.py and at random times, raises an error, hangs. After
each fault all processes have to be gone within seconds, with the right exit codes; the console has
to name the rank and its phase once; checkpoints have to be whole; `jetrl doctor` has to find the
collectives that the other rank remembers. A fault that is not met as it should is noted, and the
next one follows. At its end each run must have the bits of the undisturbed one.

Ranks are forks of this process, which has imported everything and computed nothing. It does what
torchrun does: it keeps the key-value store, and when a rank ends with an error, it sends SIGTERM to
the others. On a GPU kernels are compiled in a run before.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import faults
import torch
from kill_and_resume import SMALL, check_same, fingerprint, fork, forked
from torch.distributed import TCPStore

from jetrl.distributed.peers import peers
from jetrl.distributed.process_group import FILES
from jetrl.training.checkpoint import CheckpointFolder
from jetrl.training.checkpoint_files import check_intact

LIMIT_S = 10.0  # from the end of one rank to the end of all
RUN_LIMIT_S = 240.0  # kernels may have to be compiled
SHUTDOWN_S = 30.0  # of torchrun, between SIGTERM and SIGKILL

# Two micro-batches an update, so that each rank has one, and matrices of which each has rows.
MORE = """
    model.config.hidden_size=256 model.config.vocab_size=256 sft.examples_per_step=16 loop.steps=8
    train.tokens_per_micro_batch=128 train.updates_per_step=1
"""
SETTINGS = [*SMALL, *MORE.split()]
UPDATE = "before the work of an update"
POINTS = {**faults.POINTS, UPDATE: ("jetrl.training.trainer:Trainer.step", faults.BEFORE)}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, at the n-th time at a point; without a point, at a random time."""

    kind: str
    victim: int
    point: str = ""
    occurrence: int = 1


# Of each kind: the exit codes of the rank and of the other one, and the console's line about it.
KINDS = {
    "killed": (-9, 5, r"stopped: rank {} is gone \(.*\); it was last (.*)"),
    "raises": (1, 1, r"(?s)rank {}: Traceback.*(ZeroDivisionError): a bug"),
    "full disk": (6, 6, r"stopped: (.*No space left on device)"),
    "no memory": (7, 7, r"rank {}: stopped: out of memory in the phase (\w+) .*of a test"),
    "hangs": (5, 5, r"stopped: hang (.*): no sign of life"),
}
ERRORS = {
    "raises": ZeroDivisionError("a bug"),
    "full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "no memory": MemoryError("of a test"),
}

# The first run through all steps has to last until the hang, whose phase has ended before by then.
FAULTS = (
    Fault("hangs", 1, UPDATE, 2),
    Fault("killed", 1, "before the backward"),
    Fault("killed", 0, "after requantize"),
    Fault("raises", 1, "after the backward"),
    Fault("killed", 1, "checkpoint, while it is copied"),
    Fault("killed", 0),
    Fault("killed", 1),
)


@dataclass(frozen=True)
class Ended:
    """The end of a start of the program on several ranks."""

    codes: list[int]
    gone_s: float
    at: float
    console: str


def launch(
    arguments: list[str],
    log: Path,
    prepare: Callable[[int], None] = lambda rank: None,
    outside: Callable[[list[int]], None] = lambda pids: None,
    size: int = 2,
) -> Ended:
    """Run `jetrl ARGUMENTS` as several ranks, each in a fork of this process."""
    log.touch()
    before = log.stat().st_size
    with _agent_store(size) as port:
        pids = [_fork(rank, size, port, arguments, log, prepare) for rank in range(size)]
        outside(pids)
        codes, first_end, last_end = _wait(pids)
    console = log.read_bytes()[before:].decode(errors="replace")
    return Ended([codes[pid] for pid in pids], last_end - first_end, last_end, console)


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
    last_end = time.monotonic()
    return codes, first_end or last_end, last_end


def _fork(
    rank: int, size: int, port: int, arguments: list[str], log: Path, prepare: Callable[[int], None]
) -> int:
    """Start one rank; return its process."""

    def begin() -> None:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ |= {name: str(value) for name, value in {**own, **store, **agent}.items()}
        prepare(rank)

    return fork(arguments, log, begin)


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


def meeting(fault: Fault, note: Path) -> Callable[[int], None]:
    """Return what lets one rank meet a fault at its point, and write down where and when."""

    def meet() -> None:
        board = getattr(peers(), "_board", None)
        place = "" if board is None else replace(board.own, awaits="").place
        note.write_text(json.dumps({"place": place, "at": time.monotonic()}))
        if fault.kind in ERRORS:
            raise ERRORS[fault.kind]
        while fault.kind == "hangs":
            time.sleep(60)
        faults.die()

    def prepare(rank: int) -> None:
        if rank == fault.victim and fault.point:
            faults.wrap(POINTS[fault.point], lambda count: count == fault.occurrence, meet)

    return prepare


def killing(fault: Fault, seconds: float, note: Path) -> Callable[[list[int]], None]:
    """Return what kills a rank after some seconds, if the fault has no point and it still runs."""

    def outside(pids: list[int]) -> None:
        deadline = time.monotonic() + seconds
        while not fault.point and time.monotonic() < deadline:
            if os.waitid(os.P_PID, pids[fault.victim], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.002)
        if not fault.point:
            os.kill(pids[fault.victim], signal.SIGKILL)
            note.write_text(json.dumps({"place": "", "at": time.monotonic()}))

    return outside


def problems_of(fault: Fault, ended: Ended, gone_s: float, place: str, run: Path) -> list[str]:
    """Return what is wrong with the end of a run that met a fault, in words."""
    own, other, words = KINDS[fault.kind]
    codes = [own if rank == fault.victim else other for rank in range(2)]
    problems = [] if ended.codes == codes else [f"exit codes {ended.codes} instead of {codes}"]
    if gone_s > LIMIT_S:
        problems.append(f"all were gone after {gone_s:.1f} s")
    named = re.findall(words.format(fault.victim), ended.console)
    phase = "" if fault.kind in ERRORS else place.partition(",")[0]
    if len(named) != 1 or phase not in named[0]:
        problems.append(f"the console names {[text[:200] for text in named]}, and not {phase!r}")
    if ended.console.count("stopped:") + ended.console.count("Traceback") != 1:
        problems.append("the console does not have one message")
    checkpoints = CheckpointFolder(run / "checkpoints")
    for step in checkpoints.steps():
        check_intact(checkpoints.path(step))
    return problems


def found_by_doctor(fault: Fault, run: Path, log: Path) -> bool:
    """Return whether `jetrl doctor` finds the collectives that the other rank remembers."""
    file = run / "ranks" / f"{FILES}{1 - fault.victim}.json"
    if not file.is_file():
        return False
    log.unlink(missing_ok=True)
    forked(["doctor", str(run)], log)
    return file.name in log.read_text() and "entries" in json.loads(file.read_text())


def fail_ranks(
    folder: Path,
    device: str = "cpu",
    seed: int = 0,
    listed: Sequence[Fault] = FAULTS,
    settings: Sequence[str] = SETTINGS,
) -> tuple[list[dict[str, Any]], bool]:
    """Return a record of each fault, and whether the runs have the bits of the undisturbed one."""
    rng, log = random.Random(seed), folder / "console.txt"
    base = ["train", "demo", *settings, f"run.device={device}", f"run.dir={folder}"]
    took = 0.0
    for name in ["uncut"] if device == "cpu" else ["warm", "uncut"]:
        began = time.monotonic()
        ended = launch([*base, f"run.name={name}"], log)
        took = time.monotonic() - began
        if any(ended.codes):
            raise SystemExit(f"the uncut run failed:\n{ended.console[-3000:]}")
    note, runs, done = folder / "note.json", [folder / "cut-1"], []

    def start(run: Path, **how: Any) -> Ended:
        resume = ["--resume"] if (run / "config.toml").is_file() else []
        words = [*base, "watchdog.min_s=5", "watchdog.first_s=60", f"run.name={run.name}", *resume]
        return launch(words, log, **how)

    for fault in listed:
        run = runs[-1]
        note.unlink(missing_ok=True)
        seconds = rng.uniform(0.2 * took, 0.6 * took)
        outside = killing(fault, seconds, note)
        ended = start(run, prepare=meeting(fault, note), outside=outside)
        if not any(ended.codes):  # it came to its end without the fault
            runs.append(folder / f"cut-{len(runs) + 1}")
        met = json.loads(note.read_text()) if note.is_file() else {"place": "?", "at": ended.at}
        gone_s = ended.gone_s if fault.kind == "hangs" else ended.at - met["at"]
        problems = problems_of(fault, ended, gone_s, met["place"], run)
        record = {
            "kind": fault.kind,
            "rank": fault.victim,
            "moment": fault.point or f"after {seconds:.1f} s",
            "place": met["place"],
            "gone_s": round(gone_s, 2),
            "codes": ended.codes,
        }
        if fault.kind not in ERRORS:
            found = found_by_doctor(fault, run, folder / "doctor.txt")
            record["doctor_finds_collectives"] = found
            if not found and "before step 1" not in met["place"]:
                problems.append("jetrl doctor does not find the collectives of the other rank")
        done.append({**record, "problems": problems})
        print(json.dumps(done[-1]), flush=True)
        if problems:
            print(ended.console[-3000:], flush=True)
    same = True
    for run in runs:
        ended = start(run)
        try:
            assert not any(ended.codes), f"{run.name}: {ended.codes}: {ended.console[-3000:]}"
            check_same(run.name, fingerprint(run), fingerprint(folder / "uncut"))
        except (AssertionError, SystemExit) as different:
            print(different, flush=True)
            same = False
    return done, same


def main() -> int:
    """Let ranks fail, print each end, and write the record; return 1 if one was not right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done, same = fail_ranks(Path(folder), args.device, args.seed)
    wrong = [each for each in done if each["problems"]]
    record = {
        "command": f"python tests/reliability/fail_ranks.py --device {args.device} "
        f"--seed {args.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "ranks": 2,
        "kills": sum(each["kind"] == "killed" for each in done),
        "longest_gone_s": max(each["gone_s"] for each in done),
        "faults_not_as_they_should": len(wrong),
        "same_bits": same,
        "seconds": round(time.monotonic() - began),
        "each": done,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print({name: value for name, value in record.items() if name != "each"})
    return int(bool(wrong) or not same)


if __name__ == "__main__":
    sys.exit(main())
