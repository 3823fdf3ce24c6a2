"""Which prompts a step draws, and what it learns about their difficulty (ordering.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.errors import UserError
from jetrl.randomness import derive_seed
from jetrl.rewards.sampling import EncodedPrompt
from jetrl.session.shuffled_prompts import ShuffledPrompts
from jetrl.settings.loading import Settings
from jetrl.types import Sample


class PromptOrder:
    """The prompts of a split, drawn step by step.

    Args:
        prompts: of the split. weights: of each task, {} where there is one. use: what the prompts
            are for, `prompts` (of RL) or `sft`: each draws in an order of its own.

    Raises:
        UserError: two prompts of one id, under data.order = pass_rate.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[EncodedPrompt],
        weights: Mapping[str, float],
        use: str = "prompts",
    ) -> None:
        self._prompts = prompts
        self._threshold, self._weighed = settings.eval.threshold, settings.reward.is_weighed
        by_pass_rate = settings.data.order == "pass_rate" and use == "prompts"
        if by_pass_rate:
            (prompt_id, times), *_ = Counter(e.prompt.id for e in prompts).most_common(1)
            if times > 1:
                raise UserError(
                    f"data.order = pass_rate: {times} prompts have the id {prompt_id!r}, and pass "
                    "rates are kept by id; give each its own"
                )
        self._order = ShuffledPrompts(
            [encoded.prompt.task for encoded in prompts],
            [encoded.prompt.id for encoded in prompts],
            weights,
            derive_seed(settings.run.seed, use),
            settings.data.explore if by_pass_rate else None,
        )
        self._by_pass_rate = by_pass_rate

    def draw(self, step: int, count: int) -> list[EncodedPrompt]:
        """The prompts of a step; steps count from 1, and every step draws `count`."""
        return [self._prompts[i] for i in self._order.draw(step, count)]

    def observe(self, samples: Sequence[Sample]) -> None:
        """Takes in how often the step's prompts were solved."""
        if not self._by_pass_rate:
            return
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        for members in groups.values():
            solved = sum(self._task_score(s) >= self._threshold for s in members)
            self._order.pass_rates.observe(members[0].prompt.id, solved, len(members))

    def _task_score(self, sample: Sample) -> float:
        score = sample.score
        return score.parts["rule"] if self._weighed else score.reward

    def state(self) -> Any:
        return self._order.pass_rates.state()

    def load_state(self, state: Any) -> None:
        self._order.pass_rates.load_state(state)
