"""A profile of prefill: the kernels of the forwards over prompts, and the time between them.

The profile is of prompts alone (each completion is one token long, drawn from the prompt's last
logits), in as many forwards as a few of the case's prompts take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks._profile import idle_pieces, kernel_rows, totals
from benchmarks._timing import Row

from jetrl.rollout.engine import RolloutEngine
from jetrl.types import SamplingParams

_FORWARDS = 6  # of a profile, where there are prompts for as many
_LISTED = 12  # kernels of its table


def prefill_profile(
    engine: RolloutEngine, prompts: Sequence[list[int]], kind_of: Callable[[str], str]
) -> list[Row]:
    """Return microseconds and launches a forward, by kind of kernel and then by kernel.

    The device's idle time is one of the kinds.

    Args:
        engine: An engine that has run such prompts before.
        prompts: Token ids of each prompt.
        kind_of: Returns the kind of a kernel by its name.
    """
    tokens = _FORWARDS * engine.sizes.now.max_prefill_tokens
    profiled = list(prompts[: max(1, tokens // len(prompts[0]))])
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(profiled, params)
        torch.cuda.synchronize()
    return profile_rows(profiler.events(), engine.stats.forwards, kind_of)


def profile_rows(events: Sequence[Any], forwards: int, kind_of: Callable[[str], str]) -> list[Row]:
    """Return the rows of a profiler's events.

    Args:
        events: The events of `torch.profiler`.
        forwards: The number of forwards in which they came.
        kind_of: Returns the kind of a kernel by its name.
    """
    times, counts = totals(events, kind_of)
    ran = [event.time_range for event in events if event.device_time > 0]
    idle = idle_pieces([(span.start, span.end) for span in ran])
    times["= idle"], counts["= idle"] = sum(idle), len(idle)
    return kernel_rows("kernel of prefill", times, counts, forwards, _LISTED)
