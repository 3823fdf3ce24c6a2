"""Word problems with worked answers, a task with headroom for a model of 135M parameters.

    python -m benchmarks.word_problems build/words [--train 12000] [--test 4000] [--seed 0]
    python -m benchmarks.word_problems build/total500 --kind total --steps 18 23 --most 40
    python -m benchmarks.word_problems build/total2000 --kind total --steps 80 100 --most 9

Writes train.jsonl and test.jsonl for `task.name=dataset`: prompt, answer (a whole number), and
demonstration (one step per line, then `#### N`). No test prompt is a training prompt.

Of `words`, two to five steps take about 50 tokens of SmolLM2. `total` is for long answers: a total
that stays below 100, changed by numbered events. Each step has the event and one of 12 to 16 ways
to work it out, drawn at random.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NAMES = "Ana Ben Cara Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Noah Olga Paul Rita Sam Tina Umar "
NAMES += "Vera Will Yara Zoe"
THINGS = "apples books candles coins cookies cups eggs flowers marbles pencils plates shells "
THINGS += "stamps stickers stones tickets"


def row(text: list[str], question: str, work: list[str], answer: int) -> dict[str, str]:
    return {
        "prompt": " ".join([*text, question]),
        "answer": str(answer),
        "demonstration": "\n".join([*work, f"#### {answer}"]),
    }


def words(r: random.Random, steps: Sequence[int], most: int) -> dict[str, str]:
    """Return a problem whose events add, subtract, multiply and halve."""
    name, other = r.sample(NAMES.split(), 2)
    thing = r.choice(THINGS.split())
    n = r.randint(5, most)
    text, work = [f"{name} has {n} {thing}."], []
    for _ in range(r.randint(*steps)):
        kind, many, few = r.randrange(6), r.randint(2, most), r.randint(2, 9)
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
    return row(text, f"How many {thing} does {name} have now?", work, n)


def worked(r: random.Random, n: int, change: int) -> str:
    """Return n + change, worked out in a random way."""
    sign, word, many = ("+", "plus", change) if change >= 0 else ("-", "minus", -change)
    end = n + change
    to_ten = -n % 10 if change >= 0 else n % 10  # from n to the next round number
    ways = [
        f"{n} {sign} {many} = {end}",
        f"{end} = {n} {sign} {many}",
        f"{n} {word} {many} is {end}",
    ]
    if 0 < to_ten < many:
        ten = n + to_ten if change >= 0 else n - to_ten
        ways.append(f"{n} {sign} {to_ten} = {ten}, {ten} {sign} {many - to_ten} = {end}")
    return r.choice((": ", ", so ", ". Then ", ". Now ")) + r.choice(ways)


def total(r: random.Random, steps: Sequence[int], most: int) -> dict[str, str]:
    """Return a total that stays below 100, which events change by `most` (at most 49) or less."""
    thing, n = r.choice(THINGS.split()), r.randint(1, 99)
    text, work = [f"A box has {n} {thing}."], []
    for number in range(1, 1 + r.randint(*steps)):
        many = r.randint(1, min(most, 49))
        change = r.choice([c for c in (many, -many) if 0 <= n + c < 100])
        event = f"{number}. {r.choice(NAMES.split())} {'adds' if change > 0 else 'takes'} {many}"
        text.append(f"{event}.")
        work.append(f"{event}{worked(r, n, change)}.")
        n += change
    return row(text, f"How many {thing} are in the box now?", work, n)


Kinds = Mapping[str, Callable[[random.Random, Sequence[int], int], dict[str, str]]]
KINDS = {"words": words, "total": total}


def main(kinds: Kinds) -> None:
    """Write a data set of one of these kinds, the first by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=12_000)
    parser.add_argument("--test", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=kinds, default=next(iter(kinds)))
    parser.add_argument("--steps", type=int, nargs=2, default=(2, 5), help="fewest and most")
    parser.add_argument("--most", type=int, default=60, help="largest number (or longest word)")
    args = parser.parse_args()
    r = random.Random(args.seed)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < args.train + args.test:
        made = kinds[args.kind](r, args.steps, args.most)
        problems.setdefault(made["prompt"], made)
    rows = list(problems.values())
    sizes = sorted(len(row["demonstration"]) for row in rows)
    mean, p99 = sum(sizes) / len(sizes), sizes[len(sizes) * 99 // 100]
    print(f"characters of a demonstration: mean {mean:.0f}, 99th percentile {p99}")
    args.out.mkdir(parents=True, exist_ok=True)
    for split, part in (("test", rows[: args.test]), ("train", rows[args.test :])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (args.out / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(KINDS)
