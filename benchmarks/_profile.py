"""Sums over a profiler's events: time and launches by kernel, and the time between kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks._timing import Row


def totals(
    events: Sequence[Any], kind_of: Callable[[str], str]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return microseconds and launches by kernel, and by kind of kernel as `= kind`."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        if event.device_time > 0:
            for name in (event.name, f"= {kind_of(event.name)}"):
                times[name] += event.device_time
                counts[name] += 1
    return times, counts


def kernel_rows(
    heading: str, times: dict[str, float], counts: dict[str, int], forwards: int, listed: int
) -> list[Row]:
    """Return a row for each kind of kernel, then for the kernels that took longest.

    Args:
        heading: The heading of the column with the names.
        times: Microseconds by kernel and kind, as `totals` returns them.
        counts: Launches by kernel and kind.
        forwards: The number of forwards in which they were counted.
        listed: How many kernels are listed.
    """
    total = sum(time for name, time in times.items() if name.startswith("= "))
    names = sorted(times, key=lambda name: -times[name])
    kinds = [name for name in names if name.startswith("= ")]
    kernels = [name for name in names if not name.startswith("= ")]
    return [
        {
            heading: name[:60],
            "us_a_forward": round(times[name] / forwards, 1),
            "share": round(times[name] / total, 3),
            "launches": round(counts[name] / forwards, 2),
            "us_each": round(times[name] / max(1, counts[name]), 2),
        }
        for name in (*kinds, *kernels[:listed])
    ]


def idle_pieces(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the length of each piece of time that no span covers, in the order of time."""
    pieces: list[float] = []
    end = float("inf")
    for start, stop in sorted(spans):
        if start > end:
            pieces.append(start - end)
        end = stop if end == float("inf") else max(end, stop)
    return pieces
