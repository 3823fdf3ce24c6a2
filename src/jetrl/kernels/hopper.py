"""Hopper's kernels of plans without defined bits, named by `kernels.backend.Kernels`."""

# ruff: noqa: F401, I001  (re-exports for the protocol)

from __future__ import annotations

from jetrl.kernels.adamw_triton import adamw_
from jetrl.kernels.attention.backward import attention_backward

# fmt: off
from jetrl.kernels.attention.hopper import (
    SPLIT_KEYS, attend_batch, attend_decode, attend_decode_quantized, attend_equal_lengths,
    attend_equal_lengths_backward, attend_prefill, attend_prefill_quantized,
)
from jetrl.kernels.decode_triton import (
    next_inputs, propose, take_draws, take_verified, verify_inputs,
)
from jetrl.kernels.logprob_triton import chosen_logprobs, lm_head_logprobs
from jetrl.kernels.norm_triton import (
    block_squares, rms_norm, rms_norm_backward, rms_norm_forward, rms_norm_quantize,
    rms_norm_squares,
)
from jetrl.kernels.portable.routing import route, route_backward
from jetrl.kernels.rotary_triton import qk_norm_rotary_backward, qk_norm_rotary_cache
from jetrl.kernels.sampling_triton import exclude_tokens, sample
from jetrl.kernels.swiglu_hopper import swiglu_backward_quantize
from jetrl.kernels.swiglu_triton import (
    swiglu_backward, swiglu_backward_values_, swiglu_forward, swiglu_quantize,
    swiglu_quantize_with_values,
)
