"""What a run's phases really hold of a GPU, beside what was planned."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable

import torch

from jetrl.memory.device import peak_bytes, reset_peak
from jetrl.memory.fitting import Fitted, shown
from jetrl.memory.plan import GIB

logger = logging.getLogger(__name__)


class MemoryPeaks:
    """The most memory of each phase, as an observer of phases. On a GPU: of tensors, pages and what
    graphs work in. The CPU knows the process's peak alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._highest = 0
        self._phases: dict[str, int] = {}

    def begin(self, phase: str, step: int) -> None:
        self._take()
        if self._device is not None:
            reset_peak(self._device)

    def beat(self) -> None:
        """Nothing: a peak is kept until it is read."""

    def end(self, phase: str, seconds: float) -> None:
        peak = self._take()
        self._phases[phase] = max(peak, self._phases.get(phase, 0))

    def _take(self) -> int:
        if self._device is None:
            return 0
        peak = peak_bytes(self._device)
        self._highest = max(self._highest, peak)
        return peak

    def take_metrics(self) -> dict[str, float]:
        """memory/* of the phases since the last call."""
        self._take()
        if self._device is None:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"memory/peak_gib": peak / GIB}
        phases = {
            f"memory/{name}_peak_gib": self._phases[name] / GIB
            for name in ("rollout", "update")
            if name in self._phases
        }
        self._phases.clear()
        return {"memory/peak_gib": self._highest / GIB, **phases}


def tell_plan(
    memory: Fitted, opened: str, device: torch.device, note: Callable[[str], None]
) -> None:
    """The memory plan in lines, to the log; of a GPU to the user too. opened: what came before."""
    lines = [f"{opened}; memory plan", *shown(memory.plan).splitlines()]
    if memory.free is not None:
        lines.append(f"  of {memory.free / GIB:.1f} GiB that were free")
    logger.info("%s", "\n".join(lines))
    if device.type == "cuda":
        for line in lines:
            note(line)


def size_notes(memory: Fitted, tokens: int, wanted: int) -> list[str]:
    """What to say of the size of micro-batches where it is not train.tokens_per_micro_batch.

    tokens: what holds, after a resume has taken over the checkpoint's. wanted: the setting.
    """
    if tokens != memory.tokens:
        return [
            f"micro-batches of up to {tokens} tokens, as before the run was cut, since its bits "
            f"depend on it; the memory plan is for {memory.tokens}"
        ]
    if tokens < wanted:
        return [
            f"micro-batches of up to {tokens} tokens: there is no room for "
            f"train.tokens_per_micro_batch = {wanted}"
        ]
    return []
