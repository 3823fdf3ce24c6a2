"""How many drafted tokens are right in real runs, step by step: drafts from text, head and both.

    python -m benchmarks.draft_acceptance --out build/drafts

Models of 5 and 33 million parameters are trained from random weights on worked answers of three
tasks: traced programs of about 500 characters, products worked out digit by digit, and GSM8K's
questions with a tokenizer of their own; and one of 0.3 million on words spelt backward, if asked
for by `--task spelling --device cpu`. Each is then trained by GRPO three times, with
rollout.speculation text, head and auto, all from the same weights and with the same seed, until the
time is over. The processes share the card, so seconds mean nothing here; tokens a forward do. Every
step's are written to draft_acceptance.json in the folder, and whether the three runs of a task had
the same gradient norms, bit for bit, as they must. Where that was cut before its end,

    python -m benchmarks.draft_acceptance --out build/drafts --read

writes the file from the steps that the folder has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent / "study" / "models"
GSM8K = Path(__file__).resolve().parents[1] / "data" / "gsm8k"
MODES = ("text", "head", "auto")
MEAN_STEPS = 10  # the table has means of as many first and last steps
TIME_IS_OVER = 75  # the exit status of a run that run.max_hours has ended
TASKS = {
    "program": [
        f"model.config={MODELS / '5m.json'}",
        "model.tokenizer=characters",
        "task.name=program",
        "task.options.rounds=15",
        "task.options.mistakes=0.6",
        "rollout.max_tokens=520",
    ],
    "multiplication": [
        f"model.config={MODELS / '30m.json'}",
        "model.tokenizer=characters",
        "task.name=multiplication",
        "task.options.digits=6",
        "task.options.mistakes=0.6",
        "rollout.max_tokens=300",
    ],
    # For a CPU: words spelt backward, a task of reasoning-gym (pip install 'jetrl[reasoning-gym]').
    "spelling": [
        f"model.config={MODELS / '300k.json'}",
        "model.tokenizer=characters",
        "task.name=reasoning_gym:spell_backward",
        "task.options.format=text",
        "task.options.min_word_len=8",
        "rollout.max_tokens=24",
    ],
    "gsm8k": ["task.name=gsm8k", "task.options.format=text", "rollout.max_tokens=256"],
}
COMMON = [
    "task.workers=0",
    "train.betas=[0.9,0.95]",
    "train.tokens_per_micro_batch=16384",
    "checkpoint.every=0",
    "report.enabled=false",
    "eval.every=0",
]
RL = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.num_pages=1500",
    "rollout.keep_every=1000",
    "algorithm.aggregation=token_mean",
    "train.lr=3e-5",
    "loop.steps=1000",
    "draft_head.lr=1e-3",
    "draft_head.share=0.25",
    "draft_head.tokens_per_update=512",
]
GSM8K_SHAPE = ["--hidden-size", "512", "--num-layers", "10", "--num-heads", "8"]
GSM8K_SHAPE += ["--num-kv-heads", "4", "--intermediate-size", "1536", "--context", "1024"]


def jetrl(folder: Path, name: str, words: list[str]) -> None:
    """Run a command of jetrl, its console in FOLDER/NAME.txt; raise an error where it fails."""
    with (folder / f"{name}.txt").open("w") as console:
        call = [sys.executable, "-m", "jetrl", *words]
        done = subprocess.run(call, stdout=console, stderr=subprocess.STDOUT)
    if done.returncode not in (0, TIME_IS_OVER):
        raise RuntimeError(f"{folder / name}.txt: jetrl {words[0]} failed")


def run_task(args: argparse.Namespace, task: str) -> None:
    """Train a task's model on worked answers, then by GRPO in each mode."""
    folder: Path = args.out / task
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "empty.toml"
    recipe.touch()
    words = [*COMMON, *TASKS[task], f"run.dir={folder}", f"run.device={args.device}"]
    warm_up = ["sft.examples_per_step=64", "sft.lr=1e-3", "sft.warmup_steps=50"]
    warm_up += [f"sft.steps={args.sft_steps}", "run.name=warm-up"]
    if task == "gsm8k":
        text = ["--tokenizer", "bpe", "--text", str(GSM8K / "train.jsonl"), "--vocab-size", "4096"]
        jetrl(folder, "init", ["init", str(folder / "random"), *GSM8K_SHAPE, *text])
        warm_up.append(f"model.path={folder / 'random'}")
    start = folder / "start"
    more = [*args.more, "--out", str(start)]
    jetrl(folder, "warm-up", ["sft", str(recipe), *words, *warm_up, *more])
    model = [word for word in words if not word.startswith("model.")] + [f"model.path={start}"]
    model += [*RL, f"run.max_hours={args.seconds / 3600}"]

    def reinforce(mode: str) -> None:
        own = [f"run.name={mode}", f"rollout.speculation={mode}"]
        own += [word for word in args.more if not word.startswith("model.")]
        jetrl(folder, mode, ["train", str(recipe), *model, *own])

    with ThreadPoolExecutor(len(args.modes)) as pool:
        list(pool.map(reinforce, args.modes))


