"""Readers of an export are compared question by question."""

import json
import math
from pathlib import Path

import pytest
from benchmarks.peer_accuracy import QUESTIONS, main, row_of


@pytest.mark.parametrize("words", ["--prompts 8", "--max-tokens 9", "--plan bf16"])
def test_answers_to_other_questions_are_not_taken(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    asked = {"model": "m", "plan": "int8", "prompts": 4, "max_tokens": 320, "questions": [[1]]}
    (tmp_path / QUESTIONS).write_text(json.dumps(asked))
    usual = ["m", "--prompts", "4", "--work", str(tmp_path)]
    with pytest.raises(SystemExit):
        main([*usual, *words.split()])
    assert "name another" in capsys.readouterr().err


def test_a_reader_is_compared_with_the_model_on_the_same_questions() -> None:
    own = [True, True, False, False, True, False, False, False]
    other = [True, False, True, False, True, False, False, True]
    row = row_of("transformers", other, own)
    assert (row["accuracy"], row["minus_own"], row["different"]) == (0.5, 0.125, 3)
    # Differences of -1 once, +1 twice and 0 five times around 1/8.
    variance = (3 - 8 / 64) / 7
    assert row["error"] == round(math.sqrt(variance / 8), 4)
    assert row_of("jetrl", own, own)["error"] == 0
