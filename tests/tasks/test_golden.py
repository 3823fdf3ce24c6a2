"""GSM8K's answer checking against a file of completions whose verdicts were decided by hand.

A line of golden_gsm8k.jsonl: `gold`, what the data set says; `completion`; `right`, whether it is
worth 1; `answered`, whether it marks a final answer; `kind`, what the case is about.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from jetrl.tasks import Scorer, get_task
from jetrl.types import Prompt

FILE = Path(__file__).with_name("golden_gsm8k.jsonl")
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
KINDS = {"integer", "comma", "unit", "decimal", "fraction", "negative", "several", "boxed", "none"}


def test_every_kind_of_answer_is_there() -> None:
    counts = Counter(case["kind"].split()[0] for case in CASES)
    assert set(counts) == KINDS
    assert min(counts.values()) >= 5


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_verdicts(strict: bool) -> None:
    options = {"strict": strict}
    items = [(Prompt(id="g", text="?", answer=case["gold"]), case["completion"]) for case in CASES]
    with Scorer("gsm8k", str(FILE), options, workers=1) as scorer:
        scored = scorer.score(items)
    wrong = []
    for case, result in zip(CASES, scored, strict=True):
        right = case["right"] and (case["answered"] or not strict)
        got = (result.score.reward, result.score.parts["answered"], result.failure)
        if got != (float(right), float(case["answered"]), ""):
            wrong.append((case, got))
    assert wrong == []


def test_gold_answers_with_the_worked_text_are_right() -> None:
    task = get_task("gsm8k", path=str(FILE))
    for case in CASES:
        prompt = Prompt(id="g", text="?", answer=case["gold"])
        assert task.score(prompt, f"so it is\n#### {case['gold']}").reward == 1.0, case
