"""What a run's phases really hold of a GPU, beside what was planned."""

from __future__ import annotations

import resource

import torch

from jetrl.memory import GIB, Fitted, shown


class MemoryPeaks:
    """The most memory of each phase, as an observer of phases. On a GPU: of tensors. The CPU knows
    the process's peak alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._highest = 0
        self._phases: dict[str, int] = {}

    def begin(self, phase: str, step: int) -> None:
        self._take()
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def beat(self) -> None:
        """Nothing: a peak is kept until it is read."""

    def end(self, phase: str, seconds: float) -> None:
        peak = self._take()
        self._phases[phase] = max(peak, self._phases.get(phase, 0))

    def _take(self) -> int:
        if self._device is None:
            return 0
        peak = torch.cuda.max_memory_allocated(self._device)
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


def plan_notes(memory: Fitted, wanted: int, load_s: float) -> list[str]:
    """The memory plan in lines. wanted: train.tokens_per_micro_batch. load_s: of the models."""
    plan = memory.plan
    lines = [f"models loaded in {load_s:.1f} s; memory plan", *shown(plan).splitlines()]
    if memory.free is not None:
        lines.append(f"  of {memory.free / GIB:.1f} GiB that were free")
    if memory.tokens < wanted:
        lines.append(
            f"micro-batches of up to {memory.tokens} tokens: there is no room for "
            f"train.tokens_per_micro_batch = {wanted}"
        )
    return lines
