"""Norm, SwiGLU, rotary, log-probs: right against float64, batch-invariant, right gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetrl.kernels.logprob import chosen_logprobs
from jetrl.kernels.norm import rms_norm
from jetrl.kernels.rotary import rotary, rotary_table
from jetrl.kernels.swiglu import swiglu

TABLE = rotary_table(10000.0 ** -(np.arange(32) / 32.0), 64)
WEIGHT = torch.linspace(0.5, 1.5, 64)


def norm64(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * WEIGHT.to(x.dtype)


def swiglu64(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rotary64(x: Tensor) -> Tensor:
    cos, sin = TABLE[torch.arange(len(x)) % 64].to(x.dtype).unbind(1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotated(x: Tensor) -> Tensor:
    return rotary(x.unsqueeze(1), torch.arange(len(x)) % 64, TABLE).squeeze(1)


OPERATIONS: dict[str, tuple[Any, Any]] = {
    "rms_norm": (lambda x: rms_norm(x, WEIGHT.to(x.dtype), 1e-6), norm64),
    "swiglu": (swiglu, swiglu64),
    "rotary": (rotated, rotary64),
}


def rows(count: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("count", [1, 129])
def test_float32_result_and_gradient(name: str, count: int) -> None:
    operation, true_operation = OPERATIONS[name]
    x = rows(count).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, y64 = operation(x), true_operation(x64)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    y.backward(dy)
    y64.backward(dy.double())
    # At most 16 float32 roundings (or grid steps of the norm's sum, which are no larger for 64
    # terms) of the largest value, and as many again for each of the 64 terms of a gradient's sum.
    assert (y - y64).abs().max() <= 16 * 2.0**-24 * y64.abs().max()
    assert (x.grad - x64.grad).abs().max() <= 64 * 2.0**-24 * x64.grad.abs().max()


@pytest.mark.parametrize("name", OPERATIONS)
def test_bf16_result_is_rounded_once(name: str) -> None:
    operation, true_operation = OPERATIONS[name]
    x = rows(100).bfloat16()
    weight_rounding = 2.0**-8 if name == "rms_norm" else 0.0  # the weight is read in BF16
    true = true_operation(x.double())
    error = (operation(x).double() - true).abs()
    terms = x.double().abs().amax(-1, keepdim=True) if name == "rotary" else true.abs()
    bound = true.abs() * (2.0**-8 + weight_rounding) + 16 * 2.0**-24 * terms
    assert torch.all(error <= bound * (1 + 2.0**-7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    operation, _ = OPERATIONS[name]
    x = rows(133).to(dtype)
    whole = operation(x)
    for start, size in ((0, 1), (3, 7), (130, 3), (5, 100)):
        assert torch.equal(operation(x[start : start + size].clone()), whole[start : start + size])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("vocabulary", [5, 1000])
def test_chosen_logprobs(temperature: float, vocabulary: int) -> None:
    g = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(50, vocabulary, generator=g) * 8).requires_grad_()
    chosen = torch.randint(0, vocabulary, (50,), generator=g)
    logits64 = logits.detach().double().requires_grad_()
    true = torch.log_softmax(logits64 / temperature, -1)
    logprobs, (entropy, variance) = chosen_logprobs(logits, chosen, temperature)
    dy = torch.randn(50, generator=g)
    logprobs.backward(dy)
    picked = true.gather(-1, chosen[:, None])[:, 0]
    picked.backward(dy.double())
    spread = float((logits64.abs().max() * 2 / temperature).detach())
    assert (logprobs - picked).abs().max() <= 8 * 2.0**-24 * spread
    true_entropy = -(true.exp() * true).sum(-1)
    assert (entropy - true_entropy).abs().max() <= 64 * 2.0**-24 * spread
    true_variance = (true.exp() * true.square()).sum(-1) - true_entropy.square()
    assert (variance - true_variance).abs().max() <= 64 * 2.0**-24 * spread**2
    # p = exp(z - lse): an error of z of 8 * 2**-24 * spread is a relative error of p
    assert (logits.grad - logits64.grad).abs().max() <= 16 * 2.0**-24 * spread * dy.abs().max()
