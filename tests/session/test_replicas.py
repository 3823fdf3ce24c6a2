"""The digest of weights that ranks compare sees each bit and its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jetrl.session import ranks


def swap(x: Tensor, a: int, b: int) -> None:
    x[[a, b]] = x[[b, a]]


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "one bit": lambda x: x.view(-1)[77].add_(1),
    "last byte": lambda x: x.view(-1)[-1].add_(1),
    "rows": lambda x: swap(x, 0, 2),
    "rows of two blocks": lambda x: swap(x, 3, 36),
    "neighbouring bytes": lambda x: swap(x.view(-1), 40, 41),
    "neighbouring words": lambda x: x.view(-1)[40:48].copy_(x.view(-1)[40:48].roll(4)),
    "columns": lambda x: x.copy_(x[:, torch.arange(len(x[0]) - 1, -1, -1)]),
}


@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_digest_sees_bits_and_places(
    change: Callable[[Tensor], object], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_BLOCK", 256)  # words: the 37 * 41 bytes are two blocks
    factors = ranks._factors(torch.device("cpu"))
    whole = torch.randint(0, 256, (1 + 37 * 41,), generator=torch.Generator().manual_seed(0))
    x = whole.to(torch.uint8)[start : start + 37 * 41].view(37, 41)
    before = ranks._in_order(x, factors)
    assert ranks._in_order(x.clone(), factors) == before, "wherever it is in memory"
    change(x)
    assert ranks._in_order(x, factors) != before


def test_an_empty_tensor_has_a_digest() -> None:
    assert ranks._in_order(torch.empty(0), ranks._factors(torch.device("cpu"))) == 0
