"""The phases of a measured step, on one rank or several, and its rows.

A digest does not depend on the number of ranks: it is a sum, modulo 2**64, of a number per element,
made of the element's bits and its place in the whole tensor.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.flow import Choices, Flow, codes_of, share_changed
from benchmarks.harness import Row
from benchmarks.loads import Load, flops
from benchmarks.policies import plan_words
from torch import Tensor

from jetrl.distributed.shards import Shard
from jetrl.distributed.world import world
from jetrl.models.policy import Policy
from jetrl.precision import gradients as ordered_gradients
from jetrl.rollout.options import RolloutStats
from jetrl.training.trainer import Trainer
from jetrl.types import Completion, Sample

Known = Callable[[Row], None]

PARTS = ("rollout", "gather", "old_logprobs", "update", "optimizer", "requantize")


@dataclass(frozen=True)
class TimedRollout:
    """The rollout of a step.

    Attributes:
        seconds: This rank's seconds of `rollout`, and with several ranks of `gather`.
        captured: The number of graphs captured before, and the seconds that it took.
        peaks: The memory peak of `rollout` in GiB; empty on a CPU.
    """

    seconds: Mapping[str, float]
    completions: Sequence[Completion]
    samples: Sequence[Sample]
    stats: RolloutStats
    captured: tuple[int, float]
    peaks: Mapping[str, float]


@dataclass(frozen=True)
class TimedUpdate:
    """The update of a step, preceded by the pass for old log-probs if the plan is not exact.

    Attributes:
        seconds: This rank's seconds by phase, those of `PARTS` after the rollout's.
        whole_s: Its seconds without old log-probs.
    """

    seconds: Mapping[str, float]
    whole_s: float
    metrics: Mapping[str, float]
    peaks: Mapping[str, float]


def warmed(policy: Policy, load: Load, choices: Choices) -> tuple[Flow, float]:
    """Return a flow after its warm-up, and the share of weight codes that it changed."""
    flow = Flow(policy, load, choices)
    before = codes_of(policy)
    flow.warm_up()
    return flow, share_changed(before, codes_of(policy))


def draw(flow: Flow) -> TimedRollout:
    """Draw the completions of the step and gather those of all ranks."""
    rollout_s, completions = flow.timed("rollout", lambda: flow.sample(seed=1))
    stats = flow.engine.stats
    gather_s, samples = flow.timed("gather", lambda: flow.gathered(completions, seed=1))
    flow.peaks.pop("gather", None)
    seconds = {"rollout": rollout_s}
    if world().size > 1:
        seconds["gather"] = gather_s
    peaks = {name: peak for name, peak in flow.peaks.items() if name == "rollout"}
    return TimedRollout(seconds, completions, samples, stats, flow.captured, peaks)


def train(flow: Flow, samples: Sequence[Sample]) -> TimedUpdate:
    """Run the trainer's step, preceded by the pass for old log-probs if the plan is not exact."""
    seconds: dict[str, float] = {}
    if not flow.policy.plan.exact:
        flow.give_pages_back()
        work = lambda: flow.old_logprobs(samples)  # noqa: E731
        seconds["old_logprobs"] = flow.timed("old_logprobs", work)[0]
    whole_s, trained = flow.timed("update", lambda: flow.update(samples))
    timings = trained.timings
    seconds |= {name: timings[name] for name in ("optimizer", "requantize")}
    seconds["update"] = whole_s - timings["optimizer"] - timings["requantize"]
    return TimedUpdate(seconds, whole_s, trained.metrics, dict(flow.peaks))


def warm_row(flow: Flow, choices: Choices) -> Row:
    """Return the part of a row that is known after the warm-up."""
    return {
        "plan": plan_words(flow.policy.plan),
        "adapter_rank": choices.adapter_rank,
        "base": flow.policy.plan.base,
        "ranks": world().size,
        "load": str(flow.load),
        "settings": flow.chosen,
        "graphs": flow.captured[0],
        "capture_s": round(flow.captured[1], 2),
    }


