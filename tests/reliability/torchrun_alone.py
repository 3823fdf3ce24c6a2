"""Kill one of two ranks under torchrun, with jetrl's own account of lost ranks and without it.

    python tests/reliability/torchrun_alone.py --kills 20 --out build/torchrun_alone.json

All variants get the same victims at the same moments, counted from the end of the imports. Without
an account, the other rank hears of a dead one by gloo's error or by torchrun's SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from kill_and_resume import SMALL

from jetrl.cli.main import main as command
from jetrl.distributed import process_group
from jetrl.runs.attempts import read_status
from jetrl.training import Checkpoints

STEPS = 12
VARIANTS = WATCHED, _ = "with_watch", "torchrun_alone"


def be_rank(folder: Path, watch: bool, words: list[str]) -> None:
    """Run `jetrl WORDS` as a rank that writes down its process, and the exit code that it chose."""
    file, leave = folder / f"rank{os.environ['RANK']}", os._exit

    def end(code: int) -> None:
        file.with_suffix(".code").write_text(str(code))
        leave(code)

    os._exit = end  # type: ignore[assignment]
    if not watch:
        process_group._watched = lambda *_: process_group.NOBODY
    sys.argv = ["jetrl", *words]
    file.with_suffix(".pid").write_text(str(os.getpid()))
    end(command(words))


def is_running(pid: int) -> bool:
    """Return whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def killed(watch: bool, victim: int, after_s: float | None) -> dict[str, Any]:
    """Start a run of two ranks, kill one after some seconds, and say how it ended."""
    with tempfile.TemporaryDirectory() as name, open(f"{name}/console", "w") as console:
        folder, run = Path(name), Path(name) / "run"
        torchrun = [*(sys.executable, "-m", "torch.distributed.run"), "--standalone"]
        rank = [__file__, "--rank", name, str(int(watch))]
        words = ["train", "demo", *SMALL, f"loop.steps={STEPS}", f"run.dir={name}", "run.name=run"]
        job = subprocess.Popen(
            [*torchrun, "--nproc-per-node=2", *rank, *words], stdout=console, stderr=console
        )
        files = [folder / f"rank{rank}.pid" for rank in range(2)]
        while not all(file.is_file() and file.read_text() for file in files):
            time.sleep(0.01)
        pids, began, phase = [int(file.read_text()) for file in files], time.monotonic(), ""
        if after_s is not None:
            time.sleep(after_s)
            status = read_status(run) if run.is_dir() else None
            phase = f"{status.phase} {status.step}" if status and status.phase else ""
            if not is_running(pids[victim]):
                job.wait()
                return {}
            os.kill(pids[victim], signal.SIGKILL)
            began = time.monotonic()
        while is_running(pids[1 - victim]):
            time.sleep(0.005)
        took, torchrun_code = time.monotonic() - began, job.wait()
        text, code = Path(f"{name}/console").read_text(), folder / f"rank{1 - victim}.code"
        checkpoints = Checkpoints(run / "checkpoints")
        for step in checkpoints.steps():
            Checkpoints.check(checkpoints.path(step))
        said = re.findall(r"^(?:stopped|error|terminated|rank \d:).*", text, re.MULTILINE)
        return {
            "victim": victim,
            "after_s": after_s and round(after_s, 2),
            "phase": phase,
            "gone_s": round(took, 2),
            "code": code.read_text() if code.is_file() else "by signal",
            "torchrun_code": torchrun_code,
            "jetrl_names_rank_and_phase": bool(
                re.search(rf"rank {victim} is gone .*it was last", text)
            ),
            "torchrun_names_rank": bool(re.search(rf"rank +: {victim} .*\n +exitcode +: -9", text)),
            "said": [line[:110] for line in said],
            "whole_checkpoints": checkpoints.steps(),
        }


def summary(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of some kills, and the kills."""
    gone = sorted(kill["gone_s"] for kill in done)
    names = ("jetrl_names_rank_and_phase", "torchrun_names_rank")
    return {
        "kills": len(done),
        "median_gone_s": gone[len(gone) // 2],
        "longest_gone_s": gone[-1],
        "codes": Counter(kill["code"] for kill in done),
        **{name: sum(kill[name] for kill in done) for name in names},
        "each": done,
    }


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        be_rank(Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--commit", default="", help="the commit, for the record")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    args = parser.parse_args()
    uncut = killed(True, 1, None)
    assert uncut["torchrun_code"] == 0, uncut
    rng = random.Random(args.seed)
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in args.variants}
    while len(done[args.variants[0]]) < args.kills:
        victim, after_s = rng.randrange(2), rng.uniform(0.0, uncut["gone_s"])
        ends = {name: killed(name == WATCHED, victim, after_s) for name in args.variants}
        if all(ends.values()):  # else one was done before its moment
            for name, end in ends.items():
                done[name].append(end)
            print(json.dumps(ends), flush=True)
            record = {
                "command": f"python tests/reliability/torchrun_alone.py --kills {args.kills} "
                f"--seed {args.seed} --variants {' '.join(args.variants)}",
                "commit": args.commit,
                "date": time.strftime("%Y-%m-%d"),
                "torch": torch.__version__,
                "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                "uncut_s": uncut["gone_s"],
                **{name: summary(ends) for name, ends in done.items()},
            }
            if args.out is not None:
                args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
