"""Let one rank of a small run fail in every way in turn, also on two GPUs with NCCL.

    python tests/reliability/fail_ranks.py --out build/fail_ranks.json
    python tests/reliability/fail_ranks.py --device cuda --out build/fail_ranks.json

One run of two ranks is begun, and resumed after each fault: a rank is killed at random times and at
named points, raises an error, hangs. After each fault all processes have to be gone within
seconds, the console has to name the rank and its phase once, and `jetrl doctor` has to find the
collectives that the other rank remembers. At its end the run must have the bits of one that nobody
disturbed. A fault that is not met as it should is noted, and the next one follows.

Ranks are forks of this process, as in kill_ranks.py. On a GPU kernels are compiled in a run before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import faults
import kill_ranks
import torch
from kill_and_resume import SMALL, check_same, fingerprint, forked
from kill_ranks import LIMIT_S, Ended, launch

from jetrl.distributed.peers import peers
from jetrl.distributed.process_group import FILES
from jetrl.training import Checkpoints

# Two micro-batches an update, so that each rank has one, and matrices of which each has rows.
SETTINGS = [
    *SMALL,
    "model.config.hidden_size=256",
    "model.config.vocab_size=256",
    "train.tokens_per_micro_batch=128",
    "train.updates_per_step=1",
    "sft.examples_per_step=16",
    "loop.steps=8",
]
UPDATE = "before the work of an update"
POINTS = {**faults.POINTS, UPDATE: ("jetrl.training.trainer", "Trainer.step", faults.BEFORE)}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank."""

    kind: str
    victim: int
    point: str = ""
    occurrence: int = 1

    @property
    def codes(self) -> list[int]:
        """The exit codes of two ranks."""
        own, others = {"killed": (-9, 5), "raises": (1, 1), "hangs": (5, 5)}[self.kind]
        return [own if rank == self.victim else others for rank in range(2)]

    @property
    def words(self) -> str:
        """A pattern of the console's line about the fault, with the place as its group."""
        rank = rf"rank {self.victim}"
        return {
            "killed": rf"{rank} is gone \(.*\); it was last (.*)",
            "raises": rf"(?s){rank}: Traceback(.*)ZeroDivisionError: a bug",
            "hangs": r"stopped: hang (.*): no sign of life",
        }[self.kind]


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


def prepared(fault: Fault, note: Path) -> Callable[[int], None]:
    """Return what lets one rank meet a fault at its point, and write down where and when."""

    def meet() -> None:
        status = getattr(peers(), "_status", None)
        place = "" if status is None else replace(status, awaits="").place
        note.write_text(json.dumps({"place": place, "at": time.monotonic()}))
        if fault.kind == "raises":
            raise ZeroDivisionError("a bug")
        if fault.kind == "hangs":
            while True:
                time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare(rank: int) -> None:
        if rank == fault.victim and fault.point:
            seen = fault.occurrence
            faults._wrap(POINTS[fault.point], lambda count: count == seen, meet)

    return prepare


def at_random(fault: Fault, seconds: float, note: Path) -> Callable[[list[int]], None]:
    """Return what kills a rank after some seconds, if the fault has no point."""
    if fault.point:
        return lambda pids: None
    kill = kill_ranks.after(seconds, fault.victim, signal.SIGKILL)

    def outside(pids: list[int]) -> None:
        kill(pids)
        note.write_text(json.dumps({"place": "", "at": time.monotonic()}))

    return outside


def problems_of(fault: Fault, ended: Ended, gone_s: float, place: str, run: Path) -> list[str]:
    """Return what is wrong with the end of a run that met a fault, in words."""
    problems = []
    if ended.codes != fault.codes:
        problems.append(f"exit codes {ended.codes} instead of {fault.codes}")
    if gone_s > LIMIT_S:
        problems.append(f"all were gone after {gone_s:.1f} s")
    named = re.findall(fault.words, ended.console)
    phase = place.partition(",")[0] if fault.kind != "raises" else ""
    if len(named) != 1 or phase not in named[0]:
        problems.append(f"the console names {[text[:200] for text in named]}, and not {phase!r}")
    checkpoints = Checkpoints(run / "checkpoints")
    for step in checkpoints.steps():
        Checkpoints.check(checkpoints.path(step))
    return problems


def remembered(fault: Fault, run: Path, log: Path) -> dict[str, Any]:
    """Return what `jetrl doctor` finds of the collectives that the other rank remembers."""
    file = run / "ranks" / f"{FILES}{1 - fault.victim}.json"
    log.unlink(missing_ok=True)
    forked(["doctor", str(run)], log)
    if not file.is_file():
        return {"doctor_finds_collectives": False}
    entries = json.loads(file.read_text()).get("entries", [])
    last = entries[-1] if entries else {}
    return {
        "doctor_finds_collectives": file.name in log.read_text(),
        "collectives": len(entries),
        "last_collective": f"{last.get('profiling_name')}: {last.get('state')}",
    }


def fail_ranks(folder: Path, device: str, seed: int) -> tuple[list[dict[str, Any]], bool]:
    """Return a record of each fault, and whether the run has the bits of the undisturbed one."""
    rng, log = random.Random(seed), folder / "console.txt"
    base = ["train", "demo", *SETTINGS, f"run.device={device}", f"run.dir={folder}"]
    took = 0.0
    for name in ["uncut"] if device == "cpu" else ["warm", "uncut"]:
        began = time.monotonic()
        ended = launch([*base, f"run.name={name}"], log)
        took = time.monotonic() - began
        if ended.failed:
            raise SystemExit(f"the uncut run failed:\n{ended.console[-3000:]}")
        print(f"{name}: {took:.1f} s", flush=True)
    words = [*base, "watchdog.min_s=5", "watchdog.first_s=60"]
    note, done = folder / "note.json", []
    runs = [folder / "cut-1"]
    for fault in FAULTS:
        run = runs[-1]
        note.unlink(missing_ok=True)
        again = ["--resume"] if (run / "config.toml").is_file() else []
        seconds = rng.uniform(0.2 * took, 0.6 * took)
        ended = launch(
            [*words, f"run.name={run.name}", *again],
            log,
            prepare=prepared(fault, note),
            outside=at_random(fault, seconds, note),
        )
        met = (
            json.loads(note.read_text()) if note.is_file() else {"place": "not met", "at": ended.at}
        )
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
        if fault.kind != "raises":
            record |= remembered(fault, run, folder / "doctor.txt")
            if not record["doctor_finds_collectives"]:
                problems.append("jetrl doctor does not find the collectives of the other rank")
        done.append({**record, "problems": problems})
        print(json.dumps(done[-1]), flush=True)
        if problems:
            print(ended.console[-3000:], flush=True)
        if not ended.failed:  # it came to its end without the fault
            runs.append(folder / f"cut-{len(runs) + 1}")
    same = True
    for run in runs:
        again = ["--resume"] if (run / "config.toml").is_file() else []
        ended = launch([*words, f"run.name={run.name}", *again], log)
        try:
            assert not ended.failed, f"{run.name} ended with {ended.codes}: {ended.console[-3000:]}"
            check_same(run.name, fingerprint(run), fingerprint(folder / "uncut"))
        except (AssertionError, SystemExit) as different:
            print(different, flush=True)
            same = False
    return done, same


def main() -> int:
    """Let ranks fail, print each end, and write the record; return 1 where one was not right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    args = parser.parse_args()
    began = time.monotonic()
    kill_ranks.RUN_LIMIT_S = 240.0  # kernels may have to be compiled
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
