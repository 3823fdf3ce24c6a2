"""The draw of tokens from logits, for prompts and for decode.

`kernels.sampling.sample` applies top_p and top_k for every path (`kernels.allowed_tokens`). The
random bits of a draw are a function of only (seed, the sequence's key, the position of the drawn
token), so a sequence is the same in any batch, after a pre-emption, and next to any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.allowed_tokens import allows_all
from jetrl.kernels.sampling import sample
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.launched_step import to_device
from jetrl.types import SamplingParams

_LOGITS_AT_ONCE = 2**23  # Sampling makes several arrays of the logits that it handles at once.


@dataclass(frozen=True)
class Sampler:
    """The sampling parameters of R rows on the device: float32, and int64 for top_k."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device) -> Sampler:
        columns = [to_device(column.numpy(), device) for column in _columns(params)]
        temperature, top_p, top_k = columns
        return Sampler(temperature=temperature, top_p=top_p, top_k=top_k)

    def fill(self, params: Sequence[SamplingParams]) -> None:
        """Write the parameters of the first rows; a value that all share is written to all rows."""
        tensors = (self.temperature, self.top_p, self.top_k)
        for tensor, column in zip(tensors, _columns(params), strict=True):
            if (column == column[0]).all():
                tensor.fill_(column[0].item())
            else:
                tensor[: len(column)] = to_device(column.numpy(), tensor.device)

    def draw(
        self,
        logits: Tensor,
        bits: Tensor,
        rows: slice | Tensor,
        filtered: bool,
        plan: PrecisionPlan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, log-probs and lse of `rows`, as `kernels.sampling.sample`.

        The float32 logits may be written over; `filtered`: a row uses top_p or top_k (`filters`).
        """
        return sample(
            plan.before_draw(logits, bits),
            bits,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            filtered=filtered,
        )


def _columns(params: Sequence[SamplingParams]) -> list[Tensor]:
    """Return the temperature, top_p and top_k of each row, on the host."""
    return [
        torch.tensor([float(p.temperature) for p in params]),
        torch.tensor([float(p.top_p) for p in params]),
        torch.tensor([p.top_k for p in params]),
    ]


def filters(params: Iterable[SamplingParams]) -> bool:
    """Return whether any of the parameters forbids a token."""
    return not all(allows_all(p.top_p, p.top_k) for p in params)


def chunks_of_draws(count: int, logits: Tensor) -> Iterator[slice]:
    """Yield slices of `count` draws from logits [.., V] that bound the memory of sampling."""
    at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, count, at_once):
        yield slice(start, min(count, start + at_once))
