"""The sampling parameters of a run's rollouts and evaluations."""

from __future__ import annotations

from jetrl.randomness import derive_seed
from jetrl.settings.loading import Settings
from jetrl.types import SamplingParams


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
