"""The metrics of a step that its samples alone decide: rewards, lengths, evaluations. Names are
those of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetrl.rewards.evaluate import Evaluation
from jetrl.runs.metrics import eval_metric, part_metric, task_metric
from jetrl.types import Sample


def sample_metrics(samples: Sequence[Sample], compares_group: bool) -> dict[str, float]:
    """Rewards and lengths of a step. compares_group: whether the algorithm compares the completions
    of a prompt; else a group of equal rewards means nothing, and they are not counted."""
    rewards = np.array([s.score.reward for s in samples])
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for part, value in sample.score.parts.items():
            parts.setdefault(part_metric(part), []).append(value)
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.prompt.task:
            by_task.setdefault(sample.prompt.task, []).append(sample)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **(_group_metrics(samples, rewards) if compares_group else {}),
        "reward/failures": float(sum(bool(s.failure) for s in samples)),
        **{name: float(np.mean(values)) for name, values in parts.items()},
        **{
            task_metric("reward", task): float(np.mean([s.score.reward for s in own]))
            for task, own in by_task.items()
        },
        **{
            task_metric("response_length", task): float(
                np.mean([len(s.completion.token_ids) for s in own])
            )
            for task, own in by_task.items()
        },
        "response_length/mean": float(np.mean([len(s.completion.token_ids) for s in samples])),
        **_turn_metrics(samples),
        "response_length/clip_ratio": float(
            np.mean([s.completion.finish_reason == "length" for s in samples])
        ),
    }


def _group_metrics(samples: Sequence[Sample], rewards: np.ndarray) -> dict[str, float]:
    groups = np.array([s.group for s in samples])
    spreads = [np.ptp(rewards[groups == g]) for g in np.unique(groups)]
    return {"reward/zero_std_groups": float(np.mean([spread == 0 for spread in spreads]))}


def _turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    if not any(s.completion.turns for s in samples):
        return {}
    return {
        "response_length/turns": float(np.mean([len(s.completion.turns) for s in samples])),
        "response_length/sampled": float(np.mean([s.completion.num_sampled for s in samples])),
    }


def eval_metrics(task: str, result: Evaluation) -> dict[str, float]:
    """What an evaluation of a task, and of the tasks that it is mixed of, adds to its step."""
    metrics = _eval_metrics(task, result)
    for part, own in result.by_task.items():
        metrics |= _eval_metrics(part, own)
    return metrics


def _eval_metrics(task: str, result: Evaluation) -> dict[str, float]:
    values = {
        "mean": result.mean,
        "pass_at_k": result.pass_at_k[max(result.pass_at_k)],
        "response_length": result.response_length,
        "clip_ratio": result.clip_ratio,
        "failures": float(result.failures),
    }
    return {eval_metric(task, what): value for what, value in values.items()}
