"""The held-out sets that people report: their columns, their prompts and their verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jetrl.errors import UserError
from jetrl.tasks import get_task
from jetrl.tasks.letters import chosen_letter
from jetrl.tasks.questions import SOURCES, benchmark_name
from jetrl.types import Score

# A row of each set as the hub has it, the columns that are not read aside; and the right answer.
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "math500": ({"problem": "x?", "solution": "...", "answer": r"\frac{3}{4}"}, "0.75", "0.7"),
    "aime24": ({"id": 60, "problem": "x?", "answer": "204", "year": "2024"}, "204", "24"),
    "aime25": ({"problem": "x?", "answer": "70", "id": "0"}, "070", "7"),
    "amc": ({"id": 0, "problem": "x?", "answer": 142.0, "url": "..."}, "142", "14"),
    "gpqa_diamond": (
        {
            "Question": "Which?",
            "Correct Answer": "right\n",
            "Incorrect Answer 1": "one",
            "Incorrect Answer 2": "two",
            "Incorrect Answer 3": "three",
        },
        "",
        "",
    ),
    "mmlu_pro": ({"question": "Which?", "options": list("pqrstuvwxy"), "answer": "I"}, "I", "A"),
}


def write(folder: Path, rows: list[dict[str, Any]], split: str = "test") -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{split}.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("split", ["test", "its own"])
def test_each_set_is_read_asked_and_judged(name: str, split: str, tmp_path: Path) -> None:
    row, right, wrong = ROWS[name]
    where = SOURCES[name].split if split == "its own" else "test"
    task = get_task(name, path=write(tmp_path / "data", [row, row], where))
    prompts = list(task.prompts("test"))
    assert [prompt.id for prompt in prompts] == [f"{name}-0", f"{name}-1"]
    (message,) = prompts[0].messages
    assert "\\boxed{" in message["content"]
    if name == "gpqa_diamond":
        right = str(prompts[0].answer)
        assert f"{right}. right\n" in message["content"]
        wrong = next(letter for letter in "ABCD" if letter != right)
    assert task.score(prompts[0], f"so \\boxed{{{right}}}").reward == 1.0
    assert task.score(prompts[0], f"so \\boxed{{{wrong}}}").reward == 0.0
    assert task.score(prompts[0], "").reward == 0.0
    assert task.vote(prompts[0], f"\\boxed{{{right}}}") is not None
    assert task.vote(prompts[0], "") is None


def test_the_right_choice_is_at_another_place_in_each_question_and_the_same_every_time(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "data", [ROWS["gpqa_diamond"][0]] * 40)
    prompts = [list(get_task("gpqa_diamond", path=folder).prompts("test")) for _ in range(2)]
    assert prompts[0] == prompts[1]
    assert {prompt.answer for prompt in prompts[0]} == set("ABCD")


LETTERS = Path(__file__).with_name("golden_letters.jsonl").read_text("utf-8").splitlines()


@pytest.mark.parametrize("case", [json.loads(line) for line in LETTERS])
def test_the_letter_that_a_completion_chooses(case: dict[str, Any]) -> None:
    """golden_letters.jsonl: `completion`, the `right` letter or null, sometimes the `choices`."""
    assert chosen_letter(case["completion"], case.get("choices", ())) == case["right"], case


def test_the_choices_of_the_question_decide(tmp_path: Path) -> None:
    row = {"question": "?", "options": ["E. coli", "a virus", "C4"], "answer": "A"}
    task = get_task("mmlu_pro", path=write(tmp_path / "data", [row]))
    (prompt,) = task.prompts("test")
    for completion, reward in (("Answer: A E. coli", 1.0), ("Answer: B a virus", 0.0)):
        assert task.score(prompt, completion) == Score(reward, {"answered": 1.0})
    assert task.score(prompt, "The answer is E. coli").parts == {"answered": 0.0}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "piece", [r"\boxed{A", "answer to ", "A, B, ", "(A) or ", r"\text{", "*A*"]
)
def test_letters_are_read_in_time_about_linear_in_the_length(piece: str) -> None:
    for start in ("", "The answer is ", r"\boxed{"):
        chosen_letter(start + piece * (100_000 // len(piece)))


@pytest.mark.parametrize(
    "name, key",
    [
        ("HuggingFaceH4/MATH-500", "math500"),
        ("AIME24", "aime24"),
        ("gpqa", "gpqa_diamond"),
        ("gsm8k", None),
    ],
)
def test_names_and_hub_ids(name: str, key: str | None) -> None:
    assert benchmark_name(name) == key


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown task 'math501'; did you mean math500"):
        get_task("math501")
    task = get_task("math500", path=write(tmp_path / "a", [{"Problem": "x?", "answer": "1"}]))
    with pytest.raises(UserError, match="line 1: no column 'problem'"):
        list(task.prompts("test"))
    unread = get_task("math500", path=write(tmp_path / "c", [{"problem": "?", "answer": "{1"}]))
    with pytest.raises(UserError, match=r"line 1: no answer can be read in '\{1'"):
        list(unread.prompts("test"))
    missing = get_task("amc", path=write(tmp_path / "d", [{"problem": "?", "answer": "nan"}]))
    with pytest.raises(UserError, match=r"line 1: no answer can be read in 'nan'"):
        list(missing.prompts("test"))
    with pytest.raises(UserError, match="no split 'train'"):
        task.prompts("train")
    row = {"question": "?", "options": ["a", "b"], "answer": "C"}
    task = get_task("mmlu_pro", path=write(tmp_path / "b", [row]))
    with pytest.raises(UserError, match="line 1: 2 choices, and 'C' as the right one"):
        list(task.prompts("test"))
