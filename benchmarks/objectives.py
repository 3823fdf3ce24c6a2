"""Every objective on the demo's task, from one warm start, and what the order of the data, the
choice of samples and a reward model do to it: the tables of docs/recipes.md and docs/data.md.

    python benchmarks/objectives.py --out build/objectives          all of it
    python benchmarks/objectives.py --out build/objectives --only ppo --seeds 0

The warm start is `jetrl sft demo`, made once. Each run then is `jetrl train demo` with `STEPS`
steps from it; a run that is there already is not repeated. Prints Markdown.

The `quarter` runs have the demo's sums as a data set in which three of four training prompts have
an answer that nobody gives: a run in which most prompts teach nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import re
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
    "quarter-shuffle": QUARTER,
    "quarter-pass_rate": [*QUARTER, "data.order=pass_rate"],
    "quarter-judged": [*QUARTER, *JUDGED],
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
    means = [value for name, value in line.items() if re.fullmatch("eval/.*/mean", name)]
    return f"{100 * means[0]:.1f}%"


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


def make_quarter(folder: Path) -> None:
    """The sums of the demo, a fifth of them held out; every fourth of the others can be solved."""
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


def data(out: Path, seeds: list[int]) -> None:
    make_quarter(out / "data")
    judge = out / "judge"
    if not judge.is_dir():
        words = ["model.config=none", "model.tokenizer=none", f"model.path={out / 'warm-start'}"]
        words += ["sft.until=none", "sft.steps=300", "sft.lr=1e-3", "eval.prompts=0"]
        where = [f"run.dir={out}", "run.name=judge-run", "--out", str(judge)]
        jetrl("sft", "demo", "--task", "reward", *words, *where)
    print("| run | seed | end | groups that teach nothing | tokens trained on |")
    print("| --- | --- | --- | --- | --- |")
    for name, words in {"grpo": [], **DATA}.items():
        extra = [f"task.path={out / 'data'}"] if words[:1] == QUARTER[:1] else []
        extra += [f"reward.model_path={judge}"] if JUDGED[0] in words else []
        for seed in seeds:
            lines = run(out, name, [*words, *extra], seed)
            steps = [line for line in lines if line["step"] > 0]
            idle = sum(line["reward/zero_std_groups"] for line in steps) / len(steps)
            tokens = sum(line["mismatch/num_tokens"] for line in steps)
            cells = [accuracy(lines[-1]), f"{100 * idle:.0f}%", f"{tokens:,.0f}"]
            print(f"| `{name}` | {seed} | " + " | ".join(cells) + " |")


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
    names = [name for name in OBJECTIVES if args.only is None or name in args.only]
    if names:
        objectives(out, names, args.seeds)
    if args.only is None or "flows" in args.only:
        print()
        flows(out)
    if args.only is None or "data" in args.only:
        print()
        data(out, args.seeds)


if __name__ == "__main__":
    main()
