"""The short form of the run whose tool echoes noise (`make soak`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from noisy_tool import measure

from jetrl import load_config, train
from jetrl.runs import RunDirectory

HALVES = """
from jetrl.tasks import Task
from jetrl.types import Prompt
class Halves(Task):
    alphabet = "0123456789+="
    stop = tuple(alphabet)
    max_turns = 2
    def prompts(self, split): return [Prompt(id=str(i), text=f"{i}+1=") for i in range(4)]
    def score(self, prompt, completion): return 1.0
    def step(self, prompt, turns, completion): return "\\ud83d"
"""


def test_a_tool_that_echoes_noise_ends_completions_and_not_the_run(tmp_path: Path) -> None:
    counts = measure(3, tmp_path)
    assert 0 < counts["failed_at_a_reply"] == counts["failed"] < counts["completions"]
    assert counts["replies_with_special_tokens_as_text"] > 0
    assert counts["causes"].keys() == {"half of a character", "none"}


def test_a_step_in_which_every_reply_is_half_a_character_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "halves.py").write_text(HALVES)
    words = [
        *("sft.steps=0", "loop.steps=2", f"run.dir={tmp_path}", "run.name=halves", "eval.every=1"),
        *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "report.enabled=false"),
        *(f"task={tmp_path / 'halves.py'}:Halves", "task.workers=0", "model.config.vocab_size=14"),
    ]
    run = RunDirectory.open(train(load_config("demo", words)).run_path)
    for line in run.metrics("rl")[-2:]:
        assert line["reward/unusable_replies"] == line["reward/failures"] == 4
        assert line["reward/mean"] == 0
    assert "half of a character" in run.rollouts(2)[0]["failure"]
    assert "4 completions not judged; the first: the reply" in run.log_file.read_text()
