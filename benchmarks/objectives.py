"""Train the demo's task with every objective from one warm start: tables of docs/benchmarks.md.

Other runs measure what the order of the data, the choice of samples and a reward model change.

    python -m benchmarks.objectives --out build/objectives      all runs: an hour on a CPU
    python -m benchmarks.objectives --out build/objectives --only ppo --seeds 0

The warm start is made once, by `jetrl sft demo`. Each run then is `jetrl train demo` with `STEPS`
steps from it; a run that is already in the folder is not repeated. One row a run is printed and
written to `objectives.json` in the folder (benchmarks/results/cpu/objectives.json is such a file).

The `quarter` runs take the demo's sums as a data set in which three of four training prompts have
an answer that no completion gives: a run in which most prompts teach nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import command_typed, write_results

STEPS = 50
COMMON = [
    "model.config=none",
    "model.tokenizer=none",
    "sft.steps=0",
    "sft.until=none",
    f"loop.steps={STEPS}",
    f"eval.every={STEPS}",
    "checkpoint.every=0",
    "report.enabled=false",
    "algorithm.aggregation=none",
    "precision.bf16_rounding=nearest",
]
OBJECTIVES: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": ["algorithm.name=dr_grpo"],
    "dapo": ["algorithm.name=dapo"],
    "gspo": ["algorithm.name=gspo"],
    "cispo": ["algorithm.name=cispo"],
    "rloo": ["algorithm.name=rloo"],
    "reinforce_pp": ["algorithm.name=reinforce_pp"],
    "reinforce_pp_baseline": ["algorithm.name=reinforce_pp_baseline"],
    "ppo": ["algorithm.name=ppo", "critic.path=policy", "critic.lr=1e-3"],
}
FLOWS: dict[str, list[str]] = {
    "mixed": ["precision.preset=mixed"],
    "mixed-tis": ["precision.preset=mixed", "algorithm.correction=tis"],
    "mixed-tis-tight": [
        "precision.preset=mixed",
        "algorithm.correction=tis",
        "algorithm.correction_high=1.02",
    ],
}
QUARTER = [
    "task=dataset",
    "task.workers=0",
    "task.options.checker=exact",
    "task.options.format=text",
    "task.options.stop=['\\n']",
]
JUDGED = ["reward.model=0.1"]
DATA: dict[str, list[str]] = {
    "pass_rate": ["data.order=pass_rate"],
    "grpo-16": ["rollout.samples_per_prompt=16"],
    "shuffle_r1": ["rollout.samples_per_prompt=16", "data.batch=shuffle_r1"],
    "judged": JUDGED,
    "judged-alone": ["reward.rule=0.0", "reward.model=1.0"],
    "quarter-shuffle": QUARTER,
    "quarter-pass_rate": [*QUARTER, "data.order=pass_rate"],
    "quarter-judged": [*QUARTER, *JUDGED],
}


def jetrl(*words: str) -> None:
    command = [sys.executable, "-m", "jetrl", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)


def run(out: Path, name: str, words: list[str], seed: int) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl; make the run if it is not in the folder."""
    path = out / f"{name}-{seed}"
    if not (path / "model").is_dir():
        where = [f"run.dir={out}", f"run.name={path.name}", f"run.seed={seed}"]
        jetrl("train", "demo", f"model.path={out / 'warm-start'}", *COMMON, *where, *words)
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def row(name: str, seed: int, lines: list[dict[str, float]]) -> dict[str, Any]:
    """Summarize the metrics of one run: held-out accuracy, mismatch, correction, idle groups."""
    accuracies = [v for line in lines for k, v in line.items() if re.fullmatch("eval/.*/mean", k)]
    steps = [line for line in lines if "mismatch/num_tokens" in line]
    idle = [line["reward/zero_std_groups"] for line in steps if "reward/zero_std_groups" in line]
    summary: dict[str, Any] = {
        "run": name,
        "seed": seed,
        "percent_at_start": round(100 * accuracies[0], 1),
        "percent_at_end": round(100 * accuracies[-1], 1),
        "tokens": sum(int(line["mismatch/num_tokens"]) for line in steps),
        "different": sum(int(line["mismatch/num_different"]) for line in steps),
        "mean_abs_logprob_diff": _mean(steps, "mismatch/mean_abs_logprob_diff"),
        "max_abs_logprob_diff": max(line["mismatch/max_abs_logprob_diff"] for line in steps),
    }
    if idle:
        summary["percent_groups_without_variance"] = round(100 * sum(idle) / len(idle), 1)
    if "correction/weight_max" in steps[0]:
        touched = 100 * _mean(steps, "correction/touched_fraction")
        summary["largest_ratio"] = max(line["correction/ratio_max"] for line in steps)
        summary["largest_weight"] = max(line["correction/weight_max"] for line in steps)
        summary["percent_tokens_touched"] = round(touched, 2)
    return summary


