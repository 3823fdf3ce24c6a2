"""Partial rollouts are kept in a checkpoint and continued by the run that resumes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jetrl import load_config
from jetrl.errors import UserError
from jetrl.precision import PrecisionPlan
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.sampling import EncodedPrompt
from jetrl.types import Prompt, PromptInputs

STATE = [["b", [[5, [1, 2], [-0.5, -0.25], "cancelled", "", [1, 1]]]]]


def carrying(*ids: str, dynamic_sampling: bool = False, **given: float) -> PartialRollouts:
    prompts = [EncodedPrompt(Prompt(id=i, text=i), PromptInputs((1,))) for i in ids]
    policy = SimpleNamespace(plan=PrecisionPlan.preset("unified"))
    rollout = {"oversample": 0.5, "samples_per_prompt": 1, **given}
    words = [f"rollout.{key}={value}" for key, value in rollout.items()]
    settings = load_config("demo", [*words, "algorithm.name=reinforce_pp"])
    return PartialRollouts(settings, policy, prompts, 1, dynamic_sampling)


def test_the_state_comes_back_unless_a_prompt_is_gone() -> None:
    resumed = carrying("a", "b")
    resumed.load_state(json.loads(json.dumps(STATE)))
    assert resumed.num_unfinished == 1
    assert json.loads(json.dumps(resumed.state())) == STATE
    with pytest.raises(UserError, match=r"prompt 'b'.* no longer has"):
        carrying("a").load_state(STATE)
    with pytest.raises(UserError, match=r"resume with rollout\.samples_per_prompt=1$"):
        carrying("b", samples_per_prompt=2).load_state(STATE)
    with pytest.raises(UserError, match=r"resume with rollout\.max_tokens=3 or more$"):
        carrying("b", max_tokens=2).load_state(STATE)


@pytest.mark.parametrize("oversample, more", [(0.5, 31), (1 / 64, 0), (0.0, -1)])
def test_a_step_draws_what_the_stock_lacks(oversample: float, more: int) -> None:
    resumed = carrying("a", "b", oversample=oversample)
    resumed.load_state(STATE)
    assert resumed.start_step() == more  # the demo has 64 prompts a step
    assert resumed.on, "the prompt on its way is not lost"


def test_what_is_on_its_way_does_not_go_with_dynamic_sampling() -> None:
    resumed = carrying("b", oversample=0.0, dynamic_sampling=True)
    resumed.load_state([])
    with pytest.raises(UserError, match=r"unfinished completions, .*dynamic_sampling=false"):
        resumed.load_state(STATE)
