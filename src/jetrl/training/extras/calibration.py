"""Calibrated clipping: bounds that cut off as much in FP8 as the given ones would in BF16.

A ratio of two FP8 probabilities is noisier than one of BF16 probabilities, so a bound on it cuts
off more tokens. At the lower bound, which holds back the push away from bad answers, that can let a
run collapse although sampler and trainer agree (Chen et al. 2026, "Towards Full Pipeline FP8
Reinforcement Learning for LLMs", arXiv 2609.22870, sec. 4; read in published summaries of it, which
give these equations).

Every so many steps the last minibatch of a step is forwarded in BF16 as well, from the same
masters, before the step and at its last update. With F the distribution of the ratios of tokens
whose advantage is negative:

    low:   L with F_fp8(L) = F_bf16(1 - clip)
    high:  H with balance_fp8(L, H) = balance_bf16(1 - clip, 1 + clip_high),
           balance(l, h) = |sum over A > 0, r < h of p r A| / |sum over A < 0, r > l of p r A|

where p is the sampled token's probability. L and H are looked for on a grid, and the bounds move
half of the way, by at most 0.05 and 0.1. (The paper begins at 0.6 and 1.8; here they begin at the
algorithm's own, which it reports as equally good.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jetrl.memory.out_of_memory import explained, within_memory
from jetrl.precision.plan import PrecisionPlan
from jetrl.training.forward import batch_logprobs
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize
from jetrl.training.packing import targets

if TYPE_CHECKING:
    from jetrl.models.policy import Policy

GRID_LOW = np.round(np.arange(0.5, 0.9 + 1e-9, 0.02), 2)
GRID_HIGH = np.round(np.arange(1.2, 2.0 + 1e-9, 0.02), 2)
MOST_LOW, MOST_HIGH = 0.05, 0.1  # that a bound moves at once
_ADVICE = (
    "it holds a BF16 copy of the weights, 2 bytes a parameter, for a step: set "
    "algorithm.calibrate_clip_every=0, or use a GPU with more memory. The last checkpoint is good"
)


@dataclass(frozen=True)
class Bounds:
    """What a ratio is clipped to."""

    low: float
    high: float


class ClipCalibration:
    """The bounds of a run, and when and how they are calibrated.

    Args:
        policy: whose masters the BF16 forwards read. reference: the bounds that are meant in BF16.
        every: steps from one calibration to the next. temperature: of the log-probs. size: what a
            micro-batch may have, less once a forward here ran out of memory.

    Attributes:
        bounds: what ratios are clipped to now. They go into checkpoints.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Bounds,
        every: int,
        temperature: float,
        size: MicroBatchSize,
    ) -> None:
        self._policy, self._temperature, self._size = policy, temperature, size
        self._reference, self._every = reference, every
        self.bounds = reference
        self._steps = 0
        self._shadow: Policy | None = None
        self._before: list[np.ndarray] = []

    def begin(self, minibatches: list[list[MicroBatch]]) -> None:
        """Before the first update of a step. With one update every ratio is 1, and there is nothing
        to look at.

        minibatches: the last is divided further where memory runs out.

        Raises:
            OutOfMemoryStop: no room for the BF16 weights, or for one sequence in a micro-batch.
        """
        self._steps += 1
        if self._steps % self._every == 0 and len(minibatches) > 1:
            policy = self._policy
            masters = {name: p.detach() for name, p in policy.named_masters().items()}
            plan = PrecisionPlan.preset("bf16")
            with explained("calibrated clipping", _ADVICE):
                self._shadow = type(policy)(policy.config, plan, masters, policy.device)
            self._before = self._forward(minibatches)

    def end(
        self, minibatches: list[list[MicroBatch]], logprobs: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """At the last update of the step, before it is applied. minibatches: as in `begin`.
        logprobs: the trainer's of the last one's batches, float32 [N] each. Returns the metrics of
        a calibration; nothing without one, or of an update that is not finite, which the guard
        refuses.

        Raises:
            OutOfMemoryStop: as `begin`.
        """
        if self._shadow is None:
            return {}
        now = np.concatenate([part.detach().cpu().numpy() for part in logprobs])
        if not np.isfinite(now).all():
            self._shadow = None
            return {}
        with explained("calibrated clipping", _ADVICE):
            self._shadow.requantize()
        after = self._forward(minibatches)
        self._shadow = None
        batches = [micro.batch for micro in minibatches[-1]]
        rollout = np.concatenate([b.rollout_logprobs[targets(b)] for b in batches])
        advantages = np.concatenate([b.advantages[targets(b)] for b in batches])
        fp8 = np.exp(now - rollout)
        bf16 = np.exp(np.concatenate(after) - np.concatenate(self._before))
        wanted = calibrated(fp8, bf16, advantages, np.exp(rollout), self._reference)
        if wanted is not None:
            self.bounds = moved(self.bounds, wanted)
        return {"policy/over_clipped": over_clipped(fp8, bf16, advantages, self._reference.low)}

    def _forward(self, minibatches: list[list[MicroBatch]]) -> list[np.ndarray]:
        """The BF16 log-probs of the last minibatch."""
        last = len(minibatches) - 1
        return within_memory(
            lambda: self._logprobs(minibatches[last]),
            lambda problem: self._size.shrink(minibatches, last, problem),
        )

    @torch.no_grad()
    def _logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        assert self._shadow is not None
        return [
            batch_logprobs(self._shadow, micro.batch, self._temperature)[0].cpu().numpy()
            for micro in micro_batches
        ]

    def state(self) -> Any:
        return {"steps": self._steps, "low": self.bounds.low, "high": self.bounds.high}

    def load_state(self, state: Any) -> None:
        self._steps = state["steps"]
        self.bounds = Bounds(state["low"], state["high"])


def calibrated(
    fp8: np.ndarray,
    bf16: np.ndarray,
    advantages: np.ndarray,
    probabilities: np.ndarray,
    reference: Bounds,
) -> Bounds | None:
    """The bounds for FP8 ratios that match `reference` for BF16 ratios of the same tokens, float32
    [N] each; None where no token has a negative, or none a positive advantage."""
    negative = advantages < 0
    if not negative.any() or not (advantages > 0).any():
        return None
    share = float((bf16[negative] <= reference.low).mean())
    cut = np.sort(fp8[negative])
    # The largest bound that cuts off no larger share: below the first token that must stay.
    first_kept = cut[min(round(share * len(cut)), len(cut) - 1)]
    fitting = GRID_LOW[first_kept > GRID_LOW]
    low = float(fitting[-1]) if len(fitting) else float(GRID_LOW[0])
    weight = probabilities.astype(np.float64) * advantages
    target = _balance(bf16, weight, reference)
    gaps = [abs(_balance(fp8, weight, Bounds(low, float(h))) - target) for h in GRID_HIGH]
    return Bounds(low, float(GRID_HIGH[int(np.argmin(gaps))]))


def moved(bounds: Bounds, wanted: Bounds) -> Bounds:
    """Half of the way, by at most 0.05 and 0.1."""
    low = np.clip((wanted.low - bounds.low) / 2, -MOST_LOW, MOST_LOW)
    high = np.clip((wanted.high - bounds.high) / 2, -MOST_HIGH, MOST_HIGH)
    return Bounds(bounds.low + float(low), bounds.high + float(high))


def over_clipped(fp8: np.ndarray, bf16: np.ndarray, advantages: np.ndarray, low: float) -> float:
    """Share of the tokens with a negative advantage that `low` cuts off in FP8 and not in BF16."""
    negative = advantages < 0
    if not negative.any():
        return 0.0
    return float(((fp8 <= low) & (bf16 > low))[negative].mean())


def _balance(ratios: np.ndarray, weight: np.ndarray, bounds: Bounds) -> float:
    terms = ratios * weight
    up = float(terms[(weight > 0) & (ratios < bounds.high)].sum())
    down = float(terms[(weight < 0) & (ratios > bounds.low)].sum())
    return abs(up) / max(abs(down), np.finfo(np.float64).tiny)
