"""How far minutes of training bring a model of our own on GSM8K's real questions.

    python -m benchmarks.study.gsm8k --out build/gsm8k                  six minutes on one H200
    python -m benchmarks.study.gsm8k --out build/gsm8k --plan bf16      the same under BF16

A model of 33 million parameters with random weights and a tokenizer trained on the training
questions is trained on worked answers, those of GSM8K and variants of them with other numbers
(gsm8k_variants.py); then GRPO on the real training questions. Before and after GRPO it answers all
1,319 held-out questions, four times each. What is always the same answer, the most frequent one of
the training set, would get is printed beside it: that is the chance level. A row is printed and
written to gsm8k.json in the folder. Steps whose files are there are not done again.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import operator
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

DATA = Path("data/gsm8k")
SHAPE = ["--hidden-size", "512", "--num-layers", "10", "--num-heads", "8", "--num-kv-heads", "4"]
SHAPE += ["--intermediate-size", "1536", "--context", "1024"]
COMMON = [
    "task.name=gsm8k",
    "task.options.format=text",
    "rollout.max_tokens=256",
    "train.betas=[0.9,0.95]",
    "train.tokens_per_micro_batch=32768",
    "eval.prompts=256",
    "eval.temperature=1.0",
    "report.enabled=false",
    "checkpoint.every=0",
]


def write_data(folder: Path, num_variants: int) -> int:
    """Write training questions with variants, in an order drawn at random, and the held-out ones.

    Returns:
        The number of training rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    real = [json.loads(line) for line in (DATA / "train.jsonl").read_text("utf-8").splitlines()]
    source, rows = random.Random(0), list[Row](real)
    for row in real:
        rows += filter(None, (variant(row, source) for _ in range(num_variants)))
    source.shuffle(rows)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text, "utf-8")
    (folder / "test.jsonl").write_text((DATA / "test.jsonl").read_text("utf-8"), "utf-8")
    return len(rows)


def constant_accuracy() -> tuple[str, float]:
    """Return the most frequent answer of the training set, and its share of the held-out ones."""
    train, test = (_answers(DATA / f"{split}.jsonl") for split in ("train", "test"))
    answer = Counter(train).most_common(1)[0][0]
    return answer, test.count(answer) / len(test)


def _answers(file: Path) -> list[str]:
    """Return the right answer of every row of a file."""
    rows = map(json.loads, file.read_text("utf-8").splitlines())
    return [row["answer"].rpartition("####")[2].strip() for row in rows]


def supervise(args: argparse.Namespace) -> None:
    """Train the model on worked answers, and write it to OUT/supervised."""
    words = [f"model.path={args.out / 'random'}", f"task.path={args.out / 'data'}"]
    words += [f"sft.steps={args.sft_steps}", "sft.examples_per_step=64", "sft.lr=6e-4"]
    words += ["sft.warmup_steps=100", "sft.schedule=cosine", "run.name=supervise"]
    jetrl("sft", args, words, "--out", str(args.out / "supervised"))


def reinforce(args: argparse.Namespace) -> None:
    """Reinforce the supervised model on the real questions; the result is in OUT/reinforce."""
    words = [f"model.path={args.out / 'supervised'}", f"task.path={DATA}", "run.name=reinforce"]
    words += ["rollout.prompts_per_step=64", "rollout.samples_per_prompt=8", "train.lr=3e-5"]
    words += ["algorithm.aggregation=token_mean", f"loop.steps={args.steps}", "eval.every=20"]
    words += ["train.warmup_steps=5", "rollout.keep_every=1000"]
    jetrl("train", args, words)


def jetrl(command: str, args: argparse.Namespace, words: list[str], *options: str) -> None:
    """Run a command that trains, its console in the terminal; end this program where it fails."""
    recipe = args.out / "empty.toml"
    recipe.touch()
    shared = [f"run.dir={args.out}", f"run.device={args.device}", f"precision.preset={args.plan}"]
    call = [sys.executable, "-m", "jetrl", command, str(recipe), *COMMON, *shared, *words]
    if subprocess.run([*call, *args.more, *options]).returncode:
        sys.exit(f"jetrl {command} failed")


