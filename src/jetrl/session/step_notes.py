"""Notes on a step beside its numbers: anomalies, skipped updates, lack of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from jetrl.distributed.world import world
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs import Learning, RunDirectory
from jetrl.runs.anomalies import Anomalies
from jetrl.session.step_metrics import speculation_metrics
from jetrl.training.micro_batches import MicroBatchSize

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
            notes.append("out of memory in rollout; fewer sequences at a time now")
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
