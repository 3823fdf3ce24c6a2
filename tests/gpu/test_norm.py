"""RMSNorm on the GPU: the reference's bits, fused with the residual add and the quantization."""

from __future__ import annotations

import pytest
import torch
from linears import assert_same

from jetrl.kernels.norm import rms_norm_ref
from jetrl.precision.quantize import quantize

pytestmark = pytest.mark.gpu

KERNELS = "jetrl.kernels.norm_triton"
EPS = 1e-6


def inputs(tokens: int, width: int, std: float = 1.0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens + width)
    x, delta = (torch.randn(tokens, width, generator=g) * std for _ in range(2))
    weight = 1 + 0.1 * torch.randn(width, generator=g)
    return x.bfloat16(), delta.bfloat16(), weight.bfloat16()


@pytest.mark.parametrize("std", [1e-12, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("tokens", [1, 63, 129])
@pytest.mark.parametrize("width", [64, 128, 192, 576, 896, 4096])
def test_norm_and_codes_have_the_bits_of_the_reference(
    kernels, tokens: int, width: int, std: float
) -> None:
    x, delta, weight = inputs(tokens, width, std)
    total = x + delta
    y, inverse = rms_norm_ref(total, weight, EPS)
    entered = x.cuda(), weight.cuda(), EPS, delta.cuda()
    ours, _, rows, _ = kernels.rms_norm_quantize(*entered)
    assert torch.equal(ours.cpu(), total)
    assert_same(rows, quantize(y))
    ours, ours_inverse, rows, _ = kernels.rms_norm_quantize(*entered, True)
    assert torch.equal(ours_inverse.cpu(), inverse.squeeze(-1))
    assert_same(rows, quantize(y))
    again = kernels.rms_norm_squares(ours, weight.cuda(), ours_inverse)
    assert_same(again, quantize(y, (128, 128)))
    plain, _, _ = kernels.rms_norm_forward(total.cuda(), weight.cuda(), EPS)
    assert torch.equal(plain.cpu(), y)


def test_extreme_rows(kernels) -> None:
    x, _, weight = inputs(8, 1024)
    x[0], x[1, 7], x[2] = 0, 3e38, torch.finfo(torch.bfloat16).tiny
    x[3, 3], x[4, 4] = torch.nan, torch.inf
    x[5] *= 1e30
    x[6, 6], x[7, 7] = 300, 3000  # a channel above all others, whose squares end below the grid
    y, inverse = rms_norm_ref(x, weight, EPS)
    ours, ours_inverse, _ = kernels.rms_norm_forward(x.cuda(), weight.cuda(), EPS)
    assert_same(ours, y)
    assert_same(ours_inverse, inverse.squeeze(-1))


@pytest.mark.parametrize("tokens", [1, 129, 2000])
def test_backward(kernels, tokens: int) -> None:
    """The gradient is within 2**-8 of the norm of float64 autograd's."""
    width = 896
    x, delta, weight = inputs(tokens, width)
    dy = torch.randn(tokens, width, generator=torch.Generator().manual_seed(7)).bfloat16()
    wide_x, wide_w = x.double().requires_grad_(), weight.double().requires_grad_()
    y = wide_x / (wide_x.square().mean(-1, keepdim=True) + EPS).sqrt() * wide_w
    y.backward(dy.double())
    inverse = rms_norm_ref(x, weight, EPS)[1].squeeze(-1).cuda()
    args = (dy.cuda(), x.cuda(), weight.cuda(), inverse)
    dx, dweight = kernels.rms_norm_backward(*args)
    assert (dx.cpu() - wide_x.grad).norm() <= 2**-8 * wide_x.grad.norm()
    assert (dweight.cpu() - wide_w.grad).norm() <= 1e-5 * wide_w.grad.norm()
    added, _ = kernels.rms_norm_backward(*args, delta.cuda())
    expected = wide_x.grad + delta.double()
    assert (added.cpu() - expected).norm() <= 2**-8 * expected.norm()
