"""What benchmarks share: timing in CUDA graphs, loads, profiles, console, arguments, JSON.

FLOPs are those of the model, not of the machine: 2 per multiply-add of linear layers, of the output
projection at sampled tokens, and of the causal half of attention; backward takes twice the forward
of a product and 2.5 times that of attention. What is computed twice counts once.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import math
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.commit import commit
from benchmarks.shapes import SHAPES

from jetrl.distributed.world import world
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.rollout.options import Progress
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score

Row = dict[str, Any]
_COPY_ELEMENTS, _COPY_ELEMENTS_OF_CPU = 2**31, 2**22
_SHORT_BYTES = 2**26


def seconds_in_turn(forms: Sequence[Sequence[Callable[[], Any]]], replays: int = 15) -> list[float]:
    """Return the median seconds of one call of each form, replayed in a CUDA graph of its calls.

    The forms' graphs are replayed in turn: a card that is warm, or may draw no more power, is
    slower, and no form should run on a cooler card than another.

    Give as many calls, each on its own inputs, as together exceed the L2 cache; their results are
    kept apart too, so nothing is read or written while still cached.

    Without a GPU each call is made as it is.
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
    """Return the present moment: an event of the GPU's work, or without a GPU that of a clock."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start: Any, end: Any) -> float:
    """Return the milliseconds between two moments of `mark`; waits for the GPU."""
    if isinstance(start, float):
        return 1e3 * float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end))


def seconds_eager(function: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median seconds of a call without a graph: for long calls, which hide a launch."""
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
    """Record the start and the end of functions (`mark`) while the context is open."""

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
    """Return the bytes read plus written a second by a copy on the device, of 4 GiB on a GPU.

    Not in a graph: there a copy is a memory node, which was seen at two thirds of the speed.
    """
    on_gpu = torch.cuda.is_available()
    count, device = (_COPY_ELEMENTS, "cuda") if on_gpu else (_COPY_ELEMENTS_OF_CPU, "cpu")
    source, target = (torch.empty(count, dtype=torch.bfloat16, device=device) for _ in "ab")
    source.normal_()
    return 4 * count / seconds_eager(lambda: target.copy_(source), 15)


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
        shape: The shape of the input.
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
    """Return device, versions, date and commit, and of a GPU the speed of a copy."""
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
    """Write a JSON file: how, where and when the rows were measured, and the rows."""
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
    """Return the command as it was typed, without files that another run would have elsewhere.

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
    """Print a phase that begins now, with the seconds since this module was imported."""
    if world().is_first:
        seconds = time.perf_counter() - _IMPORTED
        print(f"[{seconds:6.1f} s] {phase}", file=sys.stderr, flush=True)


class RolloutLines:
    """A callback of `generate` that prints a line every 15 seconds."""

    def __init__(self) -> None:
        self._printed_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Print how much was drawn, where the last line is old enough."""
        if progress.seconds >= self._printed_s + _EVERY_S:
            self._printed_s = progress.seconds
            begins(
                f"sampling for {progress.seconds:.0f} s: {progress.tokens} tokens drawn, "
                f"{progress.sequences_done} of {progress.sequences_total} sequences ended"
            )


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
    """Return a row for each kind of kernel, then for the kernels that took longest."""
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


# Cases by name, as `load_text` reads them.
LOADS = {
    "8": ("1x8x128x1024",),
    "64": ("8x8x256x8192",),
    "grpo": ("64x8x256x8192x1500",),
    # A quarter of its sequences at half of its lengths.
    "tail": ("16x8x256x4096x750",),
    "256": ("32x8x256x2048",),
    # 64 sequences at the mean context of the load 64, for an eighth of its tokens.
    "64-part": ("64x1x3584x1024",),
}
TAILED = ("grpo", "tail")
_SIGMA = 0.8  # of the logarithm of lengths with a tail


