"""Evaluating a policy on prompts: mean@n and pass@k."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jetrl.models.policy import Policy
from jetrl.rewards.environment import turns_of
from jetrl.rewards.sampling import EncodedPrompt, Scoring, encode_prompts, sample_prompts
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.tasks import Scorer, Task
from jetrl.types import Sample, SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """What a split was worth to a policy.

    mean: mean reward over all completions (mean@n). pass_at_k: {k: share of prompts solved by one
    of k completions}, k = 1, 2, 4, ... and n, by the unbiased estimator of Chen et al. (arXiv
    2107.03374). response_length: tokens. clip_ratio: share cut off at max_tokens. failures:
    completions that the scorer could not judge. by_task: of each task where several are mixed, by
    `Prompt.task`; {} else."""

    mean: float
    pass_at_k: dict[int, float]
    response_length: float
    clip_ratio: float
    failures: int
    samples: tuple[Sample, ...]
    by_task: Mapping[str, Evaluation] = field(default_factory=dict)


def evaluate(
    engine: RolloutEngine,
    scorer: Scorer,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    threshold: float = 1.0,
    max_turns: int = 1,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Sample and score params.n completions of each prompt; a reward >= threshold is a solution."""
    scoring = Scoring(scorer, prompts, params.n)
    samples = scoring.samples(sample_prompts(engine, scoring, params, max_turns, progress))
    tasks = dict.fromkeys(sample.prompt.task for sample in samples)
    parts = {
        task: _judge([s for s in samples if s.prompt.task == task], params.n, threshold)
        for task in tasks
    }
    whole = _judge(samples, params.n, threshold)
    return dataclasses.replace(whole, by_task=parts) if set(parts) != {""} else whole


def _judge(samples: Sequence[Sample], n: int, threshold: float) -> Evaluation:
    """What the samples, n of each prompt in turn, say."""
    rewards = np.array([s.score.reward for s in samples]).reshape(-1, n)
    solved = (rewards >= threshold).sum(1)
    ks = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    return Evaluation(
        mean=float(rewards.mean()),
        pass_at_k={k: _pass_at_k(solved, n, k) for k in ks},
        response_length=float(np.mean([len(s.completion.token_ids) for s in samples])),
        clip_ratio=float(np.mean([s.completion.finish_reason == "length" for s in samples])),
        failures=sum(bool(s.failure) for s in samples),
        samples=tuple(samples),
    )


def _pass_at_k(solved: np.ndarray, n: int, k: int) -> float:
    return float(np.mean([1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in solved]))


def evaluate_model(
    policy: Policy,
    task: Task,
    scorer: Scorer,
    params: SamplingParams,
    split: str = "test",
    num_prompts: int = 0,
    threshold: float = 1.0,
    system_prompt: str | None = None,
    max_turns: int | None = None,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """A policy on a task's split: its first num_prompts prompts, 0 for all. max_turns: default the
    task's own."""
    encoded = encode_prompts(policy, task, split, num_prompts, system_prompt)
    turns = turns_of(task, max_turns)
    return evaluate(RolloutEngine(policy), scorer, encoded, params, threshold, turns, progress)
