"""Minibatches: the samples of a step that each optimizer update is made on.

No torch here. The setting `data.batch` says how they are chosen:

    all          every sample once: the groups are shared out over the updates
    shuffle_r1   drawn pairs of samples (extras/shuffle_r1.py)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jetrl.errors import UserError
from jetrl.randomness import derive_seed
from jetrl.settings.loading import Settings
from jetrl.training.advantages import group_advantages
from jetrl.training.extras.shuffle_r1 import contrast_pairs, shuffled_minibatches
from jetrl.types import Sample


def choose_minibatches(
    samples: Sequence[Sample], settings: Settings, num_updates: int
) -> list[list[int]]:
    """Return the numbers of the samples of each update of a step, by `data.batch`.

    Raises:
        UserError: Fewer samples than updates.
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


def split_minibatches(groups: Sequence[int], num_minibatches: int) -> list[list[int]]:
    """Return the samples of each update of a step: every sample once, in order.

    Args:
        groups: [N], the group of each sample.
        num_minibatches: How many minibatches there are; groups stay whole if there are at least as
            many of them.

    Returns:
        Sample numbers, ascending, of each minibatch. Their sizes differ by at most one group (or
        one sample, where groups had to be divided).

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
    units: Iterable[list[int]] = members.values()
    if len(members) < num_minibatches:
        units = [[i] for i in range(len(groups))]
    units = list(units)
    bounds = [len(units) * k // num_minibatches for k in range(num_minibatches + 1)]
    return [sorted(itertools.chain(*units[start:end])) for start, end in itertools.pairwise(bounds)]
