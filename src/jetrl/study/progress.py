"""The console of a study: a line for each run that ends, and below them one line that is live."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetrl.runs.format import clip, duration, visible

REFRESH_S, QUIET_S = 0.5, 60.0  # between live lines: on a terminal, and in a log


@dataclass(frozen=True)
class Standing:
    """The standing of a study at a moment.

    Attributes:
        done: The number of runs that are done.
        failed: The number of runs that have failed.
        total: The number of runs.
        work_done: The work that is done, in steps times tokens a completion.
        work: All the work.
        running: The runs that are running, each in words.
    """

    done: int
    failed: int
    total: int
    work_done: float
    work: float
    running: Sequence[str]


class Progress:
    """The console of a study.

    Args:
        standing: The standing before the first run is started, which the estimate begins from.
    """

    def __init__(self, standing: Standing) -> None:
        self._began = time.monotonic()
        self._first = standing
        self._shown_at = self._began
        self._terminal = sys.stdout.isatty()

    def event(self, text: str) -> None:
        """Print a line that stays."""
        print(self._cleared(visible(text, newlines=True)), flush=True)

    def show(self, standing_now: Callable[[], Standing]) -> None:
        """Show the standing in the live line, if the last one is old enough.

        Args:
            standing_now: Returns the standing.
        """
        now = time.monotonic()
        if now - self._shown_at < (REFRESH_S if self._terminal else QUIET_S):
            return
        self._shown_at = now
        line = self.line(standing_now(), now - self._began)
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(self._cleared(clip(visible(line), width)), end="", flush=True)
        else:
            print(visible(line), flush=True)

    def close(self) -> None:
        """Clear the live line."""
        if self._terminal:
            print(self._cleared(""), end="", flush=True)

    def line(self, standing: Standing, elapsed_s: float) -> str:
        """Return the live line.

        Args:
            standing: The standing.
            elapsed_s: The seconds since the study was started.
        """
        pieces = [f"{standing.done} of {standing.total} runs done"]
        if standing.failed:
            pieces.append(f"{standing.failed} failed")
        pieces.append(duration(elapsed_s))
        made = standing.work_done - self._first.work_done
        if made > 0:
            left = elapsed_s * (standing.work - standing.work_done) / made
            pieces.append(f"about {duration(left)} left")
        return ", ".join(pieces) + "".join(f" | {words}" for words in standing.running)

    def _cleared(self, text: str) -> str:
        return f"\r\x1b[2K{text}" if self._terminal else text
