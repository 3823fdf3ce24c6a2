"""The golden tables: which answer a text gives, and whether it is right.

golden_math.jsonl: `gold`, the right answer as a data set writes it; `completion`; `right`;
`kind`, what the case is about. golden_gsm8k.jsonl has `answered` too: the answer is marked.
golden_read.jsonl: `completion`, the `answer` read from it, `marked`.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from jetrl.settings.sections import TaskSettings
from jetrl.tasks import Scorer
from jetrl.tasks.answers import check_math, final_answer, gold_answer, same_value
from jetrl.types import Prompt


def table(name):
    text = Path(__file__).with_name(name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


MATH = table("golden_math.jsonl")
GSM8K = table("golden_gsm8k.jsonl")
LIMIT = TaskSettings().memory_mib
HELD_OUT = Path(__file__).parents[2] / "data/gsm8k/test.jsonl"


def test_final_answer():
    for case in table("golden_read.jsonl"):
        found = final_answer(case["completion"])
        assert found is not None, case
        assert (found.text, found.marked) == (case["answer"], case["marked"]), case
    for completion in ("", "####", "no idea", "#### none", "?!", "$", "-", "..."):
        assert final_answer(completion) is None
    assert final_answer("The answer is 18", strict=True) is None


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in MATH}))
def test_verdicts(kind):
    cases = [case for case in MATH if case["kind"] == kind]
    wrong = [c for c in cases if check_math(c["gold"], c["completion"]).reward != float(c["right"])]
    assert wrong == []


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_verdicts_of_gsm8k_in_a_worker(strict):
    assert min(Counter(case["kind"].split()[0] for case in GSM8K).values()) >= 5
    items = [(Prompt(id="g", text="?", answer=case["gold"]), case["completion"]) for case in GSM8K]
    with Scorer("gsm8k", str(HELD_OUT), {"strict": strict}, workers=1, memory_mib=LIMIT) as scorer:
        scored = scorer.score(items)
    for case, result in zip(GSM8K, scored, strict=True):
        right = case["right"] and (case["answered"] or not strict)
        got = (result.score.reward, result.score.parts["answered"], result.failure)
        assert got == (float(right), float(case["answered"]), ""), case


def test_all_held_out_answers_of_gsm8k_are_judged_right():
    """Three ways to give the right answer of each of the 1,319 questions, and a wrong one."""
    wrong = []
    for line in HELD_OUT.read_text(encoding="utf-8").splitlines():
        worked = json.loads(line)["answer"]
        gold = gold_answer(worked)
        assert gold
        given = [(worked, 1.0), (f"so \\boxed{{{gold}}}", 1.0), (f"The answer is ${gold}.", 1.0)]
        given.append((f"#### {int(gold) + 1}", 0.0))
        wrong += [(gold, c) for c, right in given if check_math(gold, c).reward != right]
    assert wrong == []


@pytest.mark.parametrize(
    "text, gold",
    [
        (" 5,600\n", "5600"),
        ("so\n#### -9", "-9"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so $\boxed 12$", "12"),
        (r"\fbox{5}", "5"),
        ("The answer is 12.", "12"),
        ("**Answer:** 12 apples", "12"),
        ("x=5", "x=5"),
        ("50\\%", "50%"),
        # not readable
        (" ", ""),
        ("so it is \\boxed{12", ""),
        (r"\frac{1}{2", ""),
        ("He has 12 apples", ""),
        (r"\boxed{5 6}", ""),
        ("x+" * 200, ""),
    ],
)
def test_golds_are_read_by_one_reader(text, gold):
    assert gold_answer(text) == gold
    assert gold_answer(gold) == gold


PIECES = ["9", "1,", "1,000,", "$", "- ", "-$ ", "1/", "{", r"\boxed{", r"\text{", "=", "####"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("piece", [*PIECES, "#### ", " ", "\x00\ud800", "\u0663\u0664"])
def test_any_text_is_read_in_time_about_linear_in_its_length(piece):
    """A regular expression that goes back over each of 300,000 characters would take hours."""
    for start in ("", "####", r"\boxed{"):
        found = final_answer(start + piece * (300_000 // len(piece)))
        if found is not None:
            assert same_value("18", found.text) is False


def test_an_answer_that_takes_for_ever_to_evaluate_scores_0(limits_of_starts):
    limits_of_starts(60.0, 0.5, 60.0)
    prompt = Prompt(id="0", text="?", answer="18")
    with Scorer("gsm8k", ".", workers=1) as scorer:
        scorer.close()
        tower, fine = scorer.score([(prompt, r"\boxed{9^{9^{9^{9^9}}}}"), (prompt, "#### 18")])
    assert tower.score.reward == 0
    assert "took longer than 0.5 s of processor time" in tower.failure
    assert fine.score.reward == 1


@pytest.mark.parametrize(
    "answer, right",
    [
        ("(" * 30 + "18" + ")" * 30, True),
        ("(" * 30 + "19" + ")" * 30, False),
        (r"\left(" * 14 + "18" + r"\right)" * 14, True),
        ("(" * 20 + "9" + ")" * 20 + "+" + "(" * 20 + "9" + ")" * 20, True),
        (r"\frac{{{{{{{{{{36}}}}}}}}}}{2}", True),
    ],
)
def test_brackets_around_brackets_take_no_time(answer, right):
    assert check_math("#### 18", rf"\boxed{{{answer}}}").reward == right
