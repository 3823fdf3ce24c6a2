"""RMSNorm on the GPU: the reference's bits, fused with the residual add and the quantization."""

from __future__ import annotations

import pytest
import torch

from jetrl.kernels.norm import rms_norm as rms_norm_cpu
from jetrl.kernels.norm import rms_norm_ref
from jetrl.precision.quantize import QTensor, quantize

pytestmark = pytest.mark.gpu

EPS = 1e-6


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("jetrl.kernels.norm_hopper")


def inputs(tokens: int, width: int, std: float = 1.0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens + width)
    x, delta = (torch.randn(tokens, width, generator=g) * std for _ in range(2))
    weight = 1 + 0.1 * torch.randn(width, generator=g)
    return x.bfloat16(), delta.bfloat16(), weight.bfloat16()


def assert_same(ours: QTensor, reference: QTensor) -> None:
    rows = reference.shape[0]
    codes, expected = ours.codes[:rows].cpu().float(), reference.codes.float()
    torch.testing.assert_close(codes, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours.scales.cpu(), reference.scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("std", [1e-12, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("tokens", [1, 63, 129])
@pytest.mark.parametrize("width", [128, 896, 4096])
def test_norm_and_codes_have_the_bits_of_the_reference(
    kernels, tokens: int, width: int, std: float
) -> None:
    x, delta, weight = inputs(tokens, width, std)
    total = x + delta
    y, inverse = rms_norm_ref(total, weight, EPS)
    ours = kernels.rms_norm_quantize(x.cuda(), weight.cuda(), EPS, delta.cuda())
    assert torch.equal(ours.total.cpu(), total)
    assert_same(ours.rows, quantize(y))
    train = kernels.rms_norm_quantize(x.cuda(), weight.cuda(), EPS, delta.cuda(), True)
    assert torch.equal(train.inverse_rms.cpu(), inverse.squeeze(-1))
    assert_same(train.rows, quantize(y))
    again = kernels.rms_norm_squares(train.total, weight.cuda(), train.inverse_rms)
    assert_same(again, quantize(y, (128, 128)))
    assert not again.codes[tokens:].float().any()
    plain, _, _ = kernels.rms_norm_forward(total.cuda(), weight.cuda(), EPS)
    assert torch.equal(plain.cpu(), y)


def test_extreme_rows(kernels) -> None:
    """Zeros, one huge or large value, the largest and the smallest bfloat16, NaN and Inf."""
    x, _, weight = inputs(8, 1024)
    x[0] = 0
    x[1, 7] = 3e38
    x[2] = torch.finfo(torch.bfloat16).tiny
    x[3, 3] = float("nan")
    x[4, 4] = float("inf")
    x[5] *= 1e30
    x[6, 6], x[7, 7] = 300, 3000  # a channel above all others, whose squares end below the grid
    y, inverse = rms_norm_ref(x, weight, EPS)
    ours, ours_inverse, _ = kernels.rms_norm_forward(x.cuda(), weight.cuda(), EPS)
    torch.testing.assert_close(ours.cpu(), y, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        ours_inverse.cpu(), inverse.squeeze(-1), rtol=0, atol=0, equal_nan=True
    )


def test_a_row_is_independent_of_the_others(kernels) -> None:
    x, delta, weight = (t.cuda() for t in inputs(1000, 1024))
    whole = kernels.rms_norm_quantize(x, weight, EPS, delta, True)
    for rows in (1, 63, 64, 129, 512):
        part = kernels.rms_norm_quantize(x[:rows], weight, EPS, delta[:rows])
        assert torch.equal(
            part.rows.codes.view(torch.uint8), whole.rows.codes[:rows].view(torch.uint8)
        )
        assert torch.equal(part.rows.scales, whole.rows.scales[:rows])


@pytest.mark.parametrize("tokens", [1, 129, 2000])
def test_backward(kernels, tokens: int) -> None:
    """The gradient is within 2**-8 of the norm of float64 autograd's.

    The error is the final rounding to BF16 (2**-9 of each value) plus float32 sums; dweight adds
    `tokens` float32 terms.
    """
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


def test_drop_in_for_the_reference_with_gradients(kernels) -> None:
    x, dy, weight = (t.cuda() for t in inputs(129, 1024))
    results = []
    for function in (kernels.rms_norm, rms_norm_cpu):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(a, w, EPS)
        y.backward(dy)
        results.append((y, a.grad, w.grad))
    assert torch.equal(results[0][0], results[1][0])
    for ours, reference in zip(results[0][1:], results[1][1:], strict=True):
        assert (ours - reference).float().norm() <= 2**-8 * reference.float().norm()
