"""Kernel table of plans that are defined for every machine, by `kernels.backend.Kernels`."""

# ruff: noqa: F401  (re-exports for the protocol)

from __future__ import annotations

from jetrl.kernels.attention.layout import SPLIT_KEYS
from jetrl.kernels.decode_triton import (
    next_inputs,
    propose,
    take_draws,
    take_verified,
    verify_inputs,
)
from jetrl.kernels.norm_triton import rms_norm_forward, rms_norm_quantize
from jetrl.kernels.portable.adamw import adamw_
from jetrl.kernels.portable.attention_backward import attention_backward
from jetrl.kernels.portable.attention_decode import attend_decode
from jetrl.kernels.portable.attention_forward import attend_batch, attend_prefill
from jetrl.kernels.portable.logprob import chosen_logprobs, exact_logits_gradient, exact_logprobs
from jetrl.kernels.portable.norm import block_squares, rms_norm, rms_norm_backward
from jetrl.kernels.portable.rotary import qk_norm_rotary_backward
from jetrl.kernels.portable.routing import route, route_backward
from jetrl.kernels.portable.sampling import exclude_tokens, sample
from jetrl.kernels.portable.swiglu import swiglu_backward, swiglu_forward, swiglu_quantize
from jetrl.kernels.rotary_triton import qk_norm_rotary_cache
