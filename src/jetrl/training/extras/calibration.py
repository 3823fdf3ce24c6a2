"""Calibrated clipping: bounds that clip the same fraction of tokens in FP8 as in BF16.

FP8 ratios are noisier than BF16 ratios, so a given bound clips more tokens. At the lower bound,
which limits the push away from bad answers, this can cause a run to collapse although
sampler and trainer agree (Chen et al. 2026, "Towards Full Pipeline FP8 Reinforcement Learning for
LLMs", arXiv 2609.22870, sec. 4; equations as in published summaries).

Every N steps, the last minibatch also runs a BF16 forward from the same master weights, before the
step and at its last update. With F the distribution of ratios of negative-advantage tokens, and p
the probability of a sampled token:

    low:   L with F_fp8(L) = F_bf16(1 - clip)
    high:  H with balance_fp8(L, H) = balance_bf16(1 - clip, 1 + clip_high),
           balance(l, h) = |sum over A > 0, r < h of p r A| / |sum over A < 0, r > l of p r A|

L and H are found by grid search, and the bounds move halfway to them, by at most 0.05 and 0.1. They
start at the algorithm's clips (the paper starts at 0.6 and 1.8, with equally good results).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from jetrl.distributed.world import world
from jetrl.memory.out_of_memory import explained, within_memory
from jetrl.models.source import ModelSource
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.presets import BF16_PRESET
from jetrl.training.extras import Extra
from jetrl.training.host_math import exact_sum, exp, mean
from jetrl.training.micro_batches import MicroBatch, Minibatch, batch_logprobs, trained_filter
from jetrl.training.packing import targets
from jetrl.types import Metrics, TokenFilter

if TYPE_CHECKING:
    from jetrl.models.policy import Policy
    from jetrl.settings.loading import Settings
    from jetrl.training.objectives import Objective
    from jetrl.training.update import Accumulated

GRID_LOW = np.round(np.arange(0.5, 0.9 + 1e-9, 0.02), 2)
GRID_HIGH = np.round(np.arange(1.2, 2.0 + 1e-9, 0.02), 2)
MOST_LOW, MOST_HIGH = 0.05, 0.1  # maximum change of a bound per calibration
_ADVICE = (
    "it holds a BF16 copy of the weights, 2 bytes per parameter, during a step: set "
    "algorithm.calibrate_clip_every=0, or use a GPU with more memory. The last checkpoint is good"
)


class ClipBounds(NamedTuple):
    """Clip interval of ratios, around 1."""

    low: float
    high: float


class ClipCalibration(Extra):
    """Ratio bounds of a run, recalibrated every N steps.

    `reference` holds the bounds intended for BF16 ratios.
    """

    calibrates = True

    def __init__(
        self,
        policy: Policy,
        reference: ClipBounds,
        every: int,
        temperature: float,
        token_filter: TokenFilter,
    ) -> None:
        self._policy, self._temperature = policy, temperature
        self._token_filter = token_filter
        self._reference, self._every = reference, every
        self.bounds = reference
        self._steps = 0
        self._logprobs_before: list[np.ndarray] | None = None  # only while a calibration is due

    @classmethod
    def from_settings(
        cls, policy: Policy, objective: Objective, settings: Settings
    ) -> ClipCalibration | None:
        """Return the calibration of an objective's clips, or None if the settings ask for none."""
        every = settings.algorithm.calibrate_clip_every
        if not every:
            return None
        bounds = ClipBounds(1 - objective.clips[0], 1 + objective.clips[1])
        rollout = settings.rollout
        return cls(
            policy,
            bounds,
            every,
            temperature=rollout.temperature or 1.0,
            token_filter=trained_filter(rollout),
        )

    def begin(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        """Run the BF16 forward of the step's last minibatch, if a calibration is due.

        Raises OutOfMemoryStop if the BF16 weights or a single sequence do not fit.
        """
        # Ratios differ from 1 only if the step has several updates.
        self._steps += 1
        if self._steps % self._every == 0 and len(minibatches) > 1:
            self._logprobs_before = self._forward(minibatches[-1])

    def objective(self, objective: Objective) -> Objective:
        return objective.with_clips(1 - self.bounds.low, self.bounds.high - 1)

    def before_last(self, accumulated: Accumulated) -> Metrics:
        """Move the bounds if a calibration is due and all log-probs are finite.

        Returns policy/clip_low and policy/clip_high, and after a calibration policy/over_clipped.
        """
        metrics = {}
        # Due only if `begin` ran the BF16 forward of this minibatch before the step's updates.
        before, self._logprobs_before = self._logprobs_before, None
        if before is not None:
            outputs = accumulated.all_outputs()
            trainer = np.concatenate([part.detach().cpu().numpy() for part in outputs])
            if np.isfinite(trainer).all():
                over = self._calibrate(before, accumulated.minibatch, trainer)
                metrics["policy/over_clipped"] = over
        return metrics | {"policy/clip_low": self.bounds.low, "policy/clip_high": self.bounds.high}

    def _calibrate(
        self, before: Sequence[np.ndarray], minibatch: Minibatch, trainer: np.ndarray
    ) -> float:
        """Move the bounds; return the fraction of negative-advantage tokens clipped only in FP8."""
        logprobs_after = self._forward(minibatch)
        batches = [micro.batch for micro in minibatch.micro_batches]
        rollout = np.concatenate([b.rollout_logprobs[targets(b)] for b in batches])
        advantages = np.concatenate([b.advantages[targets(b)] for b in batches])
        fp8_ratios = exp(trainer - rollout)
        bf16_ratios = exp(np.concatenate(logprobs_after) - np.concatenate(before))
        target = calibrated(fp8_ratios, bf16_ratios, advantages, exp(rollout), self._reference)
        if target is not None:
            self.bounds = moved(self.bounds, target)
        low, negative = self._reference.low, advantages < 0
        over = (fp8_ratios <= low) & (bf16_ratios > low)
        return mean(over[negative]) if negative.any() else 0.0

    def _forward(self, minibatch: Minibatch) -> list[np.ndarray]:
        """Return a minibatch's log-probs with BF16 weights, float32 [N] per micro-batch."""
        policy = self._policy
        plan = PrecisionPlan.preset(BF16_PRESET).replace(bf16_rounding="nearest")
        with explained("calibrated clipping", _ADVICE):
            # Build a temporary frozen BF16 policy from the current master weights.
            source = ModelSource.from_tensors(policy.config, policy.whole_masters())
            bf16 = type(policy)(source, plan, policy.device, frozen=True)
        own = within_memory(
            lambda: [self._logprobs(bf16, m) for m in world().share(minibatch.micro_batches)],
            minibatch.shrink,
        )
        return world().gather_in_order("log-probs by BF16 weights", own)

    @torch.no_grad()
    def _logprobs(self, bf16: Policy, micro: MicroBatch) -> np.ndarray:
        return (
            batch_logprobs(bf16, micro.batch, self._temperature, token_filter=self._token_filter)[0]
            .cpu()
            .numpy()
        )

    def state(self) -> Any:
        return {"steps": self._steps, "low": self.bounds.low, "high": self.bounds.high}

    def load_state(self, state: Any) -> None:
        self._steps = state["steps"]
        self.bounds = ClipBounds(state["low"], state["high"])


def calibrated(
    fp8: np.ndarray,
    bf16: np.ndarray,
    advantages: np.ndarray,
    probabilities: np.ndarray,
    reference: ClipBounds,
) -> ClipBounds | None:
    """Return bounds for FP8 ratios that match `reference` for BF16 ratios of the same tokens.

    Arrays are float32 [N]. Returns None unless there are both positive and negative advantages.
    """
    negative = advantages < 0
    if not negative.any() or not (advantages > 0).any():
        return None
    # Lower bound: find the FP8 bound that clips the same fraction as `reference` does in BF16.
    share = mean(bf16[negative] <= reference.low)
    cut = np.sort(fp8[negative])
    # Take the largest bound that does not clip a larger fraction.
    first_kept = cut[min(round(share * len(cut)), len(cut) - 1)]
    fitting = GRID_LOW[first_kept > GRID_LOW]
    low = float(fitting[-1]) if len(fitting) else float(GRID_LOW[0])
    weight = probabilities.astype(np.float64) * advantages
    # Upper bound: keep the balance of upward and downward push.
    target = _balance(bf16, weight, reference)
    gaps = [abs(_balance(fp8, weight, ClipBounds(low, float(h))) - target) for h in GRID_HIGH]
    return ClipBounds(low, float(GRID_HIGH[int(np.argmin(gaps))]))


def moved(bounds: ClipBounds, target: ClipBounds) -> ClipBounds:
    """Return bounds moved halfway to a target, by at most 0.05 (low) and 0.1 (high)."""
    # Moving halfway damps the noise of a single minibatch.
    low = np.clip((target.low - bounds.low) / 2, -MOST_LOW, MOST_LOW)
    high = np.clip((target.high - bounds.high) / 2, -MOST_HIGH, MOST_HIGH)
    return ClipBounds(bounds.low + float(low), bounds.high + float(high))


def _balance(ratios: np.ndarray, weight: np.ndarray, bounds: ClipBounds) -> float:
    """Return the ratio of upward to downward push over unclipped tokens."""
    terms = ratios * weight
    up = exact_sum(terms[(weight > 0) & (ratios < bounds.high)])
    down = exact_sum(terms[(weight < 0) & (ratios > bounds.low)])
    return abs(up) / max(abs(down), np.finfo(np.float64).tiny)
