"""The filter of tokens by top_k and top_p, for the sampler and the trainer.

The sampler draws only from the allowed tokens. The trainer asks if every token is allowed: only
then does a draw come from the distribution that log-probs are computed under.
"""

from __future__ import annotations

import torch
from torch import Tensor


def allows_all(top_p: float, top_k: int) -> bool:
    """Return whether every token may be drawn."""
    return top_p == 1 and top_k == 0


def allowed_tokens(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return which tokens may be drawn, bool [R, V].

    top_k keeps the largest weights, lower ids first among equals. Of those, top_p keeps the largest
    ones until their sum reaches its share of the whole; the largest one is always kept.

    Args:
        weights: int64 [R, V], proportional to the probabilities.
        top_p: float32 [R], 1 for off.
        top_k: int64 [R], 0 for off.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    limit = torch.where(top_k > 0, top_k, weights.shape[-1])[:, None]
    ordered = torch.where(rank < limit, ordered, 0)
    before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    needed = torch.where(top_p < 1, top_p.double() * total[:, 0].double(), torch.inf)[:, None]
    kept = (rank < limit) & ((before.double() < needed) | (rank == 0))
    return torch.zeros_like(kept).scatter_(-1, order, kept)
