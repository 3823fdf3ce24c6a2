"""Hopper's kernels of plans without defined bits: those of other GPUs, except for these."""

# ruff: noqa: F401, F403  (re-exports for the protocol)

from __future__ import annotations

from jetrl.kernels.triton import *  # isort: skip

from jetrl.kernels.attention.hopper import (
    SPLIT_KEYS,
    attend_batch,
    attend_decode,
    attend_decode_quantized,
    attend_equal_lengths,
    attend_equal_lengths_backward,
    attend_prefill,
    attend_prefill_quantized,
)
from jetrl.kernels.swiglu_hopper import swiglu_backward_quantize
