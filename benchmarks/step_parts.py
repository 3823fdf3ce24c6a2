"""The phases of a measured step, on one rank or several, and its rows."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.flow import Choices, Flow, codes_of, share_changed
from benchmarks.harness import Row
from benchmarks.loads import Load, flops
from benchmarks.policies import plan_facts
from torch import Tensor

from jetrl.distributed.checksum import checksum_lines
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import world
from jetrl.models.policy import Policy
from jetrl.precision import gradients as ordered_gradients
from jetrl.rollout.options import RolloutStats
from jetrl.session.ranks import compare_weights
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
        **plan_facts(flow.policy),
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


def digests(policy: Policy, trainer: Trainer) -> dict[str, str]:
    """Return digests of codes, master weights and moments, equal for any number of ranks."""
    compare_weights("of the step", policy)
    optimizer = trainer.optimizer
    moments = optimizer.state_tensors()
    of_moments = {name: shard for name in moments if (shard := optimizer.shard_of(name))}
    return {
        "codes": _digest(policy.weights.quantized_tensors(), {}),
        "masters": _digest(policy.master_weights(), policy.weights.shards),
        "moments": _digest(moments, of_moments),
    }


def _digest(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> str:
    """Return a digest of tensors; float32 has every value of codes and moments."""
    digest = hashlib.sha256()
    for name in sorted(tensors):  # one at a time, since its float32 takes memory
        (line,) = checksum_lines({name: tensors[name].float()}, shards)
        digest.update(line.encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """Collect the bytes that this rank sends to others in exchanges of products in the block."""
    exchange, sent = ordered_gradients.exchange, list[int]()

    def recorded(pieces: Sequence[Tensor] | None, received: Tensor) -> Any:
        sent.extend(p.nbytes for rank, p in enumerate(pieces or ()) if rank != world().rank)
        return exchange(pieces, received)

    ordered_gradients.exchange = recorded
    try:
        yield sent
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
