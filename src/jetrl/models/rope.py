"""Rotary frequencies, and the two rules that stretch them to a longer context: llama3 and YaRN.

A rule is read from config.json's `rope_scaling` (transformers 4) or `rope_parameters` (5), and
computed as transformers does (ROPE_INIT_FUNCTIONS), in float64. Powers and logs are rounded to
nearest (`precision.angles`). No torch in this file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jetrl.errors import UserError
from jetrl.models.config_schema import HfConfig, Rope
from jetrl.precision import angles

logger = logging.getLogger(__name__)

TYPES = ("default", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """The llama3 rule (Llama 3.1), which stretches rotary positions to a longer context.

    Slow frequencies are divided by `factor`, fast ones are kept, and those between the two
    wavelength bounds are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    attention_factor: ClassVar[float] = 1.0  # of cosines and sines

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Return stretched frequencies, float64 [head_dim / 2], in radians per position."""
        context = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        slow = wavelengths > context / self.low_freq_factor
        fast = wavelengths < context / self.high_freq_factor
        width = self.high_freq_factor - self.low_freq_factor
        keep = (context / wavelengths - self.low_freq_factor) / width
        between = (1 - keep) * frequencies / self.factor + keep * frequencies
        return np.where(slow, frequencies / self.factor, np.where(fast, frequencies, between))


@dataclass(frozen=True)
class YarnScaling:
    """The YaRN rule (Peng et al. 2023, arXiv 2309.00071), of long-context Qwen3 and Qwen2.5.

    A pair that makes more than `beta_fast` turns in the original context keeps its frequency, one
    of fewer than `beta_slow` turns has it divided by `factor`, and those between are blended.
    Cosines and sines are multiplied by `attention_factor`, which makes scores larger.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    attention_factor: float
    truncate: bool = True

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        pairs = len(frequencies)
        low, high = (
            2 * pairs * angles.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * angles.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )  # fmt: skip
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        high = high + 0.001 if low == high else high
        divided = np.clip((np.arange(pairs, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
        return frequencies / self.factor * divided + frequencies * (1.0 - divided)


Scaling = RopeScaling | YarnScaling


def frequencies_of(rotary_dim: int, theta: float, scaling: Scaling | None) -> np.ndarray:
    """Return the rotary inverse frequencies, radians per position: float64 [rotary_dim / 2].

    Pair i of a head turns by `position * f[i]`, f[i] = theta ** (-2 i / rotary_dim), stretched by
    the rule if there is one.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = 1.0 / np.array([angles.power(theta, float(each)) for each in exponents])
    return frequencies if scaling is None else scaling.scaled(frequencies, theta)


def read_rope(config: HfConfig, types: tuple[str, ...] = TYPES) -> tuple[float, Scaling | None]:
    """Return theta and the rule, from `rope_parameters` (transformers 5) or transformers 4's keys.

    If both are there, the choice is that of transformers.
    """
    key, rope = _chosen(config)
    if any(isinstance(value, Mapping) for value in (rope.model_extra or {}).values()):
        raise UserError(f"config.json: {key} differs by layer type, which is not supported")
    theta = rope.rope_theta or config.rope_theta
    kind = rope.rope_type or rope.type or "default"
    if kind not in types:
        raise UserError(
            f"config.json: {key} has rope type {kind!r}; supported for this family: "
            f"{', '.join(repr(name) for name in types)}"
        )
    if kind in ("default", "mrope"):
        return theta, None
    original = config.original_max_position_embeddings or rope.original_max_position_embeddings
    make = _llama3 if kind == "llama3" else _yarn
    where = f"config.json ({key}, {kind})"
    return theta, make(rope, where, original or config.max_position_embeddings)


def rotary_channels(config: HfConfig, head_dim: int, in_part: bool) -> int:
    """Return how many leading channels of a head rotate, by `partial_rotary_factor`.

    Raises UserError for a share that makes no pairs, or below 1 unless `in_part`.
    """
    share = _chosen(config)[1].partial_rotary_factor
    share = config.partial_rotary_factor if share is None else share
    size = head_dim if share is None else int(head_dim * share)
    what = f"config.json: partial_rotary_factor = {share!r}"
    if size != head_dim and not in_part:
        raise UserError(f"{what}; only 1.0 is supported for this family")
    if size % 2 or not 0 < size <= head_dim:
        raise UserError(f"{what}: {size} of {head_dim} channels; rotary positions need pairs")
    return size


def _chosen(config: HfConfig) -> tuple[str, Rope]:
    """Return the rule that transformers reads, and its key."""
    if config.rope_scaling is None or not config.rope_scaling.model_fields_set:
        return "rope_parameters", config.rope_parameters or Rope()
    return "rope_scaling", config.rope_scaling


def _needed(rope: Rope, where: str, key: str) -> float:
    """Return a required number of a rule."""
    if getattr(rope, key) is None:
        raise UserError(f"{where}: {key} is missing")
    return float(getattr(rope, key))


def _llama3(rope: Rope, where: str, original: int) -> RopeScaling:
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_needed(rope, where, key) for key in keys)
    if high <= low:
        raise UserError(f"{where}: high_freq_factor must be larger than low_freq_factor")
    return RopeScaling(factor, low, high, original)


def _yarn(rope: Rope, where: str, original: int) -> YarnScaling:
    factor = _needed(rope, where, "factor")
    unread = (rope.model_extra or {}).get("attn_factor")
    if unread is not None:
        logger.warning(
            "%s: attn_factor = %s is not read, as in transformers; vLLM multiplies the attention "
            "factor by it. Write attention_factor to have one that all read.",
            *(where, unread),
        )
    attention_factor = rope.attention_factor or _magnitude(factor)
    if rope.attention_factor is None and rope.mscale and rope.mscale_all_dim:
        attention_factor = _magnitude(factor, rope.mscale) / _magnitude(factor, rope.mscale_all_dim)
    fast, slow = float(rope.beta_fast or 32.0), float(rope.beta_slow or 1.0)
    if fast <= slow:
        raise UserError(f"{where}: beta_fast must be larger than beta_slow")
    truncate = rope.truncate is None or rope.truncate
    return YarnScaling(factor, fast, slow, original, float(attention_factor), truncate)


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the attention factor of a stretch: 0.1 mscale log(factor) + 1 (YaRN, sec. 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * angles.log(factor) + 1.0
