"""Shuffle-R1: updates on the pairs of samples that tell most apart.

No torch here. Zhu et al. 2025, "Shuffle-R1", arXiv 2508.05612, in two parts.

Pairwise trajectory sampling: a group of 2N samples is sorted by advantage and sample i is paired
with sample 2N + 1 - i, the best with the worst; the first pairs of this order, whose advantages
differ most, are kept.

Advantage-based batch shuffle: each update draws its share of the kept pairs with probabilities in
proportion to |A1| + |A2|, without repetition within the update; over the updates of a step a pair
may come several times, or never. A pair whose advantages are both 0 is not drawn while there are
others. Draws are counted: a function of the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jetrl.randomness import derive_seed, weighted_draw


class Pair(NamedTuple):
    """Two samples of a group, by number.

    Attributes:
        weight: |A1| + |A2|, which the pair is drawn by.
    """

    best: int
    worst: int
    weight: float


def contrast_pairs(
    advantages: Sequence[float] | np.ndarray, groups: Sequence[int], keep: float
) -> list[Pair]:
    """Return the kept pairs of each group, those that differ most first.

    Args:
        advantages: [S], one number a sample.
        groups: [S]; members of a group need not be neighbours.
        keep: The share of a group's pairs that is kept; at least one pair of each group is, and the
            middle sample of an odd group is in none.
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
    """Return the samples of each update: its share of the pairs, drawn by weight.

    Returns:
        Sample numbers, ascending, of each minibatch; together they hold as many pairs as there are,
        or fewer where fewer have a weight.
    """
    drawable = [pair for pair in pairs if pair.weight > 0] or list(pairs)
    weights = np.array([pair.weight or 1.0 for pair in drawable])
    bounds = [len(pairs) * k // num_minibatches for k in range(num_minibatches + 1)]
    minibatches = []
    for k in range(num_minibatches):
        count = min(len(drawable), max(1, bounds[k + 1] - bounds[k]))
        drawn = [drawable[i] for i in weighted_draw(weights, count, derive_seed(seed, k))]
        minibatches.append(sorted(i for pair in drawn for i in (pair.best, pair.worst)))
    return minibatches
