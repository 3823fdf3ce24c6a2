"""Sampling that depends on nothing but the row and its counter.

Random bits come from Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC11) keyed by the seed and counted by (sequence key, position). The draw itself is integer
arithmetic: probabilities become int64 weights, whose cumulative sums are exact in any order, so a
parallel scan on another device picks the same token for the same weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.logprob import log_softmax_parts

_WEIGHT_ONE = 2.0**40  # weight of the most probable token; 2**22 tokens still fit an int64 sum
_MASK32 = np.uint64(0xFFFFFFFF)
_PHILOX_ROUNDS = 10


def random_bits(seed: np.ndarray, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
    """int64 [R] in [0, 2**53) for int64 arrays [R] of seed, sequence key and position."""
    key0, key1 = _halves(seed)
    c0, c1 = _halves(sequence)
    c2, c3 = _halves(position)
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
    return (((c0 << np.uint64(32)) | c1) >> np.uint64(11)).astype(np.int64)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = np.asarray(x).astype(np.uint64)
    return wide & _MASK32, wide >> np.uint64(32)


def sample(
    logits: Tensor, bits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row, without waiting for the device.

    logits: float32 [R, V]. bits: int64 [R] from `random_bits`; -1 draws some token. temperature,
    top_p: float32 [R]. top_k: int64 [R], 0 for off. filtered: whether any row uses top_p or top_k.
    Temperature 0 takes the most probable token (the lowest id among equals), with log-probs of
    temperature 1. top_k and top_p keep the most probable tokens; among equals the lower id goes
    first.

    Returns (token ids int64 [R], log-probs float32 [R] under the full distribution, its log-sum-exp
    above the largest logit float32 [R]). A row whose last is not finite (NaN or all -inf logits)
    has no draw.
    """
    if logits.is_cuda:
        from jetrl.kernels.sampling_hopper import sample as sample_hopper

        return sample_hopper(logits, bits, temperature, top_p, top_k, filtered)
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    shifted, mass, lse = log_softmax_parts(logits, scale)
    weights = (mass.double() * _WEIGHT_ONE).round_().long()
    if filtered:
        weights = _keep_most_probable(weights, top_p, top_k)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = ((bits[:, None].double() * 2.0**-53) * total.double()).long()
    drawn = (cumulative <= torch.minimum(target, total - 1)).sum(-1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn).clamp(max=logits.shape[-1] - 1)
    return tokens, (shifted.gather(-1, tokens[:, None]) - lse).squeeze(-1), lse.squeeze(-1)


def _keep_most_probable(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero the weights [R, V] outside the top_k most probable, then outside the smallest set of the
    rest whose share of the mass reaches top_p. At least one token stays."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    limit = torch.where(top_k > 0, top_k, weights.shape[-1])[:, None]
    ordered = torch.where(rank < limit, ordered, 0)
    before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    needed = torch.where(top_p < 1, top_p.double() * total[:, 0].double(), torch.inf)[:, None]
    ordered = torch.where((before.double() < needed) | (rank == 0), ordered, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)
