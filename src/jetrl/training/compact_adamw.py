"""AdamW whose moments take three bytes a parameter: the states of kernels/adamw.py, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from jetrl.distributed.shards import Shard
from jetrl.kernels.adamw import adamw_
from jetrl.kernels.adamw_scalars import AdamWScalars, adamw_scalars, from_element
from jetrl.settings import TrainSettings

KEYS = {"ratio": torch.uint8, "root": torch.int16}


@dataclass
class _State:
    """The moments of one master weight, and how many updates they have seen."""

    ratio: torch.Tensor
    root: torch.Tensor
    step: int = 0


class CompactAdamW:
    """AdamW over named matrices.

    Args:
        masters: The float32 matrices by name; gradients are read from `.grad`.
        shards: The division of the rows of matrices among ranks, by name.
    """

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        settings: TrainSettings,
        shards: Mapping[str, Shard],
    ) -> None:
        self._masters, self._shards = dict(masters), shards
        self._settings = settings
        self._states: dict[str, _State] = {}

    @torch.no_grad()
    def step(self, clip: torch.Tensor, lr: Callable[[int], float]) -> None:
        """Update the matrices by their gradients.

        Args:
            clip: float32 scalar on the device, which the gradients are multiplied by.
        """
        settings = self._settings
        scalars: dict[int, AdamWScalars] = {}  # by step, as a rule the same one for all
        for name, master in self._masters.items():
            if master.grad is None:
                continue
            state = self._states.get(name)
            if state is None:
                ratio, root = (torch.zeros_like(master, dtype=dtype) for dtype in KEYS.values())
                state = _State(ratio, root)
                self._states[name] = state
            state.step += 1
            if state.step not in scalars:
                scalars[state.step] = adamw_scalars(
                    state.step, lr, settings.betas, settings.eps, settings.weight_decay
                )
            own = scalars[state.step]
            if name in self._shards:
                own = from_element(own, self._shards[name].first_row * math.prod(master.shape[1:]))
            gradient = master.grad.contiguous()
            adamw_(master.detach(), gradient, state.ratio, state.root, clip, own)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return the state of one matrix, the tensors themselves; {} before its first gradient.

        Returns:
            `ratio`, `root` and `step` (float32 scalar).
        """
        state = self._states.get(name)
        if state is None:
            return {}
        step = torch.tensor(float(state.step))
        return {"step": step, "ratio": state.ratio, "root": state.root}

    def load(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over what `state` returned for each name, without copying the tensors."""
        self._states = {
            name: _State(state["ratio"], state["root"], int(state["step"]))
            for name, state in states.items()
        }
