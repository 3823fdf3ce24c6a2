"""The results that a training returns to its caller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    Attributes:
        run_path: The run directory.
        report_path: The report, None if reports are off.
        checkpoint_path: The last checkpoint, None if none was written.
        model_path: The exported Hugging Face directory.
        steps: The number of RL steps that were done.
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
        run_path: The run directory.
        model_path: The Hugging Face directory of the model.
        accuracy: The share of held-out pairs whose better completion scores higher.
        pairs: The number of held-out pairs.
    """

    run_path: Path
    model_path: Path
    accuracy: float
    pairs: int
