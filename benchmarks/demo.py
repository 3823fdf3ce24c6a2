"""Run the demo for some seeds, and write what it reaches: tables of README and docs/benchmarks.md.

    python -m benchmarks.demo --out build/demo                  seeds 0, 1 and 2; minutes each
    ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.demo --out build/demo --seeds 0
    python -m benchmarks.demo --plan int8 --plan integer        seconds of the plans; minutes

Sums of floats are made in another order where a processor has other vector units:
ATEN_CPU_CAPABILITY (default, avx2, avx512) stands for other processors, and names the run. A run
that is in the folder already is not repeated. `demo.json` in the folder has a row for each run
that is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import print_table, write_results

ACCURACY = "eval/arithmetic/mean"
TOKENS, DIFFERENT = "mismatch/num_tokens", "mismatch/num_different"
Lines = list[dict[str, Any]]


def train(out: Path, seed: int, capability: str) -> None:
    """Make the run of a seed, unless it is in the folder."""
    name = f"demo-{seed}-{capability}"
    if not (out / name / "model").is_dir():
        words = [f"run.dir={out}", f"run.name={name}", f"run.seed={seed}"]
        command = [sys.executable, "-m", "jetrl", "train", "demo", *words]
        subprocess.run(command, check=True, stdout=sys.stderr)


def metrics_of(run: Path) -> tuple[Lines, Lines]:
    """Return the metrics of a run: the lines of its warm-up, and those of its steps."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [n for n in lines if "phase" in n], [n for n in lines if "phase" not in n]


def summary(run: Path) -> dict[str, Any]:
    """Return how a run began and ended: accuracies in percent of the held-out sums."""
    _, seed, capability = run.name.split("-")
    warm_up, steps = metrics_of(run)
    accuracies = [line[ACCURACY] for line in steps if ACCURACY in line]
    return {
        "seed": int(seed),
        "cpu_capability": capability,
        "warm_up_updates": len(warm_up),
        "percent_at_start": round(100 * accuracies[0], 1),
        "percent_at_end": round(100 * accuracies[-1], 1),
        "tokens": sum(int(line.get(TOKENS, 0)) for line in steps),
        "different": sum(int(line.get(DIFFERENT, 0)) for line in steps),
    }


def plan_rows(out: Path, plans: Sequence[str]) -> list[dict[str, Any]]:
    """Time 60 warm-up updates and ten steps of each plan, three times in turn."""
    taken: dict[str, tuple[list[float], list[float]]] = {plan: ([], []) for plan in plans}
    for number, plan in itertools.product(range(3), plans):
        words = [f"run.dir={out}", f"run.name={plan}-{number}", f"precision.preset={plan}"]
        words += ["sft.steps=60", "loop.steps=10", "eval.every=0", "report.enabled=false"]
        command = [sys.executable, "-m", "jetrl", "train", "demo", *words]
        subprocess.run(command, check=True, stdout=sys.stderr)
        for seconds, lines in zip(taken[plan], metrics_of(out / f"{plan}-{number}"), strict=True):
            seconds += [line["timing/step_s"] for line in lines[2:]]
    rows: list[dict[str, Any]] = []
    for plan in plans:
        update, step = (statistics.median(seconds) for seconds in taken[plan])
        rows.append({"plan": plan, "warm_up_update_s": round(update, 4), "step_s": round(step, 4)})
    for row in rows:
        for part in ("warm_up_update_s", "step_s"):
            row[f"{part}_of_first"] = round(row[part] / rows[0][part], 3)
    return rows


def processor() -> str:
    """Return the name of the processor, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((n.partition(": ")[2] for n in lines if n.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--plan", action="append", help="time plans instead; repeatable")
    args = parser.parse_args()
    out = args.out.resolve()
    if args.plan:
        command = "python -m benchmarks.demo " + " ".join(f"--plan {plan}" for plan in args.plan)
        with tempfile.TemporaryDirectory() as folder:
            rows = plan_rows(Path(folder), args.plan)
        facts = {"device": f"CPU: {processor()}", "threads": torch.get_num_threads()}
        write_results(out / "demo_plans.json", "demo", command, rows, **facts)
        print_table(rows)
        return
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "own")
    for seed in args.seeds:
        train(out, seed, capability)
    runs = sorted(run.parent for run in out.glob("demo-*-*/model"))
    if not runs:
        parser.error(f"{out}: no run is there; name --seeds")
    first = next((run for run in runs if run.name == "demo-0-own"), runs[0])
    summaries = [summary(run) for run in runs]
    facts = {
        "device": f"CPU: {processor()}",
        "what": f"the cpu_capability own is {torch.backends.cpu.get_cpu_capability()}",
        "tokens": summary(first)["tokens"],
        "different": summary(first)["different"],
        "least_percent_at_end": min(run["percent_at_end"] for run in summaries),
        "most_percent_at_end": max(run["percent_at_end"] for run in summaries),
    }
    path, command = out / "demo.json", "python -m benchmarks.demo"
    write_results(path, "demo", command, summaries, **facts)
    print(json.dumps(summaries, indent=1))


if __name__ == "__main__":
    main()
