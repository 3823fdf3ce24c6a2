"""jetrl: reinforcement learning of language models in FP8, sampling and training as one exact flow.

Names are resolved on first use, so that `jetrl.config` and the command line's help need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetrl.config import Settings, load_config
    from jetrl.loop import train
    from jetrl.policy import Policy
    from jetrl.precision import PrecisionPlan
    from jetrl.rollout.engine import RolloutEngine
    from jetrl.types import Completion, Prompt, SamplingParams, Score

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Policy",
    "PrecisionPlan",
    "Prompt",
    "RolloutEngine",
    "SamplingParams",
    "Score",
    "Settings",
    "__version__",
    "load_config",
    "train",
]

_HOME = {
    "Completion": "types",
    "Policy": "policy",
    "PrecisionPlan": "precision",
    "Prompt": "types",
    "RolloutEngine": "rollout.engine",
    "SamplingParams": "types",
    "Score": "types",
    "Settings": "config",
    "load_config": "config",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
