"""The draw of tokens from logits, for prompts and for decode.

`kernels.sampling.sample` applies top_k, top_p and min_p for every path (`kernels.allowed_tokens`).
The random bits of a draw are a function of only (seed, the sequence's key, the position of the
drawn token), so a sequence is the same in any batch, after a pre-emption, and next to any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.allowed_tokens import RowFilters
from jetrl.kernels.sampling import sample
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.launched_step import to_device
from jetrl.types import SamplingParams

_LOGITS_AT_ONCE = 2**23  # Sampling makes several arrays of the logits that it handles at once.


class Filtering(NamedTuple):
    """Filters of a batch: any row excludes tokens; such a row has log-probs of all tokens."""

    excludes: bool = False
    of_all: bool = False


@dataclass(frozen=True)
class Sampler:
    """The sampling parameters of R rows on the device; `of_all`, bool, is for log-probs."""

    temperature: Tensor
    filters: RowFilters
    of_all: Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device) -> Sampler:
        temperature, filters, of_all = _columns(params)
        top_p, top_k, min_p = (to_device(column.numpy(), device) for column in filters)
        return Sampler(
            temperature=to_device(temperature.numpy(), device),
            filters=RowFilters(top_p, top_k, min_p),
            of_all=to_device(of_all.numpy(), device),
        )

    def fill(self, params: Sequence[SamplingParams]) -> None:
        """Write the parameters of the first rows; a value that all share is written to all rows."""
        temperature, filters, of_all = _columns(params)
        tensors = (self.temperature, *self.filters, self.of_all)
        for tensor, column in zip(tensors, (temperature, *filters, of_all), strict=True):
            if (column == column[0]).all():
                tensor.fill_(column[0].item())
            else:
                tensor[: len(column)] = to_device(column.numpy(), tensor.device)

    def draw(
        self,
        logits: Tensor,
        bits: Tensor,
        rows: slice | Tensor,
        filtering: Filtering,
        plan: PrecisionPlan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, log-probs and lse of `rows`, as `kernels.sampling.sample`.

        The float32 logits may be written over; `filtering` is that of the batch (`filtering_of`).
        """
        # Rows without a filter have the same bits in a batch with filters.
        top_p, top_k, min_p = (column[rows] for column in self.filters)
        return sample(
            plan.before_draw(logits, bits),
            bits,
            temperature=self.temperature[rows],
            filters=RowFilters(top_p, top_k, min_p) if filtering.excludes else None,
            of_all=self.of_all[rows] if filtering.of_all else None,
        )


def _columns(params: Sequence[SamplingParams]) -> tuple[Tensor, RowFilters, Tensor]:
    """Return temperatures, filters and `Sampler.of_all` of the rows, on the host."""
    return (
        torch.tensor([float(p.temperature) for p in params]),
        RowFilters.of([p.token_filter for p in params]),
        torch.tensor([not p.truncated_logprobs for p in params]),
    )


def filtering_of(params: Iterable[SamplingParams]) -> Filtering:
    """Return what any of the parameters asks of a batch."""
    # A greedy row draws the largest logit, which no filter excludes.
    excluding = [p for p in params if p.temperature and not p.token_filter.keeps_all]
    return Filtering(bool(excluding), not all(p.truncated_logprobs for p in excluding))


def chunks_of_draws(count: int, logits: Tensor) -> Iterator[slice]:
    """Yield slices of `count` draws from logits [.., V] that bound the memory of sampling."""
    at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, count, at_once):
        yield slice(start, min(count, start + at_once))
