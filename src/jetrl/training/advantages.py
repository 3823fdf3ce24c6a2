"""Advantages: one value per trained token, computed from a step's rewards. Does not import torch.

    group          reward minus the group's mean, over its standard deviation    GRPO, DAPO, ...
    leave_one_out  reward minus the mean of the group's other rewards            RLOO
    global         reward to go, normalized over all tokens of the step          REINFORCE++
    group_global   reward minus the group's mean, normalized over all tokens     REINFORCE++
    gae            temporal differences against a critic, normalized             PPO

An estimator is a function of `StepRewards` and its settings, computed in float64 and rounded once.
Sums, means and variances are those of `host_math`, rewards to go are summed from the last token.
If all rewards of a group are equal, its advantages are exactly 0, without rounding error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jetrl.errors import UserError
from jetrl.training.host_math import exact_sum, mean, variance

MOST_REWARD = float(np.finfo(np.float32).max)  # larger values overflow when squared in float64
STD_EPS = 1e-6  # as in verl; TRL uses 1e-4
_VARIANCE_EPS = 1e-8  # as in verl, for normalization over tokens


@dataclass(frozen=True)
class StepRewards:
    """Rewards of the S samples of a step.

    Attributes:
        rewards: float64 [S]; NaN for an unscored sample, which is excluded from all statistics and
            has advantage 0.
        groups: int64 [S]; samples of the same prompt share a number.
        penalties: Subtracted at each trained token (a weighted KL), float64 [n] per sample.
        values: The critic's value before each trained token, float32 [n] per sample.
    """

    rewards: np.ndarray
    groups: np.ndarray
    penalties: Sequence[np.ndarray]
    values: Sequence[np.ndarray] | None = None

    @property
    def judged(self) -> np.ndarray:
        """Return a mask of the samples that have a reward, bool [S]."""
        return ~np.isnan(self.rewards)

    @property
    def scores(self) -> np.ndarray:
        """Return each reward minus the sum of its penalties, float64 [S]."""
        return self.rewards - np.array([exact_sum(penalty) for penalty in self.penalties])

    def at_tokens(self, per_sample: np.ndarray) -> list[np.ndarray]:
        """Return per-sample values [S] expanded to tokens: float32 [n] per sample."""
        return [
            np.full(len(penalty), value, dtype=np.float32)
            for value, penalty in zip(per_sample, self.penalties, strict=True)
        ]


@dataclass(frozen=True)
class Advantages:
    """Advantages, and returns for a critic, float32 [n] per sample."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None = None


def of_episodes(
    estimate: Callable[[StepRewards], Advantages], step: StepRewards, continues: Sequence[bool]
) -> Advantages:
    """Return the advantages of samples of which some continue the episode of the one before.

    An episode counts as one sample, with the trained tokens of all of its samples in order.
    """
    if not any(continues):
        return estimate(step)
    # Join the samples of each episode, estimate, and split again.
    firsts = [i for i, is_later in enumerate(continues) if not is_later]

    def joined(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        spans = itertools.pairwise([*firsts, len(parts)])
        return [np.concatenate(parts[start:end]) for start, end in spans]

    whole = estimate(
        StepRewards(
            rewards=step.rewards[firsts],
            groups=step.groups[firsts],
            penalties=joined(step.penalties),
            values=None if step.values is None else joined(step.values),
        )
    )
    ends = np.cumsum([len(penalty) for penalty in step.penalties])[:-1]

    def split(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return np.split(np.concatenate(parts), ends)

    returns = None if whole.returns is None else split(whole.returns)
    return Advantages(split(whole.advantages), returns)


def group(step: StepRewards, normalize_std: bool = True) -> Advantages:
    """Reward minus the group's mean, over its standard deviation ("DeepSeekMath", sec. 4.1.2)."""
    advantage_S = _in_groups(step.scores, step.groups, step.judged, normalize_std)
    return Advantages(step.at_tokens(advantage_S))


def leave_one_out(step: StepRewards) -> Advantages:
    """Reward minus the mean of the group's other rewards (Ahmadian et al. 2024, "RLOO")."""
    advantage_S = np.zeros(len(step.rewards))
    for members, reward in _groups(step.scores, step.groups, step.judged):
        count = len(members)
        # A group of one has no baseline.
        if count > 1 and not _constant(reward):
            advantage_S[members] = (reward - mean(reward)) * (count / (count - 1))
    return Advantages(step.at_tokens(advantage_S))


def _whole_step(step: StepRewards) -> Advantages:
    """Reward minus later penalties, normalized over the step's tokens (Hu 2025, "REINFORCE++")."""
    # Reward to go: the reward minus penalties at this token and later.
    rewards_to_go = [
        reward - np.cumsum(penalty[::-1])[::-1]
        for reward, penalty in zip(step.rewards, step.penalties, strict=True)
    ]
    return Advantages(_normalized(rewards_to_go, step.judged))


def _group_then_step(step: StepRewards) -> Advantages:
    """Reward minus its group's mean, normalized over tokens ("REINFORCE++ with baseline")."""
    # Baseline per group, scale over all tokens of the step.
    centred_S = _in_groups(step.scores, step.groups, step.judged, normalize_std=False)
    return Advantages(_normalized(step.at_tokens(centred_S), step.judged))


def gae(step: StepRewards, gamma: float = 1.0, gae_lambda: float = 0.95) -> Advantages:
    """Generalized advantage estimation, normalized over the step's tokens.

    Schulman et al. 2015, eq. 16, with the reward at the last token, penalties at theirs, and V = 0
    after the end. Returns are A_t + V_t before the normalization.
    """
    assert step.values is not None, "gae needs a critic's values"
    advantages, returns = [], []
    for reward, penalty, value in zip(step.rewards, step.penalties, step.values, strict=True):
        # The reward is at the last token; penalties are at their own tokens.
        rewards = -penalty.astype(np.float64)
        rewards[-1:] += reward
        values = value.astype(np.float64)
        advantage = np.zeros(len(rewards))
        following, next_value = 0.0, 0.0
        # Backward in time: each advantage needs the next one. V is 0 after the end.
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + gamma * next_value - values[t]
            following = delta + gamma * gae_lambda * following
            advantage[t], next_value = following, values[t]
        advantages.append(advantage)
        # An unscored completion has no value target.
        known = values if np.isnan(reward) else advantage + values
        returns.append(known.astype(np.float32))
    return Advantages(_normalized(advantages, step.judged), returns)


ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    "group": group,
    "leave_one_out": leave_one_out,
    "global": _whole_step,
    "group_global": _group_then_step,
    "gae": gae,
}


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[int], normalize_std: bool = True
) -> np.ndarray:
    """Return (reward - mean) / (sample standard deviation + 1e-6) in each group, float32 [N].

    Groups need not be contiguous. The advantage is 0 in a group of one, and for a reward of None,
    which is excluded from its group's statistics.
    """
    reward_N, group_N = check_rewards(rewards, groups)
    return _in_groups(reward_N, group_N, ~np.isnan(reward_N), normalize_std)


