"""The metrics of a step that do not come from the trainer, and notes on unusual ones.

Their names and meanings are in docs/metrics.md.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jetrl.distributed.world import world
from jetrl.kernels.decode_state import SOURCES
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import SpeculationStats
from jetrl.runs import Learning, RunDirectory
from jetrl.runs.anomalies import Anomalies
from jetrl.runs.metrics import eval_metric, part_metric, task_metric
from jetrl.session.evaluate import Evaluation
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.types import Sample

TIMED = ("rollout", "reward", "update", "optimizer", "requantize")
"""What every step has a metric timing/NAME_s of."""


def sample_metrics(samples: Sequence[Sample], compares_group: bool) -> dict[str, float]:
    """Return the rewards and lengths of a step's samples.

    Args:
        compares_group: Whether the algorithm compares a prompt's completions; else groups of equal
            rewards are not counted.
    """
    rewards = np.array([s.score.reward for s in samples])
    lengths = np.array([len(s.completion.token_ids) for s in samples])
    parts: dict[str, list[float]] = {}
    indices_by_task: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        for part, value in sample.score.parts.items():
            parts.setdefault(part_metric(part), []).append(value)
        if sample.prompt.task:
            indices_by_task.setdefault(sample.prompt.task, []).append(i)
    by_task = {
        task_metric(name, task): float(values[indices].mean())
        for name, values in (("reward", rewards), ("response_length", lengths))
        for task, indices in indices_by_task.items()
    }
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **(_group_metrics(samples, rewards) if compares_group else {}),
        "reward/failures": float(sum(bool(s.failure) for s in samples)),
        **{name: float(np.mean(values)) for name, values in parts.items()},
        **by_task,
        "response_length/mean": float(lengths.mean()),
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
    """Return the turns and sampled tokens of completions in an environment, {} without one."""
    if not any(s.completion.turns for s in samples):
        return {}
    return {
        "response_length/turns": float(np.mean([len(s.completion.turns) for s in samples])),
        "response_length/sampled": float(np.mean([s.completion.num_sampled for s in samples])),
        "reward/unusable_replies": float(sum(s.completion.unusable_reply for s in samples)),
    }


def throughput_metrics(
    timings: Mapping[str, float], samples: Sequence[Sample], rollout_tokens: int
) -> dict[str, float]:
    """Return the times and speeds of a step whose rollout, reward and update are done.

    Args:
        rollout_tokens: The number of tokens that were drawn.
    """
    num_trained = sum(len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples)
    return {
        **{f"timing/{name}_s": timings[name] for name in TIMED},
        "throughput/rollout_tokens_per_s": rollout_tokens / timings["rollout"],
        "throughput/train_tokens_per_s": num_trained / timings["update"],
    }


def speculation_metrics(speculated: SpeculationStats | None) -> dict[str, float]:
    """Return the worth of the drafts that this rank and the others verified, {} without drafts.

    Args:
        speculated: The counts of this rank's sampling; None where it verified no drafts.
    """
    counts = [c for c in world().gather("counts of drafts", speculated) if c is not None]
    if not counts:
        return {}
    total = functools.reduce(SpeculationStats.plus, counts)
    return {
        "speculation/tokens_per_forward": total.tokens_per_forward,
        "speculation/verify_share": total.verify_s / total.decode_s if total.decode_s else 0.0,
        **{
            f"speculation/acceptance_{source}": accepted / drafted
            for source, drafted, accepted in zip(
                SOURCES, total.drafted, total.accepted, strict=True
            )
            if drafted
        },
    }


def distributed_metrics(metrics: Mapping[str, float], waited_s: float) -> dict[str, float]:
    """Return throughput per rank and the fraction of time that ranks wait; {} for one process."""
    size = world().size
    if size == 1:
        return {}
    waits = world().gather("times of waiting", waited_s)
    return {
        "distributed/size": float(size),
        "distributed/wait_share": sum(waits) / size / metrics["timing/step_s"],
        **{
            f"distributed/{name}_per_rank": metrics[f"throughput/{name}"] / size
            for name in ("rollout_tokens_per_s", "train_tokens_per_s")
        },
    }


def largest_of_ranks(metrics: Mapping[str, float]) -> dict[str, float]:
    values = world().gather("measurements", dict(metrics))
    return {name: max(one[name] for one in values if name in one) for name in metrics}


def eval_metrics(task: str, evaluation: Evaluation) -> dict[str, float]:
    values = {
        "mean": evaluation.mean,
        "pass_at_k": evaluation.pass_at_k[max(evaluation.pass_at_k)],
        "response_length": evaluation.response_length,
        "clip_ratio": evaluation.clip_ratio,
        "failures": float(evaluation.failures),
    }
    metrics = {eval_metric(task, name): value for name, value in values.items()}
    for mixed_task, own in evaluation.by_task.items():
        metrics |= eval_metrics(mixed_task, own)
    return metrics


logger = logging.getLogger(__name__)


class StepNotes:
    """The notes on the steps of a run, made of their metrics."""

    def __init__(
        self,
        directory: RunDirectory,
        engine: RolloutEngine,
        micro_batch_size: MicroBatchSize,
        note: Callable[[str], None],
    ) -> None:
        self._run_path = directory.path
        self._engine, self._micro_batch_size, self._note = engine, micro_batch_size, note
        lines = world().from_first("the metrics", lambda: directory.metrics("rl"))
        self._anomalies = Anomalies([line for line in lines if line["step"] > 0])
        self._learning = Learning(lines)

    def on_update(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Note what was unusual about a step's sampling and updates; return counts as metrics.

        Args:
            metrics: The metrics of its samples and updates, without times.
        """
        # The rules look at metrics alone, so a resumed run gives the same warnings.
        anomalies = self._anomalies.see(metrics)
        rollout_retries = sum(
            world().gather("retries of the rollout", self._engine.sizes.take_retries())
        )
        for text in anomalies:
            logger.warning("step %d: %s", step, text)
        notes = list(anomalies)
        if skipped := int(metrics.get("critic/skipped_updates", 0)):
            notes.append(
                f"{skipped} update{'s' * (skipped > 1)} of the critic not finite and skipped; "
                "log.txt says more"
            )
        if skipped := int(metrics.get("policy/skipped_updates", 0)):
            notes.append(
                f"{skipped} update{'s' * (skipped > 1)} not finite and skipped; log.txt names the "
                f"operation, `jetrl replay {self._run_path}` runs it again"
            )
        if rollout_retries:
            notes.append("out of memory in rollout; sampling fewer sequences at a time now")
        if metrics.get("memory/train_retries"):
            notes.append(
                f"out of memory in training; {self._micro_batch_size.tokens} tokens a micro-batch "
                "now"
            )
        for text in notes:
            self._note(f"step {step}: {text}")
        counts = {"policy/anomalies": len(anomalies), "memory/rollout_retries": rollout_retries}
        return {
            **{name: float(count) for name, count in counts.items() if count},
            **speculation_metrics(self._engine.take_speculation()),
        }

    def on_record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn the user if the steps so far show that the run does not learn."""
        for warning in self._learning.see(metrics):
            logger.warning("step %d: %s", step, warning)
            self._note(f"warning: {warning}")
