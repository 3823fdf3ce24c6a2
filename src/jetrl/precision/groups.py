"""The rows of experts: which tokens each expert multiplies, in one order for every operation.

A row is a token in one of its slots: R = T * k. Rows are sorted by (expert, token, slot), so those
of an expert are contiguous, and the order depends only on the chosen experts. This module imports
no kernels, so that a table of kernels can name the type.

Legend: T tokens, k experts per token (slots), R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The rows of each expert.

    If two tokens chose the experts [[2, 0], [0, 1]] of 3:

        tokens = [0, 1, 1, 0],  ends = [2, 3, 4],  places = [[3, 0], [1, 2]]

    Attributes:
        tokens: int32 [R], the token of each sorted row.
        ends: int32 [E], the end of each expert's rows.
        places: int32 [T, k], the sorted row of each slot.
    """

    tokens: Tensor
    ends: Tensor
    places: Tensor

    @staticmethod
    def of(chosen: Tensor, num_experts: int) -> Groups:
        """Return the groups of the experts int64 [T, k] that tokens chose; the host never waits."""
        experts = chosen.flatten()
        order = torch.sort(experts, stable=True).indices
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=order.device)
        counts.index_add_(0, experts, torch.ones_like(experts))
        return Groups(
            tokens=(order // chosen.shape[1]).int(),
            ends=counts.cumsum(0).int(),
            places=places.view(chosen.shape).int(),
        )

    @property
    def num_experts(self) -> int:
        return len(self.ends)

    def rows(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, and its rows; for references, since the host waits."""
        start = 0
        for expert, end in enumerate(self.ends.tolist()):
            if end > start:
                yield expert, slice(start, end)
            start = end


@dataclass(frozen=True)
class TokenGroups:
    """FP8 codes along the rows of each expert, for WGrad; each expert begins with a group of 128.

    Attributes:
        codes: [C, P], each expert's rows padded with zeros to a multiple of 128; undefined past the
            last expert.
        scales: float32, [P / 128, C] of groups of 128 x 1, or [ceil(C / 128), P / 128] of groups of
            128 x 128.
    """

    codes: Tensor
    scales: Tensor
