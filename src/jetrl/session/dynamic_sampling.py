"""Dynamic sampling: more prompts in place of groups that teach nothing.

A group whose completions all have the same reward has no advantage and no gradient (Yu et al. 2025,
"DAPO", eq. 11).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jetrl.types import Sample


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

    Each round draws as many prompts as should bring the missing groups, by the share of the groups
    so far that taught something, and at most `num_groups`.

    Args:
        num_groups: The number of groups to train on; fewer where the rounds do not bring as many.
        at_least: The number of groups that a step needs; where fewer teach something, others fill
            up.
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
    """Return whether the rewards of a group differ."""
    return any(sample.score.reward != group[0].score.reward for sample in group)


def _numbered(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the samples of groups, which are numbered from 0."""
    return [replace(sample, group=i) for i, group in enumerate(groups) for sample in group]
