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
    """One token whose log-probs differ. sample: its number in the step; token: its index in the
    completion; trainer, rollout: the two float32 log-probs."""

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
    """Sampler and trainer differ under an exact plan. No weight was changed.

    samples: of the step. sample_ids: those with a token that differs, ascending. first: the first
    such token. metrics: the step's `mismatch/*`.
    """

    def __init__(
        self,
        plan_name: str,
        samples: Sequence[Sample],
        sample_ids: Sequence[int],
        first: Difference,
        metrics: dict[str, float],
    ) -> None:
        self.samples = tuple(samples)
        self.sample_ids = tuple(sample_ids)
        self.first = first
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
    """The mismatch of the same tokens, d = trainer - rollout in float64.

    Args:
        trainer_logprobs, rollout_logprobs: float32 [N], N >= 1.

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


def present_tokens(batch: Batch, samples: Sequence[Sample], version: int) -> np.ndarray:
    """bool [N], one for each True of batch.loss_mask: drawn by the present policy, not by one of
    an earlier step (`Completion.versions`). samples: of the step. version: the present one."""
    parts = []
    for index, count in zip(batch.sample_ids, trained_lengths(batch), strict=True):
        versions = samples[index].completion.versions
        parts.append(np.array(versions) == version if versions else np.ones(count, dtype=np.bool_))
    return np.concatenate(parts)


def different(trainer_logprobs: np.ndarray, rollout_logprobs: np.ndarray) -> np.ndarray:
    """bool [N]: the float32 bits differ, or either is NaN."""
    trainer, rollout = _float32(trainer_logprobs), _float32(rollout_logprobs)
    bits_differ = trainer.view(np.uint32) != rollout.view(np.uint32)
    return bits_differ | np.isnan(trainer) | np.isnan(rollout)


def differences(
    batch: Batch, trainer_logprobs: np.ndarray, compared: np.ndarray | bool = True
) -> list[Difference]:
    """The tokens of a batch whose log-probs differ, in batch order. trainer_logprobs: float32, one
    for each True of batch.loss_mask; compared: bool likewise, whether to look at it."""
    target = targets(batch)
    rollout = batch.rollout_logprobs[target]
    end = batch.cu_seqlens[1:]
    found = []
    for k in np.flatnonzero(different(trainer_logprobs, rollout) & compared):
        sequence = int(np.searchsorted(end, target[k], side="right"))
        start = int(batch.cu_seqlens[sequence])
        first = start + int(np.argmax(batch.loss_mask[start : end[sequence]]))
        found.append(
            Difference(
                sample=int(batch.sample_ids[sequence]),
                token=int(target[k]) - first,
                trainer=float(trainer_logprobs[k]),
                rollout=float(rollout[k]),
            )
        )
    return found


def _float32(values: np.ndarray) -> np.ndarray:
    if values.dtype != np.float32:
        raise ValueError(f"log-probs must be float32 to be compared as bits, not {values.dtype}")
    return np.ascontiguousarray(values)


def _hex(value: float) -> str:
    return f"0x{int(np.float32(value).view(np.uint32)):08x}"
