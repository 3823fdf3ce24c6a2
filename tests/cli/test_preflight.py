"""`jetrl train --preflight`: what it shows, what it warns of, and that nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = ["demo", "sft.steps=0", "rollout.prompts_per_step=2", "rollout.max_tokens=4"]
TASK = """
from jetrl.tasks import Task
from jetrl.types import Prompt, Score
class Mine(Task):
    alphabet = "0123456789+="
    def prompts(self, split):
        own = range(9) if split == "train" else range(SHARED, SHARED + 9)
        return [Prompt(id=f"p{i}", text=f"{i}+{i}=", answer=str(2 * i)) for i in own]
    def score(self, prompt, completion):
        return BODY
"""


def preflight(jetrl: Callable, tmp_path: Path, body: str, *words: str, start: int = 9):
    file = tmp_path / "mine.py"
    file.write_text(TASK.replace("BODY", body).replace("SHARED", str(start)))
    return jetrl("train", *WORDS, f"task={file}:Mine", "task.workers=0", "--preflight", *words)


def test_it_shows_prompts_completions_and_rewards_and_writes_nothing(
    jetrl: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = "Score(len(set(completion)) / 4, {'letters': float(len(completion))})"
    done = preflight(jetrl, tmp_path, body, "task.options={}")
    lines = done.out.splitlines()
    assert sum(line.startswith("prompt p") for line in lines) == 2
    assert sum(line.startswith("  reward ") for line in lines) == 8
    assert any(", answer " in line for line in lines if line.startswith("prompt p"))
    assert all(", letters " in line and " tokens" in line for line in lines if "  reward" in line)
    assert "4 tokens, truncated" in done.out
    assert not (tmp_path / "runs").exists()
    # Random weights seldom end on their own, so the cut-off completions are warned of.
    assert done.code == 1
    assert "8 completions: " in done.out
    assert "raise it, or make sure that completions end" in done.out


REWARD_0 = "warning: 8 completions: every completion got the reward 0"


@pytest.mark.parametrize(
    "body, messages",
    [
        ("Score(0.0, {'answered': 0.0})", [REWARD_0, "in the expected form: look at them above"]),
        ("float(completion[:1] or 0)", ["could not be scored: score raised ValueError"]),
    ],
)
def test_what_teaches_nothing_is_warned_of(
    body: str, messages: list[str], jetrl: Callable, tmp_path: Path
) -> None:
    done = preflight(jetrl, tmp_path, body)
    assert (done.code, [message in done.out for message in messages]) == (1, [True] * len(messages))


def test_all_well_is_exit_code_0_and_rewards_are_weighed(jetrl: Callable, tmp_path: Path) -> None:
    words = ("rollout.stop=['1','2','3','4','5','6','7','8','9']", "rollout.max_tokens=60")
    done = preflight(jetrl, tmp_path, "float(completion > '5')", *words, "reward.rule=0.5")
    assert (done.code, done.out.splitlines()[-1]) == (0, "no warnings"), done.out
    rewards = [line.split() for line in done.out.splitlines() if line.startswith("  reward ")]
    assert rewards
    for _, reward, _, rule, *_ in rewards:
        assert float(reward.strip(",")) == 0.5 * float(rule.strip(","))


def test_evaluation_prompts_that_are_trained_on_are_warned_of(
    jetrl: Callable, tmp_path: Path
) -> None:
    done = preflight(jetrl, tmp_path, "float(completion > '5')", start=7)
    assert done.code == 1
    shared = "warning: 2 of 9 evaluation prompts are also trained on, such as p7 (in training: p7)"
    assert shared in done.out
    task = f"task={tmp_path / 'mine.py'}:Mine"
    dry = jetrl("train", *WORDS, task, "task.workers=0", "--dry-run").out
    assert f"# {shared}: the evaluation overstates what the model can do" in dry
    without = jetrl("train", *WORDS, task, "eval.every=0", "sft.until=none", "--dry-run")
    assert "also trained on" not in without.out
