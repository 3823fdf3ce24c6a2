"""The memory of a run: what was planned, and the most that each phase really held."""

from __future__ import annotations

import logging
import resource

import torch

from jetrl.memory.device import peak_bytes, reset_peak
from jetrl.memory.fitting import Fitted, shown
from jetrl.memory.plan import GIB

logger = logging.getLogger(__name__)


class MemoryPeaks:
    """The most memory that each phase of a run held, as an observer of the phases.

    On a GPU it counts tensors, KV pages and the memory that CUDA graphs work in; on the CPU only
    the peak of the process is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._highest = 0
        self._phases: dict[str, int] = {}

    def begin(self, phase: str, step: int) -> None:
        self._take()
        if self._device is not None:
            reset_peak(self._device)

    def beat(self) -> None:
        """Do nothing: a peak is kept until it is read."""

    def end(self, phase: str, seconds: float) -> None:
        peak = self._take()
        self._phases[phase] = max(peak, self._phases.get(phase, 0))

    def _take(self) -> int:
        """Return the peak since the last reset, in bytes; 0 on the CPU."""
        if self._device is None:
            return 0
        peak = peak_bytes(self._device)
        self._highest = max(self._highest, peak)
        return peak

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics memory/* of the phases since the last call."""
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


def memory_plan_notes(memory: Fitted, loading: str, device: torch.device) -> list[str]:
    """Write the memory plan to the log; on a GPU return its lines, to be shown to the user."""
    lines = [f"{loading}; memory plan", *shown(memory.plan).splitlines()]
    if memory.free is not None:
        lines.append(f"  of {memory.free / GIB:.1f} GiB that were free")
    logger.info("%s", "\n".join(lines))
    return lines if device.type == "cuda" else []


def micro_batch_notes(memory: Fitted, tokens: int, setting: int) -> list[str]:
    """Return what to say where micro-batches do not have train.tokens_per_micro_batch tokens.

    Args:
        tokens: The tokens of a micro-batch, those of the checkpoint after a resume.
    """
    if tokens != memory.tokens:
        return [
            f"micro-batches of up to {tokens} tokens, as before the run was cut, since its bits "
            f"depend on it; the memory plan is for {memory.tokens}"
        ]
    if tokens < setting:
        return [
            f"micro-batches of up to {tokens} tokens: there is no room for "
            f"train.tokens_per_micro_batch = {setting}"
        ]
    return []