def rollout_row(flow: Flow, choices: Choices, limit: float, rollout: TimedRollout) -> Row:
    """Return the part of a row that is known after the rollout."""
    load, stats, size = flow.load, rollout.stats, world().size
    seconds = slowest("the seconds of the rollout", dict(rollout.seconds))
    needed = flops(flow.policy.config, load)["rollout"]
    return {
        **warm_row(flow, choices),
        "seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "tokens_per_s": {"rollout": round(load.drawn / seconds["rollout"])},
        "mfu": {"rollout": round(needed / seconds["rollout"] / limit / size, 3)},
        "peak_gib": slowest("the peaks of the rollout", dict(rollout.peaks)),
        "graphs": rollout.captured[0],
        "capture_s": round(rollout.captured[1], 2),
        "graphs_captured_late": stats.graphs,
        "preemptions": stats.preemptions,
        "rollout_idle_share": round(stats.device_idle_s / stats.seconds, 4),
    }


def step_row(
    flow: Flow,
    choices: Choices,
    limit: float,
    rollout: TimedRollout,
    update: TimedUpdate,
    changed: float,
) -> Row:
    """Return the row of a step."""
    load, metrics = flow.load, update.metrics
    whole = slowest("the seconds of the update", {"whole": update.whole_s})["whole"]
    seconds = slowest("the seconds of the step", {**rollout.seconds, **update.seconds})
    needed = flops(flow.policy.config, load, choices.adapter_rank > 0)
    rates = {
        "rollout": (load.drawn, seconds["rollout"]),
        "old_logprobs": (load.tokens, seconds.get("old_logprobs")),
        "update": (load.tokens, whole),
    }
    size, plan = world().size, flow.planned()
    peaks = slowest("the peaks of memory", {**update.peaks, **rollout.peaks})
    planned = {"rollout": plan.at("rollout") / 2**30, "update": plan.update / 2**30}
    return {
        **rollout_row(flow, choices, limit, rollout),
        "seconds": {name: round(seconds[name], 3) for name in PARTS if name in seconds},
        "step_s": round(sum(seconds.values()), 2),
        "training_s": round(whole, 2),
        "tokens_per_s": {n: round(t / s) for n, (t, s) in rates.items() if s is not None},
        "mfu": {
            n: round(needed[n] / s / limit / size, 3)
            for n, (_, s) in rates.items()
            if s is not None
        },
        "peak_gib": peaks,
        "planned_gib": {name: round(size, 1) for name, size in planned.items()},
        "peak_of_plan": {n: round(peaks[n] / s, 3) for n, s in planned.items() if n in peaks},
        "compared_tokens": int(metrics["mismatch/num_tokens"]),
        "different": int(metrics["mismatch/num_different"]),
        "mean_abs_logprob_diff": metrics["mismatch/mean_abs_logprob_diff"],
        "weights_changed": round(changed, 5),
        "train_retries": int(metrics.get("memory/train_retries", 0)),
    }