def _mean(steps: list[dict[str, float]], name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


def make_quarter(folder: Path) -> None:
    """Write the demo's sums as a data set: a fifth held out, a quarter of the others solvable."""
    sums = [(a, b) for a in range(30) for b in range(30)]
    random.Random(0).shuffle(sums)
    folder.mkdir(exist_ok=True)
    for split, chosen in (("test", sums[:180]), ("train", sums[180:])):
        rows = [
            {
                "id": f"{a}+{b}",
                "prompt": f"{a:02d}+{b:02d}=",
                "answer": str(a + b).zfill(3)[::-1] if split == "test" or i % 4 == 0 else "no sum",
            }
            for i, (a, b) in enumerate(chosen)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def make_reward_model(out: Path) -> float:
    """Train the `judged` runs' reward model once; return the percent of pairs it orders right."""
    model, name = out / "judge", "judge-run"
    if not model.is_dir():
        words = ["model.config=none", "model.tokenizer=none", f"model.path={out / 'warm-start'}"]
        words += ["sft.until=none", "sft.steps=300", "sft.lr=1e-3", "eval.prompts=0"]
        where = [f"run.dir={out}", f"run.name={name}", "--out", str(model)]
        jetrl("sft", "demo", "--task", "reward", *words, *where)
    lines = (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    accuracies = [v for line in lines if (v := json.loads(line).get("reward_model/eval_accuracy"))]
    return round(100 * accuracies[-1], 1)


def runs(out: Path, only: list[str] | None) -> dict[str, list[str]]:
    """Return the settings of each run by its name, for the objectives that were chosen."""
    chosen = {name: words for name, words in OBJECTIVES.items() if only is None or name in only}
    if only is None or "flows" in only:
        chosen |= FLOWS
    if only is None or "data" in only:
        make_quarter(out / "data")
        for name, words in {"grpo": [], **DATA}.items():
            extra = [f"task.path={out / 'data'}"] if words[:1] == QUARTER[:1] else []
            if any(word.startswith("reward.model") for word in words):
                extra.append(f"reward.model_path={out / 'judge'}")
            chosen[name] = [*words, *extra]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/objectives"))
    parser.add_argument("--only", nargs="+", choices=[*OBJECTIVES, "flows", "data"], default=None)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    args = parser.parse_args()
    out = args.out.resolve()
    if not (out / "warm-start").is_dir():
        where = [f"run.dir={out}", "run.name=warm", "eval.every=0", "report.enabled=false"]
        jetrl("sft", "demo", *where, "--out", str(out / "warm-start"))
    facts: dict[str, Any] = {}
    if args.only is None or "data" in args.only:
        facts["reward_model_percent_pairs_right"] = make_reward_model(out)
    rows: list[dict[str, Any]] = []
    for name, words in runs(out, args.only).items():
        for seed in args.seeds if name not in FLOWS else args.seeds[:1]:
            rows.append(row(name, seed, run(out, name, words, seed)))
            print(json.dumps(rows[-1]), flush=True)
    command = command_typed("python -m benchmarks.objectives", None)
    write_results(out / "objectives.json", "objectives", command, rows, **facts)


if __name__ == "__main__":
    main()
