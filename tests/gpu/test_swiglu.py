"""SwiGLU on the GPU, forward and backward, with and without quantization."""

from __future__ import annotations

import pytest
import torch
from linears import assert_same

from jetrl.kernels.swiglu import swiglu, swiglu_ref
from jetrl.precision.quantize import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

KERNELS = "jetrl.kernels.hopper"


def gate_up(tokens: int, width: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens)
    return (4 * torch.randn(tokens, 2 * width, generator=g)).bfloat16().cuda()


@pytest.mark.parametrize("tokens", [1, 63, 129, 1000])
def test_values_are_within_one_unit_of_the_reference(kernels, tokens: int) -> None:
    """Few values round to the neighbour of the reference's, and none further."""
    x = gate_up(tokens, 384)
    ours, reference = kernels.swiglu_forward(x).cpu(), swiglu_ref(x.cpu())
    steps = (ours.view(torch.int16).int() - reference.view(torch.int16).int()).abs()
    assert int(steps.max()) <= 1
    assert int((steps > 0).sum()) <= 5 + steps.numel() * 2**-10


@pytest.mark.parametrize("tokens", [1, 63, 129, 1000])
@pytest.mark.parametrize("width", [192, 384])
def test_all_forms_make_the_same_bits(kernels, tokens: int, width: int) -> None:
    x = gate_up(tokens, width)
    y = kernels.swiglu_forward(x)
    assert_same(kernels.swiglu_quantize(x), quantize(y))
    rows, values = kernels.swiglu_quantize_with_values(x)
    assert_same(rows, quantize(y))
    assert_same(values, y)
    assert_same(kernels.swiglu_forward(x[:1]), y[:1])
    if width % 128:
        return  # a group of the gradient has values of both gate and up
    dy = torch.randn(tokens, 384, device="cuda").bfloat16()
    for scales in ("fp32", "pow2"):
        again = kernels.swiglu_backward_quantize(dy, x, scales=scales)[2]
        assert_same(again, quantize(y, (128, 128), scales=scales))


@pytest.mark.parametrize("tokens", [1, 129])
def test_backward(kernels, tokens: int) -> None:
    """Against float64 autograd: one rounding to BF16, 2**-9 of each value at most."""
    x = gate_up(tokens, 384)
    dy = torch.randn(tokens, 384, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dy.double())
    dx = kernels.swiglu_backward(dy, x)
    assert (dx - wide.grad).norm() <= 2**-8 * wide.grad.norm()
    for format in ("e4m3", "e5m2"):
        rows, by_token, y = kernels.swiglu_backward_quantize(dy, x, format)
        assert y.codes.dtype == torch.float8_e4m3fn
        assert_same(rows, quantize(dx, format=format))
        assert_same(by_token, quantize(dx, (128, 1), format))
    x.requires_grad_()
    swiglu(x).backward(dy)
    assert torch.equal(x.grad, dx)


def test_extreme_gates(kernels) -> None:
    """NaN stays NaN; large gates neither overflow nor lose their sign."""
    x = torch.zeros(4, 256, dtype=torch.bfloat16, device="cuda")
    x[:, 128:] = 2.0
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = float("nan"), 1e4, -1e4, float("inf")
    assert_same(kernels.swiglu_forward(x), swiglu_ref(x.cpu()))
    rows = kernels.swiglu_quantize(x)
    assert rows.codes[0, 0].float().isnan()