_AT_ONCE = 2**24  # elements
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of 64 bits (SplitMix64's, Steele et al., OOPSLA 2014), as signed integers.
_PLACE, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_MODULUS = 2**64


def tensor_digest(name: str, tensor: Tensor, first_element: int = 0) -> int:
    """Return the digest of consecutive elements of a tensor, below 2**64.

    Digests of the parts of a tensor add up, modulo 2**64, to the digest of the whole.

    Args:
        tensor: Elements of any shape and dtype.
        first_element: The index of the first one in the whole tensor.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    salt = zlib.crc32(name.encode()) << 20
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].long()
        begin = first_element + start
        place = torch.arange(begin, begin + len(part), device=tensor.device)
        part += place.mul_(_PLACE).add_(salt)
        part ^= part >> 30
        part *= _FIRST
        part ^= part >> 27
        part *= _SECOND
        part ^= part >> 31
        total += part.sum()
    return int(total) % _MODULUS


def digests(policy: Policy, trainer: Trainer) -> dict[str, str]:
    """Return digests of codes, master weights and moments, equal for any number of ranks."""
    quantized = policy.weights.quantized_tensors()
    codes = sum(tensor_digest(name, tensor) for name, tensor in quantized.items()) % _MODULUS
    world().same("the quantized weights", codes)
    shards = policy.weights.shards
    masters = _of_all_ranks(dict(policy.master_weights()), shards)
    moments = trainer.optimizer.state_tensors()
    masters_of = {name: name.partition(".")[2] for name in moments}
    of_moments = {name: shards[m] for name, m in masters_of.items() if m in shards}
    return {
        "codes": f"{codes:016x}",
        "masters": f"{masters:016x}",
        "moments": f"{_of_all_ranks(moments, of_moments):016x}",
    }


def _of_all_ranks(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> int:
    """Return the digest over all ranks of tensors that are sharded by rows, or whole."""
    own = 0
    for name, tensor in tensors.items():
        divided = name in shards and tensor.dim() > 1
        if divided:
            own += tensor_digest(name, tensor, shards[name].first_row * tensor[:1].numel())
        elif world().is_first:
            own += tensor_digest(name, tensor)
    return sum(world().gather("the digest of the model", own)) % _MODULUS


@dataclass
class Exchanged:
    """The gradient products that an update sent to the owners of their rows.

    Attributes:
        calls: Per exchange, the shapes of the pieces per rank (None: nothing to send), and the
            shape and dtype of the received tensor.
        bytes: The bytes that this rank sent to others.
    """

    calls: list[tuple[list[torch.Size] | None, torch.Size, torch.dtype]] = field(
        default_factory=list
    )
    bytes: int = 0

    def seconds(self, device: torch.device) -> float:
        """Return the seconds of these exchanges on an otherwise idle device."""
        world().barrier("the exchange alone")
        began = time.perf_counter()
        for shapes, shape, dtype in self.calls:
            pieces: list[Tensor] | None = None
            if shapes is not None:
                pieces = [torch.zeros(size, dtype=dtype, device=device) for size in shapes]
            received = torch.empty(shape, dtype=dtype, device=device)
            work = ordered_gradients.exchange(pieces, received)
            if work is not None:
                work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


@contextlib.contextmanager
def recorded_exchange() -> Iterator[Exchanged]:
    """Record the exchanges of products within the block."""
    exchange, log = ordered_gradients.exchange, Exchanged()

    def recorded(pieces: Sequence[Tensor] | None, received: Tensor) -> Any:
        shapes = None if pieces is None else [piece.shape for piece in pieces]
        log.calls.append((shapes, received.shape, received.dtype))
        for rank, piece in enumerate(pieces or ()):
            log.bytes += piece.nbytes if rank != world().rank else 0
        return exchange(pieces, received)

    ordered_gradients.exchange = recorded
    try:
        yield log
    finally:
        ordered_gradients.exchange = exchange


class _Copied:
    """The handle of an exchange that was replaced by a local copy."""

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> None:
        """Make the current stream wait for the copies."""
        torch.cuda.current_stream().wait_event(self._copied)


@contextlib.contextmanager
def without_exchange() -> Iterator[None]:
    """Skip the exchange within the block: the same sums run, on wrong numbers."""
    exchange = ordered_gradients.exchange

    def nothing(pieces: Sequence[Tensor] | None, received: Tensor) -> Any:
        if pieces is None:
            received.zero_()
        else:
            received.copy_(pieces[world().rank].expand_as(received))
        return _Copied() if received.is_cuda else None

    ordered_gradients.exchange = nothing
    try:
        yield
    finally:
        ordered_gradients.exchange = exchange


def slowest(what: str, numbers: Row) -> Row:
    """Return the maximum over all ranks of each number."""
    of_ranks = world().gather(what, numbers)
    return {name: max(row[name] for row in of_ranks) for name in numbers}
