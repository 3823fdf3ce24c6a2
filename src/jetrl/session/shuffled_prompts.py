"""In which order prompts are drawn: shuffled, mixed by weight, and by measured difficulty.

`shuffle` is a function of (seed, step). `pass_rate` depends on what the policy has solved so far as
well: a prompt that is always solved, or never, teaches a group comparison nothing, so prompts are
drawn with a weight of 4 p (1 - p), where p is the prompt's own measured pass rate, and never with
less than `explore` (they may have become easier or harder since). A prompt that was not tried yet
has the weight of one solved half of the time. The record of pass rates goes into checkpoints; the
draws themselves are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jetrl.randomness import derive_seed, draw_range, shares, weighted_draw

PRIOR = 1.0  # completions that a prompt counts as solved, and as many as not, before it was tried
MEMORY = 0.5  # what a completion still counts when the prompt is tried again


class PassRates:
    """Each prompt's own history of completions solved and tried, older ones counting less.

    state() is {prompt id: [solved, tried]}; the floats survive JSON bit for bit.
    """

    def __init__(self) -> None:
        self._history: dict[str, tuple[float, float]] = {}

    def observe(self, prompt_id: str, solved: int, tried: int) -> None:
        """Takes in the completions of one group."""
        before_solved, before_tried = self._history.get(prompt_id, (0.0, 0.0))
        self._history[prompt_id] = (
            MEMORY * before_solved + solved,
            MEMORY * before_tried + tried,
        )

    def rate(self, prompt_id: str) -> float:
        """Estimated share of completions that solve it, in (0, 1); 0.5 where it was not tried."""
        solved, tried = self._history.get(prompt_id, (0.0, 0.0))
        return (solved + PRIOR) / (tried + 2 * PRIOR)

    def state(self) -> dict[str, list[float]]:
        return {prompt_id: list(counts) for prompt_id, counts in self._history.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        self._history = {key: (float(counts[0]), float(counts[1])) for key, counts in state.items()}


class ShuffledPrompts:
    """Which prompts a step draws.

    Args:
        tasks: the task of each prompt (`Prompt.task`), in the order of the split.
        prompt_ids: the id of each.
        weights: of each task; {} where there is one.
        seed: of the run's prompts.
        explore: None draws shuffled; else the least weight of a prompt under `pass_rate`.
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
        """Indices of the prompts of a step; steps count from 1, and each draws `count`.

        The tasks take turns, each at equal distances: a step's updates are made on consecutive
        prompts, and each of them is to see every task.
        """
        counts = shares(list(self._weights.values()), count, step, self._seed)
        chosen: list[tuple[float, int]] = []  # places in the step, from 0 to 1, and indices
        for column, (task, members) in enumerate(self._members.items()):
            now, before = int(counts[-1, column]), int(counts[:-1, column].sum())
            seed = self._seed if len(self._members) == 1 else derive_seed(self._seed, task)
            if self._explore is None:
                places = draw_range(len(members), before, now, seed)
            else:
                rates = np.array([self.pass_rates.rate(self._ids[i]) for i in members])
                weight = np.maximum(4.0 * rates * (1.0 - rates), self._explore)
                places = weighted_draw(weight, now, derive_seed(seed, "pass_rate", step))
            chosen += [((k + 0.5) / now, members[place]) for k, place in enumerate(places)]
        return [index for _, index in sorted(chosen, key=lambda entry: entry[0])]
