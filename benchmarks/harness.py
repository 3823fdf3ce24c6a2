"""The frame of a benchmark: its arguments, its console, and its JSON file."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.commit import commit
from benchmarks.loads import Load
from benchmarks.shapes import SHAPES
from benchmarks.timing import copy_bandwidth

from jetrl.distributed.world import world
from jetrl.rollout.options import Progress

Row = dict[str, Any]


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
    """Return device, versions, date and commit, and the copy bandwidth of a GPU."""
    on_gpu = torch.cuda.is_available()
    facts = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }
    speed = {"copy_terabytes_per_s": round(copy_bandwidth() / 1e12, 3)} if on_gpu else {}
    return {**facts, **speed}


def write_results(
    path: str | Path, benchmark: str, command: str, rows: list[Row], **facts: Any
) -> None:
    """Write the rows to a JSON file, with command, environment and further facts."""
    fields = {"benchmark": benchmark, "command": command, **environment(), **facts, "rows": rows}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def print_table(rows: list[Row]) -> None:
    """Print rows as a table with a column per key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([str(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def bench_parser(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `jetrl bench NAME`; its help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"jetrl bench {benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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


def add_tokens_argument(parser: argparse.ArgumentParser) -> None:
    """Add --tokens."""
    parser.add_argument("--tokens", type=int, default=16384, help="rows in training")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --shape and --layers, for a model with random weights."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="default: the shape's")


_FILES = ("--out", "--beside", "--figure")


def command_typed(program: str, argv: Sequence[str] | None) -> str:
    """Return the command as it was typed, without the options that name files.

    Args:
        argv: The arguments; None: those of this process.
    """
    words = iter(sys.argv[1:] if argv is None else argv)
    kept = []
    for word in words:
        if word in _FILES:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in _FILES)):
            kept.append(word)
    ranks = world().size
    launch = f"torchrun --nproc-per-node {ranks} -m " if ranks > 1 else ""
    return launch + " ".join(filter(None, [program, shlex.join(kept)]))


_EVERY_S = 15.0
_IMPORTED = time.perf_counter()


def begins(phase: str) -> None:
    """Print the name of a phase and the seconds since the start."""
    if world().is_first:
        seconds = time.perf_counter() - _IMPORTED
        print(f"[{seconds:6.1f} s] {phase}", file=sys.stderr, flush=True)


class RolloutLines:
    """A progress callback of `generate` that prints a line every 15 seconds."""

    def __init__(self) -> None:
        self._printed_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Print the progress, if the last line is old enough."""
        if progress.seconds >= self._printed_s + _EVERY_S:
            self._printed_s = progress.seconds
            begins(
                f"sampling for {progress.seconds:.0f} s: {progress.tokens} tokens drawn, "
                f"{progress.sequences_done} of {progress.sequences_total} sequences ended"
            )


def add_load_arguments(parser: argparse.ArgumentParser, prompts: int, samples: int) -> None:
    """Add --prompts, --samples, --prompt-length and --response-length.

    Args:
        prompts: The default of --prompts.
        samples: The default of --samples.
    """
    parser.add_argument("--prompts", type=int, default=prompts, help=f"default {prompts}")
    parser.add_argument(
        "--samples", type=int, default=samples, help=f"per prompt, default {samples}"
    )
    parser.add_argument("--prompt-length", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--response-length", type=int, default=2048, help="tokens (default 2048)")


def load_of(args: argparse.Namespace) -> Load:
    """Return the load given by the arguments of `add_load_arguments` and by --mean-length."""
    return Load(
        args.prompts,
        args.samples,
        args.prompt_length,
        args.response_length,
        mean_length=getattr(args, "mean_length", 0),
        image_side=getattr(args, "image_side", 0),
    )
