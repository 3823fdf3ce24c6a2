"""A training step: record, sampling parameters, dynamic sampling and metrics.

Dynamic sampling draws more prompts in place of zero-advantage groups: if all completions of a group
have the same reward, it has no gradient (Yu et al. 2025, "DAPO", eq. 11). `preflight` inspects
samples of the first step.

The metrics are those that do not come from the trainer; docs/metrics.md lists all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jetrl.distributed.world import world
from jetrl.kernels.decode_state import SOURCES
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import SpeculationStats
from jetrl.runs.anomalies import Anomalies, Learning, problems
from jetrl.runs.metrics import eval_metric, part_metric, task_metric
from jetrl.session.episodes import EpisodeSamples
from jetrl.session.evaluate import Evaluation
from jetrl.session.open import WARNING, open_context
from jetrl.session.sampling import EncodedPrompt, Scoring, groups_of, numbered, sample_prompts
from jetrl.session.training_run import TrainingRun
from jetrl.settings.loading import Settings
from jetrl.training.host_math import mean, variance
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.types import Completion, Metrics, Sample, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """A training step; each verb of the loop returns a new record with more fields set.

    Attributes:
        number: From 1; 0 is the model before the first step.
        round: Sampling round, from 1; after dynamic sampling, the number of rounds.
        completions: Of this round, `rollout.samples_per_prompt` per prompt.
        trained_samples: The samples, and those of earlier steps that the update also trained on.
        rollout_tokens: Tokens sampled in all rounds.
    """

    number: int
    round: int = 1
    prompts: Sequence[EncodedPrompt] = ()
    completions: Sequence[Completion] = ()
    scoring: Scoring | EpisodeSamples | None = None
    samples: Sequence[Sample] = ()
    drawn_samples: Sequence[Sample] = ()
    trained_samples: Sequence[Sample] = ()
    rollout_tokens: int = 0
    metrics: Metrics = field(default_factory=dict)


def rollout_params(settings: Settings, step: int, round: int = 1) -> SamplingParams:
    """Return the sampling parameters of a step; rounds of dynamic sampling count from 1."""
    rollout = settings.rollout
    # Each round of dynamic sampling has its own random keys.
    later_round = [round] if round > 1 else []
    return SamplingParams(
        n=rollout.samples_per_prompt,
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        truncated_logprobs=rollout.truncated_logprobs,
        stop=rollout.stop,
        seed=derive_seed(settings.run.seed, "rollout", step, *later_round),
    )


def eval_params(settings: Settings) -> SamplingParams:
    """Return the sampling parameters of an evaluation, the same in every step."""
    return SamplingParams(
        n=settings.eval.samples,
        max_tokens=settings.eval.max_tokens or settings.rollout.max_tokens,
        temperature=settings.eval.temperature,
        top_p=settings.eval.top_p,
        min_p=settings.eval.min_p,
        stop=settings.rollout.stop,
        seed=derive_seed(settings.run.seed, "eval"),
    )


def refill(
    samples: Sequence[Sample],
    num_groups: int,
    at_least: int,
    max_rounds: int,
    draw: Callable[[int, int], Sequence[Sample]],
) -> tuple[list[Sample], list[Sample], dict[str, int]]:
    """Draw prompts until enough groups have differing rewards (nonzero advantages).

    Each round draws the number of prompts expected to fill the missing groups, given the fraction
    of useful groups so far, and at most `num_groups`. A step needs `at_least` groups;
    zero-advantage groups fill up if there are fewer. `draw` maps a round (2, 3, ...) and a number
    of prompts to samples.

    Returns the samples to train on, all samples with groups numbered from 0, and counts.
    """
    # A group is useful if its rewards differ.
    drawn, rounds = groups_of(samples), 1
    useful = [group for group in drawn if _has_signal(group)]
    while len(useful) < num_groups and rounds < max_rounds:
        # Prompts expected to fill the missing groups, given the fraction so far.
        share = max(len(useful), 1) / len(drawn)
        rounds += 1
        missing = math.ceil((num_groups - len(useful)) / share)
        more = groups_of(draw(rounds, min(num_groups, missing)))
        drawn += more
        useful += [group for group in more if _has_signal(group)]
    kept = useful[:num_groups]
    # An update needs at least one group, even without advantages.
    if len(kept) < at_least:
        idle = [group for group in drawn if not _has_signal(group)]
        kept += idle[: at_least - len(kept)]
    counts = {"rounds": rounds, "dropped_groups": len(drawn) - len(kept)}
    return numbered(kept), numbered(drawn), counts


def _has_signal(group: Sequence[Sample]) -> bool:
    """Return True if rewards differ among the scored completions."""
    return len({sample.score.reward for sample in group} - {None}) > 1


TIMED = ("rollout", "reward", "update", "optimizer", "requantize")
"""Phases for which every step has a metric timing/NAME_s."""


def sample_metrics(samples: Sequence[Sample], compares_group: bool) -> Metrics:
    """Return reward and length metrics of a step's samples.

    With `compares_group`, also counts zero-advantage groups.
    """
    completions = [sample.completion for sample in samples]
    episodes = [sample for sample in samples if not sample.continues]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    judged = [sample for sample in episodes if sample.score.reward is not None]
    rewards = np.array([sample.score.reward for sample in judged], dtype=np.float64)
    metrics: Metrics = {}
    if judged:
        metrics = {"reward/mean": mean(rewards), "reward/std": math.sqrt(variance(rewards))}
    if compares_group:
        groups = groups_of(samples)
        metrics["reward/zero_std_groups"] = mean(not _has_signal(group) for group in groups)
    if left_out := len(episodes) - len(judged):
        metrics["reward/left_out"] = float(left_out)
    metrics["reward/failures"] = float(sum(bool(sample.failure) for sample in episodes))
    # Reward parts, and tasks of a mixture.
    parts: dict[str, list[float]] = {}
    for sample in episodes:
        for part, value in sample.score.parts.items():
            parts.setdefault(part_metric(part), []).append(value)
    metrics |= {name: mean(values) for name, values in parts.items()}
    for name, members, numbers in (
        ("reward", judged, rewards),
        ("response_length", samples, lengths),
    ):
        tasks = np.array([sample.prompt.task for sample in members])
        for task in dict.fromkeys(filter(None, tasks.tolist())):
            metrics[task_metric(name, task)] = mean(numbers[tasks == task])
    metrics["response_length/mean"] = mean(lengths)
    if any(completion.turns for completion in completions):  # multi-turn
        metrics["response_length/turns"] = mean(len(c.turns) for c in completions)
        metrics["response_length/sampled"] = mean(c.num_sampled for c in completions)
        metrics["reward/unusable_replies"] = float(sum(c.unusable_reply for c in completions))
    is_cut = (completion.finish_reason == "length" for completion in completions)
    return metrics | {"response_length/clip_ratio": mean(is_cut)}


def throughput_metrics(timings: Metrics, samples: Sequence[Sample], rollout_tokens: int) -> Metrics:
    """Return times and throughput of a step after rollout, reward and update."""
    # Include prompt tokens, which the trainer processes too.
    num_trained = sum(len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples)
    return {
        **{f"timing/{name}_s": timings.get(name, 0.0) for name in TIMED},  # 0: recorded rewards
        "throughput/rollout_tokens_per_s": rollout_tokens / timings["rollout"],
        "throughput/train_tokens_per_s": num_trained / timings["update"],
    }


def _speculation_metrics(speculated: SpeculationStats | None) -> Metrics:
    """Return speculative-decoding metrics over all ranks; {} without drafts."""
    counts = [c for c in world().gather("counts of drafts", speculated) if c is not None]
    if not counts:
        return {}
    # Sum counts over ranks first: averaging ratios would weight ranks wrongly.
    total = functools.reduce(SpeculationStats.plus, counts)
    metrics = {
        "speculation/tokens_per_forward": total.tokens_per_forward,
        "speculation/verify_share": total.verify_s / total.decode_s if total.decode_s else 0.0,
    }
    for source, drafted, accepted in zip(SOURCES, total.drafted, total.accepted, strict=True):
        if drafted:
            metrics[f"speculation/acceptance_{source}"] = accepted / drafted
    return metrics


def distributed_metrics(metrics: Metrics, waited_s: float) -> Metrics:
    """Return throughput per rank and the fraction of time waiting; {} for one process."""
    size = world().size
    if size == 1:
        return {}
    waits = world().gather("times of waiting", waited_s)
    speeds = ("rollout_tokens_per_s", "train_tokens_per_s")
    return {
        "distributed/size": float(size),
        "distributed/wait_share": sum(waits) / size / metrics["timing/step_s"],
        **{f"distributed/{name}_per_rank": metrics[f"throughput/{name}"] / size for name in speeds},
    }


def largest_of_ranks(metrics: Metrics) -> Metrics:
    values = world().gather("measurements", dict(metrics))
    return {name: max(one[name] for one in values if name in one) for name in metrics}


def eval_metrics(task: str, evaluation: Evaluation, partial_credit: bool = False) -> Metrics:
    values = {
        "mean": evaluation.mean,
        "pass_at_k": evaluation.pass_at_k[max(evaluation.pass_at_k)],
        "response_length": evaluation.response_length,
        "clip_ratio": evaluation.clip_ratio,
        "failures": float(evaluation.failures),
    }
    if partial_credit:
        values["accuracy"] = evaluation.accuracy
    if evaluation.outside_0_1:
        values["outside_0_1"] = float(evaluation.outside_0_1)
    metrics = {eval_metric(task, name): value for name, value in values.items()}
    for mixed_task, own in evaluation.by_task.items():
        metrics |= eval_metrics(mixed_task, own, partial_credit)
    return metrics


class StepNotes:
    """Notes on the steps of a run, derived from metrics."""

    def __init__(
        self, run: TrainingRun, engine: RolloutEngine, micro_batch_size: MicroBatchSize
    ) -> None:
        self._run, self._engine, self._micro_batch_size = run, engine, micro_batch_size
        lines = world().from_first("the metrics", lambda: run.directory.metrics("rl"))
        self._anomalies = Anomalies([line for line in lines if line["step"] > 0])
        self._learning = Learning(lines)

    def on_update(self, step: int, metrics: Metrics) -> Metrics:
        """Note anything unusual about a step's samples and updates; return counts as metrics."""
        # Rules use only metrics, so a resumed run gives the same warnings.
        anomalies = self._anomalies.see(metrics)
        # Gather retries from all ranks: only rank 0 has a console.
        own_retries = self._engine.sizes.take_retries()
        rollout_retries = sum(world().gather("retries of the rollout", own_retries))
        for text in anomalies:
            logger.warning("step %d: %s", step, text)
        notes = list(anomalies)
        again = f"names the operation, `jetrl replay {self._run.directory.path}` runs it again"
        for part, of, more in (("critic", " of the critic", "has details"), ("policy", "", again)):
            if skipped := int(metrics.get(f"{part}/skipped_updates", 0)):
                notes.append(
                    f"{skipped} update{'s' * (skipped > 1)}{of} not finite and skipped; log.txt "
                    f"{more}"
                )
        if rollout_retries:
            notes.append("out of memory in rollout; sampling fewer sequences at a time now")
        if metrics.get("memory/train_retries"):
            tokens = self._micro_batch_size.tokens
            notes.append(f"out of memory in training; micro-batches have {tokens} tokens now")
        for text in notes:
            self._run.display.note(f"step {step}: {text}")
        counts = {"policy/anomalies": len(anomalies), "memory/rollout_retries": rollout_retries}
        return {
            **{name: float(count) for name, count in counts.items() if count},
            **_speculation_metrics(self._engine.take_speculation()),
        }

    def on_record(self, step: int, metrics: Metrics) -> None:
        """Warn if the steps so far show that the run does not learn."""
        for warning in self._learning.see(metrics):
            logger.warning("step %d: %s", step, warning)
            self._run.display.note(f"warning: {warning}")


