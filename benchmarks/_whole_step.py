"""The phases of a step that is measured, and its row: what `jetrl bench step` makes its rows of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks._flow import Choices, Flow, codes_of, share_changed
from benchmarks._load import Load, flops
from benchmarks._ranks import slowest
from benchmarks._timing import Row

from jetrl.distributed.world import world
from jetrl.models.policy import Policy
from jetrl.rollout.options import RolloutStats
from jetrl.types import Completion, Sample

Known = Callable[[Row], None]

PARTS = ("rollout", "gather", "old_logprobs", "update", "optimizer", "requantize")


@dataclass(frozen=True)
class TimedRollout:
    """The rollout of a step.

    Attributes:
        seconds: This rank's seconds: `rollout`, and of several ranks `gather`.
        completions: This rank's completions.
        samples: The samples of all ranks, with their rewards.
        stats: The counts of the engine's call.
        captured: The graphs that were there before, and the seconds that capturing them took.
        peaks: The peak of memory in GiB, as `rollout`; empty on a CPU.
    """

    seconds: Mapping[str, float]
    completions: Sequence[Completion]
    samples: Sequence[Sample]
    stats: RolloutStats
    captured: tuple[int, float]
    peaks: Mapping[str, float]


@dataclass(frozen=True)
class TimedUpdate:
    """The update of a step, with the pass for old log-probs of a plan that is not exact.

    Attributes:
        seconds: This rank's seconds by phase, `PARTS` behind the rollout's.
        whole_s: Those of update, optimizer and requantize together.
        metrics: The metrics of the trainer's step.
        peaks: The peak of memory in GiB, by phase.
    """

    seconds: Mapping[str, float]
    whole_s: float
    metrics: Mapping[str, float]
    peaks: Mapping[str, float]


def warmed(policy: Policy, load: Load, choices: Choices) -> tuple[Flow, float]:
    """Return a flow after its warm-up, and the share of the codes that the warm-up changed.

    Args:
        policy: The policy under the plan.
        load: The prompts and completions of the step, of all ranks.
        choices: The choices that are the same for all plans.
    """
    flow = Flow(policy, load, choices)
    before = codes_of(policy)
    flow.warm_up()
    return flow, share_changed(before, codes_of(policy))


def draw(flow: Flow) -> TimedRollout:
    """Draw the completions of the step, and gather those of all ranks."""
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
    """Make the trainer's step, after the pass for old log-probs of a plan that is not exact."""
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
    """Return what is known of a step when all has been warmed up.

    Args:
        flow: The sampler and trainer.
        choices: The choices that are the same for all plans.
    """
    return {
        "plan": flow.policy.plan.name,
        "adapter_rank": choices.adapter_rank,
        "base": choices.base,
        "ranks": world().size,
        "load": str(flow.load),
        "settings": flow.chosen,
        "graphs": flow.captured[0],
        "capture_s": round(flow.captured[1], 2),
    }


def rollout_row(flow: Flow, choices: Choices, limit: float, rollout: TimedRollout) -> Row:
    """Return the row of a rollout without its update.

    Args:
        flow: The sampler.
        choices: The choices that are the same for all plans.
        limit: The FLOP/s that MFU is a share of.
        rollout: The rollout.
    """
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
    """Return the row of a step.

    Args:
        flow: The sampler and trainer.
        choices: The choices that are the same for all plans.
        limit: The FLOP/s that MFU is a share of.
        rollout: The rollout.
        update: The update.
        changed: The share of the codes that the warm-up changed.
    """
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
    planned = {name: getattr(plan, name) / 2**30 for name in ("rollout", "update")}
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
