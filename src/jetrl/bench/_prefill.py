"""Where the time of prefill goes: kernels of the forwards over prompts, and between them nothing.

The profile is of prompts alone (each completion is one token long, drawn from the prompt's last
logits), in as many forwards as a few of the case's prompts take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jetrl.bench._profile import idle_pieces, kernel_rows, totals
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
    times, counts = totals(events, kind_of)
    ran = [event.time_range for event in events if event.device_time > 0]
    idle = idle_pieces([(span.start, span.end) for span in ran])
    times["= idle"], counts["= idle"] = sum(idle), len(idle)
    return kernel_rows("kernel of prefill", times, counts, forwards, _LISTED)