def read_task(args: argparse.Namespace, task: str) -> dict[str, Any]:
    """Return all steps that the runs of a task have done, and whether their gradients agree."""

    def steps_of(mode: str) -> list[dict[str, Any]]:
        lines = (args.out / task / mode / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["step"] > 0]

    steps = {mode: steps_of(mode) for mode in args.modes}
    together = min(map(len, steps.values()))
    norms = {tuple(line["policy/grad_norm"] for line in s[:together]) for s in steps.values()}
    return {
        "task": task,
        "steps_in_all": together,
        "same_gradient_norms": len(norms) == 1,
        "means": {mode: _means(lines) for mode, lines in steps.items()},
        "modes": {mode: [_numbers(line) for line in lines] for mode, lines in steps.items()},
    }


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return what is written of a step's metrics."""
    wanted = ("speculation/", "draft_head/", "response_length/mean", "reward/mean", "timing/draft")
    found = {"step": line["step"]}
    return found | {n: round(v, 4) for n, v in line.items() if n.startswith(wanted)}


def _means(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return means of first and last steps, of each metric over those steps that have it."""
    found: dict[str, dict[str, float]] = {}
    for name, part in (("first", lines[:MEAN_STEPS]), ("last", lines[-MEAN_STEPS:])):
        rows = [_numbers(line) for line in part]
        keys = dict.fromkeys(key for row in rows for key in row if key != "step")
        found[name] = {
            key: round(statistics.mean(row[key] for row in rows if key in row), 4) for key in keys
        }
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print tokens a forward and shares of right tokens: means of the first and the last steps."""
    print(f"{'task':15}{'mode':6}{'steps':6}  tokens/forward  self  siblings  head  loss")
    for row in rows:
        for mode, parts in row["means"].items():
            for part, line in parts.items():
                shares = [
                    line.get(f"speculation/acceptance_{source}", float("nan"))
                    for source in ("self", "siblings", "head")
                ]
                values = "".join(f"{share:8.2f}" for share in shares)
                loss = line.get("draft_head/loss", float("nan"))
                tokens = line["speculation/tokens_per_forward"]
                print(f"{row['task']:15}{mode:6}{part:6}{tokens:10.3f}{values}{loss:8.3f}")
        print(f"{row['task']}: {row['steps_in_all']} steps in all modes, ", end="")
        print(f"gradient norms {'the same' if row['same_gradient_norms'] else 'DIFFERENT'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/drafts"), help="folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--task", dest="tasks", action="append", choices=list(TASKS))
    parser.add_argument("--mode", dest="modes", action="append", choices=[*MODES, "off"])
    parser.add_argument("--sft-steps", type=int, default=400, help="supervised updates")
    parser.add_argument("--seconds", type=float, default=90, help="of each run of GRPO")
    parser.add_argument("--read", action="store_true", help="train nothing: read what is there")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="settings of both trainings")
    args = parser.parse_args()
    args.tasks = args.tasks or [task for task in TASKS if task != "spelling"]
    args.modes = args.modes or list(MODES)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.read:
        with ThreadPoolExecutor(len(args.tasks)) as pool:
            list(pool.map(lambda task: run_task(args, task), args.tasks))
    rows = [read_task(args, task) for task in args.tasks]
    result = {
        "benchmark": "draft_acceptance",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "benchmarks/draft_acceptance.py", *sys.argv[1:]]),
        "rows": rows,
    }
    (args.out / "draft_acceptance.json").write_text(json.dumps(result, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
