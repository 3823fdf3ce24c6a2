"""What every benchmark shares: rotated timing in CUDA graphs, the card's own limits, JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from jetrl.errors import MismatchError

Row = dict[str, Any]
_COPY_ELEMENTS = 2**31
_SHORT_BYTES = 2**26


def seconds_in_turn(forms: Sequence[Sequence[Callable[[], Any]]], replays: int = 15) -> list[float]:
    """Median seconds of one call of each form, over replays of a CUDA graph that makes all of the
    form's calls in order. The forms' graphs are replayed in turn: a card that is warm, or may draw
    no more power, is slower, and none of them should find it cooler than another.

    Give as many calls, each on its own inputs, as together exceed the L2 cache; their results are
    kept apart too, so nothing is read or written while still cached.
    """
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
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if replay >= 2:
                taken.append(start.elapsed_time(end) / 1e3 / len(calls))
    del results, graphs
    return [statistics.median(taken) for taken in times]


def seconds_per_call(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """`seconds_in_turn` of one form."""
    return seconds_in_turn([calls], replays)[0]


def seconds_eager(function: Callable[[], Any], repeats: int = 7) -> float:
    """Median seconds of a call outside of a graph: for milliseconds, which hide the launch."""
    function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


@contextlib.contextmanager
def watched(
    places: Iterable[tuple[Any, str, str, bool]], log: list[tuple[str, Any, Any]]
) -> Iterator[None]:
    """Records CUDA events around functions: (label, start, end) of each call goes to log.

    places: (owner, attribute, label, whether it is a static method of a class).
    """

    def watch(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = function(*args, **kwargs)
            end.record()
            log.append((label, start, end))
            return result

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, label, static in places:
            original = getattr(owner, name)
            wrapped = watch(label, original)
            setattr(owner, name, staticmethod(wrapped) if static else wrapped)
            stack.callback(setattr, owner, name, staticmethod(original) if static else original)
        yield


@functools.cache
def copy_bandwidth() -> float:
    """Bytes read plus written a second by a device-to-device copy of 4 GiB.

    Not in a graph: there a copy is a memory node, which was seen at two thirds of the speed.
    """
    source, target = (
        torch.empty(_COPY_ELEMENTS, dtype=torch.bfloat16, device="cuda") for _ in "ab"
    )
    source.normal_()
    return 4 * _COPY_ELEMENTS / seconds_eager(lambda: target.copy_(source), 15)


@functools.cache
def matrix_limit() -> float:
    """FLOP a second of a large BF16 product: the fastest of the shapes of an 8B model's layers, on
    random values, 8192 rows."""
    best = 0.0
    for n, k in ((4096, 4096), (24576, 4096), (4096, 12288)):
        x, weight = (
            torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (8192, n)
        )
        call = functools.partial(torch.nn.functional.linear, x, weight)
        best = max(best, 2 * 8192 * n * k / seconds_per_call([call] * 4))
    return best


def memory_row(name: str, shape: str, num_bytes: int, calls: Sequence[Callable[[], Any]]) -> Row:
    """A row for a kernel that moves bytes: num_bytes is the least it must read and write. Calls of
    a few microseconds are made more than once a graph, whose own launch would count otherwise."""
    seconds = seconds_per_call([*calls] * (12 if num_bytes < _SHORT_BYTES else 1))
    rate = num_bytes / seconds
    return {
        "name": name,
        "shape": shape,
        "microseconds": round(seconds * 1e6, 2),
        "terabytes_per_s": round(rate / 1e12, 3),
        "share_of_copy": round(rate / copy_bandwidth(), 3),
    }


def versions() -> dict[str, str | None]:
    """Of what the kernels stand on."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "sgl-deep-gemm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment() -> Row:
    """Device and versions."""
    return {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "copy_terabytes_per_s": round(copy_bandwidth() / 1e12, 3),
    }


def write_results(
    path: str | Path, benchmark: str, command: str, rows: list[Row], **facts: Any
) -> None:
    """One JSON file: how, where and when it was measured, further facts, and the rows."""
    fields = {"benchmark": benchmark, "command": command, **environment(), **facts, "rows": rows}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def print_table(rows: list[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([str(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def bench_parser(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `jetrl bench NAME`, whose help is the benchmark's own document."""
    return argparse.ArgumentParser(
        prog=f"jetrl bench {benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def report(
    benchmark: str,
    run: Callable[[], list[Row]],
    argv: Sequence[str] | None,
    differences: Callable[[], int],
) -> None:
    """Check the bits, run a benchmark, print its table and write its JSON: `jetrl bench NAME [--out
    FILE]`.

    Raises:
        MismatchError: elements that differ where they must not (`bench/_bits`).
    """
    parser = bench_parser(benchmark, None)
    parser.add_argument("--out", default=f"build/bench/{benchmark}.json", help="JSON file")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    found = differences()
    if found:
        raise MismatchError(f"jetrl bench {benchmark}: {found} elements differ; nothing measured")
    rows = run()
    write_results(args.out, benchmark, f"jetrl bench {benchmark}", rows)
    print_table(rows)
