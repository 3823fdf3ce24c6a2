"""Kill runs of a small demo at random moments, resume them, and compare with an undisturbed run.

    python tests/reliability/kill_and_resume.py --kills 60 --seed 1
    python tests/reliability/kill_and_resume.py --kills 5 --device cuda

The result must be that of a run nobody touched, bit for bit: metrics (but for times), rollouts,
last checkpoint, exported model.

Each attempt is a fork of this process, which has imported everything and computed nothing (a GPU is
first touched by the fork), and runs `jetrl train` as the command line does. Most kills are at a
named point of faults.py, so that rare moments (half a line written, a rename not yet done) are met
as often as long ones; the others come from outside, at a random time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a GPU must not open it: forks will

import faults
import torch
import torch._dynamo  # torch's optimizers import it: here, once, and not in every fork

from jetrl.cli.main import main as jetrl
from jetrl.runs import plots  # noqa: F401 (plots: as above)
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible

MORE = """
    sft.steps=5 sft.until=2.0 sft.check_every=2 sft.examples_per_step=8 eval.prompts=8 eval.every=2
    train.warmup_steps=2 checkpoint.keep_best=1 loop.steps=7
"""
SMALL = [*faults.SMALL, *MORE.split()]
FROM_OUTSIDE = "from outside, at a random time"


@dataclass
class Attempt:
    """The end of one start of the program: killed, or the exit code."""

    killed: bool
    code: int


def fork(arguments: list[str], log: Path, prepare: Callable[[], None]) -> int:
    """Start `jetrl ARGUMENTS` in a fork of this process, which calls `prepare` first."""
    if child := os.fork():
        return child
    try:
        torch.set_num_threads(1)
        prepare()
        faults.redirect(log)
        code = jetrl(arguments)
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        os._exit(99)


def forked(
    arguments: list[str],
    log: Path,
    prepare: Callable[[], None] = lambda: None,
    kill_after_s: float | None = None,
) -> Attempt:
    """Run `jetrl ARGUMENTS` in a fork of this process, which may be killed after some seconds."""
    child = fork(arguments, log, prepare)
    ended, status = 0, 0
    if kill_after_s is not None:
        deadline = time.monotonic() + kill_after_s
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.002)
        if not ended:
            os.kill(child, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Attempt(killed=os.WTERMSIG(status) == signal.SIGKILL, code=-os.WTERMSIG(status))
    return Attempt(killed=False, code=os.WEXITSTATUS(status))


def fingerprint(run: Path) -> dict[str, object]:
    """All that an uncut run must have in common with a resumed one."""
    directory = RunDirectory.open(run)
    last = max((run / "checkpoints").glob("step_*"))
    return {
        "metrics": [{"step": r["step"], **reproducible(r)} for r in directory.metrics()],
        "digests": [r.get("digest") for r in directory.metrics()],
        "rollouts": [path.read_bytes() for path in sorted((run / "rollouts").iterdir())],
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
        "last checkpoint": {
            str(path.relative_to(last)): tensors_of(path) for path in last.rglob("*.safetensors")
        },
        "model": (run / "model" / "model.safetensors").read_bytes(),
        "report": (run / "report.html").is_file(),
        "left over": sorted(p.name for p in run.rglob(".*") if p.name != ".lock"),
    }


def tensors_of(path: Path) -> tuple[object, bytes]:
    """Return a safetensors file's tensors: where each lies, and the bytes of all.

    The order of the file's further remarks is another one each time.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {name: place for name, place in header.items() if name != "__metadata__"}, data[start:]


def check_same(name: str, found: dict[str, object], expected: dict[str, object]) -> None:
    different = [key for key in expected if found[key] != expected[key]]
    if different:
        raise SystemExit(f"run {name} differs from the uncut one in: {', '.join(different)}")


def kill_and_resume(
    folder: Path, kills: int, seed: int, device: str, overrides: list[str]
) -> Counter[str]:
    """Kill, resume and compare runs until there were so many kills; return the kills by point."""
    rng = random.Random(seed)
    log = folder / "output.txt"
    base = ["train", "demo", *SMALL, f"run.device={device}", f"run.dir={folder}", *overrides]

    def attempt(name: str, resume: bool, point: str = "", after_s: float = 0.0) -> Attempt:
        arguments = [*base, f"run.name={name}", *(["--resume"] if resume else [])]
        occurrence = 1 if point in faults.ONCE else rng.choice((1, 1, 2, 3, 5, 8))
        if point in faults.POINTS:
            return forked(arguments, log, lambda: faults.arm(point, occurrence))
        return forked(arguments, log, kill_after_s=after_s if point else None)

    names = ["uncut"] if device == "cpu" else ["warm", "uncut"]  # kernels are compiled in the first
    for name in names:
        began = time.monotonic()
        if attempt(name, resume=False).code != 0:
            raise SystemExit(f"the uncut run failed:\n{log.read_text()[-2000:]}")
        took = time.monotonic() - began
    expected = fingerprint(folder / "uncut")
    check_same(names[0], fingerprint(folder / names[0]), expected)
    done: Counter[str] = Counter()
    points = [FROM_OUTSIDE] * 4 + list(faults.POINTS)
    queue: list[str] = []
    runs = 0
    while done.total() < kills:
        runs += 1
        name = f"cut-{runs}"
        # A few kills a run, then it may come to its end.
        for number in range(rng.randint(2, 5) + 1):
            if not queue:
                queue = rng.sample(points, len(points))
            last = number > 0 and done.total() >= kills
            point = "" if last else queue.pop()
            resume = (folder / name / "config.toml").is_file()
            ended = attempt(name, resume, point, rng.uniform(0.0, took))
            if not ended.killed:
                break
            done[point] += 1
        while ended.killed:
            resume = (folder / name / "config.toml").is_file()
            ended = attempt(name, resume)
        if ended.code != 0:
            raise SystemExit(f"run {name} ended with {ended.code}:\n{log.read_text()[-3000:]}")
        check_same(name, fingerprint(folder / name), expected)
    print(f"{done.total()} kills in {runs} runs; every run ended as the uncut one, bit for bit")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = kill_and_resume(Path(folder), args.kills, args.seed, args.device, args.overrides)
    for point, count in sorted(done.items()):
        print(f"  {count:3}  {point}")


if __name__ == "__main__":
    main()
