"""Timing: CUDA graphs and events, the bandwidth of a copy, profiles by kernel.

Without a GPU a call is timed by the clock, to try a benchmark out.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

_COPY_ELEMENTS, _COPY_ELEMENTS_OF_CPU = 2**31, 2**22


def seconds_in_turn(forms: Sequence[Sequence[Callable[[], Any]]], replays: int = 15) -> list[float]:
    """Return the median seconds per call of each form, from replays of a CUDA graph of its calls.

    The graphs are replayed in turn, because a GPU that is warm or at its power limit is slower.
    Pass enough calls per form, each on its own inputs, to exceed the L2 cache; results are kept
    too, so that no call reads or writes cached memory. Without a GPU the calls are made eagerly.
    """
    if not torch.cuda.is_available():
        return [statistics.median(seconds_eager(call, 1) for call in calls) for calls in forms]
    graphs, results = [], []
    for calls in forms:
        for call in calls:  # compile and warm up outside of the graph
            call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append([call() for call in calls])
    times: list[list[float]] = [[] for _ in forms]
    for replay in range(replays + 2):
        for graph, calls, taken in zip(graphs, forms, times, strict=True):
            start = mark()
            graph.replay()
            spent = milliseconds_between(start, mark())
            if replay >= 2:
                taken.append(spent / 1e3 / len(calls))
    del results, graphs
    return [statistics.median(taken) for taken in times]


def seconds_per_call(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Return `seconds_in_turn` of one form."""
    return seconds_in_turn([calls], replays)[0]


def mark() -> Any:
    """Return a time stamp: a recorded CUDA event, or without a GPU the clock."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start: Any, end: Any) -> float:
    """Return the milliseconds between two time stamps of `mark`; waits for the GPU."""
    if isinstance(start, float):
        return 1e3 * float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end))


def seconds_eager(function: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median seconds of a call without a graph, for calls much longer than a launch."""
    function()
    times = []
    for _ in range(repeats):
        start = mark()
        function()
        times.append(milliseconds_between(start, mark()) / 1e3)
    return statistics.median(times)


@contextlib.contextmanager
def watched(
    functions: Iterable[tuple[Any, str, str, bool]], log: list[tuple[str, Any, Any]]
) -> Iterator[None]:
    """Append the label, start and end (`mark`) of each call of some functions to a log.

    Args:
        functions: (owner, attribute, label, whether it is a static method) of each function.
        log: Receives the calls of the block.
    """

    def watch(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = mark()
            result = function(*args, **kwargs)
            log.append((label, start, mark()))
            return result

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, label, static in functions:
            original = getattr(owner, name)
            wrapped = watch(label, original)
            setattr(owner, name, staticmethod(wrapped) if static else wrapped)
            stack.callback(setattr, owner, name, staticmethod(original) if static else original)
        yield


@functools.cache
def copy_bandwidth() -> float:
    """Return the bandwidth of a device-to-device copy, read plus write, in bytes per second.

    The copy runs outside a graph: as a memory node of a graph it was a third slower.
    """
    on_gpu = torch.cuda.is_available()
    count, device = (_COPY_ELEMENTS, "cuda") if on_gpu else (_COPY_ELEMENTS_OF_CPU, "cpu")
    source, target = (torch.empty(count, dtype=torch.bfloat16, device=device) for _ in "ab")
    source.normal_()
    return 4 * count / seconds_eager(lambda: target.copy_(source), 15)


@functools.cache
def matrix_limit() -> float:
    """Return the FLOP/s of a large BF16 product: the fastest of an 8B model's, with 8192 rows."""
    best = 0.0
    for n, k in ((4096, 4096), (24576, 4096), (4096, 12288)):
        x, weight = (
            torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (8192, n)
        )
        call = functools.partial(torch.nn.functional.linear, x, weight)
        best = max(best, 2 * 8192 * n * k / seconds_per_call([call] * 4))
    return best


def idle_pieces(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the lengths of the gaps between spans, in the order of time."""
    pieces: list[float] = []
    end = float("inf")
    for start, stop in sorted(spans):
        if start > end:
            pieces.append(start - end)
        end = stop if end == float("inf") else max(end, stop)
    return pieces
