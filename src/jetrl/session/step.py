"""A training step: its record, its sampling parameters, and dynamic sampling.

Dynamic sampling draws more prompts instead of groups that teach nothing: a group whose completions
all have the same reward has no advantage and no gradient (Yu et al. 2025, "DAPO", eq. 11).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jetrl.randomness import derive_seed
from jetrl.session.sampling import EncodedPrompt, Scoring
from jetrl.settings.loading import Settings
from jetrl.types import Completion, Sample, SamplingParams


@dataclass(frozen=True)
class Step:
    """A training step; each verb of the loop returns a new record in which more fields are filled.

    Attributes:
        number: From 1; 0 stands for the model before the first step.
        round: The round of sampling, from 1; after dynamic sampling, the number of rounds.
        completions: Of the round, `rollout.samples_per_prompt` per prompt.
        scoring: The scores, begun while other completions are sampled; None before sampling.
        rollout_tokens: Tokens sampled in all rounds.
    """

    number: int
    round: int = 1
    prompts: Sequence[EncodedPrompt] = ()
    completions: Sequence[Completion] = ()
    scoring: Scoring | None = None
    samples: Sequence[Sample] = ()
    drawn_samples: Sequence[Sample] = ()
    rollout_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def rollout_params(settings: Settings, step: int, round: int = 1) -> SamplingParams:
    """Return how the completions of a step are drawn.

    Args:
        round: The round of dynamic sampling, 1 for the step's own prompts.
    """
    rollout = settings.rollout
    later_round = [round] if round > 1 else []
    return SamplingParams(
        n=rollout.samples_per_prompt,
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        seed=derive_seed(settings.run.seed, "rollout", step, *later_round),
    )


def eval_params(settings: Settings) -> SamplingParams:
    """Return how the completions of a held-out evaluation are drawn, in every step alike."""
    return SamplingParams(
        n=settings.eval.samples,
        max_tokens=settings.eval.max_tokens or settings.rollout.max_tokens,
        temperature=settings.eval.temperature,
        top_p=settings.eval.top_p,
        stop=settings.rollout.stop,
        seed=derive_seed(settings.run.seed, "eval"),
    )


@dataclass(frozen=True)
class Refilled:
    """The groups of a step after dynamic sampling.

    Attributes:
        samples: The samples to train on, their groups numbered from 0.
    """

    samples: list[Sample]
    drawn: list[Sample]
    rounds: int
    dropped: int


def refill(
    samples: Sequence[Sample],
    num_groups: int,
    at_least: int,
    max_rounds: int,
    draw: Callable[[int, int], Sequence[Sample]],
) -> Refilled:
    """Draw prompts until enough groups have rewards that differ.

    Each round draws as many prompts as should bring the missing groups, by the fraction of groups
    so far that taught something, and at most `num_groups`.

    Args:
        at_least: The groups that a step needs; if fewer teach something, others fill up.
        draw: Maps a round (2, 3, ...) and a number of prompts to the samples of these prompts.
    """
    drawn, rounds = _groups(samples), 1
    teaching = [group for group in drawn if _teaches(group)]
    while len(teaching) < num_groups and rounds < max_rounds:
        share = max(len(teaching), 1) / len(drawn)
        rounds += 1
        missing = math.ceil((num_groups - len(teaching)) / share)
        more = _groups(draw(rounds, min(num_groups, missing)))
        drawn += more
        teaching += [group for group in more if _teaches(group)]
    kept = teaching[:num_groups]
    if len(kept) < at_least:
        idle = [group for group in drawn if not _teaches(group)]
        kept += idle[: at_least - len(kept)]
    return Refilled(_numbered(kept), _numbered(drawn), rounds, len(drawn) - len(kept))


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    return [list(group) for _, group in itertools.groupby(samples, key=lambda s: s.group)]


def _teaches(group: Sequence[Sample]) -> bool:
    return any(sample.score.reward != group[0].score.reward for sample in group)


def _numbered(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [replace(sample, group=i) for i, group in enumerate(groups) for sample in group]
