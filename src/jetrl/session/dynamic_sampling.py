"""Dynamic sampling: more prompts in place of groups that teach nothing (Yu et al. 2025, "DAPO",
eq. 11). A group whose completions all have the same reward has no advantage and no gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jetrl.types import Sample


@dataclass(frozen=True)
class Refilled:
    """samples: to train on, `wanted` groups of them numbered from 0, or fewer where the rounds did
    not bring more. drawn: all samples of all rounds. rounds: how often prompts were drawn.
    dropped: groups that were drawn and are not trained on."""

    samples: list[Sample]
    drawn: list[Sample]
    rounds: int
    dropped: int


def refill(
    samples: Sequence[Sample],
    wanted: int,
    at_least: int,
    max_rounds: int,
    draw: Callable[[int, int], list[Sample]],
) -> Refilled:
    """Draws until `wanted` groups have rewards that differ, at most `max_rounds` times in all.

    Each round asks for as many prompts as should bring what is missing, by the share of the groups
    so far that taught something, and for at most `wanted`.

    Args:
        samples: of the first round. draw: (round 2, 3, ..., number of prompts) -> their samples.
        at_least: groups that a step needs; where fewer teach something, the others fill up.
    """
    drawn, rounds = _groups(samples), 1
    teaching = [group for group in drawn if _teaches(group)]
    while len(teaching) < wanted and rounds < max_rounds:
        share = max(len(teaching), 1) / len(drawn)
        rounds += 1
        more = _groups(draw(rounds, min(wanted, math.ceil((wanted - len(teaching)) / share))))
        drawn += more
        teaching += [group for group in more if _teaches(group)]
    kept = teaching[:wanted]
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
