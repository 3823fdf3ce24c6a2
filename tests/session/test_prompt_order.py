"""The order of prompts learns from a step's samples."""

from __future__ import annotations

import pytest

from jetrl.rewards.sampling import EncodedPrompt
from jetrl.session.prompt_order import PromptDigest, PromptOrder
from jetrl.settings.loading import load_config
from jetrl.types import Completion, Prompt, Sample, Score


@pytest.mark.parametrize(
    "words, reward, parts, solved",
    [
        ([], 1.0, {}, 1),
        ([], 0.5, {"rule": 1.0}, 0),  # a part of the task's own, that is called so
        (["reward.rule=0.5"], 0.5, {"rule": 1.0}, 1),
        (["reward.rule=2.0"], 1.0, {"rule": 0.5}, 0),
        (["reward.model_path=judge", "reward.model=1.0"], 4.0, {"rule": 0.0, "model": 4.0}, 0),
    ],
)
def test_solved_is_what_evaluation_calls_solved(words, reward, parts, solved) -> None:
    """A sample is solved by the task's own score, whatever [reward] adds."""
    prompt = Prompt(id="a", text="?")
    drawing = PromptOrder(
        load_config("demo", ["data.order=pass_rate", *words]), [EncodedPrompt(prompt, (1,))], {}
    )
    completion = Completion((2,), (0.0,), "stop")
    drawing.observe([Sample(prompt, 0, (1,), completion, Score(reward, parts))])
    assert drawing.state() == {"a": [solved, 1]}


@pytest.mark.parametrize(
    "prompt, token_ids, warned",
    [
        (Prompt(id="a", text="?", answer="1"), (1, 2), False),
        (Prompt(id="b", text="?", answer="1"), (1, 2), True),
        (Prompt(id="a", text="?", answer="2"), (1, 2), True),
        (Prompt(id="a", text="?", answer="1"), (1, 3), True),
    ],
)
def test_a_resumed_run_is_warned_of_other_prompts(caplog, prompt, token_ids, warned) -> None:
    stored = PromptDigest([EncodedPrompt(Prompt(id="a", text="?", answer="1"), (1, 2))]).state()
    PromptDigest([EncodedPrompt(prompt, token_ids)]).load_state(stored)
    assert ("are not those of the checkpoint" in caplog.text) == warned
