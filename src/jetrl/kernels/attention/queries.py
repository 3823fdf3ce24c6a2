"""The rows of a forward of decode in which a sequence has several queries, its newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceQueries:
    """The places of the queries of B sequences among the R rows of a forward of decode.

    A sequence's queries are rows side by side, and its last query is at its last key. A row that
    no sequence has is padding.

    Attributes:
        counts: int32 [B], the queries of each sequence, 0 to `most`.
        first: int32 [B], the row of its first query.
        keys: int32 [R], the keys that the last query of the row's sequence sees; 0 for padding.
    """

    counts: Tensor
    first: Tensor
    keys: Tensor
    most: int

    def check(self, batch: int, rows: int) -> None:
        """Raise ValueError unless the tensors are int32 and of the shapes of a forward."""
        for name, x, shape in (
            ("counts", self.counts, (batch,)),
            ("first", self.first, (batch,)),
            ("keys", self.keys, (rows,)),
        ):
            if x.dtype != torch.int32 or x.shape != shape:
                raise ValueError(
                    f"{name} of queries: int32 {list(shape)} expected, got {x.dtype} "
                    f"{list(x.shape)}"
                )
