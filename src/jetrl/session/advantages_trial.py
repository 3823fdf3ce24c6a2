"""A trial call of a user's advantage function on made-up rewards, before anything is sampled."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from jetrl.errors import UserError
from jetrl.settings.loading import Settings
from jetrl.training.advantages import StepRewards
from jetrl.training.objectives.objective import Objective, UsersEstimator

_SHORT = 7  # tokens: completions of the trial have 1 to so many, but for the first


def try_advantages(objective: Objective, settings: Settings) -> None:
    """Call a user's advantage function once with rewards such as the first step of a run may have.

    The global random generators are left as they were. The trainer has an objective of its own,
    for which the user's file is run again, so that nothing which the file keeps comes from here.

    Raises:
        UserError: The function raised, or returned something else than advantages.
    """
    if not isinstance(objective.advantages, UsersEstimator):
        return
    step = made_up_rewards(objective, settings)
    try:
        with _same_random_state():
            objective.advantages(step)
    except UserError as error:
        rollout = settings.rollout
        raise UserError(
            f"{error} (tried before the run on made-up rewards of {rollout.prompts_per_step} x "
            f"{rollout.samples_per_prompt} samples)"
        ) from error


def made_up_rewards(objective: Objective, settings: Settings) -> StepRewards:
    """Return rewards of a whole step, of 0 and 1.

    Every second group has equal rewards, unless the algorithm samples other groups in their place.
    """
    rollout = settings.rollout
    count = rollout.samples_per_prompt
    group_S = np.repeat(np.arange(rollout.prompts_per_step), count)
    which_S = np.tile(np.arange(count), rollout.prompts_per_step)
    reward_S = ((which_S + group_S // 2) % 2).astype(np.float64)
    if not objective.dynamic_sampling:
        reward_S[group_S % 2 == 1] = 0.0
    longest = rollout.max_tokens
    lengths = [longest if i == 0 else min(1 + i % _SHORT, longest) for i in range(len(group_S))]
    penalty = 0.01 if objective.kl_in_reward else 0.0
    has_critic = settings.critic.path is not None
    return StepRewards(
        reward_S,
        group_S,
        [np.full(length, penalty) for length in lengths],
        [np.full(length, 0.5, np.float32) for length in lengths] if has_critic else None,
    )


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Put the global random generators of Python, NumPy and torch back at the end of the block."""
    python, numpy = random.getstate(), np.random.get_state()
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
