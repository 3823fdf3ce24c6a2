"""Steps that were launched and not yet taken in, and copies between host and device that nobody
waits for: they go by way of pinned memory, in the order of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.decode_state import NOT_DRAWN
from jetrl.rollout.scheduler import Step


@dataclass(frozen=True)
class LaunchedStep:
    """tokens, logprobs: [forwards or more, draws or more] on the host, a column for each of
    `Step.draws`, not to be read before `ready`. began: when the device came to the step. Both are
    None where the values are there at once."""

    step: Step
    tokens: Tensor
    logprobs: Tensor
    began: torch.cuda.Event | None = None
    ready: torch.cuda.Event | None = None

    def drawn(self) -> list[tuple[list[int], list[float]]]:
        """Waits for the step: (token ids, log-probs) of each draw, as `Scheduler.complete` takes
        them. BROKEN as the last id stands for logits without a finite softmax, which are nothing to
        a sequence that ended before."""
        if self.ready is not None:
            self.ready.synchronize()
        lengths = [
            chunk.length if self.step.decodes else 1
            for chunk in self.step.chunks
            for _ in chunk.draws
        ]
        drawn = []
        tokens, logprobs = self.tokens.t().tolist(), self.logprobs.t().tolist()
        for row, length in enumerate(lengths):
            ids = tokens[row][:length]
            if ids[-1] == NOT_DRAWN:
                ids = ids[: ids.index(NOT_DRAWN)]
            drawn.append((ids, logprobs[row][: len(ids)]))
        return drawn


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Now, in the order of the device's work; None on the CPU, which has no other time."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, there once the device has come to it."""
    if not x.is_cuda:
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def to_device(
    values: np.ndarray | Sequence[int] | Sequence[tuple[int, ...]], device: torch.device
) -> Tensor:
    """Values on the device; integers of Python as int64."""
    host = torch.from_numpy(np.asarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
