"""The base class of observers that watch a run's metrics step by step and warn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping


class Watch:
    """An observer of a run's steps that gives a warning when it begins, and not while it lasts.

    The warnings are a function of the steps' metrics alone, so a resumed run, and the report, have
    the same ones. A subclass has `window`, the number of steps that it remembers, and `warnings`.

    Args:
        history: The metrics of the RL steps so far, in order.
    """

    window: int

    def __init__(self, history: Iterable[Mapping[str, float]] = ()) -> None:
        self._steps: deque[Mapping[str, float]] = deque(maxlen=self.window)
        self._lasting: set[str] = set()
        for metrics in history:
            self.see(metrics)

    def see(self, metrics: Mapping[str, float]) -> list[str]:
        """Take in a step's metrics, and return the warnings that begin with this step."""
        warnings = self.warnings(metrics)
        if warnings is None:
            return []
        new = [text for kind, text in warnings.items() if kind not in self._lasting]
        self._lasting = set(warnings)
        return new

    def warnings(self, metrics: Mapping[str, float]) -> dict[str, str] | None:
        """Take in a step, and return all its warnings by kind; None changes nothing."""
        raise NotImplementedError
