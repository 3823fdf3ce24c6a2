"""The golden table: which answer a text gives, and whether it is right."""

import json
from pathlib import Path

import pytest

from jetrl.tasks import Scorer
from jetrl.tasks.answers import (
    check_math,
    final_answer,
    gold_answer,
    same_value,
    without_doubled_brackets,
)
from jetrl.types import Prompt

FORMS = Path(__file__).with_name("answer_forms.jsonl")
CASES = [json.loads(line) for line in FORMS.read_text("utf-8").splitlines()]
GOLDEN = [
    # completion, answer read, marked
    ("#### 18", "18", True),
    ("She sells 9 eggs.\n#### 18\n", "18", True),
    ("####18", "18", True),
    ("#### $18", "18", True),
    ("#### -18", "-18", True),
    ("#### -$18", "-18", True),
    ("#### $-18", "-18", True),
    ("#### \u221218", "-18", True),
    ("#### 1,234,567", "1234567", True),
    ("#### $1,200.50", "1200.50", True),
    ("#### 18 dollars", "18", True),
    ("#### 18.", "18", True),
    ("#### 50%", "50", True),
    ("#### **18**", "18", True),
    ("#### 3/4", "3/4", True),
    ("#### .5", ".5", True),
    ("#### 5 apples and 3 pears", "5", True),
    ("#### 17\nNo: \n#### 18", "18", True),
    (r"\boxed{18}", "18", True),
    (r"The answer is $\boxed{18}$.", "18", True),
    (r"\boxed{\$18}", "18", True),
    (r"\boxed{1{,}200}", "1200", True),
    (r"\boxed{18\text{ dollars}}", "18", True),
    (r"\boxed{18 eggs}", "18", True),
    (r"\boxed{50\%}", "50", True),
    (r"\boxed{x = 18}", "18", True),
    (r"\boxed{9 + 9 = 18}", "18", True),
    (r"\boxed{-\frac{1}{2}}", r"-\frac{1}{2}", True),
    (r"\boxed{\dfrac{36}{2}}", r"\dfrac{36}{2}", True),
    (r"\boxed{17} no, \boxed{18}", "18", True),
    (r"\boxed{.5}", ".5", True),
    ("\\boxed{\n18\n}", "18", True),
    (r"\boxed{18\ \text{cm}}", "18", True),
    (r"\boxed{18~\mathrm{m/s}}", "18", True),
    (r"\boxed{18\text{ cm}^2}", "18", True),
    (r"\boxed{18 \text{ m}^{3}}", "18", True),
    (r"\boxed{18 cm^2}", "18", True),
    (r"\boxed{18 km/h}", "18", True),
    (r"\boxed{18 sq. ft}", "18", True),
    (r"\boxed{\text{18}}", "18", True),
    (r"\boxed{\text{18 apples}}", "18", True),
    (r"\boxed{18°}", "18", True),
    (r"\boxed{₹18}", "18", True),
    ("#### ¥1,800", "1800", True),
    ("#### 1e6", "1000000", True),
    (r"\boxed{2.5E-3}", "0.0025", True),
    ("#### 18e", "18e", True),
    # mixed numbers
    ("#### 2 1/3", "7/3", True),
    (r"\boxed{-2 1/2}", "-5/2", True),
    ("It takes 2 1/2 hours", "5/2", False),
    ("It takes 2 1/2.", "5/2", False),
    ("It takes 2.5 1/2.", "1/2", False),
    # precedence: the last marked answer, of either kind, before any plain number
    (r"\boxed{17}" + "\n#### 18", "18", True),
    ("#### 17\n" + r"so \boxed{18}", "18", True),
    ("#### 18\nThat is 3 more than 15.", "18", True),
    (r"\boxed{18} of the 20", "18", True),
    ("#### Step 2: add\nThe answer is 18", "18", False),
    ("#### Step 2: add\n" + r"\boxed{18}", "18", True),
    # plain numbers: the last one
    ("The answer is 18.", "18", False),
    ("9 * 2 = $18", "18", False),
    ("It is 1,200 dollars", "1200", False),
    ("10-5=5", "5", False),
    ("left with x-5", "5", False),
    ("it fell to -3 degrees", "-3", False),
    ("a half, 1/2", "1/2", False),
    ("2.50 per egg", "2.50", False),
    # marked and unreadable: no other answer is tried
    (r"18 = \boxed{}", "", True),
    (r"18 = \boxed{18", "", True),
    (r"18 = \boxed{" + "1" * 1000 + "}", "", True),
]


@pytest.mark.parametrize("completion, answer, marked", GOLDEN)
def test_final_answer(completion, answer, marked):
    found = final_answer(completion)
    assert found is not None
    assert (found.text, found.marked) == (answer, marked)


@pytest.mark.parametrize("completion", ["", "####", "no idea", "#### none", "?!", "$", "-", "..."])
def test_no_answer(completion):
    assert final_answer(completion) is None


def test_strict_takes_marked_answers_only():
    assert final_answer("The answer is 18", strict=True) is None
    assert final_answer("#### 18", strict=True) is not None
    assert final_answer(r"\boxed{18}", strict=True) is not None


