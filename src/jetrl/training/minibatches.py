"""Minibatches: the samples of a step that each optimizer update is made on. No torch here.

`data.batch` says how they are chosen:

    all          every sample once; the groups are divided among the updates
    shuffle_r1   pairs of samples, drawn by weight (Zhu et al. 2025, "Shuffle-R1", arXiv 2508.05612)

Shuffle-R1 has two parts. Pairwise trajectory sampling: a group of 2N samples is sorted by advantage
and sample i is paired with sample 2N + 1 - i; the first pairs, whose advantages differ most, are
kept. Advantage-based batch shuffle: each update draws its share of the kept pairs with probability
proportional to |A1| + |A2|, without repetition within the update; over a step a pair may come
several times or never. Pairs of weight 0 are drawn only if there are no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jetrl.errors import UserError
from jetrl.randomness import derive_seed, weighted_draw
from jetrl.settings.loading import Settings
from jetrl.training.advantages import group_advantages
from jetrl.types import Sample


def choose_minibatches(
    samples: Sequence[Sample], settings: Settings, num_updates: int
) -> list[list[int]]:
    """Return the sample numbers of each update of a step, by `data.batch`."""
    groups = [sample.group for sample in samples]
    updates = settings.train.updates_per_step
    if settings.data.batch == "all":
        return split_minibatches(groups, updates)
    advantages = group_advantages([sample.score.reward for sample in samples], groups)
    pairs = contrast_pairs(advantages, groups, settings.data.keep_pairs)
    return shuffled_minibatches(
        pairs, updates, derive_seed(settings.run.seed, "minibatches", num_updates)
    )


def split_minibatches(groups: Sequence[int], num_minibatches: int) -> list[list[int]]:
    """Return the sample numbers of each update, ascending: every sample once.

    Groups stay whole if there are at least as many of them as minibatches. Sizes differ by at most
    one group (or one sample).

    Raises:
        UserError: Fewer samples than minibatches.
    """
    if len(groups) < num_minibatches:
        raise UserError(
            f"train.updates_per_step = {num_minibatches} but the step has only {len(groups)} "
            "samples: lower it, or raise rollout.prompts_per_step or rollout.samples_per_prompt"
        )
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    # Whole groups if there are enough, else single samples.
    units: Iterable[list[int]] = members.values()
    if len(members) < num_minibatches:
        units = [[i] for i in range(len(groups))]
    units = list(units)
    bounds = [len(units) * k // num_minibatches for k in range(num_minibatches + 1)]
    return [sorted(itertools.chain(*units[start:end])) for start, end in itertools.pairwise(bounds)]


class Pair(NamedTuple):
    """Two samples of a group, by number, drawn in proportion to weight = |A1| + |A2|."""

    best: int
    worst: int
    weight: float


def contrast_pairs(
    advantages: Sequence[float] | np.ndarray, groups: Sequence[int], keep: float
) -> list[Pair]:
    """Return the kept pairs of each group, those that differ most first.

    Args:
        advantages: [S].
        groups: [S]; groups need not be contiguous. The middle sample of an odd group is in no pair.
        keep: The share of a group's pairs that is kept; at least one is.
    """
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    pairs = []
    for group_members in members.values():
        order = sorted(group_members, key=lambda i: (-advantages[i], i))
        num_pairs = len(order) // 2
        for rank in range(min(num_pairs, max(1, int(keep * num_pairs)))):
            best, worst = order[rank], order[-1 - rank]
            weight = abs(float(advantages[best])) + abs(float(advantages[worst]))
            pairs.append(Pair(best, worst, weight))
    return pairs


def shuffled_minibatches(pairs: Sequence[Pair], num_minibatches: int, seed: int) -> list[list[int]]:
    """Return the sample numbers of each update, ascending: its share of the pairs, drawn by weight.

    Together the minibatches hold as many pairs as there are, or fewer if fewer have a weight.
    """
    # Pairs that teach nothing are used only if there are no others.
    drawable = [pair for pair in pairs if pair.weight > 0] or list(pairs)
    weights = np.array([pair.weight or 1.0 for pair in drawable])
    bounds = [len(pairs) * k // num_minibatches for k in range(num_minibatches + 1)]
    minibatches = []
    for k in range(num_minibatches):
        count = min(len(drawable), max(1, bounds[k + 1] - bounds[k]))
        drawn = [drawable[i] for i in weighted_draw(weights, count, derive_seed(seed, k))]
        minibatches.append(sorted(i for pair in drawn for i in (pair.best, pair.worst)))
    return minibatches
