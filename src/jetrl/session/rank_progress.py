"""The progress of a rollout over all ranks, for the console of rank 0.

Each rank writes its own progress to the store that the ranks met at, about once a second, and rank
0 adds up what it finds there. Nobody waits: a rank that has not written in this phase counts from
its first second on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from jetrl.distributed.meeting import Meeting, meet
from jetrl.distributed.world import world
from jetrl.rollout.options import Progress

EVERY_S = 1.0
_NOTHING = (0, 0, 0)  # sequences done, all sequences, tokens


class RankProgress:
    """The progress of all ranks, an observer of the run's phases.

    Args:
        clock: A function that returns seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._meeting: Meeting | None = meet() if world().size > 1 else None
        self._clock, self._phase, self._last = clock, 0, -EVERY_S
        self._others = _NOTHING

    def begin(self, phase: str, step: int) -> None:
        """Forget the progress of the phase before; every rank begins the same phases."""
        self._phase += 1
        self._last = -EVERY_S
        self._others = _NOTHING

    def beat(self) -> None:
        """Do nothing: the progress of a rollout says more than a sign of life."""

    def end(self, phase: str, seconds: float) -> None:
        """Do nothing: a phase forgets the progress before it when it begins."""

    def of_all(self, own: Progress) -> Progress:
        """Return the progress of all ranks on rank 0, and this rank's own on the others."""
        if self._meeting is None:
            return own
        if self._clock() - self._last >= EVERY_S:
            self._last = self._clock()
            written = [self._phase, own.sequences_done, own.sequences_total, own.tokens]
            self._meeting.write(f"progress {world().rank}", json.dumps(written))
            if world().is_first:
                self._others = self._read()
        done, total, tokens = self._others
        tokens += own.tokens
        return replace(
            own,
            sequences_done=own.sequences_done + done,
            sequences_total=own.sequences_total + total,
            tokens=tokens,
            tokens_per_s=tokens / own.seconds if own.seconds > 0 else 0.0,
        )

    def _read(self) -> tuple[int, int, int]:
        """Return the sums of the progress that the other ranks have written in this phase."""
        assert self._meeting is not None
        done = total = tokens = 0
        for rank in range(1, world().size):
            text = self._meeting.read(f"progress {rank}")
            phase, *counts = json.loads(text) if text else [0, 0, 0, 0]
            if phase == self._phase:
                done, total, tokens = done + counts[0], total + counts[1], tokens + counts[2]
        return done, total, tokens