@pytest.mark.parametrize(
    "gold, answer, same",
    [
        ("18", "18", True),
        ("18", "18.0", True),
        ("18", "18.00", True),
        ("18", "018", True),
        ("18", "36/2", True),
        ("18", r"\frac{36}{2}", True),
        ("18", r"\dfrac{36}{2}", True),
        ("18", "9+9", True),
        ("18", r"2 \times 9", True),
        ("0.5", "1/2", True),
        ("0.5", ".5", True),
        ("-3", "-3", True),
        ("1200.5", "1200.50", True),
        ("1000000000", "1000000000", True),
        ("18", "19", False),
        ("18", "-18", False),
        ("18", "1.8", False),
        ("18", "180", False),
        ("18", "18.001", False),
        ("-3", "3", False),
        ("0.3333", "1/3", False),
        ("18", "", False),
        ("18", "x", False),
        ("18", r"\frac{1}{0}", False),
        ("18", "1/0", False),
        ("18", r"\text", False),
        ("18", "18, 19", False),
    ],
)
def test_same_value(gold, answer, same):
    assert same_value(gold, answer) is same


@pytest.mark.parametrize(
    "gold, completion, right",
    [
        # a gold answer that is LaTeX is compared with the box as it was written
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
        (r"\text{Evelyn}", r"\boxed{\text{Briana}}", False),
        (r"so it is \boxed{\text{Evelyn}}.", r"\boxed{\text{Evelyn}}", True),
        ("A", r"\boxed{\text{A}}", True),
        (r"\text{(A)}", r"\boxed{\text{(B)}}", False),
        ("3x", r"\boxed{3x}", True),
        ("3x", r"\boxed{3}", False),
        (r"\boxed{3x}", r"\boxed{3x}", True),
        (r"\boxed{3x}", r"\boxed{3y}", False),
        ("y=2x+3", r"\boxed{2x+3}", True),
        (r"\frac{7}{2}", r"\boxed{x = 3.5 \text{ cm}}", True),
        (r"12 \text{ cm}", r"\boxed{12}", True),
        (r"(1,\ 2)", r"\boxed{(1,2)}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\ 2\end{pmatrix}}", True),
        # one that is a number: units do not matter, variables do
        ("18", r"\boxed{18 kg}", True),
        ("18", r"\boxed{18x}", False),
        (".5", r"\boxed{\frac{1}{2}}", True),
        ("5", r"\boxed{.5}", False),
        ("2", "#### 2 1/3", False),
        (r"11,\! 111,\! 100", r"\boxed{11111100}", True),
    ],
)
def test_latex_is_compared_as_it_was_written(gold, completion, right):
    assert check_math(gold, completion).reward == float(right)


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in CASES}))
def test_what_is_removed_does_not_change_the_value(kind: str) -> None:
    """answer_forms.jsonl has the gold, the completion and the reward of each form, by kind."""
    cases = [case for case in CASES if case["kind"] == kind]
    wrong = [
        case
        for case in cases
        if check_math(case["gold"], case["completion"]).reward != case["expect"]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text, gold",
    [
        (" 72", "72"),
        (" 5,600\n", "5600"),
        ("so\n#### -9", "-9"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so $\boxed {5}$.", "5"),
        (r"so $\boxed 12$", "12"),
        (r"\fbox{5}", "5"),
        ("The answer is 12.", "12"),
        ("**Answer:** 12 apples", "12"),
        ("x=5", "x=5"),
        ("50\\%", "50%"),
        # not readable
        ("", ""),
        (" ", ""),
        ("so it is \\boxed{12", ""),
        (r"\boxed{}", ""),
        (r"\frac{1}{2", ""),
        ("He has 12 apples", ""),
        (r"\boxed{5 6}", ""),
        ("x+" * 200, ""),
    ],
)
def test_golds_are_read_by_one_reader(text: str, gold: str) -> None:
    assert gold_answer(text) == gold
    assert gold_answer(gold) == gold


PIECES = ["9", "1,", "1,000,", "$", "- ", "-$ ", "1/", "{", r"\boxed{", r"\text{", "=", "####"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["", "####", r"\boxed{"])
@pytest.mark.parametrize("piece", [*PIECES, "#### ", " ", "\x00\ud800", "\u0663\u0664"])
def test_any_text_is_read_in_time_about_linear_in_its_length(start, piece):
    """A million characters take less than half a second.

    A regular expression that goes back over them for each of them would make 5e11 steps, and the
    time limit would end the test.
    """
    found = final_answer(start + piece * (1_000_000 // len(piece)))
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
        ("{" * 30 + "18" + "}" * 30, True),
        (r"\left(" * 14 + "18" + r"\right)" * 14, True),
        ("(" * 20 + "9" + ")" * 20 + "+" + "(" * 20 + "9" + ")" * 20, True),
        (r"2 \cdot " + "(" * 30 + "9" + ")" * 30, True),
    ],
)
def test_brackets_around_brackets_take_no_time(answer: str, right: bool) -> None:
    """Reading LaTeX takes several times as long with each bracket; 30 brackets took minutes."""
    assert check_math("#### 18", rf"\boxed{{{answer}}}").reward == right


@pytest.mark.parametrize(
    "text, expected",
    [
        ("((18))", "((18))"),  # few brackets are read as they are
        ("((((((((((1,2))))))))))", "(1,2)"),
        ("(((((((((1+(2))))))))))", "(1+(2))"),
        ("(((((((((1)+(2)))))))))", "((1)+(2))"),
        (r"\frac{{{{{{{{{{1}}}}}}}}}}{2}", r"\frac{1}{2}"),
        ("(((((((((1", "(((((((((1"),
        ("({({({({({1})})})})})", "({({({({({1})})})})})"),
    ],
)
def test_only_brackets_right_around_brackets_are_dropped(text: str, expected: str) -> None:
    assert without_doubled_brackets(text) == expected