@dataclass(frozen=True)
class Load:
    """The load of a step: prompts of one length, each with completions.

    Completions have one length, or lengths with a long tail: drawn from a log-normal distribution
    whose logarithm has a standard deviation of 0.8. The first completions of a load with more
    prompts have the same lengths.

    Attributes:
        response_length: Tokens of a completion; with a tail, of the longest that there can be.
        mean_length: The mean of lengths with a tail, before they are cut; 0: no tail.
    """

    prompts: int
    samples: int
    prompt_length: int
    response_length: int
    mean_length: int = 0

    @property
    def sequences(self) -> int:
        """The number of completions."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """The tokens of a sequence, of the longest that there can be."""
        return self.prompt_length + self.response_length

    @property
    def tokens(self) -> int:
        """The tokens of all sequences, which are trained on."""
        return self.sequences * self.prompt_length + self.drawn

    @property
    def drawn(self) -> int:
        """The tokens of all completions."""
        return sum(self.response_lengths())

    @property
    def most_held(self) -> int:
        """The most tokens that sequences hold at once where all begin together."""
        lengths = np.sort(self.response_lengths())
        running = np.arange(self.sequences, 0, -1)
        return int((running * (self.prompt_length + lengths)).max())

    def __str__(self) -> str:
        tail = f", log-normal with a mean of {self.mean_length}" if self.mean_length else ""
        return (
            f"{self.prompts} prompts x {self.samples} samples, {self.prompt_length} + "
            f"{self.response_length} tokens{tail}"
        )

    def response_lengths(self, seed: int | np.random.Generator = 0) -> list[int]:
        """Return the tokens of each completion, those of a prompt side by side."""
        if not self.mean_length:
            return [self.response_length] * self.sequences
        center = math.log(self.mean_length) - _SIGMA**2 / 2
        drawn = np.random.default_rng(seed).normal(center, _SIGMA, self.sequences)
        return [int(n) for n in np.exp(drawn).round().clip(1, self.response_length)]

    def random_prompts(self, vocabulary: int, seed: int | np.random.Generator) -> list[list[int]]:
        """Return random token ids for the prompts."""
        shape = (self.prompts, self.prompt_length)
        prompts: list[list[int]] = (
            np.random.default_rng(seed).integers(0, vocabulary, shape).tolist()
        )
        return prompts


def random_rewards(count: int, seed: int) -> list[float]:
    """Return random rewards between 0 and 1."""
    rewards: list[float] = np.random.default_rng(seed).random(count).tolist()
    return rewards


def make_samples(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], rewards: Iterable[float]
) -> list[Sample]:
    """Return samples of completions, as many of each prompt."""
    each = len(completions) // len(prompts)
    return [
        Sample(
            prompt=Prompt(id=str(i // each), text="?"),
            group=i // each,
            inputs=PromptInputs(tuple(prompts[i // each])),
            completion=completion,
            score=Score(float(reward)),
        )
        for i, (completion, reward) in enumerate(zip(completions, rewards, strict=True))
    ]


def flops(config: ModelConfig, load: Load, frozen: bool = False) -> dict[str, float]:
    """Return the floating-point operations of a step by phase.

    The phases are `rollout` (a prompt counts once for its samples), `old_logprobs` (a forward) and
    `update` (forward and backward).

    Args:
        config: The model's shape.
    """
    shapes = parameter_shapes(config)
    layers = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and name.startswith("layers.")
    )
    head = config.vocab_size * config.hidden_size
    heads = 2 * config.num_layers * config.num_heads * config.head_dim
    squares = sum((load.prompt_length + n) ** 2 for n in load.response_lengths())
    prompt_square = load.prompt_length**2
    forward = 2 * (layers * load.tokens + head * load.drawn)
    attention = heads * squares
    prompts = load.prompts * load.prompt_length
    return {
        "rollout": 2 * (layers * (prompts + load.drawn) + head * load.drawn)
        + heads * (prompt_square * load.prompts + squares - prompt_square * load.sequences),
        "old_logprobs": forward + attention,
        "update": (2 if frozen else 3) * forward + 3.5 * attention,
    }


def add_load_arguments(parser: argparse.ArgumentParser, prompts: int, samples: int) -> None:
    """Add --prompts, --samples, --prompt-length and --response-length.

    Args:
        prompts: The default of --prompts.
        samples: The default of --samples.
    """
    parser.add_argument("--prompts", type=int, default=prompts, help=f"default {prompts}")
    parser.add_argument("--samples", type=int, default=samples, help=f"a prompt, default {samples}")
    parser.add_argument("--prompt-length", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--response-length", type=int, default=2048, help="tokens (default 2048)")


def load_text(text: str) -> Load:
    """Return the load PxSxLxR or PxSxLxRxM.

    The numbers are prompts, samples of each, prompt and response tokens, and the mean length of
    responses with a tail.
    """
    return Load(*map(int, text.split("x")))


def tailed_load(name: str, vocabulary: int) -> tuple[Load, list[list[int]], list[int]]:
    """Return a load with a tail, its prompts, and the tokens of each completion.

    The completions of a prompt stand side by side. Rollouts of `grpo` have always been measured
    with prompts and lengths of one generator, so its lengths are not those of `jetrl bench
    speculation`; those of other loads are.
    """
    (case,) = LOADS[name]
    load = load_text(case)
    seed = np.random.default_rng(0) if name == "grpo" else 0
    return load, load.random_prompts(vocabulary, seed), load.response_lengths(seed)


def load_of(args: argparse.Namespace) -> Load:
    """Return the load that the arguments of `add_load_arguments` give, with --mean-length."""
    mean = getattr(args, "mean_length", 0)
    return Load(args.prompts, args.samples, args.prompt_length, args.response_length, mean)
