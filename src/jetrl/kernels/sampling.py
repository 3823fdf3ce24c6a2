"""Sampling whose result depends only on the row and its counter.

Random bits come from Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC11), keyed by the seed, with (sequence key, position) as the counter. Sampling is integer
arithmetic: cumulative sums of int64 weights are exact in any order, so every device picks the same
token for the same weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.allowed_tokens import RowFilters, exclude_tokens, sampling_weights
from jetrl.kernels.backend import kernels_of
from jetrl.kernels.logprob import log_softmax_parts

_MASK32 = np.uint64(0xFFFFFFFF)
_PHILOX_ROUNDS = 10


def random_bits(seed: np.ndarray, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the random bits for sampling, int64 [R] in [0, 2**53).

    Args:
        seed: int64 [R].
        sequence: int64 [R], sequence keys.
        position: int64 [R], positions of the tokens to sample.
    """
    key0, key1 = _halves(seed)
    c0, c1 = _halves(sequence)
    c2, c3 = _halves(position)
    # A round multiplies two of the four words and swaps halves; the keys follow Weyl sequences.
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ key0,
            product1 & _MASK32,
            (product0 >> np.uint64(32)) ^ c3 ^ key1,
            product0 & _MASK32,
        )
        key0 = (key0 + np.uint64(0x9E3779B9)) & _MASK32
        key1 = (key1 + np.uint64(0xBB67AE85)) & _MASK32
    # Keep 53 of the 64 bits, which float64 represents exactly.
    return (((c0 << np.uint64(32)) | c1) >> np.uint64(11)).astype(np.int64)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = np.asarray(x).astype(np.uint64)
    return wide & _MASK32, wide >> np.uint64(32)


def sample(
    logits: Tensor,
    bits: Tensor,
    temperature: Tensor,
    filters: RowFilters | None = None,
    of_all: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row of logits, float32 [R, V], without waiting for the device.

    `kernels.allowed_tokens` defines the tokens that filters exclude; it may write over the logits.

    Args:
        bits: int64 [R] from `random_bits`; -1 gives an arbitrary token.
        temperature: float32 [R]; 0 picks the most probable token (ties go to the lowest id), with
            log-probs at temperature 1.
        filters: None if no row excludes tokens.
        of_all: bool [R], rows whose log-probs are of all tokens, not only of those that filters
            keep; None: no row.

    Returns:
        Token ids int64 [R]; their log-probs float32 [R]; log-sum-exp of the kept tokens relative to
        the largest logit, float32 [R], not finite for a row that cannot be sampled (logits with NaN
        or all -inf).
    """
    if filters is None:
        return _sample(logits, bits, temperature)
    if of_all is None:
        return _sample(exclude_tokens(logits, temperature, filters), bits, temperature)
    scale = torch.where(temperature == 0, 1.0, temperature)
    _, _, lse_of_all = _sample(logits, bits, temperature)
    kept = exclude_tokens(logits, temperature, filters)
    tokens, logprobs, lse = _sample(kept, bits, temperature)
    # The largest logit is always kept.
    shifted = kept.gather(-1, tokens[:, None])[:, 0] / scale - kept.amax(-1) / scale
    return tokens, torch.where(of_all, shifted - lse_of_all, logprobs), lse


def _sample(logits: Tensor, bits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if (kernels := kernels_of(logits)) is not None:
        return kernels.sample(logits, bits, temperature)
    return sample_ref(logits, bits, temperature)


def sample_ref(logits: Tensor, bits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `sample` without filters, by the operations that define their bits."""
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    shifted, mass, lse = log_softmax_parts(logits, scale)
    # Inverse CDF: pick the first token whose cumulative weight exceeds the target.
    cumulative = sampling_weights(mass).cumsum(-1)
    total = cumulative[:, -1:]
    target = ((bits[:, None].double() * 2.0**-53) * total.double()).long()
    # The product may round up to the total, which no cumulative weight exceeds.
    drawn = (cumulative <= torch.minimum(target, total - 1)).sum(-1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn).clamp(max=logits.shape[-1] - 1)
    return tokens, (shifted.gather(-1, tokens[:, None]) - lse).squeeze(-1), lse.squeeze(-1)
