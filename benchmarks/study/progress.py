"""The console of a study: lines that stay, and a live line with progress and remaining time."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetrl.runs.format import clip, duration, visible

REFRESH_S, QUIET_S = 0.5, 60.0  # between live lines, on a terminal and in a log
_LEAST_DONE = 0.05  # share of the remaining work after which the time left is estimated


@dataclass(frozen=True)
class Standing:
    """The progress of a study.

    Attributes:
        done, failed, total: Numbers of runs.
        work_done, work: Finished work and all work, in steps times tokens per completion.
        running: The commands that run now, with their steps.
    """

    done: int
    failed: int
    total: int
    work_done: float
    work: float
    running: Sequence[str]


class Progress:
    """The console of a study."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self.begin(Standing(0, 0, 0, 0.0, 0.0, []))

    def begin(self, standing: Standing) -> None:
        """Start the estimate of the remaining time."""
        self._began = self._shown_at = time.monotonic()
        self._first = standing

    def event(self, text: str) -> None:
        """Print a permanent line."""
        print(self._cleared(visible(text, newlines=True)), flush=True)

    def show(self, standing_now: Callable[[], Standing]) -> None:
        """Update the live line, if the last one is old enough."""
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
        """Return the live line."""
        pieces = [f"{standing.done} of {standing.total} runs done"]
        if standing.failed:
            pieces.append(f"{standing.failed} failed")
        pieces.append(duration(elapsed_s))
        made = standing.work_done - self._first.work_done
        left = standing.work - standing.work_done
        if made and made >= _LEAST_DONE * (made + left):
            # Once all steps are made, the last runs are still evaluated.
            text = f"about {duration(elapsed_s * left / made)} left" if left else "nearly done"
            pieces.append(text)
        return ", ".join(pieces) + "".join(f" | {words}" for words in standing.running)

    def _cleared(self, text: str) -> str:
        return f"\r\x1b[2K{text}" if self._terminal else text
