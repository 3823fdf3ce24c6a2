"""What a run does about bad numbers and too little memory, and how it says so.

An update or a sample that is not finite is repeated once under observation, which names the first
operation, and kept for `jetrl replay`. What is made smaller because memory ran out stays so, also
across a resume. What went out of bounds (runs/anomalies.py) is said with the step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jetrl.errors import NonFiniteError
from jetrl.memory.out_of_memory import is_out_of_memory
from jetrl.models.model import Model
from jetrl.rollout.sequence import NonFiniteLogits
from jetrl.runs.anomalies import Anomalies
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.nonfinite import Facts, Kind, forward_again, keep
from jetrl.session.open import RunContext
from jetrl.training.extras.critic import LR
from jetrl.training.first_nonfinite import watch
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.types import Sample

logger = logging.getLogger(__name__)

FOLDER = "nonfinite"
MOST_KEPT = 3  # reproductions of a run: each holds the weights
_NOT_AGAIN = (
    "and it was not met again when it was repeated at once: an operation that does not give the "
    "same result each time, a fault of the device, or a loss of your own (algorithm.name) that "
    "makes it of finite values"
)


class Safeguards:
    """Of one attempt at a run.

    Args:
        note: shows a line to the user. beat: a sign of life, before what may take long.

    Attributes:
        micro_batch_size: for the trainers of the run. guard, sft_guard, critic_guard: for that of
            RL, that of the warm-up, and the critic.
    """

    def __init__(
        self,
        parts: RunContext,
        saved: RunCheckpoints,
        note: Callable[[str], None],
        beat: Callable[[], None],
    ) -> None:
        self._parts, self._saved, self._note, self._beat = parts, saved, note, beat
        train = parts.settings.train
        self.micro_batch_size = MicroBatchSize.of(train, parts.memory.tokens)
        self.guard = Guard(train.on_nonfinite)
        self.sft_guard = Guard(train.on_nonfinite, "sft.lr")
        self.critic_guard = Guard(train.on_nonfinite, LR)
        saved.register("micro_batches", self.micro_batch_size)
        saved.register("guard", self.guard)
        saved.register("sft_guard", self.sft_guard)
        saved.register("critic_guard", self.critic_guard)
        saved.register("rollout_sizes", parts.engine.sizes)
        self._anomalies: Anomalies | None = None

    @contextlib.contextmanager
    def update(self, step: int, samples: Sequence[Sample] = ()) -> Iterator[None]:
        """While a trainer updates: of RL on samples, of the warm-up without."""

        def report(refused: NonFiniteUpdate) -> str:
            first = self._first(refused.repeat, refused.model)
            if refused.model is not self._parts.policy:  # `jetrl replay` is for the policy
                return _where(step, first)
            kind: Kind = "update" if samples else "supervised update"
            facts = self._facts(kind, step, refused.index, str(refused), first)
            # The weights of a step's first update are those of the checkpoint before it.
            saved = None if refused.index else self._saved.masters_after(step - 1, bool(samples))
            return self._keep(
                facts,
                lambda folder: keep(
                    folder,
                    facts,
                    self._parts.settings,
                    self._parts.policy,
                    refused.micro_batches,
                    samples,
                    saved_masters=saved,
                ),
            )

        for guard in (self.guard, self.sft_guard, self.critic_guard):
            guard.report = report
        yield

    @contextlib.contextmanager
    def sampling(self, step: int) -> Iterator[None]:
        """While completions are drawn.

        Raises:
            NonFiniteError: logits were not finite; says where it began.
        """
        try:
            yield
        except NonFiniteLogits as error:
            token_ids, policy = error.token_ids, self._parts.policy
            first = self._first(lambda: forward_again(policy, token_ids), policy)
            facts = self._facts("sampling", step, 0, str(error), first)
            told = self._keep(
                facts,
                lambda folder: keep(
                    folder, facts, self._parts.settings, policy, token_ids=token_ids
                ),
            )
            raise NonFiniteError(f"{error}. {told}") from None

    def take_in(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Says what was unusual about a step, and returns it as metrics.

        metrics: of the step, without times.
        """
        if self._anomalies is None:
            before = [r for r in self._parts.run.metrics("rl") if 0 < r["step"] < step]
            self._anomalies = Anomalies(before)
        found = self._anomalies.see(metrics)
        events = {
            "policy/anomalies": len(found),
            "memory/rollout_retries": self._parts.engine.sizes.take_retries(),
        }
        for text in found:
            logger.warning("step %d: %s", step, text)
            self._note(f"step {step}: {text}")
        untaught = int(metrics.get("critic/skipped_updates", 0))
        if untaught:
            self._note(
                f"step {step}: {untaught} update{'s' * (untaught > 1)} of the critic not finite "
                "and skipped; log.txt says more"
            )
        skipped = int(metrics.get("policy/skipped_updates", 0))
        if skipped:
            self._note(
                f"step {step}: {skipped} update{'s' * (skipped > 1)} not finite and skipped; "
                f"log.txt says more, {self._parts.run.path / FOLDER} has what `jetrl replay` takes"
            )
        if events["memory/rollout_retries"]:
            self._note(f"step {step}: out of memory in rollout; fewer sequences at a time now")
        if metrics.get("memory/train_retries"):
            self._note(
                f"step {step}: out of memory in training; {self.micro_batch_size.tokens} tokens a "
                "micro-batch now"
            )
        return {name: float(count) for name, count in events.items() if count}

    def _first(self, repeat: Callable[[], object], model: Model) -> str:
        """Repeats what was not finite while the model is watched. Returns the first such value, in
        words; "" if there is none now."""
        self._beat()
        seen = None
        try:
            with watch(model) as seen:
                repeat()
        except Exception as error:
            if not is_out_of_memory(error):  # to look takes some; the update itself had enough
                raise
            logger.warning("no memory to look at all of what was not finite: %s", error)
        return "" if seen is None or seen.first is None else str(seen.first)

    def _facts(self, kind: Kind, step: int, update: int, what: str, first: str) -> Facts:
        policy, seed = self._parts.policy, self._parts.settings.run.seed
        return Facts(kind, step, update, what, first, seed, str(policy.device))

    def _keep(self, facts: Facts, write: Callable[[Path], None]) -> str:
        """Keeps a reproduction if there is room; returns what is known, in words."""
        first = _where(facts.step, facts.first)
        parent = self._parts.run.path / FOLDER
        name = {"supervised update": "sft_"}.get(facts.kind, "") + f"step_{facts.step:06d}"
        folder = parent / (f"{name}_update_{facts.update + 1}" if facts.update else name)
        kept = [path for path in parent.glob("*") if path != folder]
        if len(kept) >= MOST_KEPT:
            return f"{first}. Not kept: {parent} has {len(kept)} already"
        try:
            write(folder)
        except OSError as error:
            return f"{first}. It could not be kept in {folder}: {error.strerror or error}"
        return f"{first}. Kept for `jetrl replay {folder}`"


def _where(step: int, first: str) -> str:
    """In words; first: "" if such a value was not met again."""
    found = f"the first such value is the {first}" if first else _NOT_AGAIN
    return f"In step {step}, {found}"
