"""Top-k and top-p filtering, for the sampler and the trainer.

The sampler draws only from the allowed tokens. The trainer checks whether all tokens are allowed,
since its log-probs assume that tokens were sampled from the full distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor


def allows_all(top_p: float, top_k: int) -> bool:
    """Return whether the filter is off, so that any token can be sampled."""
    return top_p == 1 and top_k == 0


def allowed_tokens(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return the mask of tokens that can be sampled, bool [R, V].

    top_k keeps the largest weights; ties go to lower ids. Among those, top_p keeps the largest
    weights until their sum reaches that fraction of the total; the largest is always kept.

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
