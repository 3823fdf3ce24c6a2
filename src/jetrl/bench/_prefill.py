"""Where the time of prefill goes: kernels of the forwards over prompts, and between them nothing.

The profile is of prompts alone (each completion is one token long, drawn from the prompt's last
logits), in as many forwards as a few of the case's prompts take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jetrl.bench._timing import Row
from jetrl.rollout.engine import RolloutEngine
from jetrl.types import SamplingParams

_FORWARDS = 6  # of a profile, where there are prompts for as many
_LISTED = 12  # kernels of its table


def prefill_profile(
    engine: RolloutEngine, prompts: Sequence[list[int]], kind_of: Callable[[str], str]
) -> list[Row]:
    """Microseconds and launches a forward by kind of kernel, the device's idle time among them,
    then by kernel. The engine has run such prompts before."""
    tokens = _FORWARDS * engine.sizes.now.max_prefill_tokens
    some = list(prompts[: max(1, tokens // len(prompts[0]))])
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(some, params)
        torch.cuda.synchronize()
    return profile_rows(profiler.events(), engine.stats.forwards, kind_of)


def profile_rows(events: Sequence[Any], forwards: int, kind_of: Callable[[str], str]) -> list[Row]:
    """The rows of a profiler's events."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    spans = []
    for event in events:
        if event.device_time > 0:
            spans.append((event.time_range.start, event.time_range.end))
            for name in (f"= {kind_of(event.name)}", event.name):
                times[name] += event.device_time
                counts[name] += 1
    times["= idle"], counts["= idle"] = idle_microseconds(spans)
    total = sum(time for name, time in times.items() if name.startswith("= "))
    names = sorted(times, key=lambda name: -times[name])
    kinds = [name for name in names if name.startswith("= ")]
    kernels = [name for name in names if not name.startswith("= ")]
    return [
        {
            "kernel of prefill": name[:60],
            "us_a_forward": round(times[name] / forwards, 1),
            "share": round(times[name] / total, 3),
            "launches": round(counts[name] / forwards, 2),
            "us_each": round(times[name] / max(1, counts[name]), 2),
        }
        for name in (*kinds, *kernels[:_LISTED])
    ]


def idle_microseconds(spans: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """(time between the first start and the last end that no span covers, pieces of it)."""
    idle, pieces, end = 0.0, 0, float("inf")
    for start, stop in sorted(spans):
        if start > end:
            idle += start - end
            pieces += 1
        end = stop if end == float("inf") else max(end, stop)
    return idle, pieces
