"""The table of Hopper's kernels: one name for each entry of `kernels.backend.Kernels`."""

from __future__ import annotations

from jetrl.kernels.adamw_hopper import adamw_ as adamw_
from jetrl.kernels.decode_hopper import next_inputs as next_inputs
from jetrl.kernels.decode_hopper import propose as propose
from jetrl.kernels.decode_hopper import take_draws as take_draws
from jetrl.kernels.decode_hopper import take_verified as take_verified
from jetrl.kernels.decode_hopper import verify_inputs as verify_inputs
from jetrl.kernels.logprob_hopper import chosen_logprobs as chosen_logprobs
from jetrl.kernels.logprob_hopper import lm_head_logprobs as lm_head_logprobs
from jetrl.kernels.norm_hopper import block_squares as block_squares
from jetrl.kernels.norm_hopper import rms_norm as rms_norm
from jetrl.kernels.sampling_hopper import add_noise_ as add_noise_
from jetrl.kernels.sampling_hopper import sample as sample
from jetrl.kernels.swiglu_hopper import swiglu as swiglu
