"""The reports of updates and samples that are not finite.

An update or a sample that is not finite is repeated once under observation, which names the first
operation, and kept as a reproduction for `jetrl replay`. Whether the run goes on is the guards'
decision (training/guard.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from jetrl.distributed.agreement import Decision, agree
from jetrl.distributed.world import world
from jetrl.errors import NonFiniteError
from jetrl.memory.out_of_memory import is_out_of_memory
from jetrl.models.model import Model
from jetrl.models.policy import Policy
from jetrl.models.tiny import alphabet_of
from jetrl.rollout.sequence import NonFiniteLogits
from jetrl.runs import RunDirectory
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.reproduction import (
    Facts,
    Kind,
    first_nonfinite,
    largest_logit,
    write_reproduction,
)
from jetrl.settings.loading import Settings
from jetrl.training.extras.critic import LR
from jetrl.training.guard import Guard, NonFiniteUpdate, watch
from jetrl.types import Sample

logger = logging.getLogger(__name__)

FOLDER = "nonfinite"
_FIRST = Decision[str](
    "the first value that was not finite, empty where all are",
    lambda answers: next(filter(None, answers), ""),
)
MOST_KEPT = 3  # reproductions of a run: each holds the weights
_NOT_AGAIN = (
    "and it was not met again when it was repeated at once: an operation that does not give the "
    "same result each time, a fault of the device, or a loss of your own (algorithm.name) that "
    "makes it of finite values"
)


class NonFiniteReports:
    """The guards of a run, and the reports of the updates that the guards refuse."""

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        directory: RunDirectory,
        checkpoints: RunCheckpoints,
        beat: Callable[[], None],
    ) -> None:
        self._settings, self._policy, self._beat = settings, policy, beat
        self._folder, self._checkpoints = directory.path / FOLDER, checkpoints
        action = settings.train.on_nonfinite
        self.guard = Guard(action)
        self.sft_guard = Guard(action, "sft.lr")
        self.critic_guard = Guard(action, LR)
        for name in ("guard", "sft_guard", "critic_guard"):
            checkpoints.register(name, getattr(self, name))

    def expect_updates(self, step: int, samples: Sequence[Sample] = ()) -> None:
        """Say of which step the next updates are, for the reports of refused ones.

        Args:
            samples: The samples of a step; none for a supervised update.
        """
        for guard in (self.guard, self.sft_guard, self.critic_guard):
            guard.report = partial(self._report_update, step, samples)

    @contextlib.contextmanager
    def sampling(self, step: int) -> Iterator[None]:
        """Draw completions of a step in the body of the `with`.

        Raises:
            NonFiniteError: Logits were not finite; the message says where that began.
        """
        try:
            yield
        except NonFiniteLogits as error:
            token_ids = error.token_ids
            first = self._first_nonfinite(
                lambda: largest_logit(self._policy, token_ids), self._policy
            )
            facts = self._facts("sampling", step, 0, str(error), first)
            write = partial(write_reproduction, token_ids=token_ids)
            raise NonFiniteError(f"{error}. {self._keep(facts, write)}") from None

    def _report_update(self, step: int, samples: Sequence[Sample], refused: NonFiniteUpdate) -> str:
        """Keep a reproduction of a refused update; return what is known, in words."""
        first = agree(_FIRST, self._first_nonfinite(refused.repeat, refused.model))
        if refused.model is not self._policy:  # `jetrl replay` is for the policy
            return _where(step, first)
        kind: Kind = "update" if samples else "supervised update"
        # The weights of a step's first update are those of the checkpoint before the step.
        saved = None
        if not refused.index:
            saved = self._checkpoints.masters_after(step - 1, bool(samples))
        write = partial(
            write_reproduction,
            micro_batches=refused.micro_batches,
            samples=samples,
            saved_masters=saved,
        )
        return self._keep(self._facts(kind, step, refused.index, str(refused), first), write)

    def _first_nonfinite(self, repeat: Callable[[], object], model: Model) -> str:
        """Repeat work that was not finite while the model's operations are watched."""
        self._beat()
        operations = None
        try:
            with watch(model) as operations:
                repeat()
        except Exception as error:
            if not is_out_of_memory(error):  # watching takes memory that the update did not need
                raise
            logger.warning("no memory to look at all of what was not finite: %s", error)
        return "" if operations is None else first_nonfinite(operations)

    def _facts(self, kind: Kind, step: int, update: int, what: str, first: str) -> Facts:
        """Return the facts of a reproduction of this run."""
        return Facts(
            kind=kind,
            step=step,
            update=update,
            what=what,
            first=first,
            seed=self._settings.run.seed,
            device=str(self._policy.device),
            alphabet=alphabet_of(self._policy.tokenizer),
        )

    def _keep(self, facts: Facts, write: Callable[..., None]) -> str:
        """Write a reproduction if the run has not too many; return what is known, in words."""
        first = _where(facts.step, facts.first)
        prefix = "sft_" if facts.kind == "supervised update" else ""
        update = f"_update_{facts.update + 1}" if facts.update else ""
        folder = self._folder / f"{prefix}step_{facts.step:06d}{update}"
        kept = world().from_first(
            "reproductions", lambda: [path for path in self._folder.glob("*") if path != folder]
        )
        if len(kept) >= MOST_KEPT:
            return f"{first}. Not kept: {self._folder} has {len(kept)} already"
        try:
            write(folder, facts, self._settings, self._policy)
        except OSError as error:
            return f"{first}. It could not be kept in {folder}: {error.strerror or error}"
        return f"{first}. Kept for `jetrl replay {folder}`"


def _where(step: int, first: str) -> str:
    """Return in which step the first value that is not finite was met, "" if not met again."""
    return f"In step {step}, " + (f"the first such value is the {first}" if first else _NOT_AGAIN)
