"""Work lists of the backward of integer attention, whose operands are in a padded layout.

The backward needs codes with consecutive tokens next to each other in memory, which begin at
aligned addresses. So it copies them: each run of a packed batch (`attention.layout`) begins at a
multiple of 128 rows of the copies, called places. The copies of padding are zeros.

The sums over queries of integer attention begin at 0 for each sequence, and those of the sequences
that share a stem are added in order. So a block of keys of a stem has one item, and one array of
sums, per branch. The first of them also has the queries of the stem itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS, BACKWARD_QUERIES, Run


@dataclass(frozen=True)
class PaddedLists:
    """Work lists of all layers for a packed batch, the last two sorted longest item first.

    Attributes:
        blocks: int32 [n, 4], blocks of 128 places, in order: first row, end row of its run; then
            the index of its first sums, and the number of its sums.
        query_blocks: int32 [n, 6], blocks of 128 queries: first place, first row, end row of the
            run; then the first place of the run, the first place of its stem, and the number of
            the stem's keys.
        key_blocks: int32 [num_sums, 5], blocks of 128 keys in one sequence: first place, number of
            blocks of 64 queries of its own run, which begin at that place; first place of the
            branch, its number of blocks of 64 queries; then the index of its sums.
    """

    blocks: Tensor
    query_blocks: Tensor
    key_blocks: Tensor

    @property
    def num_places(self) -> int:
        return len(self.blocks) * BACKWARD_KEYS

    @property
    def num_sums(self) -> int:
        return len(self.key_blocks)

    @staticmethod
    def of(runs: Sequence[Run], device: torch.device | str) -> PaddedLists:
        """Return the work lists of the runs of a packed batch, built on the CPU."""
        places = []
        place = 0
        for run in runs:
            places.append(place)
            place += -(-run.length // BACKWARD_KEYS) * BACKWARD_KEYS
        branches: list[list[int]] = [[] for _ in runs]  # per stem, the indices of its branches
        for i, run in enumerate(runs):
            if run.stem >= 0:
                branches[run.stem].append(i)
        blocks: list[tuple[int, ...]] = []
        query_blocks: list[tuple[int, ...]] = []
        key_blocks: list[tuple[int, ...]] = []
        for i, run in enumerate(runs):
            end = run.start + run.length
            num_stem = stem = 0
            if run.stem >= 0:
                num_stem = runs[run.stem].length
                stem = places[run.stem]
            for first in range(0, run.length, BACKWARD_KEYS):
                at = places[i] + first
                row = run.start + first
                num_sums = max(1, len(branches[i]))
                blocks.append((row, end, len(key_blocks), num_sums))
                query_blocks.append((at, row, end, places[i], stem, num_stem))
                own = -(-(run.length - first) // BACKWARD_QUERIES)
                if not branches[i]:
                    key_blocks.append((at, own, 0, 0, len(key_blocks)))
                for branch in branches[i]:
                    after = (places[branch], runs[branch].query_blocks)
                    key_blocks.append((at, own, *after, len(key_blocks)))
                    own = 0  # the stem's queries count in the first sequence only
        query_blocks.sort(key=lambda t: t[3] - t[0] - t[5])
        key_blocks.sort(key=lambda t: -(t[1] + t[3]))

        return PaddedLists(
            blocks=uploaded(blocks, 4, device),
            query_blocks=uploaded(query_blocks, 6, device),
            key_blocks=uploaded(key_blocks, 5, device),
        )


def uploaded(records: Sequence[tuple[int, ...]], width: int, device: torch.device | str) -> Tensor:
    """Return records as int32 [n, width], copied from pinned memory without waiting for a GPU."""
    host = torch.tensor(records, dtype=torch.int32).reshape(-1, width)
    on_gpu = torch.device(device).type == "cuda"
    return (host.pin_memory() if on_gpu else host).to(device, non_blocking=True)
