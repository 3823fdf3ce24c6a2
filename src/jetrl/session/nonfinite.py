"""Reports of non-finite updates and samples.

A non-finite update is repeated once under `watch`, which names the first faulty operation. The
step's rollouts are kept for `jetrl replay`. Guards decide if the run continues (training/guard.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from jetrl.distributed.agreement import FIRST_NONFINITE, agree
from jetrl.errors import NonFiniteError, StorageError
from jetrl.memory.out_of_memory import is_out_of_memory
from jetrl.models.model import Model
from jetrl.models.policy import Policy
from jetrl.rollout.sequence import NonFiniteLogits
from jetrl.session.training_run import TrainingRun
from jetrl.training.extras.critic import LR
from jetrl.training.guard import Guard, NonFiniteUpdate, watch
from jetrl.types import Sample

logger = logging.getLogger(__name__)

REPLAY = "replay-"  # name prefix of the copy of a run used for a replay
_NOT_AGAIN = (
    "no value was non-finite when the work was repeated at once: a nondeterministic operation, a "
    "hardware fault, or your own loss (algorithm.name)"
)


class NonFiniteReports:
    """Guards of a run, and the reports of the updates that they skip."""

    def __init__(self, run: TrainingRun, policy: Policy) -> None:
        self._policy, self._run = policy, run
        action = run.settings.train.on_nonfinite
        self.guard = Guard(action)
        self.sft_guard = Guard(action, "sft.lr")
        self.critic_guard = Guard(action, LR)
        # The count of consecutive skipped updates is checkpointed.
        for name in ("guard", "sft_guard", "critic_guard"):
            run.checkpoints.components.register(name, getattr(self, name))

    def expect_updates(self, step: int, samples: Sequence[Sample] = ()) -> None:
        """Set the step that the next updates belong to; supervised updates have no samples."""
        for guard in (self.guard, self.sft_guard, self.critic_guard):
            guard.report = partial(self._report_update, step, samples)

    @contextlib.contextmanager
    def sampling(self, step: int) -> Iterator[None]:
        """Turn non-finite logits in this context into an error that names the operation."""
        try:
            yield
        except NonFiniteLogits as error:
            # Append the last token again, so that the logits after it are computed too.
            tokens = [*error.token_ids, error.token_ids[-1]]

            def forward() -> None:
                with torch.no_grad():
                    self._policy.logprobs([tokens[: self._policy.config.max_position_embeddings]])

            # The sampler records no operations, so run its tokens through the trainer's forward.
            first = self._first_nonfinite(forward, self._policy)
            raise NonFiniteError(f"{error}. {self._where(step, first)}") from None

    def _report_update(self, step: int, samples: Sequence[Sample], refused: NonFiniteUpdate) -> str:
        """Keep the rollouts of a skipped update; return a sentence about it."""
        # All ranks repeat the update; the first one that finds an operation names it.
        first = agree(FIRST_NONFINITE, self._first_nonfinite(refused.repeat, refused.model))
        where = self._where(step, first, refused.index)
        try:
            if samples:
                self._run.directory.write_rollouts(step, samples)
        except StorageError as failure:  # the NaN is the more important message
            where += f". The step's rollouts could not be kept: {failure}"
        return where

    def _first_nonfinite(self, repeat: Callable[[], object], model: Model) -> str:
        """Repeat non-finite work under `watch`; describe the first such value, or return ""."""
        self._run.phases.beat()
        operations = None
        try:
            with watch(model) as operations:
                repeat()
        except Exception as error:
            if not is_out_of_memory(error):  # `watch` needs extra memory
                raise
            logger.warning("not enough memory to watch every operation again: %s", error)
        return operations.first if operations is not None else ""

    def _where(self, step: int, first: str, update: int = 0) -> str:
        """Return the step and operation of the first non-finite value, as text."""
        found = f"the first such value is the {first}" if first else _NOT_AGAIN
        path = self._run.directory.path
        again = "" if path.name.startswith(REPLAY) else f". To run it again: `jetrl replay {path}`"
        number = f", update {update + 1}" if update else ""
        return f"In step {step}{number}, {found}{again}"
