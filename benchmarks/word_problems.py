"""Word problems with worked answers, a task with headroom for a model of 135M parameters.

    python -m benchmarks.word_problems build/words [--train 12000] [--test 4000] [--seed 0]

Writes train.jsonl and test.jsonl for `task.name=dataset`: prompt, answer (a whole number), and
demonstration (one step per line, then `#### N`). No test prompt is a training prompt.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NAMES = "Ana Ben Cara Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Noah Olga Paul Rita Sam Tina Umar "
NAMES += "Vera Will Yara Zoe"
THINGS = "apples books candles coins cookies cups eggs flowers marbles pencils plates shells "
THINGS += "stamps stickers stones tickets"
MOST = 60  # of a number that a problem begins with or adds
STEPS = (2, 5)


def problem(r: random.Random) -> dict[str, str]:
    """Return a problem of two to five steps."""
    name, other = r.sample(NAMES.split(), 2)
    thing = r.choice(THINGS.split())
    n = r.randint(5, MOST)
    text, work = [f"{name} has {n} {thing}."], []
    for _ in range(r.randint(*STEPS)):
        kind, many, few = r.randrange(6), r.randint(2, MOST), r.randint(2, 9)
        if kind == 0:
            text.append(f"{name} finds {many} more.")
            work.append(f"{n} + {many} = {n + many}")
            n += many
        elif kind == 1 and n > 2:
            many = r.randint(1, n - 1)
            text.append(f"{name} gives {many} to {other}.")
            work.append(f"{n} - {many} = {n - many}")
            n -= many
        elif kind == 2:
            bags = many % 12 or 1
            text.append(f"{name} buys {bags} bags with {few} {thing} in each.")
            work += [f"{bags} * {few} = {bags * few}", f"{n} + {bags * few} = {n + bags * few}"]
            n += bags * few
        elif kind == 3 and n * few < 2000:
            text.append(f"Then {other} makes the number {few} times as large.")
            work.append(f"{n} * {few} = {n * few}")
            n *= few
        elif kind == 4 and n % 2 == 0:
            text.append(f"{name} loses half of them.")
            work.append(f"{n} / 2 = {n // 2}")
            n //= 2
        else:
            text.append(f"{other} brings {few} more.")
            work.append(f"{n} + {few} = {n + few}")
            n += few
    return {
        "prompt": " ".join(text) + f" How many {thing} does {name} have now?",
        "answer": str(n),
        "demonstration": "\n".join([*work, f"#### {n}"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=12_000)
    parser.add_argument("--test", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    r = random.Random(args.seed)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < args.train + args.test:
        made = problem(r)
        problems.setdefault(made["prompt"], made)
    rows = list(problems.values())
    args.out.mkdir(parents=True, exist_ok=True)
    for split, part in (("test", rows[: args.test]), ("train", rows[args.test :])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (args.out / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
