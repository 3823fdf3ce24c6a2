"""The console of a run: one for the supervised updates, one for the steps of the loop."""

from __future__ import annotations

from collections.abc import Callable

from jetrl.rollout.options import Progress
from jetrl.runs import Console
from jetrl.types import StepStats


class Display:
    """The console of the present stretch of a run, opened with the stretch's first line.

    It is an observer of the run's phases.

    Args:
        elapsed_s: Returns the wall time of all attempts at the run, in seconds.
    """

    def __init__(self, total_steps: int, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._console: Console | None = None
        self._open: Callable[[], Console]
        self.show_steps(total_steps)

    def show_steps(self, total: int, first: int = 0) -> None:
        """Begin the stretch of `total` steps, of which earlier attempts did `first`."""
        self.close()
        self._open = lambda: Console(total, first_step=first, elapsed_s=self._elapsed_s())

    def show_updates(self, title: str, total: int, first: int = 0) -> None:
        """Begin a stretch of supervised updates."""
        self.close()
        self._open = lambda: Console(
            total, first_step=first, title=title, samples_every=0, lines_every=25
        )

    def close(self) -> None:
        """Take the bar away; the next line opens it again."""
        if self._console is not None:
            self._console.close()
            self._console = None

    def note(self, *notes: str) -> None:
        """Show each note on a line of its own."""
        for text in notes:
            self._opened().note(text)

    def step(self, stats: StepStats) -> None:
        """Show the line of a step or of a supervised update."""
        self._opened().step(stats)

    def progress(self, progress: Progress) -> None:
        """Show how far a rollout is."""
        self._opened().progress(
            progress.sequences_done,
            progress.sequences_total,
            progress.tokens_per_s,
            (progress.pages_in_use, progress.pages_total),
            progress.eta_s,
        )

    def begin(self, phase: str, step: int) -> None:
        """Show which phase runs."""
        self._opened().phase(phase)

    def beat(self) -> None:
        """Show nothing: the progress of a rollout says more than a sign of life."""

    def end(self, phase: str, seconds: float) -> None:
        """Show nothing: the next phase takes the place of this one."""

    def _opened(self) -> Console:
        """Return the console of the present stretch, opened if it is not."""
        if self._console is None:
            self._console = self._open()
        return self._console


class SilentDisplay(Display):
    """The display of a rank other than the first, which shows nothing."""

    def close(self) -> None:
        """Do nothing: no console was opened."""

    def note(self, *notes: str) -> None:
        """Show nothing."""

    def step(self, stats: StepStats) -> None:
        """Show nothing."""

    def progress(self, progress: Progress) -> None:
        """Show nothing."""

    def begin(self, phase: str, step: int) -> None:
        """Show nothing."""
