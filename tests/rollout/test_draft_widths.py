"""The choices of `auto` over the steps of a call whose forwards take seconds by a formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetrl.kernels.decode import share_rows
from jetrl.kernels.decode_state import FIRST_QUALITY, MAX_DRAFT, QUALITY_ONE, QUALITY_SHIFT
from jetrl.rollout.draft_widths import DraftWidths, Seen, Width, choices

FORWARDS, STEPS = 8, 60
NONE = Width(1, 0, False)


def milliseconds(most: int, rows: int, attention: float) -> float:
    """Return the time of a forward as at the shape of 8B: products of a weight, and attention.

    Products of up to 64 rows take the same, and then grow in steps of 64 rows, faster beyond 256.
    Attention reads pages once for four queries.
    """
    tiles = -(-rows // 64)
    products = 3.3 + 0.7 * (tiles - 1) + 0.45 * max(0, tiles - 4)
    return products + attention * (1 + 0.03 * min(most - 1, 3) + 0.8 * (most > 4))


class Batch:
    """Sequences without an end, whose drafts' tokens are right with a chance."""

    def __init__(self, sequences: int, right: float) -> None:
        self.chance, self.right = np.random.default_rng(0), right
        self.quality = torch.full((sequences,), FIRST_QUALITY, dtype=torch.int32)

    def forward(self, width: Width, turn: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens drawn, tokens verified, and if the first draft token was right."""
        count = len(self.quality)
        right = self.chance.random((count, MAX_DRAFT)) < self.right
        drafted = np.zeros(count, dtype=int)
        if width.most > 1:
            wanted = torch.full((count,), width.most - 1, dtype=torch.int32)
            drafted = share_rows(wanted, self.quality, width.rows - count, turn).numpy()
        kept = right & (np.arange(MAX_DRAFT) < drafted[:, None])
        drawn = 1 + kept.cumprod(1).sum(1)
        hit = right[:, 0].astype(int)
        if width.drafts:
            self.quality += (
                QUALITY_ONE * torch.from_numpy(hit).int() - self.quality
            ) >> QUALITY_SHIFT
        return drawn, drafted, hit


def tokens_a_millisecond(
    sequences: int, right: float, attention: float, fixed: Width | None = None
) -> float:
    widths, batch = DraftWidths(always=False), Batch(sequences, right)
    tokens = taken = 0.0
    for step in range(STEPS):
        width = widths.choose(sequences) if fixed is None else fixed
        each = [batch.forward(width, FORWARDS * step + i) for i in range(FORWARDS)]
        drawn, drafted, hit = (np.concatenate(values) for values in zip(*each, strict=True))
        spent = FORWARDS * milliseconds(width.most, max(width.rows, sequences), attention)
        # Clocks are not exact.
        spent *= 1 + 0.004 * batch.chance.standard_normal()
        tokens, taken = tokens + drawn.mean() * FORWARDS, taken + spent
        one = np.ones_like(hit)
        seen = Seen(drawn, drafted, hit, one, one == 0)
        widths.observe(sequences, width, FORWARDS, spent / 1e3, seen)
    return tokens / taken


@pytest.mark.parametrize(("sequences", "attention"), [(8, 0.2), (64, 5.3), (256, 3.0)], ids=str)
@pytest.mark.parametrize("right", [0.0, 0.3, 0.85])
def test_auto_loses_nothing_and_is_near_the_best_width(
    sequences: int, attention: float, right: float
) -> None:
    off = tokens_a_millisecond(sequences, right, attention, NONE)
    auto = tokens_a_millisecond(sequences, right, attention) / off
    best = max(
        tokens_a_millisecond(sequences, right, attention, Width(most, rows, True))
        for most, rows in choices(sequences)
    )
    assert auto >= 0.98
    assert auto >= 0.93 * best / off


def test_a_head_that_is_not_asked_is_asked_once_in_a_while():
    widths, no = DraftWidths(always=False), np.zeros(100, dtype=int)
    for _ in range(30):
        widths.observe(8, Width(1, 8, True), 8, 24.0, Seen(no + 1, no, no, no + 1, no == 1))
    assert {widths.choose(8).most for _ in range(100)} == {1}, "no head"
    widths.acceptance.head_tokens = 3
    most = [widths.choose(8).most for _ in range(100)]
    assert 2 <= most.count(2) <= 4
    assert set(most) == {1, 2}
    assert {widths.choose(200).most for _ in range(100)} == {1}, "of hundreds of sequences never"
