"""Adaptive quantization noise of QeRL: Gaussian noise on the weights of norms, for exploration.

Quantization noise raises the entropy of sampling. QeRL (arXiv 2510.11696) adds more, which fades
out over a run: w + z with z ~ N(0, sigma**2) for the weight w of every norm in front of attention
and of a feed-forward block. A norm's weight is a factor of each column of the linear layer after
it, so this is free noise on that layer's weights.

The noise is added when the FP32 weight is rounded for forwards, so sampler and trainer read the
same bits. It is a function of (seed, step, layer): updates within a step, resumed runs and all
ranks have the same. Master weights, checkpoints, exports and evaluation have none.

A run of S steps is divided into stages + 1 equal parts. The first has no noise; in part k = 1 to
`stages` sigma is start * (end / start) ** ((k - 1) / (stages - 1)).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from jetrl.models.layer import RMSNorm
from jetrl.models.model import Model
from jetrl.randomness import derive_seed
from jetrl.settings.loading import Settings

_NOISY = ("input_norm", "post_norm")  # of a layer; not those of queries and keys, nor the last


def noise_sigma(start: float, end: float, stages: int, num_steps: int, step: int) -> float:
    """Return the standard deviation of the noise in a step, from 1 on; always 0 if `start` is 0."""
    part = (step - 1) * (stages + 1) // max(num_steps, 1)
    if start == 0 or part <= 0:
        return 0.0
    done = (min(part, stages) - 1) / max(stages - 1, 1)
    return float(start * (end / start) ** done)


class NormNoise:
    """The noise on one model's norms, none if `adapter.noise_start` is 0."""

    def __init__(self, model: Model, settings: Settings) -> None:
        adapter = settings.adapter
        self._sigma = partial(
            noise_sigma,
            start=adapter.noise_start,
            end=adapter.noise_end,
            stages=adapter.noise_stages,
            num_steps=settings.loop.steps,
        )
        self._seed, self._step = settings.run.seed, 0
        self._norms: dict[str, RMSNorm] = {}
        if adapter.noise_start > 0:
            self._norms = {
                module.quantized.name: module
                for module in model.decoder.modules()
                if isinstance(module, RMSNorm) and module.quantized.name.endswith(_NOISY)
            }

    def begin_step(self, step: int) -> dict[str, float]:
        """Put the noise of a step, from 1, on the norms and return its metrics; 0 removes it."""
        self._step = step
        if not self._norms:
            return {}
        sigma = self._sigma(step=step) if step else 0.0
        for name, norm in self._norms.items():
            norm.quantized.noise = self._draw(name, norm, sigma) if sigma else None
            norm.quantized.requantize()
        return {"noise/sigma": sigma}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Remove the noise within the block."""
        step = self._step
        self.begin_step(0)
        try:
            yield
        finally:
            self.begin_step(step)

    def _draw(self, name: str, norm: RMSNorm, sigma: float) -> torch.Tensor:
        """Return the noise of one norm, float32 [D], on its device."""
        key = derive_seed(self._seed, "norm noise", self._step, name)
        drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal(norm.weight.numel())
        return torch.from_numpy((drawn * sigma).astype(np.float32)).to(norm.weight.device)
