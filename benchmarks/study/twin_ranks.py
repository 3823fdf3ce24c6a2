r"""Runs of a study on 1, 2 and 4 processes: are their final weights equal, bit for bit?

    python -m benchmarks.study.twin_ranks --study benchmarks/study/twins.toml --out build/ranks.json

One run of the study, the arm `plain` unless another one is named, is made once by itself and once
by torchrun with each number of processes: on a CPU through gloo, on GPUs through NCCL, a card each.
Its start is trained once. The file is written after each run. A run that ended is not made again
while its directory is in FOLDER, and one that was cut goes on: the same command finishes what a
time limit interrupts. The command ends with exit code 1 where weights differ. On two CPU cores the
demo's thousand steps take 5 to 10 minutes each.

With `--start`, the same command on two kinds of GPU says whether their weights are equal:

    python -m benchmarks.study.twin_ranks --study benchmarks/study/eight_bits.toml \
        --arm int8-e4m3 --seed 1 --start build/smollm2 --steps 10 --processes 1 --out h100.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import command_typed, write_results
from benchmarks.study.definition import read_definition
from benchmarks.study.final_evaluation import sha256_of_weights
from benchmarks.study.plan import PlannedRun, planned_runs, recipe_of


def main() -> None:
    """Make the runs and write what they end with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, default=Path("benchmarks/study/twins_int8_demo.toml"))
    parser.add_argument("--arm", default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", help="the model to begin from, instead of the study's start")
    parser.add_argument("--steps", type=int, help="steps, instead of the study's")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", type=Path, default=Path("build/twin_ranks"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = planned_runs(read_definition(args.study))
    run = next((run for run in runs if run.arm == args.arm and run.seed == args.seed), None)
    if run is None:
        parser.error(f"{args.study} has no arm {args.arm} with seed {args.seed}")
    args.folder.mkdir(parents=True, exist_ok=True)
    model = args.start or trained_start(run, args.folder)
    typed = command_typed("python -m benchmarks.study.twin_ranks", None)
    facts = {"study": str(args.study), "arm": args.arm, "seed": args.seed}
    equal: bool | None = None  # of one run: there is nothing to compare it with
    rows = list[dict[str, Any]]()
    for count in args.processes:
        rows.append(trained(run, model, count, args.steps, args.folder))
        print(json.dumps(rows[-1]), flush=True)
        digests = [row["weights_sha256"] for row in rows]
        if len(digests) > 1:
            equal = all(digests) and len(set(digests)) == 1  # "" where a run left no weights
        write_results(args.out, "twin_ranks", typed, rows, **facts, equal=equal)
    sys.exit(equal is False)


def trained_start(run: PlannedRun, folder: Path) -> str | None:
    """Return the model that a run begins from, trained unless it is there, or None.

    None is returned for a run that begins from random weights.
    """
    if run.start is None:
        return run.settings.model.path
    model = folder / run.start.name / "model"
    if not model.exists():
        recipe = folder / "start.toml"
        recipe.write_text(recipe_of(run.start.settings), encoding="utf-8")
        command(1, ["sft", str(recipe), f"run.dir={folder}", *resumed(folder / run.start.name)])
    return str(model)


def trained(
    run: PlannedRun, model: str | None, count: int, steps: int | None, folder: Path
) -> dict[str, Any]:
    """Return what a run by several processes ended with.

    A run without a final model in its directory is begun, or resumed where it was cut.

    Args:
        steps: The number of steps; None: the study's.
    """
    steps = steps or run.settings.loop.steps
    name = f"{run.name}-{run.digest[:8]}-{steps}-steps-{count}"
    if not (folder / name / "model").exists():
        recipe = folder / f"{name}.toml"
        recipe.write_text(recipe_of(run.settings), encoding="utf-8")
        words = ["train", str(recipe), f"run.dir={folder}", f"run.name={name}"]
        words += [f"loop.steps={steps}", *([f"model.path={model}"] if model else [])]
        command(count, [*words, *resumed(folder / name)])
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "mismatch/num_tokens" in record]
    return {
        "processes": count,
        "steps": len(records),
        "weights_sha256": sha256_of_weights(folder / name),
        "compared_tokens": int(sum(record["mismatch/num_tokens"] for record in records)),
        "different_tokens": int(sum(record["mismatch/num_different"] for record in records)),
        "steps_s": round(sum(record["timing/step_s"] for record in records), 1),
    }


def resumed(run: Path) -> list[str]:
    """Return the option with which a command goes on with a run, if the run was begun."""
    return ["--resume"] if (run / "config.toml").exists() else []


def command(count: int, words: list[str]) -> None:
    """Run a command of jetrl by several processes, with a CPU thread each."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    launch = [sys.executable, *(torchrun if count > 1 else []), "-m", "jetrl", *words]
    subprocess.run(launch, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
