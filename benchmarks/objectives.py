"""Every objective on the demo's task, from one warm start: the tables of docs/recipes.md.

    python benchmarks/objectives.py --out build/objectives          all of it
    python benchmarks/objectives.py --out build/objectives --only ppo --seeds 0

The warm start is `jetrl sft demo`, made once. Each run then is `jetrl train demo` with `STEPS`
steps from it; a run that is there already is not repeated. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

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
    "unified": [],
    "mixed": ["precision.preset=mixed"],
    "mixed-tis": ["precision.preset=mixed", "algorithm.correction=tis"],
    "mixed-tis-tight": [
        "precision.preset=mixed",
        "algorithm.correction=tis",
        "algorithm.correction_high=1.02",
    ],
}


def jetrl(*words: str) -> None:
    command = [sys.executable, "-m", "jetrl", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)


def run(out: Path, name: str, words: list[str], seed: int) -> list[dict[str, float]]:
    """The run's lines, from disk if it is there."""
    path = out / f"{name}-{seed}"
    if not (path / "model").is_dir():
        where = [f"run.dir={out}", f"run.name={path.name}", f"run.seed={seed}"]
        jetrl("train", "demo", f"model.path={out / 'warm-start'}", *COMMON, *where, *words)
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def accuracy(line: dict[str, float]) -> str:
    return f"{100 * line['eval/arithmetic/mean']:.1f}%"


def objectives(out: Path, names: list[str], seeds: list[int]) -> None:
    print(
        "| objective | start | " + " | ".join(f"seed {s}" for s in seeds) + " | different tokens |"
    )
    print("| --- | --- | " + "--- | " * len(seeds) + "--- |")
    for name in names:
        runs = [run(out, name, OBJECTIVES[name], seed) for seed in seeds]
        different = sum(int(line.get("mismatch/num_different", 0)) for r in runs for line in r)
        tokens = sum(int(line.get("mismatch/num_tokens", 0)) for r in runs for line in r)
        ends = " | ".join(accuracy(r[-1]) for r in runs)
        print(f"| `{name}` | {accuracy(runs[0][0])} | {ends} | {different} of {tokens:,} |")


def flows(out: Path) -> None:
    print("| flow | end | mean abs. difference | largest | largest weight | touched tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, words in FLOWS.items():
        lines = run(out, "grpo" if name == "unified" else name, words, 0)
        steps = [line for line in lines if "mismatch/num_tokens" in line]
        mean = sum(line["mismatch/mean_abs_logprob_diff"] for line in steps) / len(steps)
        largest = max(line["mismatch/max_abs_logprob_diff"] for line in steps)
        cells = [f"{mean:.2g}", f"{largest:.2g}", "", ""]
        if "correction/weight_max" in steps[0]:
            weight = max(line["correction/weight_max"] for line in steps)
            touched = sum(line["correction/touched_fraction"] for line in steps) / len(steps)
            cells[2:] = [f"{weight:.4g}", f"{100 * touched:.2g}%"]
        print(f"| `{name}` | {accuracy(lines[-1])} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/objectives"))
    parser.add_argument("--only", nargs="+", choices=[*OBJECTIVES, "flows"], default=None)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    args = parser.parse_args()
    out = args.out.resolve()
    if not (out / "warm-start").is_dir():
        where = [f"run.dir={out}", "run.name=warm", "eval.every=0", "report.enabled=false"]
        jetrl("sft", "demo", *where, "--out", str(out / "warm-start"))
    names = [name for name in OBJECTIVES if args.only is None or name in args.only]
    if names:
        objectives(out, names, args.seeds)
    if args.only is None or "flows" in args.only:
        print()
        flows(out)


if __name__ == "__main__":
    main()