def _in_groups(
    rewards: np.ndarray, groups: np.ndarray, judged: np.ndarray, normalize_std: bool
) -> np.ndarray:
    advantage_N = np.zeros(len(rewards), dtype=np.float32)
    for members, reward in _groups(rewards, groups, judged):
        # Exactly 0, without the rounding error of a mean.
        if _constant(reward):
            continue
        advantage = reward - mean(reward)
        if normalize_std:
            advantage = advantage / (math.sqrt(variance(reward, ddof=1)) + STD_EPS)
        advantage_N[members] = advantage
    return advantage_N


def check_rewards(
    rewards: Sequence[float | None], groups: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards as float64 [N] (None becomes NaN) and groups as int64 [N].

    Raises UserError for a reward that is infinite, NaN or too large, since its advantage would be
    0.
    """
    reward_N = np.array([np.nan if r is None else r for r in rewards], dtype=np.float64)
    group_N = np.asarray(groups, dtype=np.int64)
    for i, reward in enumerate(rewards):
        if reward is not None and not abs(reward) <= MOST_REWARD:  # also true for NaN
            raise UserError(
                f"the reward of sample {i} (group {group_N[i]}) is {reward}; it must be a finite "
                f"number within {MOST_REWARD:.3g}"
            )
    return reward_N, group_N


def overlong_penalties(lengths: np.ndarray, max_tokens: int, buffer: int) -> np.ndarray:
    """Return the penalty of completions near the token limit, float64 [S] ("DAPO", eq. 13).

    The penalty is 0 up to max_tokens - buffer tokens and rises linearly to 1 at max_tokens. A
    buffer of 0 disables it.
    """
    if buffer == 0:
        return np.zeros(len(lengths))
    return np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def _groups(
    rewards: np.ndarray, groups: np.ndarray, judged: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (sample numbers, rewards) of the scored samples of each group."""
    numbers = np.unique(groups[judged])
    members = [np.flatnonzero((groups == number) & judged) for number in numbers]
    return [(ids, rewards[ids]) for ids in members]


def _constant(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _normalized(values: Sequence[np.ndarray], judged: np.ndarray) -> list[np.ndarray]:
    """Return values normalized to mean 0, variance 1 over all tokens: float32 [n] per sample.

    Tokens of unscored samples are excluded and get 0.
    """
    parts = [np.asarray(part, dtype=np.float64) for part in values]
    kept = [part for part, known in zip(parts, judged, strict=True) if known]
    everything = np.concatenate(kept) if kept else np.zeros(0)
    # Equal values carry no signal, and a single value has no variance.
    if len(everything) < 2 or _constant(everything):
        return [np.zeros(len(part), dtype=np.float32) for part in values]
    scale = 1.0 / math.sqrt(variance(everything, ddof=1) + _VARIANCE_EPS)
    center = mean(everything)
    return [
        ((part - center) * scale if known else np.zeros(len(part))).astype(np.float32)
        for part, known in zip(values, judged, strict=True)
    ]
