"""Prompt order: shuffled, as given, by difficulty, or by measured pass rate; tasks by weight.

`shuffle` is a function of (seed, step); `sequential` (the order of the data) and `curriculum` (by
a field of the rows, ascending) only of the step, and begin again with every epoch. Their extra
prompts, of dynamic sampling and oversampling, are shuffled. Under `pass_rate`, a prompt is drawn
with weight 4 p (1 - p), with its measured pass rate p, and at least `explore`: a prompt that is
always or never solved gives zero advantages. Untried prompts have p = 1/2. Pass rates are saved in
checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jetrl.errors import UserError
from jetrl.files import MOST_STEPS
from jetrl.randomness import derive_seed, draw_range, shares, weighted_draw
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import Settings
from jetrl.types import Prompt, Sample

logger = logging.getLogger(__name__)

PRIOR = 1.0  # prior: completions counted as solved, and as unsolved, before the first try
MEMORY = 0.5  # decay of earlier completions when the prompt is tried again


class PromptDigest:
    """Hash of the prompts and answers, to detect changed data on resume."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for prompt in prompts:
            digest.update(prompt.inputs.content())
            digest.update(repr((prompt.prompt.id, prompt.prompt.answer)).encode())
        self._digest = digest.hexdigest()

    def state(self) -> str:
        return self._digest

    def load_state(self, state: str | None) -> str | None:
        if state in (None, self._digest):
            return None
        text = (
            "the training prompts or their answers are not those of the checkpoint (data, options, "
            "system prompt, tokenizer or version of jetrl changed); training continues on the new "
            "ones"
        )
        logger.warning(text)
        return f"warning: {text}"


def with_steps(
    settings: Settings, prompts: Sequence[EncodedPrompt], weights: Mapping[str, float]
) -> tuple[Settings, str]:
    """Return settings with loop.epochs converted to loop.steps, and the steps per epoch."""
    # Tasks of weight 0 are never drawn. An epoch's last step may include prompts of the next.
    count = sum(weights.get(encoded.prompt.task, 1.0) > 0 for encoded in prompts)
    epoch, loop = count / settings.rollout.prompts_per_step, settings.loop
    if loop.epochs is not None:
        if loop.epochs * epoch > MOST_STEPS:
            raise UserError(
                f"loop.epochs = {loop.epochs:g} is {loop.epochs * epoch:.3g} steps, more than the "
                f"maximum of {MOST_STEPS:.0e}"
            )
        loop = loop.model_copy(update={"steps": max(math.ceil(loop.epochs * epoch - 1e-9), 1)})
    note = f"{count:,} training prompts: an epoch is {epoch:,.4g} steps"
    if settings.sft.steps:
        note += f" (supervised: {count / settings.sft.examples_per_step:,.4g} updates)"
    if loop.steps:
        note += f", and loop.steps = {loop.steps} makes {loop.steps / epoch:.3g} epochs"
    return settings.model_copy(update={"loop": loop}), note


class PromptOrder:
    """Draws the prompts of a split step by step, in the order of `data.order`.

    The state is {prompt id: [solved, tried]}, with decay. Mixed tasks have `weights`, by default 1.
    Each `use` has its own order; only training `prompts` follow pass rates.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[EncodedPrompt],
        weights: Mapping[str, float],
        use: str = "prompts",
    ) -> None:
        self._settings, self._prompts = settings, prompts
        self._seed = derive_seed(settings.run.seed, use)
        # Prompts per task: tasks share a step by weight, and have their own epochs.
        self._members: dict[str, list[int]] = {}
        for index, encoded in enumerate(prompts):
            self._members.setdefault(encoded.prompt.task, []).append(index)
        self._weights = [weights.get(task, 1.0) for task in self._members]
        self._history: dict[str, tuple[float, float]] = {}
        ordered = settings.data.order in ("sequential", "curriculum")
        self._ordered = ordered and use in ("prompts", "sft")
        if self._ordered and settings.data.order == "curriculum":
            # Stable: prompts of equal difficulty keep the order of the data.
            for members in self._members.values():
                members.sort(key=lambda i: _difficulty(prompts[i].prompt, settings.data.difficulty))
        self._by_pass_rate = settings.data.order == "pass_rate" and use == "prompts"
        if self._by_pass_rate:
            (prompt_id, times), *_ = Counter(e.prompt.id for e in prompts).most_common(1)
            if times > 1:
                raise UserError(
                    f"data.order = pass_rate: {times} prompts have the id {prompt_id!r}; give each "
                    "its own"
                )

    def draw(self, step: int, count: int) -> list[EncodedPrompt]:
        """Return the `count` prompts of a step (from 1); `count` must not change between steps."""
        # Number of prompts per task: in this step, and in all earlier steps.
        counts = shares(self._weights, count, step, self._seed)
        drawn: list[tuple[float, int]] = []  # (position in the step from 0 to 1, index)
        for column, (task, members) in enumerate(self._members.items()):
            now, before = int(counts[-1, column]), int(counts[:-1, column].sum())
            seed = self._seed if len(self._members) == 1 else derive_seed(self._seed, task)
            if self._by_pass_rate:
                rates = np.array([self.rate(self._prompts[i].prompt.id) for i in members])
                weight = np.maximum(4.0 * rates * (1.0 - rates), self._settings.data.explore)
                chosen = weighted_draw(weight, now, derive_seed(seed, "pass_rate", step))
            elif self._ordered:
                chosen = [i % len(members) for i in range(before, before + now)]
            else:
                chosen = draw_range(len(members), before, now, seed)
            # Interleave tasks evenly, so that every update of a step sees every task.
            drawn += [((k + 0.5) / now, members[i]) for k, i in enumerate(chosen)]
        return [self._prompts[i] for _, i in sorted(drawn, key=lambda entry: entry[0])]

    def rate(self, prompt_id: str) -> float:
        """Return the estimated pass rate of a prompt; 0.5 before the first try."""
        solved, tried = self._history.get(prompt_id, (0.0, 0.0))
        return (solved + PRIOR) / (tried + 2 * PRIOR)

    def observe(self, samples: Sequence[Sample]) -> None:
        """Record how often the prompts of a step were solved, by the task's own score."""
        if not self._by_pass_rate:
            return
        weighed, threshold = self._settings.reward.is_weighed, self._settings.eval.threshold
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            if not sample.continues:
                groups.setdefault(sample.group, []).append(sample)
        for members in groups.values():
            # Use the task's own score, without [reward].
            scores = [s.score.parts.get("rule") if weighed else s.score.reward for s in members]
            judged = [score for score in scores if score is not None]
            # Halve earlier counts: the policy has changed since.
            solved, tried = self._history.get(members[0].prompt.id, (0.0, 0.0))
            self._history[members[0].prompt.id] = (
                MEMORY * solved + sum(score >= threshold for score in judged),
                MEMORY * tried + len(judged),
            )

    def state(self) -> dict[str, list[float]]:
        return {prompt_id: list(counts) for prompt_id, counts in self._history.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        self._history = {key: (float(counts[0]), float(counts[1])) for key, counts in state.items()}


def _difficulty(prompt: Prompt, field: str) -> float:
    """Return a prompt's difficulty for `curriculum`: a number in a field of its row."""
    value = prompt.metadata.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(
            f"data.order = curriculum: prompt {prompt.id!r} has {field} = {value!r:.60}, and a "
            "finite number is needed; set data.difficulty to the field that has it"
        )
    return value
