"""Turns on a Hopper GPU: what the environment says comes in between graphs, and the bits agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from small_models import config
from tests.training.shared import count_different

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.models.tiny import character_tokenizer
from jetrl.precision import PrecisionPlan
from jetrl.rollout.options import EnvironmentReply, GenerateOptions
from jetrl.types import Turn

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=128, max_position_embeddings=2048)
PROMPTS = ["12+30=", "what is it?", "a", "the last of the four prompts"]


class Scripted:
    """Answers up to three turns of a sequence with a text of its own, at once or late."""

    max_turns = 4

    def __init__(self, late: bool) -> None:
        self.late, self.open = late, list[tuple[int, int]]()

    def ask(self, sequence: int, turns: Sequence[Turn], completion: str) -> None:
        self.open.append((sequence, len(turns)))

    def answers(self, wait: bool) -> list[EnvironmentReply]:
        if self.late and not wait:
            return []
        ready, self.open = self.open, []
        return [
            EnvironmentReply(s, "=" * (1 + 40 * (s % 3)) + str(n) if n <= s % 4 else None)
            for s, n in ready
        ]

    def close(self) -> None:
        self.open.clear()


def generate(policy: Policy, late: bool, stop: tuple[str, ...] = (), **sizes: int) -> Any:
    params = SamplingParams(
        n=6, max_tokens=400, seed=3, stop_token_ids=tuple(range(5, 15)), stop=stop
    )
    return RolloutEngine(policy, **sizes).generate(
        PROMPTS, params, options=GenerateOptions(environment=Scripted(late))
    )


@pytest.mark.parametrize("preset", ["unified", "jet"])
@pytest.mark.parametrize("stop", [(), ("e", "#")], ids=["stop ids", "stop strings"])
def test_exact_across_turns_whenever_answers_come(preset: str, stop: tuple[str, ...]) -> None:
    plan, tokenizer = PrecisionPlan.preset(preset), character_tokenizer()
    policy = Policy.from_config(CONFIG, plan, seed=0, device="cuda", tokenizer=tokenizer)
    wanted = generate(policy, late=False, stop=stop)
    assert sum(len(c.environment) for c in wanted) > 12
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert count_different(policy, prompts, wanted) == 0
    assert generate(policy, late=True, stop=stop) == wanted
    tight = generate(policy, late=True, stop=stop, num_pages=20, max_batch_size=5)
    assert tight == wanted
