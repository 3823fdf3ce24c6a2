r"""The digest of a run under `integer`, in legs on different devices, and next to that of a file.

    python -m benchmarks.digest smollm2 --out build/bench/digest_smollm2.json
    python -m benchmarks.digest smollm2 --leg cuda --against build/bench/digest_smollm2.json
    python -m benchmarks.digest steps --leg cuda:4 --leg cpu:5 --leg cuda run.backend=triton

A leg is DEVICE, DEVICE*RANKS, or one of them and :STEP, as cuda*2:4. At STEP of reinforcement
learning the run is killed (SIGKILL), and the next leg resumes it from its last checkpoint; the last
leg runs to the end. Settings that follow are added to those of the run; they must not change its
bits, as `run.backend` does not.

The runs: `demo` is the whole demo, `steps` ten steps after 60 of its supervised updates, and
`smollm2` three steps on questions of GSM8K with the model that docs/smollm2.md makes. The reward of
`smollm2` is the share of digits, which differs between answers, so that every step changes weights.

The file has the digest after the last supervised update and after each step. With --against the
exit code is 1 if one differs from the file's, and the first one is named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

ALL = ["precision.preset=integer", "report.enabled=false", "checkpoint.background=false"]
SMOLLM2 = [
    *("model.path=build/smollm2", "task.name=dataset", "task.path=data/gsm8k"),
    *("task.options.checker=benchmarks/digest.py:digits", "eval.every=0", "checkpoint.every=0"),
    *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_tokens=24"),
    *("train.lr=1e-5", "train.tokens_per_micro_batch=1024", "loop.steps=3"),
]
STEPS = ["demo", "sft.steps=60", "loop.steps=10", "eval.every=0", "checkpoint.every=1"]
RUNS = {"demo": ["demo"], "smollm2": SMOLLM2, "steps": STEPS}


def digits(prompt: object, completion: str) -> float:
    """Return the share of digits among the characters of a completion, as its reward."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def lines_of(run: Path) -> list[Row]:
    """Return the complete lines of a run's metrics; none before it has written some."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def steps_of(run: Path) -> list[Row]:
    """Return the lines of the steps of reinforcement learning that have a digest."""
    return [line for line in lines_of(run) if "phase" not in line and "digest" in line]


class Leg(NamedTuple):
    """A part of a run: its device, the number of ranks, and the step after which it is killed."""

    device: str
    ranks: int
    until: int | None


def run_leg(run: Path, words: Sequence[str], leg: Leg, resume: bool) -> None:
    """Run `jetrl train` on a device, until it ends or is killed after a step."""
    place = [f"run.device={leg.device}", f"run.dir={run.parent}", f"run.name={run.name}"]
    place += ["run.backend=auto"] * (leg.device == "cpu")  # the settings' one is for a GPU
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={leg.ranks}", "-m"]
    launch = [sys.executable, "-m", *launch * (leg.ranks > 1), "jetrl"]
    command = [*launch, "train", *words, *place, *["--resume"] * resume]
    process = subprocess.Popen(command, stdout=2, start_new_session=True)  # to stderr
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if leg.until is not None and any(line["step"] >= leg.until for line in steps_of(run)):
                return
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        sys.exit(f"error: the leg on {leg.device} ended with exit code {process.returncode}")
    if leg.until is not None:
        sys.exit(f"error: --leg {leg.device}:{leg.until}: the run ended before it could be killed")


def row_of(run: Path) -> Row:
    """Return the digests of a run, and which steps had rewards and changed weights."""
    steps = steps_of(run)
    warm_up = [line for line in lines_of(run) if "phase" in line and "digest" in line][-1:]
    before = [*warm_up, *steps]
    changed = [a["digest"]["weights"] != b["digest"]["weights"] for a, b in pairwise(before)]
    return {
        "digest": steps[-1]["digest"]["run"],
        "chain": [f"{x.get('phase', 'rl')} {x['step']} {x['digest']['run'][:16]}" for x in before],
        "mean_rewards": [round(line["reward/mean"], 4) for line in steps],
        "steps_compared": len(changed),
        "steps_that_changed_weights": sum(changed),
        "tokens_different": sum(int(line["mismatch/num_different"]) for line in steps),
    }


def difference(ours: Row, theirs: Row) -> str:
    """Return the first digest that differs, in words; "" if none does."""
    for a, b in zip(ours["chain"], theirs["chain"], strict=False):
        if a != b:
            return f"{a} here, {b} there"
    return "" if ours["digest"] == theirs["digest"] else "one run has more steps than the other"


def leg_of(text: str) -> Leg:
    """Return a leg of the command line."""
    match = re.fullmatch(r"(cpu|cuda)(?:\*([1-9]\d*))?(?::(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: DEVICE*RANKS:STEP, as cuda, cpu:5 or cuda*2")
    device, ranks, step = match.groups()
    return Leg(device, int(ranks or 1), int(step) if step else None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digest", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", choices=sorted(RUNS))
    parser.add_argument("settings", nargs="*", help="KEY=VALUE, added to the run's settings")
    parser.add_argument("--leg", type=leg_of, action="append", help="repeatable; default: cpu")
    parser.add_argument("--against", type=Path, help="a file of this benchmark to compare with")
    parser.add_argument("--runs", type=Path, default=Path("build/digests"), help="of the new run")
    parser.add_argument("--out", type=Path, default=Path("build/bench/digest.json"))
    args = parser.parse_intermixed_args(argv)
    legs = args.leg or [Leg("cpu", 1, None)]
    if [leg.until is None for leg in legs] != [False] * (len(legs) - 1) + [True]:
        parser.error("each --leg but the last needs a step, and the last has none")
    theirs = json.loads(args.against.read_text(encoding="utf-8")) if args.against else None
    run = args.runs.resolve() / f"{args.run}-{time.strftime('%Y%m%d-%H%M%S')}"
    words = [*RUNS[args.run], *ALL, *args.settings]
    for index, leg in enumerate(legs):
        run_leg(run, words, leg, resume=index > 0)
    from benchmarks.harness import command_typed, write_results  # torch, after the run itself

    row = {"run": args.run, "settings": " ".join(words), **row_of(run)}
    write_results(args.out, "digest", command_typed("python -m benchmarks.digest", argv), [row])
    print(json.dumps(row, indent=1))
    if theirs is not None:
        found = difference(row, theirs["rows"][0])
        print(f"{args.against}: {found or 'the same digests'}")
        sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
