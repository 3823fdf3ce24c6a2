"""The mismatch of sampled tokens: what the sampler reported against what the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.settings import AlgorithmSettings
from jetrl.training.mismatch import different, mismatch_metrics
from jetrl.types import SamplingParams

_TOKENS_AT_ONCE = 2**16


@dataclass(frozen=True)
class ParityResult:
    """The mismatch of sampled tokens.

    tokens: compared. different: whose float32 log-probs differ in any bit. mean_abs, max_abs: of
    the log-prob difference, nats. k3_kl: nats. token_mult_prob_error: mean of exp|difference|.
    first_different: the first sequence with a token that differs, as (prompt ids, completion ids);
    None if there is none."""

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
    """Sample completions, `max_batch_size` at a time, run the trainer's forward over all of them in
    other batches, and compare. Without prompts, random ones of mixed lengths are taken. gradients:
    let that forward keep what a backward needs; on a GPU other kernels run then."""
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


def check_correction(algorithm: AlgorithmSettings, policy: Policy) -> None:
    """Refuses a correction of a mismatch that is not there, with the mismatch as measured here.

    Raises:
        UserError: a correction under an exact plan that was not asked for by name.
    """
    wanted = algorithm.correction
    if wanted == "none" or not policy.plan.exact or algorithm.correction_under_exact_plan:
        return
    found = measure(policy, num_prompts=4, samples=2, max_tokens=16)
    raise UserError(
        f"algorithm.correction = {wanted} corrects nothing under the exact plan "
        f"{policy.plan.name!r}: {found.different} of {found.tokens} tokens sampled just now differ "
        f"from the trainer's (largest difference {found.max_abs:.3g} nats), so that every weight "
        "is 1, and each step checks all of its tokens. Leave it out, or set "
        "algorithm.correction_under_exact_plan=true"
    )


def random_prompts(policy: Policy, count: int, max_tokens: int, seed: int) -> list[list[int]]:
    """`count` prompts of random tokens, between 1 token and half of what the context leaves."""
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
    """float32 of each completion's tokens, from packed forwards of bounded size."""
    found: list[np.ndarray] = []
    batch: list[list[int]] = []
    for index, (prompt, answer) in enumerate(pairs):
        batch.append(prompt + answer)
        if index + 1 == len(pairs) or sum(map(len, batch)) >= _TOKENS_AT_ONCE:
            with torch.set_grad_enabled(gradients):
                rows = policy.logprobs(batch, temperature)
            found += [row.detach().cpu().numpy() for row in rows]
            batch = []
    return [row[len(prompt) - 1 :] for (prompt, _), row in zip(pairs, found, strict=True)]
