"""`benchmarks.digest`: a run that is killed and resumed, and the comparison with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.small import SMALL, task_of

from benchmarks import digest
from jetrl import load_config, train

WORDS = [*SMALL, "checkpoint.every=1", "sft.steps=0", "loop.steps=3", "train.lr=1e-3"]


def test_a_killed_run_ends_with_the_digest_of_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = f"task={task_of(tmp_path, 'return float(len(completion))')}"
    whole = train(load_config("demo", [*WORDS, *digest.ALL, task, f"run.dir={tmp_path}"]))
    row = digest.row_of(whole.run_path)
    assert row["digest"] == whole.digest
    assert row["steps_that_changed_weights"] == row["steps_compared"] == 2
    assert [line[:4] for line in row["chain"]] == ["rl 1", "rl 2", "rl 3"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"rows": [row]}))
    words = ["steps", *WORDS, task, "--leg", "cpu:1", "--leg", "cpu", "--against", str(other)]
    with pytest.raises(SystemExit) as ended:
        digest.main([*words, "--runs", str(tmp_path / "legs"), "--out", str(tmp_path / "own.json")])
    assert ended.value.code == 0
    assert "the same digests" in capsys.readouterr().out
    (own,) = json.loads((tmp_path / "own.json").read_text())["rows"]
    assert own["chain"] == row["chain"]


def test_the_first_difference_is_named() -> None:
    row = {"digest": "b", "chain": ["rl 1 a", "rl 2 b"]}
    assert digest.difference(row, row) == ""
    other = {"digest": "d", "chain": ["rl 1 a", "rl 2 d"]}
    assert digest.difference(row, other) == "rl 2 b here, rl 2 d there"
    longer = {"digest": "c", "chain": [*row["chain"], "rl 3 c"]}
    assert "more steps" in digest.difference(row, longer)


def test_legs_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for legs in (["cpu", "cpu"], ["cpu:3"], ["gpu"], ["cpu*0"]):
        with pytest.raises(SystemExit):
            digest.main(["steps", *(word for leg in legs for word in ("--leg", leg))])
    errors = capsys.readouterr().err
    assert "each --leg but the last needs a step" in errors
    assert "'gpu': DEVICE*RANKS:STEP" in errors


def test_digits_are_worth_their_share() -> None:
    assert digest.digits(None, "a1b2") == 0.5
    assert digest.digits(None, "") == 0.0
