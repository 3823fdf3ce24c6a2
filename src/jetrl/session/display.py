"""The console of a run: one for the warm-up, one for the steps, opened with their first line."""

from __future__ import annotations

from collections.abc import Callable

from jetrl.rollout.progress import Progress
from jetrl.runs import Console
from jetrl.types import StepStats


class Display:
    """Shows the stretch that runs now. It is told of phases as their observer.

    Args:
        total_steps: RL steps of the run. elapsed_s: wall time over all attempts, when asked.
    """

    def __init__(self, total_steps: int, elapsed_s: Callable[[], float]) -> None:
        self.first_step = 0
        self._total_steps = total_steps
        self._elapsed_s = elapsed_s
        self._console: Console | None = None

    def open_warm_up(self, steps: int, first_step: int) -> None:
        """Opens the console of the warm-up: its updates, and those that were done before."""
        self.close()
        self._console = Console(
            steps, first_step=first_step, title="sft", samples_every=0, lines_every=25
        )

    def close(self) -> None:
        """Takes the bar away; the next line opens the console of the steps."""
        if self._console is not None:
            self._console.close()
            self._console = None

    def note(self, text: str) -> None:
        self._opened().note(text)

    def step(self, stats: StepStats) -> None:
        self._opened().step(stats)

    def progress(self, progress: Progress) -> None:
        self._opened().progress(
            progress.sequences_done,
            progress.sequences_total,
            progress.tokens_per_s,
            (progress.pages_in_use, progress.pages_total),
            progress.eta_s,
        )

    def begin(self, phase: str, step: int) -> None:
        self._opened().phase(phase)

    def beat(self) -> None:
        """A rollout's progress says more."""

    def end(self, phase: str, seconds: float) -> None:
        """The next phase takes the place of this one."""

    def _opened(self) -> Console:
        if self._console is None:
            self._console = Console(
                self._total_steps, first_step=self.first_step, elapsed_s=self._elapsed_s()
            )
        return self._console
