"""The console of studies: a line for each run that ends, and below them one line that is live."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetrl.runs.format import clip, duration, visible

REFRESH_S, QUIET_S = 0.5, 60.0  # between live lines: on a terminal, and in a log
_FORESEEN = 0.05  # share of the work after which the time that is left can be estimated


@dataclass(frozen=True)
class Standing:
    """The standing of one study, or of several together, at a moment.

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


def together(standings: Sequence[Standing]) -> Standing:
    """Return the standing of several studies together.

    Args:
        standings: The standing of each.
    """
    return Standing(
        sum(one.done for one in standings),
        sum(one.failed for one in standings),
        sum(one.total for one in standings),
        sum(one.work_done for one in standings),
        sum(one.work for one in standings),
        [words for one in standings for words in one.running],
    )


class Progress:
    """The console of studies."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self.begin(Standing(0, 0, 0, 0.0, 0.0, []))

    def begin(self, standing: Standing) -> None:
        """Begin the estimate of the time that is left.

        Args:
            standing: The standing before the first run is started.
        """
        self._began = self._shown_at = time.monotonic()
        self._first = standing

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
            elapsed_s: The seconds since the runs were begun.
        """
        pieces = [f"{standing.done} of {standing.total} runs done"]
        if standing.failed:
            pieces.append(f"{standing.failed} failed")
        pieces.append(duration(elapsed_s))
        made = standing.work_done - self._first.work_done
        left = standing.work - standing.work_done
        if made and made >= _FORESEEN * (made + left):
            # Once all steps are made, the last runs are still evaluated.
            text = f"about {duration(elapsed_s * left / made)} left" if left else "nearly done"
            pieces.append(text)
        return ", ".join(pieces) + "".join(f" | {words}" for words in standing.running)

    def _cleared(self, text: str) -> str:
        return f"\r\x1b[2K{text}" if self._terminal else text
