"""Training: samples in, updated master weights and metrics out.

The modules advantages, packing and mismatch need numpy alone; losses and objectives
are pure functions. trainer and sft make training steps of updates (update, optimizer), extras has
the critic and what else is rare. checkpoint keeps everything that a run needs to continue, written
so that a crash cannot spoil it. Names are resolved on first use, so that the modules without torch
import without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetrl.training.advantages import group_advantages
    from jetrl.training.checkpoint import Checkpoints
    from jetrl.training.extras.critic import Critic
    from jetrl.training.mismatch import StepMismatchError, mismatch_metrics
    from jetrl.training.objectives import Objective
    from jetrl.training.optimizer import Optimizer
    from jetrl.training.packing import pack, pack_examples, split_minibatches
    from jetrl.training.sft import SftTrainer
    from jetrl.training.trainer import Trainer

__all__ = [
    "Checkpoints",
    "Critic",
    "Objective",
    "Optimizer",
    "SftTrainer",
    "StepMismatchError",
    "Trainer",
    "group_advantages",
    "mismatch_metrics",
    "pack",
    "pack_examples",
    "split_minibatches",
]

_HOME = {
    "Checkpoints": "checkpoint",
    "Critic": "extras.critic",
    "Optimizer": "optimizer",
    "SftTrainer": "sft",
    "StepMismatchError": "mismatch",
    "Trainer": "trainer",
    "group_advantages": "advantages",
    "Objective": "objectives",
    "mismatch_metrics": "mismatch",
    "pack": "packing",
    "pack_examples": "packing",
    "split_minibatches": "packing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
