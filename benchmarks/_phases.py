"""Lines on the console that say how far a benchmark of several minutes has come.

Where a time limit cuts a benchmark off, these lines say in which phase, and what each earlier
phase took.
"""

from __future__ import annotations

import sys
import time

from jetrl.distributed.world import world
from jetrl.rollout.options import Progress

_EVERY_S = 15.0
_IMPORTED = time.perf_counter()


def begins(phase: str) -> None:
    """Print a phase that begins now, with the seconds since this module was imported.

    Args:
        phase: The name of the phase.
    """
    if world().is_first:
        seconds = time.perf_counter() - _IMPORTED
        print(f"[{seconds:6.1f} s] {phase}", file=sys.stderr, flush=True)


class RolloutLines:
    """A callback of `generate` that prints a line every 15 seconds."""

    def __init__(self) -> None:
        self._printed_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Print how much was drawn, where the last line is old enough."""
        if progress.seconds >= self._printed_s + _EVERY_S:
            self._printed_s = progress.seconds
            begins(
                f"sampling for {progress.seconds:.0f} s: {progress.tokens} tokens drawn, "
                f"{progress.sequences_done} of {progress.sequences_total} sequences ended"
            )
