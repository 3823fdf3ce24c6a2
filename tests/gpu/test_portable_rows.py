"""The portable kernels of norms, rotary and AdamW on a GPU: the bits of the references."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # portable_rows.py

from jetrl.kernels import norm
from jetrl.precision.gradients import rows_added

portable_norm = pytest.importorskip("jetrl.kernels.portable.norm")
portable_rows = pytest.importorskip("portable_rows")
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CASES = [(kind, sizes) for kind, (cases, _) in portable_rows.KINDS.items() for sizes in cases(True)]


@pytest.mark.parametrize("kind, sizes", CASES, ids=str)
def test_bits_of_the_references(kind: str, sizes: tuple[Any, ...]) -> None:
    assert portable_rows.differences(kind, sizes, CUDA) == []


@pytest.mark.parametrize("shape", [(1, 64), (300, 896), (129, 5, 128)], ids=str)
def test_rms_norm_and_its_gradients(shape: tuple[int, ...]) -> None:
    """The function for autograd, forward and backward."""
    x, dy = (portable_rows.random(*shape, seed=seed).bfloat16().cuda() for seed in range(2))
    weight = (1 + 0.1 * portable_rows.random(shape[-1])).bfloat16().cuda()
    results = []
    for function in (portable_norm.rms_norm, norm._RMSNorm.apply):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(*leaves, 1e-6)
        y.backward(dy)
        results.append((y.detach(), leaves[0].grad, leaves[1].grad))
    for ours, expected in zip(*results, strict=True):
        assert portable_rows.different(ours, expected) == 0


@pytest.mark.parametrize("tokens, rows", [(1, 5), (3000, 7), (16384, 32000)], ids=str)
def test_rows_of_an_embedding_are_added_in_order(tokens: int, rows: int) -> None:
    """torch's sum on a GPU, which has the bits of the CPU's: token after token."""
    places = torch.randint(rows + 4, (tokens,), generator=torch.Generator().manual_seed(tokens))
    places[::2] = 3
    values = portable_rows.random(tokens, 256).bfloat16()
    total = portable_rows.random(rows, 256, seed=1)
    for own in (range(rows), range(2, rows)):
        start = total[own.start :].clone()
        ours = rows_added(start.cuda(), places.cuda(), values.cuda(), own)
        assert portable_rows.different(ours.cpu(), rows_added(start, places, values, own)) == 0
        ours = rows_added(None, places.cuda(), values.cuda(), own)
        assert portable_rows.different(ours.cpu(), rows_added(None, places, values, own)) == 0
