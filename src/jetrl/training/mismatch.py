"""The mismatch between sampler and trainer: how far apart their log-probs of the same tokens are.

Under an exact plan (`jet`, `unified`) the right answer is known: no token differs, compared as the
bits of float32. `StepMismatchError` is what a step raises when that does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jetrl.errors import MismatchError
from jetrl.training.packing import targets, trained_lengths
from jetrl.types import Batch, Sample


@dataclass(frozen=True)
class Difference:
    """A token whose log-probs differ between sampler and trainer.

    Attributes:
        sample: The number of the sample in the step.
        token: The index of the token in its completion.
        trainer: The trainer's log-prob, a float32 value.
        rollout: The sampler's log-prob, a float32 value.
    """

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
    """Sampler and trainer differ under an exact plan; no weight was changed.

    Args:
        plan_name: The precision plan.
        samples: All samples of the step.
        differences: The tokens that differ, at least one.
        metrics: The step's `mismatch/*`.

    Attributes:
        samples: All samples of the step.
        sample_ids: The numbers of the samples with a token that differs, ascending.
        first: The first token that differs, in the order of samples.
        metrics: The step's `mismatch/*`.
    """

    def __init__(
        self,
        plan_name: str,
        samples: Sequence[Sample],
        differences: Sequence[Difference],
        metrics: dict[str, float],
    ) -> None:
        self.samples = tuple(samples)
        self.sample_ids = tuple(sorted({difference.sample for difference in differences}))
        self.first = first = min(differences, key=lambda d: (d.sample, d.token))
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


def mismatch_metrics(
    trainer_logprobs: np.ndarray, rollout_logprobs: np.ndarray
) -> dict[str, float]:
    """Return the mismatch of some tokens, with d = trainer - rollout in float64.

    Args:
        trainer_logprobs: float32 [N], N >= 1.
        rollout_logprobs: float32 [N].

    Returns:
        mismatch/num_tokens: N.
        mismatch/num_different: tokens whose float32 bits differ, or where either is NaN.
        mismatch/mean_abs_logprob_diff, mismatch/max_abs_logprob_diff: of |d|, in nats.
        mismatch/k3_kl: mean of exp(d) - d - 1, an estimate of KL(rollout || trainer) in nats.
        mismatch/token_mult_prob_error: mean of exp|d|; 1 when nothing differs.
    """
    trainer, rollout = _float32(trainer_logprobs), _float32(rollout_logprobs)
    if trainer.shape != rollout.shape or trainer.ndim != 1 or not len(trainer):
        raise ValueError(f"log-probs of shapes {trainer.shape} and {rollout.shape}")
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


def compare_step(
    plan_name: str,
    exact: bool,
    samples: Sequence[Sample],
    version: int,
    batches: Sequence[Batch],
    trainer_logprobs: Sequence[np.ndarray],
) -> dict[str, float]:
    """Return the mismatch of all trained tokens of a step that the present policy has drawn.

    Args:
        plan_name: The precision plan.
        exact: Whether the plan is exact, so that no log-prob may differ.
        samples: All samples of the step.
        version: The version of the present policy; tokens that an earlier one drew are exempt.
        batches: The batches of all updates of the step.
        trainer_logprobs: The trainer's log-probs before the first update, float32 [N] a batch.

    Returns:
        The metrics of `mismatch_metrics`, and partial_rollout/earlier_tokens, the share of tokens
        that are exempt, where there are any. Nothing of a step whose log-probs are not all finite:
        that is the guard's to deal with.

    Raises:
        StepMismatchError: A log-prob differs under an exact plan.
    """
    if not all(np.isfinite(logprobs).all() for logprobs in trainer_logprobs):
        return {}
    present = [present_tokens(batch, samples, version) for batch in batches]
    compared = np.concatenate(present)
    earlier = {} if compared.all() else {"partial_rollout/earlier_tokens": 1 - compared.mean()}
    if not compared.any():
        return earlier
    rollout_logprobs = np.concatenate([batch.rollout_logprobs[targets(batch)] for batch in batches])
    metrics = earlier | mismatch_metrics(
        np.concatenate(trainer_logprobs)[compared], rollout_logprobs[compared]
    )
    if exact and metrics["mismatch/num_different"]:
        found = [
            difference
            for batch, logprobs, mask in zip(batches, trainer_logprobs, present, strict=True)
            for difference in differences(batch, logprobs, mask)
        ]
        raise StepMismatchError(plan_name, samples, found, metrics)
    return metrics


def present_tokens(batch: Batch, samples: Sequence[Sample], version: int) -> np.ndarray:
    """Return which trained tokens of a batch the present policy has drawn.

    Args:
        batch: A batch with N trained tokens.
        samples: All samples of the step.
        version: The version of the present policy (`Completion.versions`).

    Returns:
        bool [N].
    """
    masks = []
    for index, count in zip(batch.sample_ids, trained_lengths(batch), strict=True):
        versions = samples[index].completion.versions
        masks.append(np.array(versions) == version if versions else np.ones(count, dtype=np.bool_))
    return np.concatenate(masks)


def different(trainer_logprobs: np.ndarray, rollout_logprobs: np.ndarray) -> np.ndarray:
    """Return, bool [N], where the float32 bits differ or either number is NaN."""
    trainer, rollout = _float32(trainer_logprobs), _float32(rollout_logprobs)
    bits_differ = trainer.view(np.uint32) != rollout.view(np.uint32)
    return bits_differ | np.isnan(trainer) | np.isnan(rollout)


def differences(
    batch: Batch, trainer_logprobs: np.ndarray, compared: np.ndarray | bool = True
) -> list[Difference]:
    """Return the trained tokens of a batch whose log-probs differ, in batch order.

    Args:
        batch: A batch with N trained tokens.
        trainer_logprobs: float32 [N].
        compared: bool [N], which tokens to look at; True for all.
    """
    target = targets(batch)
    rollout = batch.rollout_logprobs[target]
    ends = batch.cu_seqlens[1:]
    differing = []
    for k in np.flatnonzero(different(trainer_logprobs, rollout) & compared):
        sequence = int(np.searchsorted(ends, target[k], side="right"))
        start = int(batch.cu_seqlens[sequence])
        first = start + int(np.argmax(batch.loss_mask[start : ends[sequence]]))
        differing.append(
            Difference(
                sample=int(batch.sample_ids[sequence]),
                token=int(target[k]) - first,
                trainer=float(trainer_logprobs[k]),
                rollout=float(rollout[k]),
            )
        )
    return differing


def _float32(values: np.ndarray) -> np.ndarray:
    """Return log-probs in one piece of memory, and refuse another type than float32."""
    if values.dtype != np.float32:
        raise ValueError(f"log-probs must be float32 to be compared as bits, not {values.dtype}")
    return np.ascontiguousarray(values)


def _hex(value: float) -> str:
    """Return the bits of a float32 value, as text."""
    return f"0x{int(np.float32(value).view(np.uint32)):08x}"
