"""Policy evaluation: mean@n, pass@k and maj@k."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jetrl.distributed.agreement import ending_together
from jetrl.errors import RunStopped
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.session.episodes import EpisodeSamples, Play
from jetrl.session.sampling import EncodedPrompt, Scoring, encode_prompts, sample_prompts, turns_of
from jetrl.settings.sections import EvalSettings, TaskSettings
from jetrl.tasks import Scorer, Task
from jetrl.training.host_math import mean, variance
from jetrl.types import Sample, SamplingParams, Score

_Z = 1.959964  # two-sided 95% quantile of the normal distribution


@dataclass(frozen=True)
class Evaluation:
    """Evaluation results of a policy on the prompts of a split.

    Attributes:
        pass_at_k: Fraction of prompts solved by one of k completions, for k = 1, 2, 4, ... and n,
            by the unbiased estimator of Chen et al. (arXiv 2107.03374).
        response_length: Mean completion length in tokens.
        clip_ratio: Fraction of completions truncated at max_tokens.
        interval: 95% confidence interval of the mean over similar prompts (docs/tasks.md); None
            for one prompt, or if all partial rewards are equal.
        accuracy: Fraction of completions with a reward of at least 1.
        outside_0_1: Number of rewards below 0 or above 1.
        by_task: Results per task of a mixture, by `Prompt.task`; otherwise {}.
        maj_at_k: Fraction of groups of k completions per prompt whose most frequent answer (the
            first if tied) solves the prompt; {} if answers cannot be compared.
    """

    mean: float
    pass_at_k: dict[int, float]
    response_length: float
    clip_ratio: float
    failures: int
    samples: tuple[Sample, ...]
    interval: tuple[float, float] | None = None
    accuracy: float = 0.0
    outside_0_1: int = 0
    by_task: Mapping[str, Evaluation] = field(default_factory=dict)
    maj_at_k: Mapping[int, float] = field(default_factory=dict)

    @property
    def margin(self) -> float | None:
        """Distance from the mean to the farther end of `interval`."""
        if self.interval is None:
            return None
        low, high = self.interval
        return max(self.mean - low, high - self.mean)

    @property
    def has_partial_credit(self) -> bool:
        """True if a reward is neither 0 nor 1, so that the mean is not the accuracy."""
        return any(sample.score.reward not in (0.0, 1.0, None) for sample in self.samples)

    @property
    def left_out(self) -> int:
        """Number of completions that no reward function scored; the mean excludes them."""
        return sum(sample.score.reward is None for sample in self.samples)


def evaluate(
    engine: RolloutEngine,
    scorer: Scorer,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    threshold: float = 1.0,
    max_turns: int = 1,
    progress: ProgressCallback | None = None,
    play: Play | None = None,
) -> Evaluation:
    """Sample and score `params.n` completions per prompt, or `play` as many episodes."""
    if play is not None:
        samples = _played(play, prompts, params, progress)
    else:
        scoring = Scoring(scorer, prompts, params.n)
        # A failing verifier ends all ranks.
        with ending_together("an evaluation"):
            completions = sample_prompts(engine, scoring, params, max_turns, progress)
            own_samples = scoring.own_samples(completions)
        samples = scoring.gathered(own_samples)
    tasks = dict.fromkeys(sample.prompt.task for sample in samples)
    by_task = {
        task: _results([s for s in samples if s.prompt.task == task], params.n, threshold)
        for task in tasks
    }
    overall = _results(samples, params.n, threshold)
    return dataclasses.replace(overall, by_task=by_task) if set(by_task) != {""} else overall


def _played(
    play: Play,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    progress: ProgressCallback | None,
) -> list[Sample]:
    """Return one sample per episode of a harness, its first; one that failed has reward 0."""
    with ending_together("an evaluation"):
        own = play(prompts, params, progress)
    # As in other tasks, what could not be judged counts as not solved.
    samples = EpisodeSamples(own).gathered(own)
    return [
        dataclasses.replace(sample, score=Score(0.0)) if sample.failure else sample
        for sample in samples
        if not sample.continues
    ]


def _results(samples: Sequence[Sample], n: int, threshold: float) -> Evaluation:
    """Return the results of samples with n consecutive completions per prompt."""
    # Exclude completions that no reward function scored.
    groups = [
        [s.score.reward for s in samples[start : start + n] if s.score.reward is not None]
        for start in range(0, len(samples), n)
    ]
    groups = [group for group in groups if group]
    if not groups:
        raise RunStopped(
            f"every reward function returned None for the evaluation's {len(samples)} "
            "completions, so there is no mean"
        )
    rewards = np.concatenate(groups)
    solved = [(sum(reward >= threshold for reward in group), len(group)) for group in groups]
    ks = _numbers_of_completions(n)
    return Evaluation(
        mean=mean(rewards),
        pass_at_k={k: _pass_at_k(solved, k) for k in ks},
        response_length=mean(len(s.completion.token_ids) for s in samples),
        clip_ratio=mean(s.completion.finish_reason == "length" for s in samples),
        failures=sum(bool(s.failure) for s in samples),
        samples=tuple(samples),
        interval=_interval(groups),
        accuracy=mean(rewards >= 1.0),
        outside_0_1=int(np.sum((rewards < 0.0) | (rewards > 1.0))),
    )


def _interval(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the 95% interval of the mean of rewards grouped by prompt (Wilson or Student's t)."""
    prompts, rewards = len(groups), np.concatenate(groups)
    if prompts < 2:
        return None
    center = mean(rewards)
    means = [mean(group) for group in groups]
    spread_of_mean = variance(means, ddof=1) / prompts  # of the mean; prompts are independent
    if not np.isin(rewards, (0.0, 1.0)).all():
        half = _t_value(prompts - 1) * math.sqrt(spread_of_mean)
        return (center - half, center + half) if spread_of_mean else None
    # Completions of a prompt are correlated, so the effective sample size is smaller.
    spread = center * (1 - center)
    draws = float(prompts) if not spread else float(len(rewards))
    if spread_of_mean:
        draws = min(max(spread / spread_of_mean, prompts), draws)
    z2 = _Z * _Z / draws
    middle = (center + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (spread + z2 / 4)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def _t_value(freedom: int) -> float:
    """Return the two-sided 95% quantile of Student's t-distribution."""
    if freedom > 1000:
        return _Z
    low, high = 0.0, 13.0  # 12.7 for 1 degree of freedom
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _t_inside(middle, freedom) > 0.95 else (middle, high)
    return round(high, 9)  # without the last bits of the C library


def _t_inside(t: float, freedom: int) -> float:
    """Return the probability of |T| < t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    term, total = math.cos(angle) ** (freedom % 2), 0.0
    for j in range(freedom % 2, freedom - 1, 2):
        total += term
        term *= (j + 1) / (j + 2) * math.cos(angle) ** 2
    inside = math.sin(angle) * total
    return 2 / math.pi * (angle + inside) if freedom % 2 else inside


def _numbers_of_completions(n: int) -> list[int]:
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def _majorities(
    samples: Sequence[Sample], votes: Sequence[str | None], n: int, threshold: float
) -> dict[int, float]:
    """Return maj@k for samples with n consecutive completions per prompt, over groups of k."""
    majorities = {}
    for k in _numbers_of_completions(n):
        solved = []
        # Vote in consecutive groups of k completions; drop the remainder.
        for prompt in range(0, len(samples), n):
            for start in range(prompt, prompt + n - k + 1, k):
                given = [i for i in range(start, start + k) if votes[i] is not None]
                counts = Counter(votes[i] for i in given)
                best = counts.most_common(1)[0][0] if counts else None
                first = next((i for i in given if votes[i] == best), None)
                reward = None if first is None else samples[first].score.reward
                solved.append(reward is not None and reward >= threshold)
        majorities[k] = mean(solved)
    return majorities


def _pass_at_k(solved: Sequence[tuple[int, int]], k: int) -> float:
    """Return mean pass@k from (solved, scored) counts per prompt."""
    counts = [(c, n, min(k, n)) for c, n in solved]
    return mean(1.0 - math.comb(n - c, k) / math.comb(n, k) for c, n, k in counts)


def evaluate_model(
    engine: RolloutEngine,
    task: Task,
    scorer: Scorer,
    section: TaskSettings,
    own: EvalSettings,
    params: SamplingParams,
) -> Evaluation:
    """Evaluate the engine's policy on the first `own.prompts` eval prompts of a task (0: all)."""
    prompts = encode_prompts(
        engine.policy, task, section.eval_split, own.prompts, section.system_prompt
    )
    result = evaluate(
        engine,
        scorer,
        prompts,
        params,
        threshold=own.threshold,
        max_turns=turns_of(task, section.max_turns),
    )
    # maj@k needs comparable answers, which few tasks have.
    votes = [task.vote(sample.prompt, sample.completion.text) for sample in result.samples]
    if not any(vote is not None for vote in votes):
        return result
    majorities = _majorities(result.samples, votes, params.n, own.threshold)
    return dataclasses.replace(result, maj_at_k=majorities)
