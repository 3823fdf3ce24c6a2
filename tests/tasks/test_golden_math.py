"""The checker `math` against golds and answers whose verdicts were decided by hand.

A line of golden_math.jsonl: `gold`, the right answer as a data set writes it; `completion`;
`right`, whether it is worth 1; `kind`, what the case is about.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from jetrl.tasks.answers import check_math, gold_answer

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("golden_math.jsonl").read_text("utf-8").splitlines()
]
GSM8K = Path(__file__).parents[2] / "data/gsm8k/test.jsonl"


def test_there_are_right_and_wrong_answers_of_every_kind() -> None:
    assert len(CASES) >= 200
    kinds = Counter((case["kind"], case["right"]) for case in CASES)
    assert {kind for kind, _ in kinds} == {
        *("percent", "tiny", "large", "decimal", "equation", "interval", "variable", "line"),
        *("tuple", "set", "matrix", "words", "algebra", "money"),
    }
    assert all((kind, not right) in kinds for kind, right in kinds)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-{case['gold']}")
def test_verdict(case: dict[str, object]) -> None:
    assert check_math(str(case["gold"]), str(case["completion"])).reward == float(
        bool(case["right"])
    ), case


def test_all_held_out_answers_of_gsm8k_are_judged_right() -> None:
    """Three ways to give the right answer of each of the 1,319 questions, and a wrong one."""
    wrong = []
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        worked = json.loads(line)["answer"]
        gold = gold_answer(worked)
        assert gold
        given = [(worked, 1.0), (f"so \\boxed{{{gold}}}", 1.0), (f"The answer is ${gold}.", 1.0)]
        given.append((f"#### {int(gold) + 1}", 0.0))
        wrong += [(gold, c) for c, right in given if check_math(gold, c).reward != right]
    assert wrong == []
