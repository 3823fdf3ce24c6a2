"""Variants of the questions of GSM8K with other numbers have calculations that hold."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("gsm8k", ROOT / "benchmarks" / "study" / "gsm8k.py")
variants = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(variants)


def test_calculations_of_variants_hold_and_constants_stay():
    rows = [
        json.loads(line)
        for line in (ROOT / "data/gsm8k/train.jsonl").read_text("utf-8").splitlines()[:200]
    ]
    source = random.Random(0)
    made = [(row, variants.variant(row, source)) for row in rows]
    # Three in four questions have a variant; half would be a sign that a rule is broken.
    assert sum(other is not None for _, other in made) > 100
    for row, other in made:
        if other is None:
            continue
        assert other["question"] != row["question"]
        calculations = variants.CALCULATION.findall(other["answer"])
        assert len(calculations) == len(variants.CALCULATION.findall(row["answer"]))
        for expression, result in calculations:
            assert variants.calculated(expression, {}) == variants.value_of(result)


@pytest.mark.parametrize(
    "answer",
    [
        "48/2=<<48/2=25>>25\n#### 25",  # a wrong calculation
        "48%=<<48%=0.48>>0.48\n#### 0.48",  # no sum, product or quotient
        "48/0=<<48/0=1>>1\n#### 1",
        "48**9=<<48**9=1>>1\n#### 1",
        "no calculation\n#### 7",
    ],
)
def test_answers_that_cannot_be_worked_again_have_no_variant(answer):
    row = {"question": "Of 48 apples?", "answer": answer}
    assert variants.variant(row, random.Random(0)) is None
