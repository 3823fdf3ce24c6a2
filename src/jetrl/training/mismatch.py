"""Train-inference mismatch: how sampler and trainer log-probs of the same tokens differ.

Under an exact plan, any different float32 bit raises `StepMismatchError`. Equal log-probs do not
prove that the tokens were sampled from that distribution; `surprise_z` tests this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jetrl.errors import MismatchError
from jetrl.training.host_math import exact_sum, exp, expm1, log, mean
from jetrl.training.loss_math import total
from jetrl.training.packing import targets, trained_lengths
from jetrl.types import Batch, Metrics, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl.precision import PrecisionPlan

# Per-micro-batch sums for `surprise_z` in the step's first update; not metrics.
EXCESS, VARIANCE = "surprise/excess", "surprise/variance"
_NOTHING_COMPARED = {"mismatch/num_tokens": 0.0}


class Difference(NamedTuple):
    """A token whose log-probs differ between sampler and trainer."""

    sample: int
    token: int
    trainer: float
    rollout: float

    def __str__(self) -> str:
        return (
            f"sample {self.sample}, completion token {self.token}: "
            f"sampler {self.rollout!r} ({_hex(self.rollout)}), "
            f"trainer {self.trainer!r} ({_hex(self.trainer)})"
        )


class StepMismatchError(MismatchError):
    """Sampler and trainer differ under an exact plan; no weights were changed."""

    def __init__(
        self, plan_name: str, samples: Sequence[Sample], found: list[Difference], metrics: Metrics
    ) -> None:
        self.samples = tuple(samples)
        self.sample_ids = tuple(sorted({difference.sample for difference in found}))
        self.first = first = min(found, key=lambda d: (d.sample, d.token))
        self.metrics = dict(metrics)
        sample = self.samples[first.sample]
        super().__init__(
            f"plan {plan_name!r} promises that sampler and trainer agree to the bit, but "
            f"{int(metrics['mismatch/num_different'])} of "
            f"{int(metrics['mismatch/num_tokens'])} log-probs differ, in "
            f"{len(self.sample_ids)} of {len(self.samples)} samples; the largest difference is "
            f"{metrics['mismatch/max_abs_logprob_diff']:.3g}. The first is {first}, token id "
            f"{sample.completion.token_ids[first.token]} after a prompt of "
            f"{len(sample.prompt_token_ids)} tokens (prompt {sample.prompt.id!r}). "
            "No weight was changed; the last checkpoint is good. "
            "`jetrl parity MODEL --locate` names the operation"
        )


def mismatch_metrics(trainer: np.ndarray, rollout: np.ndarray) -> Metrics:
    """Return mismatch metrics of N >= 1 tokens, with d = trainer - rollout log-prob in float64.

    mismatch/num_different: tokens with different float32 bits, or with a NaN.
    mismatch/{mean,max}_abs_logprob_diff: mean and max of |d|, in nats.
    mismatch/k3_kl: mean of exp(d) - d - 1, an estimate of KL(rollout || trainer) in nats.
    mismatch/token_mult_prob_error: mean of exp|d|; 1 without mismatch.
    """
    trainer, rollout = _float32(trainer), _float32(rollout)
    assert trainer.shape == rollout.shape == (len(trainer),), (trainer.shape, rollout.shape)
    # NaN counts as different; equal bits give exactly 0.
    same = ~different(trainer, rollout)
    with np.errstate(over="ignore", invalid="ignore"):
        d = np.where(same, 0.0, trainer.astype(np.float64) - rollout.astype(np.float64))
        return {
            "mismatch/num_tokens": float(len(d)),
            "mismatch/num_different": float(np.count_nonzero(~same)),
            "mismatch/mean_abs_logprob_diff": mean(np.abs(d)),
            "mismatch/max_abs_logprob_diff": float(np.abs(d).max()),
            "mismatch/k3_kl": mean(expm1(d) - d),
            "mismatch/token_mult_prob_error": mean(exp(np.abs(d))),
        }


def surprise_sums(logprobs: Tensor, moments: Tensor) -> dict[str, Tensor]:
    """Return float64 sums for `surprise_z`; moments float32 [2, N] are entropy and variance."""
    entropy, variance = moments.double()
    return {EXCESS: -total(logprobs.detach() + entropy), VARIANCE: total(variance)}


def surprise_z(sums: Metrics, vocab_size: int) -> Metrics:
    """Return sampling/surprise_z, a test that tokens were sampled from the trainer's distribution.

        d_t = -log p_t(x_t) - H_t,   S = sum_t d_t,   V = sum_t Var_t,   z = S / sqrt(V + b |S| / 3)

    p_t is the distribution of token t given all before it, at the sampling temperature, H_t its
    entropy, x_t the drawn token, Var_t = sum_v p_t(v) log^2 p_t(v) - H_t^2. If x_t is drawn from
    p_t, the d_t are martingale differences: variances add, and S / sqrt(V) tends to N(0, 1).

    If the policy is confident, a single rare token is many standard deviations away. Hence the term
    b |S| / 3 from Freedman (1975): if no d_t exceeds b, P(|z| > 5) < 2 exp(-12.5) for any
    distribution. For negative S, b is log(vocab_size), the maximum entropy. For positive S, b
    follows from the sampler, which only draws tokens with at least 2^-41 of the maximum
    probability, whose -log is at most H_t.

    A sequence may end depending on its own tokens, but selecting samples by later tokens breaks the
    test. `Trainer` therefore skips it with samples selected by reward, and partial rollouts; and
    with filters if log-probs are of all tokens. Returns {} if a sum is not finite or no token was
    random.
    """
    excess, variance = sums.get(EXCESS, 0.0), sums.get(VARIANCE, 0.0)
    if not (math.isfinite(excess) and 0 < variance < math.inf):
        return {}
    # Bound b of one token's excess, for the sign of S.
    largest = 41 * log(2) if excess > 0 else log(vocab_size)
    return {"sampling/surprise_z": excess / math.sqrt(variance + largest * abs(excess) / 3)}


def compare_step(
    plan: PrecisionPlan,
    samples: Sequence[Sample],
    version: int,
    batches: Sequence[Batch],
    trainer_logprobs: Sequence[np.ndarray],
) -> Metrics:
    """Return mismatch metrics of all trained tokens sampled by the current policy.

    Tokens from earlier versions are excluded; partial_rollout/earlier_tokens is their fraction, and
    replay/* are the effective sample sizes that they leave. If nothing is compared (all excluded,
    or a log-prob is not finite, which the guard handles), mismatch/num_tokens is 0.
    `trainer_logprobs`, float32 [N] per batch, are from before the first update.

    Raises StepMismatchError for any difference under an exact plan.
    """
    # The guard reports NaNs, with the name of the operation.
    if not all(np.isfinite(logprobs).all() for logprobs in trainer_logprobs):
        return _NOTHING_COMPARED
    # Partial rollouts contain tokens of earlier policies, whose log-probs may differ.
    present = [_present_tokens(batch, samples, version) for batch in batches]
    compared = np.concatenate(present)
    rollout_logprobs = np.concatenate([batch.rollout_logprobs[targets(batch)] for batch in batches])
    earlier = {}
    if not compared.all():
        earlier = {"partial_rollout/earlier_tokens": 1 - compared.mean()}
        lengths = np.concatenate([trained_lengths(batch) for batch in batches])
        earlier |= effective_sizes(np.concatenate(trainer_logprobs), rollout_logprobs, lengths)
    if not compared.any():
        return earlier | _NOTHING_COMPARED
    metrics = earlier | mismatch_metrics(
        np.concatenate(trainer_logprobs)[compared], rollout_logprobs[compared]
    )
    if plan.exact and metrics["mismatch/num_different"]:
        found = [
            difference
            for batch, logprobs, mask in zip(batches, trainer_logprobs, present, strict=True)
            for difference in differences(batch, logprobs, mask)
        ]
        raise StepMismatchError(plan.name, samples, found, metrics)
    return metrics


def _present_tokens(batch: Batch, samples: Sequence[Sample], version: int) -> np.ndarray:
    """Return a mask of the trained tokens sampled by `version` of the policy, bool [N]."""
    masks = []
    for index, count in zip(batch.sample_ids, trained_lengths(batch), strict=True):
        # Without versions, the current policy sampled the whole completion.
        done = samples[index].completion
        mask = np.ones(count, dtype=np.bool_)
        if done.versions:
            mask = np.array(done.versions) == version
            # Versions are of all tokens, the mask of the trained ones.
            environment = [np.arange(start, end) for start, end in done.environment]
            mask = np.delete(mask, np.concatenate(environment)) if environment else mask
        masks.append(mask)
    return np.concatenate(masks)


def effective_sizes(trainer: np.ndarray, rollout: np.ndarray, lengths: np.ndarray) -> Metrics:
    """Return replay/effective_{tokens, sequences}: (sum w)^2 / sum w^2, as a share of the count.

    w is the ratio of the trainer's probability to the recorded one, per token (log-probs float32
    [N]), or per sequence (`lengths`, int64 [S]). The share is 1 if all w are equal (Kong 1992).
    """
    log_ratio = trainer.astype(np.float64) - rollout.astype(np.float64)
    # The log-ratio of a sequence is the sum of its tokens'.
    parts = np.split(log_ratio, np.cumsum(lengths)[:-1])
    of_sequences = np.array([exact_sum(part) for part in parts])
    sizes = {}
    for name, values in (("tokens", log_ratio), ("sequences", of_sequences)):
        weights = exp(values - values.max())  # a common factor cancels
        share = exact_sum(weights) ** 2 / (exact_sum(weights * weights) * len(weights))
        sizes[f"replay/effective_{name}"] = share
    return sizes


def different(trainer_logprobs: np.ndarray, rollout_logprobs: np.ndarray) -> np.ndarray:
    """Return a mask of values whose float32 bits differ or that are NaN, bool [N]."""
    trainer, rollout = _float32(trainer_logprobs), _float32(rollout_logprobs)
    bits_differ = trainer.view(np.uint32) != rollout.view(np.uint32)
    return bits_differ | np.isnan(trainer) | np.isnan(rollout)


def differences(
    batch: Batch, trainer_logprobs: np.ndarray, compared: np.ndarray | bool = True
) -> list[Difference]:
    """Return the `compared` trained tokens of a batch whose log-probs differ."""
    target = targets(batch)
    rollout = batch.rollout_logprobs[target]
    ends = batch.cu_seqlens[1:]
    differing = []
    # Map a packed position back to sample and completion token.
    for k in np.flatnonzero(different(trainer_logprobs, rollout) & compared):
        sequence = int(np.searchsorted(ends, target[k], side="right"))
        start = int(batch.cu_seqlens[sequence])
        first = start + int(np.argmax(batch.loss_mask[start : ends[sequence]]))
        sample, token = int(batch.sample_ids[sequence]), int(target[k]) - first
        differing.append(Difference(sample, token, float(trainer_logprobs[k]), float(rollout[k])))
    return differing


def _float32(values: np.ndarray) -> np.ndarray:
    assert values.dtype == np.float32, values.dtype
    return np.ascontiguousarray(values)


def _hex(value: float) -> str:
    return f"0x{int(np.float32(value).view(np.uint32)):08x}"
