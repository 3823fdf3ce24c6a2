"""The results that a training returns to its caller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    Attributes:
        report_path: The report, None if reports are off.
        checkpoint_path: The last checkpoint, None if none was written.
        stopped: Why the run ended before its last step, "" if it did not.
    """

    run_path: Path
    report_path: Path | None
    checkpoint_path: Path | None
    model_path: Path | None
    steps: int
    stopped: str = ""


@dataclass(frozen=True)
class RewardResult:
    """The end of a reward model's training.

    Attributes:
        accuracy: The share of held-out pairs whose better completion scores higher.
    """

    run_path: Path
    model_path: Path
    accuracy: float
    pairs: int
