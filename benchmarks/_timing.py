"""The parts that benchmarks share: timing in CUDA graphs, the card's limits, arguments, JSON."""

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
from benchmarks._command import command_typed

from jetrl.errors import MismatchError
from jetrl.models.families import SHAPES

Row = dict[str, Any]
_COPY_ELEMENTS = 2**31
_SHORT_BYTES = 2**26


def seconds_in_turn(forms: Sequence[Sequence[Callable[[], Any]]], replays: int = 15) -> list[float]:
    """Return the median seconds of one call of each form, replayed in a CUDA graph of its calls.

    The forms' graphs are replayed in turn: a card that is warm, or may draw no more power, is
    slower, and no form should run on a cooler card than another.

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
    """Return `seconds_in_turn` of one form."""
    return seconds_in_turn([calls], replays)[0]


def seconds_eager(function: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median seconds of a call without a graph: for long calls, which hide a launch."""
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
    functions: Iterable[tuple[Any, str, str, bool]], log: list[tuple[str, Any, Any]]
) -> Iterator[None]:
    """Record CUDA events around functions while the context is open.

    Args:
        functions: Owner, attribute and label of each function, and True for a static method.
        log: Takes (label, start, end) of each call.
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
        for owner, name, label, static in functions:
            original = getattr(owner, name)
            wrapped = watch(label, original)
            setattr(owner, name, staticmethod(wrapped) if static else wrapped)
            stack.callback(setattr, owner, name, staticmethod(original) if static else original)
        yield


@functools.cache
def copy_bandwidth() -> float:
    """Return the bytes read plus written a second by a device-to-device copy of 4 GiB.

    Not in a graph: there a copy is a memory node, which was seen at two thirds of the speed.
    """
    source, target = (
        torch.empty(_COPY_ELEMENTS, dtype=torch.bfloat16, device="cuda") for _ in "ab"
    )
    source.normal_()
    return 4 * _COPY_ELEMENTS / seconds_eager(lambda: target.copy_(source), 15)


@functools.cache
def matrix_limit() -> float:
    """Return the FLOP a second of a large BF16 product.

    It is the fastest of the shapes of an 8B model's layers, on random values, with 8192 rows.
    """
    best = 0.0
    for n, k in ((4096, 4096), (24576, 4096), (4096, 12288)):
        x, weight = (
            torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (8192, n)
        )
        call = functools.partial(torch.nn.functional.linear, x, weight)
        best = max(best, 2 * 8192 * n * k / seconds_per_call([call] * 4))
    return best


def memory_row(name: str, shape: str, num_bytes: int, calls: Sequence[Callable[[], Any]]) -> Row:
    """Return the row of a kernel that moves bytes.

    Calls of a few microseconds are made more than once a graph, whose own launch would count
    otherwise.

    Args:
        name: The name of the kernel.
        shape: The shape of the input.
        num_bytes: The least that the kernel must read and write.
        calls: Calls of the kernel, each on its own inputs.
    """
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
    """Return the versions of the packages that kernels depend on."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "sgl-deep-gemm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def environment() -> Row:
    """Return the device, the versions and the date, and of a GPU the speed of a copy."""
    on_gpu = torch.cuda.is_available()
    facts = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }
    speed = {"copy_terabytes_per_s": round(copy_bandwidth() / 1e12, 3)} if on_gpu else {}
    return {**facts, **speed}


def write_results(
    path: str | Path, benchmark: str, command: str, rows: list[Row], **facts: Any
) -> None:
    """Write a JSON file: how, where and when the rows were measured, and the rows.

    Args:
        path: The file.
        benchmark: The name of the benchmark.
        command: The command that measures the rows again.
        rows: The rows.
        facts: Further values of the file.
    """
    fields = {"benchmark": benchmark, "command": command, **environment(), **facts, "rows": rows}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def print_table(rows: list[Row]) -> None:
    """Print rows as a table with a column for each key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([str(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def bench_parser(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `jetrl bench NAME`, whose help is the benchmark's own document."""
    return argparse.ArgumentParser(
        prog=f"jetrl bench {benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def require_same_bits(benchmark: str, different: int) -> None:
    """Refuse to measure kernels with elements that differ where they must not."""
    if different:
        raise MismatchError(
            f"jetrl bench {benchmark}: {different} elements differ; nothing measured"
        )


def add_adapter_argument(parser: argparse.ArgumentParser) -> None:
    """Add --adapter-rank."""
    parser.add_argument(
        "--adapter-rank",
        type=int,
        default=0,
        metavar="R",
        help="adapters of this rank on a frozen base; default: all parameters are trained",
    )


def add_base_argument(parser: argparse.ArgumentParser) -> None:
    """Add --base, for benchmarks of a whole policy with adapters."""
    parser.add_argument(
        "--base",
        choices=("fp8", "nvfp4"),
        default="fp8",
        help="format of a frozen base (precision.base); nvfp4 needs --adapter-rank",
    )


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --shape and --layers, for a model with random weights."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="default: the shape's")


def report(
    benchmark: str,
    run: Callable[[], list[Row]],
    argv: Sequence[str] | None,
    differences: Callable[[], int],
) -> None:
    """Check the bits, run a benchmark, print its table and write its JSON.

    Args:
        benchmark: The name of the benchmark.
        run: Returns the rows.
        argv: The arguments of the command: [--out FILE].
        differences: Counts the elements that differ where they must not (`bench/_bits`).

    Raises:
        MismatchError: Elements differ.
    """
    parser = bench_parser(benchmark, None)
    parser.add_argument("--out", default=f"build/bench/{benchmark}.json", help="JSON file")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    require_same_bits(benchmark, differences())
    rows = run()
    write_results(args.out, benchmark, command_typed(f"jetrl bench {benchmark}", argv), rows)
    print_table(rows)
