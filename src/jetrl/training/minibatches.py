"""Which samples of a step each optimizer update is made on. No torch.

    all          every sample once: the groups are shared out over the updates (packing.py)
    shuffle_r1   the pairs of a group that tell most apart, drawn for each update by how much they
                 tell (Zhu et al. 2025, "Shuffle-R1", arXiv 2508.05612)

Shuffle-R1 in two parts. Pairwise trajectory sampling: a group of 2N samples is sorted by advantage
and sample i is paired with sample 2N + 1 - i, the best with the worst; the first pairs of this
order, whose advantages differ most, are kept. Advantage-based batch shuffle: each update draws its
share of the kept pairs with probabilities in proportion to |A1| + |A2|, without repetition within
the update; over the updates of a step a pair may come several times, or never. A pair whose
advantages are both 0 is not drawn while there are others. Draws are counted: a function of the
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jetrl.randomness import derive_seed, weighted_draw
from jetrl.settings.loading import Settings
from jetrl.training.advantages import group_advantages
from jetrl.training.packing import split_minibatches
from jetrl.types import Sample


class Pair(NamedTuple):
    """Two samples of a group, by number; best has the higher advantage. weight: |A1| + |A2|."""

    best: int
    worst: int
    weight: float


def contrast_pairs(
    advantages: Sequence[float] | np.ndarray, groups: Sequence[int], keep: float
) -> list[Pair]:
    """The kept pairs of each group, those that differ most first.

    Args:
        advantages: [S], one number a sample. groups: [S], members need not be neighbours.
        keep: share of a group's pairs; at least one pair of each group is kept, and the middle
            sample of an odd group is in none.
    """
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    pairs = []
    for own in members.values():
        order = sorted(own, key=lambda i: (-advantages[i], i))
        num_pairs = len(order) // 2
        for place in range(min(num_pairs, max(1, int(keep * num_pairs)))):
            best, worst = order[place], order[-1 - place]
            weight = abs(float(advantages[best])) + abs(float(advantages[worst]))
            pairs.append(Pair(best, worst, weight))
    return pairs


def shuffled_minibatches(pairs: Sequence[Pair], num_minibatches: int, seed: int) -> list[list[int]]:
    """The samples of each update: its share of the pairs, drawn by weight.

    Returns:
        Sample numbers, ascending, of each minibatch; together they hold as many pairs as there are,
        or fewer where fewer have a weight.
    """
    telling = [pair for pair in pairs if pair.weight > 0] or list(pairs)
    weights = np.array([pair.weight or 1.0 for pair in telling])
    bounds = [len(pairs) * k // num_minibatches for k in range(num_minibatches + 1)]
    minibatches = []
    for k in range(num_minibatches):
        count = min(len(telling), max(1, bounds[k + 1] - bounds[k]))
        drawn = [telling[i] for i in weighted_draw(weights, count, derive_seed(seed, k))]
        minibatches.append(sorted(i for pair in drawn for i in (pair.best, pair.worst)))
    return minibatches


def choose_minibatches(
    samples: Sequence[Sample], settings: Settings, num_updates: int
) -> list[list[int]]:
    """The samples of each update of a step, by `data.batch`. num_updates: made before this step.

    Raises:
        UserError: fewer samples than updates.
    """
    groups = [sample.group for sample in samples]
    updates = settings.train.updates_per_step
    if settings.data.batch == "all":
        return split_minibatches(groups, updates)
    advantages = group_advantages([sample.score.reward for sample in samples], groups)
    pairs = contrast_pairs(advantages, groups, settings.data.keep_pairs)
    return shuffled_minibatches(
        pairs, updates, derive_seed(settings.run.seed, "minibatches", num_updates)
    )
