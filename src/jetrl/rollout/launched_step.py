"""Launched steps with pending draws, and asynchronous copies between host and device.

Copies go through pinned memory, in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.decode_state import NOT_DRAWN
from jetrl.rollout.draft_widths import Width
from jetrl.rollout.scheduler import ScheduledStep


@dataclass(frozen=True)
class LaunchedStep:
    """A launched step, with host buffers for its draws.

    Attributes:
        tokens: Integers [forwards, draws * width], valid after `ready`.
        logprobs: float32, same shape.
        began, ready: Events at the start of the step and after its last copy; None on a CPU.
        offers: int32 [forwards, draws], `Verified.offers`; None without drafts.
        host_s: Seconds of the launch, which on a CPU runs the step.
    """

    step: ScheduledStep
    tokens: Tensor
    logprobs: Tensor
    began: torch.cuda.Event | None = None
    ready: torch.cuda.Event | None = None
    offers: Tensor | None = None
    verify: Width | None = None
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration of a finished step, by GPU events if available."""
        if self.began is None or self.ready is None:
            return self.host_s
        return self.began.elapsed_time(self.ready) / 1e3

    def drawn(self) -> list[tuple[list[int], list[float]]]:
        """Wait for (token ids, log-probs) per draw; a last id BROKEN means no finite softmax."""
        if self.ready is not None:
            self.ready.synchronize()
        lengths = self.step.draw_lengths
        # From [forwards, draws * width] to one list per draw, in order of forwards.
        shape = (len(lengths), self.step.width)
        tokens, logprobs = (
            x.unflatten(1, shape).transpose(0, 1).flatten(1).tolist()
            for x in (self.tokens, self.logprobs)
        )
        drawn = []
        for length, ids, values in zip(lengths, tokens, logprobs, strict=True):
            last = length * self.step.width
            kept = [at for at, id in enumerate(ids[:last]) if id != NOT_DRAWN]
            drawn.append(([ids[at] for at in kept], [values[at] for at in kept]))
        return drawn


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Record an event in the current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def to_host(x: Tensor) -> Tensor:
    """Return a host copy, filled when the device reaches the copy."""
    if x.device.type == "cpu":
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def to_device(
    values: np.ndarray | Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Return a tensor on the device; Python integers become int64."""
    host = torch.from_numpy(np.asarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