def accuracy(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return how well a model answers the held-out questions."""
    words = ["--task", "gsm8k", "--path", str(DATA), "--option", "format=text", "--samples", "4"]
    words += ["--temperature", "1.0", "--max-tokens", "256", "--plan", args.plan, "--json"]
    words += ["--prompts", str(args.prompts), "--device", args.device, "--workers", "8"]
    call = [sys.executable, "-m", "jetrl", "eval", str(model), *words]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("jetrl eval failed")
    values = json.loads(done.stdout)
    names = ("mean", "pass_at_k", "maj_at_k", "response_length", "clip_ratio")
    return {name: values[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gsm8k"), help="folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--plan", default="unified", help="precision preset")
    parser.add_argument("--variants", type=int, default=12, help="of each training question")
    parser.add_argument("--sft-steps", type=int, default=2500, help="supervised updates")
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO")
    parser.add_argument("--prompts", type=int, default=0, help="held-out questions; 0: all")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="settings of both trainings")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    row: dict[str, Any] = {"plan": args.plan, "sft_steps": args.sft_steps, "steps": args.steps}
    row["constant_answer"], row["constant_accuracy"] = constant_accuracy()
    if not (args.out / "random").is_dir():
        row["training_rows"] = write_data(args.out / "data", args.variants)
        call = [sys.executable, "-m", "jetrl", "init", str(args.out / "random"), *SHAPE]
        call += ["--tokenizer", "bpe", "--text", str(DATA / "train.jsonl"), "--vocab-size", "4096"]
        subprocess.run(call, check=True)
    for name, train, model in (
        ("supervised", supervise, args.out / "supervised"),
        ("reinforced", reinforce, args.out / "reinforce" / "model"),
    ):
        started = time.monotonic()
        if not (model / "config.json").is_file():
            train(args)
            row[f"{name}_s"] = round(time.monotonic() - started, 1)
        row[name] = accuracy(model, args)
        print(name, json.dumps(row[name]), flush=True)
    row["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    row["command"] = " ".join(["python", "benchmarks/study/gsm8k.py", *sys.argv[1:]])
    (args.out / "gsm8k.json").write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))


NUMBER = re.compile(r"\d[\d,]*\.?\d*(?<![.,])|\.\d+")
CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
CONSTANTS = frozenset(map(Fraction, (0, 1, 2, 7, 12, 24, 30, 52, 60, 100, 365)))
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LARGEST = 100_000
TRIES = 30

Row = dict[str, str]


def variant(row: Row, source: random.Random) -> Row | None:
    """Return a row of GSM8K with other numbers, or None where no draw fits."""
    named = {value_of(text) for text in NUMBER.findall(row["question"])}
    free = sorted(value for value in named - CONSTANTS if value.denominator == 1)
    if not free or any(value > LARGEST for value in free):
        return None
    for _ in range(TRIES):
        values = {value: Fraction(_draw(int(value), source)) for value in free}
        worked = _worked_again(row["answer"], values)
        if worked is not None and any(values[value] != value for value in free):
            return {
                "question": _rewritten(row["question"], values),
                "answer": _rewritten(row["answer"], worked),
            }
    return None


def value_of(text: str) -> Fraction:
    """Return the value of a number as GSM8K writes it, such as `1,200` or `.5`."""
    return Fraction(text.replace(",", ""))


def _draw(value: int, source: random.Random) -> int:
    """Return a new number like an old one: near it, and a multiple of ten or five as it was."""
    for unit in (100, 50, 10, 5):
        if value >= 2 * unit and value % unit == 0:
            return unit * source.randint(1, 2 * value // unit)
    return source.randint(max(2, value // 2), max(9, 2 * value))


def _worked_again(
    answer: str, named: Mapping[Fraction, Fraction]
) -> dict[Fraction, Fraction] | None:
    """Return the new value of each old one after all calculations; None where there is none."""
    values = dict(named)
    try:
        calculations = [
            (expression, value_of(written.strip()))
            for expression, written in CALCULATION.findall(answer)
        ]
        for expression, old in calculations:
            new = calculated(expression, values)
            if calculated(expression, {}) != old or not _may_become(old, new, values):
                return None
            values[old] = new
        # A number is replaced wherever it stands, also before the calculation that gave it.
        if any(calculated(expression, values) != values[old] for expression, old in calculations):
            return None
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
    final = value_of(answer.rpartition("####")[2].strip())
    return values if final in values and values != dict(named) else None


def _may_become(old: Fraction, new: Fraction, values: Mapping[Fraction, Fraction]) -> bool:
    """Return whether a value can take another's place: the only one, in bounds, whole as it was."""
    hundredths = (100 * new).denominator == 1
    alike = (old.denominator == 1) == (new.denominator == 1)
    return values.get(old, new) == new and 0 <= new <= LARGEST and hundredths and alike


def calculated(expression: str, values: Mapping[Fraction, Fraction]) -> Fraction:
    """Return the value of a calculation, with some of its numbers replaced."""
    text = NUMBER.sub(lambda match: f"'{match.group()}'", expression.strip())
    return _evaluated(ast.parse(text, mode="eval").body, values)


def _evaluated(node: ast.expr, values: Mapping[Fraction, Fraction]) -> Fraction:
    """Return the value of a node of a parsed calculation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        number = value_of(node.value)
        return values.get(number, number)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = (_evaluated(side, values) for side in (node.left, node.right))
        return Fraction(OPERATIONS[type(node.op)](left, right))
    raise ValueError("not a sum, product or quotient of numbers")


def _rewritten(text: str, values: Mapping[Fraction, Fraction]) -> str:
    """Return a text with new numbers in place of the old ones."""

    def new(match: re.Match[str]) -> str:
        old = value_of(match.group())
        return _shown(values[old]) if values.get(old, old) != old else match.group()

    return NUMBER.sub(new, text)


def _shown(value: Fraction) -> str:
    """Return a number as GSM8K writes it: whole, or with its hundredths."""
    return str(value) if value.denominator == 1 else f"{float(value):.2f}".rstrip("0")


if __name__ == "__main__":
    main()
