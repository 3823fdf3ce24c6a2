"""Sources of a step's completions, used by `Session.sample`.

They are the rollout engine, with full prompts or partial rollouts, and somebody's own harness,
which asks the engine through an endpoint. Recorded rollouts would be another `Source`; nothing else
in the loop knows where completions come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.session.episodes import EpisodeSamples, ServedPolicy
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.sampling import Scoring, sample_prompts
from jetrl.session.step import Step
from jetrl.tasks import Scorer
from jetrl.types import Completion, SamplingParams


class Source(Protocol):
    """Provides the completions of a step."""

    can_give_up: bool
    """True if a step interrupted during sampling leaves no persistent state."""

    def draw(
        self,
        step: Step,
        params: SamplingParams,
        own_part: AbstractContextManager[None],
        progress: ProgressCallback,
    ) -> Step:
        """Return the step with its completions, which have log-probs, and with their scores.

        The prompts are those of all ranks, the completions this rank's share, `params.n` per
        prompt in order, and `rollout_tokens` counts the tokens sampled on this rank.

        Inside `own_part`, ranks work independently and may fail independently, without collectives.
        """


class WholePrompts:
    """Samples every prompt of a step to completion, scoring in the background."""

    can_give_up = True

    def __init__(self, engine: RolloutEngine, scorer: Scorer, max_turns: int) -> None:
        self._engine, self._scorer, self._max_turns = engine, scorer, max_turns

    def draw(
        self,
        step: Step,
        params: SamplingParams,
        own_part: AbstractContextManager[None],
        progress: ProgressCallback,
    ) -> Step:
        with own_part:
            later = step.round > 1
            scoring = Scoring(self._scorer, step.prompts, params.n, continues_step=later)
            completions = sample_prompts(self._engine, scoring, params, self._max_turns, progress)
        return _drawn(step, completions, scoring)


class ContinuedPrompts:
    """Samples until enough prompts are complete, from this step or earlier; the rest wait."""

    can_give_up = False

    def __init__(
        self, engine: RolloutEngine, scorer: Scorer, partial_rollouts: PartialRollouts
    ) -> None:
        self._engine, self._scorer, self._partial_rollouts = engine, scorer, partial_rollouts

    def draw(
        self,
        step: Step,
        params: SamplingParams,
        own_part: AbstractContextManager[None],
        progress: ProgressCallback,
    ) -> Step:
        partial_rollouts = self._partial_rollouts
        with own_part:
            groups = partial_rollouts.sample(
                engine=self._engine,
                prompts=step.prompts,
                params=params,
                version=step.number,
                progress=progress,
            )
        prompts, completions = partial_rollouts.choose(groups, step.number)
        unfinished = {"partial_rollout/unfinished": float(partial_rollouts.num_unfinished)}
        return replace(
            step,
            prompts=prompts,
            completions=completions,
            # Score only now: the set of complete completions is known once sampling ends.
            scoring=Scoring(self._scorer, prompts, params.n),
            rollout_tokens=self._engine.stats.tokens_drawn,
            metrics={**step.metrics, **unfinished},
        )


class HarnessEpisodes:
    """Lets a harness play the episodes of a step, which has their rewards too."""

    can_give_up = True

    def __init__(self, served: ServedPolicy) -> None:
        self._served = served

    def draw(
        self,
        step: Step,
        params: SamplingParams,
        own_part: AbstractContextManager[None],
        progress: ProgressCallback,
    ) -> Step:
        with own_part:
            # The weights are those after the steps before this one.
            samples = self._served.player(step.number - 1)(step.prompts, params, progress)
        completions = [sample.completion for sample in samples]
        return _drawn(step, completions, EpisodeSamples(samples))


def _drawn(
    step: Step, completions: Sequence[Completion], scoring: Scoring | EpisodeSamples
) -> Step:
    """Return a step with the completions of its own prompts."""
    num_tokens = sum(completion.num_sampled for completion in completions)
    return replace(step, completions=completions, scoring=scoring, rollout_tokens=num_tokens)
