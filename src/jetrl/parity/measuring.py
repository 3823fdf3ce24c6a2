"""The mismatch of sampled tokens: what the sampler reported against what the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.settings import AlgorithmSettings
from jetrl.training.mismatch import different, mismatch_metrics
from jetrl.types import SamplingParams

_TOKENS_AT_ONCE = 2**16  # of a forward of the trainer


@dataclass(frozen=True)
class ParityResult:
    """The mismatch of sampled tokens.

    Attributes:
        different: The number of tokens whose float32 log-probs differ in any bit.
        k3_kl: The K3 estimate of the KL divergence, in nats.
        first_different: The first sequence with a token that differs, as (prompt ids, completion
            ids); None if there is none.
    """

    tokens: int
    different: int
    mean_abs: float
    max_abs: float
    k3_kl: float
    token_mult_prob_error: float
    first_different: tuple[list[int], list[int]] | None = field(default=None, repr=False)


def measure(
    policy: Policy,
    prompts: Sequence[Sequence[int]] | None = None,
    num_prompts: int = 8,
    samples: int = 2,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    max_batch_size: int = 256,
    gradients: bool = False,
) -> ParityResult:
    """Sample completions, and compare their log-probs with the trainer's in other batches.

    Args:
        prompts: Token ids of each prompt; None: random ones of mixed lengths.
        max_tokens: Tokens a completion: the end of sequence is ignored.
        gradients: True: the trainer's forward keeps what a backward needs; on a GPU other kernels
            run then.
    """
    if prompts is None:
        prompts = random_prompts(policy, num_prompts, max_tokens, seed)
    params = SamplingParams(
        n=samples, max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True
    )
    completions = RolloutEngine(policy, max_batch_size=max_batch_size).generate(
        prompts, params, progress
    )
    pairs = [
        (list(prompts[i // samples]), list(completion.token_ids))
        for i, completion in enumerate(completions)
    ]
    rollout = [np.array(c.logprobs, dtype=np.float32) for c in completions]
    trainer = _trainer_logprobs(policy, pairs, temperature or 1.0, gradients)
    metrics = mismatch_metrics(np.concatenate(trainer), np.concatenate(rollout))
    first = next(
        (p for p, a, b in zip(pairs, trainer, rollout, strict=True) if different(a, b).any()), None
    )
    return ParityResult(
        tokens=int(metrics["mismatch/num_tokens"]),
        different=int(metrics["mismatch/num_different"]),
        mean_abs=metrics["mismatch/mean_abs_logprob_diff"],
        max_abs=metrics["mismatch/max_abs_logprob_diff"],
        k3_kl=metrics["mismatch/k3_kl"],
        token_mult_prob_error=metrics["mismatch/token_mult_prob_error"],
        first_different=first,
    )


def check_correction(algorithm: AlgorithmSettings, plan: PrecisionPlan) -> list[str]:
    """Refuse a correction of a mismatch that an exact plan does not have.

    Returns:
        What to tell a user whose sampler differs from the trainer, beyond the rounding of one
        precision, without a correction; nothing for others.

    Raises:
        UserError: An exact plan has a correction, without correction_under_exact_plan.
    """
    correction = algorithm.correction
    if correction == "none":
        if plan.rollout_linear == plan.train_linear and not plan.deviation:
            return []
        return [
            f"under the plan {plan.name} sampler and trainer differ: consider "
            "algorithm.correction=tis or icepop (in docs/study.md some runs without one were lost, "
            "none with one)"
        ]
    if not plan.exact or algorithm.correction_under_exact_plan:
        return []
    raise UserError(
        f"algorithm.correction = {correction} corrects nothing under the exact plan "
        f"{plan.name!r}: sampler and trainer agree bit for bit, which each step checks for all of "
        "its tokens, so every weight is 1. Leave it out, or set "
        "algorithm.correction_under_exact_plan=true"
    )


def random_prompts(policy: Policy, count: int, max_tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens, from 1 token to half of the room in the context.

    Args:
        max_tokens: The tokens of a completion, which the context has to hold as well.
    """
    generator = np.random.Generator(np.random.Philox(derive_seed("parity", seed)))
    room = max(2, (policy.config.max_position_embeddings - max_tokens) // 2)
    lengths = generator.integers(1, min(room, 256), size=count)
    return [generator.integers(0, policy.config.vocab_size, n).tolist() for n in lengths]


def _trainer_logprobs(
    policy: Policy,
    pairs: Sequence[tuple[list[int], list[int]]],
    temperature: float,
    gradients: bool,
) -> list[np.ndarray]:
    """Return the trainer's log-probs of each completion, float32, by forwards of bounded size."""
    whole: list[np.ndarray] = []
    batch: list[list[int]] = []
    for index, (prompt, answer) in enumerate(pairs):
        batch.append(prompt + answer)
        if index + 1 == len(pairs) or sum(map(len, batch)) >= _TOKENS_AT_ONCE:
            with torch.set_grad_enabled(gradients):
                rows = policy.logprobs(batch, temperature)
            whole += [row.detach().cpu().numpy() for row in rows]
            batch = []
    return [row[len(prompt) - 1 :] for (prompt, _), row in zip(pairs, whole, strict=True)]
