"""The mismatch between sampler and trainer: how far apart their log-probs of the same tokens are.

Under an exact plan no float32 bit may differ; a step raises `StepMismatchError`
if one does. Equal log-probs do not prove how the tokens were drawn; `surprise_z` tests that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jetrl.errors import MismatchError
from jetrl.training.packing import targets, trained_lengths
from jetrl.types import Batch, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl.precision import PrecisionPlan

# Sums of a micro-batch that `surprise_z` needs of the step's first update; not metrics.
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
    """Sampler and trainer differ under an exact plan; no weight was changed."""

    def __init__(
        self,
        plan_name: str,
        samples: Sequence[Sample],
        found: list[Difference],
        metrics: dict[str, float],
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


def mismatch_metrics(trainer: np.ndarray, rollout: np.ndarray) -> dict[str, float]:
    """Return the mismatch of N >= 1 tokens' float32 log-probs; d = trainer - rollout in float64.

    mismatch/num_different: tokens whose float32 bits differ, or of which one is NaN.
    mismatch/{mean,max}_abs_logprob_diff: of |d|, in nats.
    mismatch/k3_kl: mean of exp(d) - d - 1, an estimate of KL(rollout || trainer) in nats.
    mismatch/token_mult_prob_error: mean of exp|d|; 1 if nothing differs.
    """
    trainer, rollout = _float32(trainer), _float32(rollout)
    assert trainer.shape == rollout.shape == (len(trainer),), (trainer.shape, rollout.shape)
    # A NaN differs from everything; equal bits count as exactly 0.
    same = ~different(trainer, rollout)
    with np.errstate(over="ignore", invalid="ignore"):
        d = np.where(same, 0.0, trainer.astype(np.float64) - rollout.astype(np.float64))
        return {
            "mismatch/num_tokens": float(len(d)),
            "mismatch/num_different": float(np.count_nonzero(~same)),
            "mismatch/mean_abs_logprob_diff": float(np.abs(d).mean()),
            "mismatch/max_abs_logprob_diff": float(np.abs(d).max()),
            "mismatch/k3_kl": float((np.expm1(d) - d).mean()),
            "mismatch/token_mult_prob_error": float(np.exp(np.abs(d)).mean()),
        }


def surprise_sums(logprobs: Tensor, moments: Tensor) -> dict[str, Tensor]:
    """Return float64 sums for `surprise_z`; moments float32 [2, N] are entropies and variances."""
    entropy, variance = moments.double()
    return {EXCESS: -(logprobs.detach() + entropy).sum(), VARIANCE: variance.sum()}


def surprise_z(sums: Mapping[str, float], vocab_size: int) -> dict[str, float]:
    """Return sampling/surprise_z, which tells if tokens were drawn from the trainer's distribution.

        d_t = -log p_t(x_t) - H_t,   S = sum_t d_t,   V = sum_t Var_t,   z = S / sqrt(V + b |S| / 3)

    p_t is the distribution of token t given all before it, at the sampling temperature, H_t its
    entropy, x_t the drawn token, Var_t = sum_v p_t(v) log^2 p_t(v) - H_t^2. If x_t is drawn from
    p_t, the d_t are martingale differences: variances add, and S / sqrt(V) tends to N(0, 1).

    If the policy is confident, one rare token is many standard deviations. So b |S| / 3 is added,
    the correction of Freedman (1975): if no d_t is beyond b, |z| > 5 has a chance below 2
    exp(-12.5) for any distributions. For negative S, b is log(vocab_size), the largest entropy. For
    positive S it is the sampler's bound: it draws only tokens with at least 2^-41 of the largest
    probability, whose -log is at most H_t.

    A sequence may end because of its tokens. Selection by later tokens, however, breaks the test,
    so `Trainer` does not measure it with top_p, top_k, samples chosen by reward, or partial
    rollouts. {} if a sum is not finite, or no token was random.
    """
    excess, variance = sums.get(EXCESS, 0.0), sums.get(VARIANCE, 0.0)
    if not (math.isfinite(excess) and 0 < variance < math.inf):
        return {}
    # The bound b of one token's excess, on the side of S.
    largest = 41 * math.log(2) if excess > 0 else math.log(vocab_size)
    return {"sampling/surprise_z": excess / math.sqrt(variance + largest * abs(excess) / 3)}


def compare_step(
    plan: PrecisionPlan,
    samples: Sequence[Sample],
    version: int,
    batches: Sequence[Batch],
    trainer_logprobs: Sequence[np.ndarray],
) -> dict[str, float]:
    """Return the mismatch of all trained tokens that the current policy has drawn.

    Tokens of earlier versions are exempt; partial_rollout/earlier_tokens is their fraction. If
    nothing is compared (all are exempt, or a log-prob is not finite, which the guard handles), the
    only number is mismatch/num_tokens = 0. `trainer_logprobs`, float32 [N] per batch, are from
    before the first update. A difference under an exact plan is a StepMismatchError.
    """
    # A NaN is the guard's to report: it names the operation.
    if not all(np.isfinite(logprobs).all() for logprobs in trainer_logprobs):
        return _NOTHING_COMPARED
    # Partial rollouts hold tokens of earlier policies, whose log-probs may differ.
    present = [_present_tokens(batch, samples, version) for batch in batches]
    compared = np.concatenate(present)
    earlier = {} if compared.all() else {"partial_rollout/earlier_tokens": 1 - compared.mean()}
    if not compared.any():
        return earlier | _NOTHING_COMPARED
    rollout_logprobs = np.concatenate([batch.rollout_logprobs[targets(batch)] for batch in batches])
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
    """Return whether `version` of the policy drew each trained token of a batch, bool [N]."""
    masks = []
    for index, count in zip(batch.sample_ids, trained_lengths(batch), strict=True):
        # Without versions the whole completion is the current policy's.
        versions = samples[index].completion.versions
        masks.append(np.array(versions) == version if versions else np.ones(count, dtype=np.bool_))
    return np.concatenate(masks)


def different(trainer_logprobs: np.ndarray, rollout_logprobs: np.ndarray) -> np.ndarray:
    """Return whether the float32 bits differ or a number is NaN, bool [N]."""
    trainer, rollout = _float32(trainer_logprobs), _float32(rollout_logprobs)
    bits_differ = trainer.view(np.uint32) != rollout.view(np.uint32)
    return bits_differ | np.isnan(trainer) | np.isnan(rollout)


def differences(
    batch: Batch, trainer_logprobs: np.ndarray, compared: np.ndarray | bool = True
) -> list[Difference]:
    """Return a batch's trained tokens whose log-probs differ, of those `compared`, bool [N]."""
    target = targets(batch)
    rollout = batch.rollout_logprobs[target]
    ends = batch.cu_seqlens[1:]
    differing = []
    # Translate a packed position back into sample and completion token.
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
