"""The differences from BF16 that eight_bits.toml asks for, by its rule.

    python -m benchmarks.study.eight_bits [RESULTS.json] [--out SUMMARY.json]

A row per arm: mean and standard error, over seeds, of the greedy accuracy before the first step and
after the last, and of their differences from `bf16` with the same start, in points; the mean reward
and gradient norm of the first and of the last ten steps; the mean seconds of all updates of a run;
and the tokens that sampler and trainer gave different log-probs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness import print_table

FILE = Path("benchmarks/results/study/eight_bits.json")


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return round(fmean(values), 2), round(stdev(values) / len(values) ** 0.5, 2)


def summary(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a results file."""
    runs = {(run["arm"], run["seed"]): run for run in results["runs"]}
    seeds = results["definition"]["study"]["seeds"]
    rows = []
    for arm in results["definition"]["arms"]:
        own = [runs[arm, seed] for seed in seeds]
        row: dict[str, Any] = {"arm": arm, "seeds": len(seeds)}
        for place, name in ((0, "start"), (-1, "end")):
            held = [100 * run["held_out"]["values"]["mean"][place] for run in own]
            base = [100 * runs["bf16", seed]["held_out"]["values"]["mean"][place] for seed in seeds]
            row[name] = mean_and_error(held)[0]
            if arm != "bf16":
                differences = [a - b for a, b in zip(held, base, strict=True)]
                row[f"{name}_minus_bf16"], row[f"{name}_error"] = mean_and_error(differences)
        for key in ("reward/mean", "policy/grad_norm"):
            for steps, name in ((slice(10), "first"), (slice(-10, None), "last")):
                means = [fmean(run["curves"]["values"][key][steps]) for run in own]
                row[f"{key}_{name}"] = round(fmean(means), 4)
        row["update_s"] = round(fmean(run["seconds"]["update"] for run in own), 1)
        row["tokens"] = sum(run["compared_tokens"] for run in own)
        row["different"] = sum(run["different_tokens"] for run in own)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study.eight_bits")
    parser.add_argument("results", nargs="?", type=Path, default=FILE)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = json.loads(args.results.read_text(encoding="utf-8"))
    rows = summary(results)
    print_table(rows)
    if args.out:
        facts = {"command": "python -m benchmarks.study.eight_bits", "date": results["date"]}
        text = json.dumps({**facts, "devices": results["devices"], "rows": rows}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
