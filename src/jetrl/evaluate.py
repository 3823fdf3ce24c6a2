"""Sampling and scoring prompts, and what evaluation makes of it: mean@n and pass@k."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jetrl.errors import UserError
from jetrl.models.chat import encode_prompt
from jetrl.policy import Policy
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.tasks import Scorer, Task, read_prompts
from jetrl.types import Completion, Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with the token ids that the model reads."""

    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """What a split was worth to a policy.

    mean: mean reward over all completions (mean@n). pass_at_k: {k: share of prompts solved by one
    of k completions}, k = 1, 2, 4, ... and n, by the unbiased estimator of Chen et al. (arXiv
    2107.03374). response_length: tokens. clip_ratio: share cut off at max_tokens. failures:
    completions that the scorer could not judge."""

    mean: float
    pass_at_k: dict[int, float]
    response_length: float
    clip_ratio: float
    failures: int
    samples: tuple[Sample, ...]


def encode_prompts(
    policy: Policy, prompts: Sequence[Prompt], where: str, system_prompt: str | None = None
) -> list[EncodedPrompt]:
    """Prompts as token ids, each with room for an answer in the model's context.

    Raises:
        UserError: no prompts; a prompt that fills the context, by id, and how many do.
    """
    if not prompts:
        raise UserError(f"{where} has no prompts")
    encoded = [
        EncodedPrompt(p, tuple(encode_prompt(policy.tokenizer, p, system_prompt))) for p in prompts
    ]
    context = policy.config.max_position_embeddings
    long = [e for e in encoded if len(e.token_ids) >= context]
    if long:
        raise UserError(
            f"{where}: prompt {long[0].prompt.id!r} has {len(long[0].token_ids)} tokens, which "
            f"leaves no room for an answer in the model's context of {context}; {len(long)} of "
            f"{len(encoded)} prompts are too long: shorten or drop them"
        )
    return encoded


def sample_prompts(
    engine: RolloutEngine,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    progress: ProgressCallback | None = None,
) -> list[Completion]:
    """params.n completions for each prompt, in order."""
    return engine.generate([list(p.token_ids) for p in prompts], params, progress)


def score_completions(
    scorer: Scorer, prompts: Sequence[EncodedPrompt], completions: Sequence[Completion]
) -> list[Sample]:
    """Samples of `len(completions) / len(prompts)` completions a prompt, grouped by prompt."""
    each = len(completions) // len(prompts)
    pairs = [(prompts[i // each].prompt, c.text) for i, c in enumerate(completions)]
    return [
        Sample(
            prompt=prompts[i // each].prompt,
            group=i // each,
            prompt_token_ids=prompts[i // each].token_ids,
            completion=completion,
            score=verdict.score,
            failure=verdict.failure,
        )
        for i, (completion, verdict) in enumerate(
            zip(completions, scorer.score(pairs), strict=True)
        )
    ]


def evaluate(
    engine: RolloutEngine,
    scorer: Scorer,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    threshold: float = 1.0,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Sample and score params.n completions of each prompt; a reward >= threshold is a solution."""
    samples = score_completions(scorer, prompts, sample_prompts(engine, prompts, params, progress))
    rewards = np.array([s.score.reward for s in samples]).reshape(len(prompts), params.n)
    solved = (rewards >= threshold).sum(1)
    ks = sorted({2**i for i in range(params.n.bit_length()) if 2**i <= params.n} | {params.n})
    return Evaluation(
        mean=float(rewards.mean()),
        pass_at_k={k: _pass_at_k(solved, params.n, k) for k in ks},
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
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """A policy on a task's split: its first num_prompts prompts, 0 for all."""
    prompts = read_prompts(task, split)[: num_prompts or None]
    encoded = encode_prompts(policy, prompts, f"task {task.label}, split {split}", system_prompt)
    params = with_stops(params, task)
    return evaluate(RolloutEngine(policy), scorer, encoded, params, threshold, progress)


def with_stops(params: SamplingParams, task: Task) -> SamplingParams:
    """params with the task's own stop strings added."""
    return dataclasses.replace(params, stop=tuple(dict.fromkeys((*params.stop, *task.stop))))
