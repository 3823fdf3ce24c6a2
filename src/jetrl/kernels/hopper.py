"""The table of Hopper's kernels: a `Kernels` (`kernels.backend`), one name for each."""

from __future__ import annotations

from jetrl.kernels.adamw_hopper import adamw_
from jetrl.kernels.decode_hopper import (
    next_inputs,
    propose,
    take_draws,
    take_verified,
    verify_inputs,
)
from jetrl.kernels.logprob_hopper import chosen_logprobs, lm_head_logprobs
from jetrl.kernels.norm_hopper import block_squares, rms_norm
from jetrl.kernels.sampling_hopper import add_noise_, sample
from jetrl.kernels.swiglu_hopper import swiglu

__all__ = [
    "adamw_",
    "add_noise_",
    "block_squares",
    "chosen_logprobs",
    "lm_head_logprobs",
    "next_inputs",
    "propose",
    "rms_norm",
    "sample",
    "swiglu",
    "take_draws",
    "take_verified",
    "verify_inputs",
]
