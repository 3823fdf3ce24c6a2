"""The portable kernels of norms and rotary on a GPU: the bits of the references."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # portable_rows.py

import portable_rows

from jetrl.kernels import norm

portable_norm = pytest.importorskip("jetrl.kernels.portable.norm")
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
