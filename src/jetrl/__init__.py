"""Reinforcement learning of language models in FP8, sampling and training as one exact flow.

Public names are imported on first use, so that settings and the command line's help need no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetrl.errors import UserError as UserError
    from jetrl.loop import train as train
    from jetrl.models.policy import Policy as Policy
    from jetrl.precision import PrecisionPlan as PrecisionPlan
    from jetrl.rollout.engine import RolloutEngine as RolloutEngine
    from jetrl.settings.loading import Settings as Settings
    from jetrl.settings.loading import load_config as load_config
    from jetrl.tasks.base import Task as Task
    from jetrl.types import Completion as Completion
    from jetrl.types import Prompt as Prompt
    from jetrl.types import SamplingParams as SamplingParams
    from jetrl.types import Score as Score

__version__ = "0.1.0"

_HOME = {
    "Completion": "types",
    "Policy": "models.policy",
    "PrecisionPlan": "precision",
    "Prompt": "types",
    "RolloutEngine": "rollout.engine",
    "SamplingParams": "types",
    "Score": "types",
    "Settings": "settings.loading",
    "Task": "tasks.base",
    "UserError": "errors",
    "load_config": "settings.loading",
    "train": "loop",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        what = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(what, name=name, obj=sys.modules[__name__])  # Python adds the nearest
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