_PROMPTS = 4
_SAMPLES = 4  # samples per prompt, or fewer if the recipe has fewer


def preflight(settings: Settings) -> tuple[list[Sample], list[str]]:
    """Sample and score the first prompts without a run directory; also return warnings."""
    rollout = settings.rollout
    with contextlib.ExitStack() as stack:
        context = open_context(settings, stack)
        order = context.prompt_order()
        prompts = order.draw(1, min(_PROMPTS, rollout.prompts_per_step))
        params = replace(rollout_params(settings, 1), n=min(_SAMPLES, rollout.samples_per_prompt))
        if (play := context.play(0)) is not None:
            samples = play(prompts, params)
        else:
            scoring = Scoring(context.scorer, prompts, params.n)
            drawn = sample_prompts(context.engine, scoring, params, context.max_turns)
            samples = scoring.samples(drawn)
    if context.reward is not None:
        context.engine.free_cache()
        samples = context.reward(samples)
    # Same checks as after the first steps of a run.
    metrics = sample_metrics(samples, context.objective.algorithm.compares_group)
    warnings = problems([metrics], f"{len(samples)} completions", "look at them above")
    failures = [sample.failure for sample in samples if sample.failure]
    if failures:
        warnings["failures"] = (
            f"{len(failures)} of {len(samples)} completions could not be scored: {failures[0]}"
        )
    of_data = [note.removeprefix(WARNING) for note in context.notes if note.startswith(WARNING)]
    return samples, [*of_data, *warnings.values()]
