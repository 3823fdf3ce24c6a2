"""Top-k, top-p and min-p filtering, for the sampler and the trainer.

A filter excludes tokens by setting their logits to -inf. The sampler draws from what is left, and
log-probs, entropy and gradients of such logits are those of the renormalized distribution, so the
kernels of `sampling` and `logprob` need no filters. The rule compares integers, the weights by
which tokens are drawn, so equal logits keep equal tokens on both sides.

The trainer also keeps the token that was drawn: after an update, the new weights may exclude it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.kernels.logprob import log_softmax_parts
from jetrl.types import TokenFilter

_WEIGHT_ONE = 2.0**40  # weight of the most probable token; sums of 2**22 tokens fit int64


class RowFilters(NamedTuple):
    """Filters of R rows: top_p float32 (1: off), top_k int64 (0: off), min_p float32 (0: off)."""

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    @staticmethod
    def of(filters: Sequence[TokenFilter]) -> RowFilters:
        """Return filters of rows, on the CPU."""
        return RowFilters(
            torch.tensor([float(each.top_p) for each in filters]),
            torch.tensor([each.top_k for each in filters]),
            torch.tensor([float(each.min_p) for each in filters]),
        )


def sampling_weights(mass: Tensor) -> Tensor:
    """Return the int64 weights by which tokens are drawn, from exp(z - max z), float32 [R, V]."""
    return (mass.double() * _WEIGHT_ONE).round_().long()


def allowed_tokens(weights: Tensor, filters: RowFilters) -> Tensor:
    """Return the mask of tokens that can be sampled, bool [R, V].

    top_k keeps the largest weights; ties go to lower ids. Among those, top_p keeps the largest
    weights until their sum reaches that fraction of the total. Among those, min_p keeps weights of
    at least that fraction of the largest. The largest is always kept.

    Args:
        weights: int64 [R, V], proportional to the probabilities.
    """
    top_p, top_k, min_p = filters
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    limit = torch.where(top_k > 0, top_k, weights.shape[-1])[:, None]
    ordered = torch.where(rank < limit, ordered, 0)
    before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    needed = torch.where(top_p < 1, top_p.double() * total[:, 0].double(), torch.inf)[:, None]
    least = min_p[:, None].double() * ordered[:, :1].double()
    kept = (before.double() < needed) & (ordered.double() >= least)
    kept = (rank < limit) & (kept | (rank == 0))
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def exclude_tokens(
    logits: Tensor, temperature: Tensor, filters: RowFilters, chosen: Tensor | None = None
) -> Tensor:
    """Return logits float32 [R, V] with -inf for excluded tokens; may write over the given ones.

    Rows of temperature 0, which are greedy, and rows without a finite softmax stay as they are.

    Args:
        temperature: float32 [R].
        chosen: int64 [R], a token to keep in any case per row, or -1.
    """
    if chosen is None:
        chosen = torch.full_like(filters.top_k, -1)
    if (kernels := kernels_of(logits)) is not None:
        top_p, top_k, min_p = filters
        return kernels.exclude_tokens(logits, temperature, top_p, top_k, min_p, chosen)
    return exclude_tokens_ref(logits, temperature, filters, chosen)


def exclude_tokens_ref(
    logits: Tensor, temperature: Tensor, filters: RowFilters, chosen: Tensor
) -> Tensor:
    """Return the results of `exclude_tokens`, by the operations that define them."""
    with torch.no_grad():
        greedy = temperature == 0
        scale = torch.where(greedy, 1.0, temperature)[:, None]
        _, mass, lse = log_softmax_parts(logits, scale)
        kept = allowed_tokens(sampling_weights(mass), filters)
        kept |= torch.arange(logits.shape[-1], device=logits.device) == chosen[:, None]
        kept |= greedy[:, None] | ~lse.isfinite()
    return torch.where(kept, logits, -torch.inf)


def filtered_logits(
    logits: Tensor, chosen: Tensor, temperature: float, token_filter: TokenFilter
) -> Tensor:
    """Return the logits of the distribution from which tokens were drawn, for the trainer.

    Args:
        logits: float32 [R, V]; may be written over.
        chosen: int64 [R], the drawn tokens, which are always kept.
    """
    if token_filter.keeps_all:
        return logits
    top_p, top_k, min_p = (each.to(logits.device) for each in RowFilters.of([token_filter]))
    rows = len(chosen)
    filters = RowFilters(top_p.repeat(rows), top_k.repeat(rows), min_p.repeat(rows))
    temperatures = torch.full_like(filters.top_p, temperature)
    return exclude_tokens(logits, temperatures, filters, chosen)
