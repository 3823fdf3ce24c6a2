"""Advantages: what the algorithm makes of the rewards of a group.

GRPO (Shao et al. 2024, "DeepSeekMath", equation 21) compares the completions of one prompt with
each other: advantage = (reward - mean of the group) / (standard deviation of the group + eps).
The deviation is that of a sample (n - 1), as in TRL and verl. A group whose rewards are all equal
says nothing, and its advantages are exactly 0, not the rounding error of a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetrl.errors import UserError

STD_EPS = 1e-6


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence[int] | np.ndarray,
    normalize_std: bool = True,
) -> np.ndarray:
    """The advantage of each sample within its group.

    Args:
        rewards: [N], one number a sample.
        groups: [N], the group of each sample; members of a group need not be neighbours.
        normalize_std: divide by the group's standard deviation + 1e-6.

    Returns:
        float32 [N]. A group of one has advantage 0. Computed in float64 and rounded once.

    Raises:
        UserError: a reward that is not finite, named by its sample.
        ValueError: rewards and groups differ in length.
    """
    reward_N = np.asarray(rewards, dtype=np.float64)
    group_N = np.asarray(groups, dtype=np.int64)
    if reward_N.shape != group_N.shape or reward_N.ndim != 1:
        raise ValueError(f"{reward_N.shape} rewards for {group_N.shape} group numbers")
    if not np.isfinite(reward_N).all():
        first = int(np.flatnonzero(~np.isfinite(reward_N))[0])
        raise UserError(
            f"the reward of sample {first} (group {group_N[first]}) is {reward_N[first]}: "
            "a task's score must be a finite number"
        )
    advantage_N = np.zeros(len(reward_N), dtype=np.float32)
    for group in np.unique(group_N):
        members = np.flatnonzero(group_N == group)
        reward = reward_N[members]
        if (reward == reward[0]).all():
            continue
        advantage = reward - reward.mean()
        if normalize_std:
            advantage = advantage / (reward.std(ddof=1) + STD_EPS)
        advantage_N[members] = advantage
    return advantage_N
