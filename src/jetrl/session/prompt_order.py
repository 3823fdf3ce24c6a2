"""The order in which prompts are drawn: shuffled, mixed by weight, and by measured difficulty.

`shuffle` is a function of (seed, step). `pass_rate` depends on what the policy has solved so far as
well: a prompt that is always solved, or never, teaches a group comparison nothing, so prompts are
drawn with a weight of 4 p (1 - p), where p is the prompt's own measured pass rate, and never with
less than `explore` (they may have become easier or harder since). A prompt that was not tried yet
has the weight of one solved half of the time. The record of pass rates goes into checkpoints; the
draws themselves are counted.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetrl.errors import UserError
from jetrl.randomness import derive_seed, draw_range, shares, weighted_draw
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import Settings
from jetrl.types import Sample

logger = logging.getLogger(__name__)

PRIOR = 1.0  # completions that a prompt counts as solved, and as many as not, before it was tried
MEMORY = 0.5  # what a completion still counts when the prompt is tried again


class PassRates:
    """The history of each prompt's completions, solved and tried, older ones counting less.

    `state()` is {prompt id: [solved, tried]}; the floats survive JSON bit for bit.
    """

    def __init__(self) -> None:
        self._history: dict[str, tuple[float, float]] = {}

    def observe(self, prompt_id: str, solved: int, tried: int) -> None:
        """Take in the completions of one group."""
        before_solved, before_tried = self._history.get(prompt_id, (0.0, 0.0))
        self._history[prompt_id] = (
            MEMORY * before_solved + solved,
            MEMORY * before_tried + tried,
        )

    def rate(self, prompt_id: str) -> float:
        """Return the estimated share of completions that solve a prompt, in (0, 1).

        A prompt that was not tried has 0.5.
        """
        solved, tried = self._history.get(prompt_id, (0.0, 0.0))
        return (solved + PRIOR) / (tried + 2 * PRIOR)

    def state(self) -> dict[str, list[float]]:
        return {prompt_id: list(counts) for prompt_id, counts in self._history.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        self._history = {key: (float(counts[0]), float(counts[1])) for key, counts in state.items()}


class PromptDigest:
    """A digest of the prompts and their answers, which warns when a resumed run has others."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for prompt in prompts:
            digest.update(array("q", prompt.token_ids))
            digest.update(repr((prompt.prompt.id, prompt.prompt.answer)).encode())
        self._digest = digest.hexdigest()

    def state(self) -> str:
        return self._digest

    def load_state(self, state: str | None) -> None:
        if state not in (None, self._digest):
            logger.warning(
                "the training prompts or their answers are not those of the checkpoint: the data, "
                "its options, the system prompt or the tokenizer changed; training continues on "
                "the new ones, and is not what an uncut run on either would be"
            )


class ShuffledPrompts:
    """The order of prompts, by their index in the split.

    Args:
        tasks: The task of each prompt (`Prompt.task`), in the order of the split.
        explore: The least weight of a prompt under `pass_rate`; None draws shuffled.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        prompt_ids: Sequence[str],
        weights: Mapping[str, float],
        seed: int,
        explore: float | None = None,
    ) -> None:
        self._ids, self._seed, self._explore = list(prompt_ids), seed, explore
        self._members: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            self._members.setdefault(task, []).append(index)
        self._weights = {task: weights.get(task, 1.0) for task in self._members}
        self.pass_rates = PassRates()

    def draw(self, step: int, count: int) -> list[int]:
        """Return the indices of the prompts of a step, counted from 1.

        The tasks take turns at equal distances: updates take consecutive prompts, and each update
        should see every task.
        """
        counts = shares(list(self._weights.values()), count, step, self._seed)
        drawn: list[tuple[float, int]] = []  # positions in the step, from 0 to 1, and indices
        for column, (task, members) in enumerate(self._members.items()):
            now, before = int(counts[-1, column]), int(counts[:-1, column].sum())
            seed = self._seed if len(self._members) == 1 else derive_seed(self._seed, task)
            if self._explore is None:
                chosen = draw_range(len(members), before, now, seed)
            else:
                rates = np.array([self.pass_rates.rate(self._ids[i]) for i in members])
                weight = np.maximum(4.0 * rates * (1.0 - rates), self._explore)
                chosen = weighted_draw(weight, now, derive_seed(seed, "pass_rate", step))
            drawn += [((k + 0.5) / now, members[i]) for k, i in enumerate(chosen)]
        return [index for _, index in sorted(drawn, key=lambda entry: entry[0])]


class PromptOrder:
    """The prompts of a split, drawn step by step in the order that `data.order` names.

    Args:
        use: What the prompts are for: `prompts` are those of the loop's steps. Each use has an
            order of its own, and only the steps draw by pass rate.
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
        self._by_pass_rate = settings.data.order == "pass_rate" and use == "prompts"
        if self._by_pass_rate:
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
            settings.data.explore if self._by_pass_rate else None,
        )

    def draw(self, step: int, count: int) -> list[EncodedPrompt]:
        """Return the prompts of a step, counted from 1; every step draws `count`."""
        return [self._prompts[i] for i in self._order.draw(step, count)]

    def observe(self, samples: Sequence[Sample]) -> None:
        """Take in how often the prompts of a step were solved."""
        if not self._by_pass_rate:
            return
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        for members in groups.values():
            num_solved = sum(self._task_score(s) >= self._threshold for s in members)
            self._order.pass_rates.observe(members[0].prompt.id, num_solved, len(members))

    def _task_score(self, sample: Sample) -> float:
        score = sample.score
        return score.parts["rule"] if self._weighed else score.reward

    def state(self) -> Any:
        return self._order.pass_rates.state()

    def load_state(self, state: Any) -> None:
        self._order.pass_rates.load_state(state)
