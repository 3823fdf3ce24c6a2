"""The digest of an open run (`runs.digest`), which passes from step to step through checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from jetrl.distributed.checksum import checksum_lines
from jetrl.models.model import Model
from jetrl.runs.digest import START, Digest, Line, fields_of, next_digest
from jetrl.types import Metrics, Sample


class RunDigest:
    """The digest after the `last` step; None if the run continues a checkpoint without one."""

    def __init__(self) -> None:
        self.last: Digest | None = START

    @property
    def text(self) -> str:
        """The digest in 64 hex digits; "" before the first step, or without one."""
        return self.last["run"] if self.last is not None and len(self.last) > 1 else ""

    def advance(
        self, line: Line, models: Sequence[Model], metrics: Metrics, samples: Sequence[Sample] = ()
    ) -> Digest | None:
        """Return the digest after one more step or supervised update, given all trained models.

        A collective: every process has the same digest.
        """
        if self.last is not None:
            weights = []
            # The policy first; a second model's names cannot be confused with the policy's.
            for number, model in enumerate(models):
                prefix = f"{number}/" if number else ""
                lines = checksum_lines(model.master_weights(), model.weights.shards)
                weights += [prefix + line for line in lines]
            self.last = next_digest(self.last, line, fields_of(samples, metrics, weights))
        return self.last

    def state(self) -> Digest | None:
        return self.last

    def load_state(self, state: Digest | None) -> str | None:
        self.last = state
        if state is not None:
            return None
        # A digest of later steps only would look like one of the whole run.
        return (
            "the checkpoint has no digest, since an earlier version of jetrl wrote it or began the "
            "run: the run has none from here on"
        )
