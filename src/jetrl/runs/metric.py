"""The record of a metric: its name, unit and meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

FREE = r"[^/<>\s]+"
"""The pattern of <task> and <name>: a path component without blanks or angle brackets."""


@dataclass(frozen=True)
class Metric:
    """A metric that a run may write.

    Attributes:
        measured: Whether the metric is a time, a speed or memory, which depend on the machine. All
            others are the same, bit for bit, when a run is repeated on the CPU.
        known_as: The metric's name in other systems, by system.
    """

    name: str
    unit: str
    meaning: str
    measured: bool = False
    known_as: Mapping[str, str] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        """Return whether a name is this metric's, or one of its family."""
        if "<" not in self.name:
            return name == self.name
        pattern = re.sub(r"<\w+>", lambda _: FREE, self.name)
        return re.fullmatch(pattern, name) is not None
