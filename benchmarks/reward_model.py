"""Does a reward model judge in eight bits as in BF16? One set of weights, scored under each plan.

    python -m benchmarks.reward_model build/smollm2 --out reward_model.json      seeds 0 to 4

A pair is a worked answer of data/gsm8k, and the same answer with one wrong result: one calculation,
drawn at random, gets a number that is 1 to 12 away, and the rest stays. A seed is that of the
errors and of the order of training. SmolLM2 with a new scalar head learns 12,800 pairs under `bf16`
and is written in FP32; then each plan scores 1,000 pairs of the test split with these weights.

Set before the first run:

- Measure: pair accuracy of a plan less that of `bf16`, per seed; its mean over five seeds with a t
  interval of 95%.
- Eight bits are said to judge as BF16 does if the whole interval is within one point of 0; to judge
  worse if it is below 0 otherwise; neither, if neither holds.
- Scores are said to keep their order if their rank correlation (Spearman) with those of `bf16` is
  0.99 or more with every seed. `fp32` is the yardstick: what BF16's own rounding changes.
- Check, without which nothing is shown: accuracy under `bf16` between 60 and 98% with every seed.
- Reported without a rule: the share of pairs whose order differs, seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.harness import Row, begins, command_typed, print_table, write_results
from benchmarks.policies import plan_of
from benchmarks.study.statistics import mean_interval

from jetrl import load_config
from jetrl.errors import UserError
from jetrl.memory.out_of_memory import release
from jetrl.models.scalar_model import ScalarModel
from jetrl.session.open import check_pairs
from jetrl.session.supervised import train_reward_model

ROOT = Path(__file__).parents[1]
PLANS = {"bf16": "bf16 bf16_rounding=nearest", "fp32": "fp32", "int8": "int8", "unified": "unified"}
MARGIN, ORDERED, SOLVED = 0.01, 0.99, (0.6, 0.98)
TRAINING = """
    task=dataset precision.preset=bf16 run.name=judge checkpoint.every=0 report.enabled=false
    sft.examples_per_step=32 sft.lr=5e-5 sft.warmup_steps=20 sft.schedule=linear
    train.tokens_per_micro_batch=16384
"""
TOKENS_AT_ONCE = 16384
_RESULT = re.compile(r"=(\d+)>>\1")


def with_error(answer: str, r: random.Random) -> str | None:
    """Return a worked answer with another result of one calculation; None without a whole one."""
    found = [*_RESULT.finditer(answer)]
    if not found:
        return None
    one = r.choice(found)
    wrong = int(one[1]) + r.choice([n for n in range(-12, 13) if n and int(one[1]) + n >= 0])
    return f"{answer[: one.start()]}={wrong}>>{wrong}{answer[one.end() :]}"


def write_pairs(folder: Path, seed: int) -> None:
    """Write train.jsonl and test.jsonl, with right and wrong answers to the questions of gsm8k."""
    for split in ("train", "test"):
        r = random.Random(f"{split} {seed}")
        with (
            (ROOT / "data" / "gsm8k" / f"{split}.jsonl").open(encoding="utf-8") as rows,
            (folder / f"{split}.jsonl").open("w", encoding="utf-8") as pairs,
        ):
            for row in map(json.loads, rows):
                if wrong := with_error(row["answer"], r):
                    pair = {"chosen": row["answer"], "rejected": wrong}
                    pairs.write(json.dumps({"prompt": row["question"], **pair}) + "\n")


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation of the ranks of two vectors."""
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def of_seed(seed: int, args: argparse.Namespace) -> list[Row]:
    """Train a reward model and return the row of each plan that scores with its weights."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder, written = Path(name), Path(name) / "judge-written"
        write_pairs(folder, seed)
        words = [f"model.path={args.model}", f"task.path={folder}", f"run.dir={folder}"]
        words += [f"run.seed={seed}", f"sft.steps={args.steps}", f"eval.prompts={args.pairs}"]
        words += [f"run.device={args.device}", *TRAINING.split(), *args.settings]
        settings = load_config(None, words)
        # Only the held-out pairs: training reads the others.
        held_out = load_config(None, [*words, "task.split=test"])
        pairs = check_pairs(held_out).eval_pairs
        began = time.perf_counter()
        train_reward_model(settings, written)
        training_s = round(time.perf_counter() - began, 1)
        release()
        scores: dict[str, np.ndarray] = {}
        for plan, options in PLANS.items():
            begins(f"seed {seed}: scores under {plan}")
            model = ScalarModel.from_pretrained(written, plan_of(options), args.device, frozen=True)
            began = time.perf_counter()
            sequences = [sequence for pair in pairs for sequence in pair]
            scores[plan] = model.scores(sequences, TOKENS_AT_ONCE).double().numpy()
            seconds = round(time.perf_counter() - began, 2)
            right, base = (s[0::2] > s[1::2] for s in (scores[plan], scores["bf16"]))
            rows.append(
                {
                    "seed": seed,
                    "plan": plan,
                    "pairs": len(pairs),
                    "accuracy": float(right.mean()),
                    "accuracy_change": float(right.mean() - base.mean()),
                    "other_order": float((right != base).mean()),
                    "rank_correlation": rank_correlation(scores[plan], scores["bf16"]),
                    "score_std": float(scores[plan].std()),
                    "mean_abs_score_change": float(abs(scores[plan] - scores["bf16"]).mean()),
                    "seconds_with_compiling": seconds,
                    "training_s": training_s,
                }
            )
            del model
            release()
    return rows


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Return what the rule says of each plan."""
    solved = all(SOLVED[0] <= row["accuracy"] <= SOLVED[1] for row in rows if row["plan"] == "bf16")
    found = []
    for plan in list(PLANS)[1:]:
        own = [row for row in rows if row["plan"] == plan]
        change = mean_interval([row["accuracy_change"] for row in own], 0.95)
        verdict = "undecided"
        if not solved or change.n < 5:
            verdict = "nothing is shown"
        elif change.low >= -MARGIN and change.high <= MARGIN:
            verdict = "as bf16"
        elif change.high < 0:
            verdict = "worse than bf16"
        found.append(
            {
                "plan": plan,
                "accuracy_change": change.mean,
                "low": change.low,
                "high": change.high,
                "seeds": change.n,
                "verdict": verdict,
                "keeps_order": all(row["rank_correlation"] >= ORDERED for row in own),
            }
        )
    return found


def earlier_rows(out: Path | None, command: str) -> list[Row]:
    """Return the rows of a file that the same command has begun; none without a file."""
    if out is None or not out.is_file():
        return []
    results = json.loads(out.read_text(encoding="utf-8"))
    if results["command"] != command:
        raise UserError(f"--out {out}: the file of another command: {results['command']}")
    return list(results["rows"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the directory of SmolLM2-135M-Instruct")
    parser.add_argument("settings", nargs="*", help="other settings of training, to try it out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="updates of 32 pairs")
    parser.add_argument("--pairs", type=int, default=1000, help="held-out pairs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--out", type=Path, help="JSON file, written after each seed, and continued"
    )
    args = parser.parse_args(argv)
    command = command_typed("python -m benchmarks.reward_model", argv)
    rows = earlier_rows(args.out, command)
    for seed in range(len(rows) // len(PLANS), args.seeds):
        rows += of_seed(seed, args)
        print_table(rows[-len(PLANS) :])
        if args.out is not None:
            write_results(args.out, "reward_model", command, rows, verdicts=verdicts(rows))
    print_table(verdicts(rows))


if __name__ == "__main__":
    main()
