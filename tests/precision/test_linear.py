"""FProp, DGrad and WGrad of the FP8 linear against FP32 autograd, with a derived floor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from jetrl.errors import UserError
from jetrl.precision import PrecisionPlan, quantize
from jetrl.precision.gradients import Gradients
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import QuantizedWeight


def make(plan: PrecisionPlan, n: int = 256, k: int = 384, bias: bool = False) -> Linear:
    g = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(n, k, generator=g) / math.sqrt(k))
    bias_master = nn.Parameter(torch.randn(n, generator=g)) if bias else None
    formats = plan.linear_formats(0, 1)
    roundings = {side: plan.rounding(side, format) for side, format in formats.items()}
    quantized = QuantizedWeight("layers.0.test", weight, formats, roundings)
    return Linear(quantized, bias_master, plan, torch.bfloat16, Gradients())


def sqnr_db(approximate: torch.Tensor, true: torch.Tensor) -> float:
    true = true.detach()
    noise = (approximate.detach().double() - true.double()).square().sum()
    return float(10 * torch.log10(true.double().square().sum() / noise))


# A value rounded to m significant bits has a relative error of at most 2**-m, with a mean square of
# at most 2**(-2m) / 3: E4M3 (m = 4) 28.9 dB, E5M2 (m = 3) 22.8 dB. Two independent factors add up;
# 1.5 dB covers values below the normal range of codes and the BF16 rounding of the result.
E4M3_NOISE, E5M2_NOISE = 2.0**-8 / 3, 2.0**-6 / 3


def floor_db(*noises: float) -> float:
    return -10 * math.log10(sum(noises)) - 1.5


@pytest.mark.parametrize(
    "grad_output, wgrad_input",
    [("e4m3", "128x128"), ("e5m2", "128x128"), ("bf16", "128x128"), ("e4m3", "1x128")],
)
@pytest.mark.parametrize("tokens", [1, 63, 129, 300])
def test_gradients_stay_above_the_floor(grad_output: str, wgrad_input: str, tokens: int) -> None:
    plan = PrecisionPlan.preset("unified").replace(grad_output=grad_output, wgrad_input=wgrad_input)
    layer = make(plan)
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 384, generator=g).bfloat16().requires_grad_()
    dy = torch.randn(tokens, 256, generator=g).bfloat16()
    y = layer(x, "train")
    y.backward(dy)
    x32, w32 = x.detach().float().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    y32 = x32 @ w32.T
    y32.backward(dy.float())
    gradient_noise = {"e4m3": E4M3_NOISE, "e5m2": E5M2_NOISE, "bf16": 0.0}[grad_output]
    assert sqnr_db(y, y32) > floor_db(E4M3_NOISE, E4M3_NOISE)
    assert sqnr_db(x.grad, x32.grad) > floor_db(gradient_noise, E4M3_NOISE)
    assert sqnr_db(layer.weight.grad, w32.grad) > floor_db(gradient_noise, E4M3_NOISE)


def test_a_linear_keeps_its_input_and_nothing_else() -> None:
    """The very tensor that it was given, which whoever made it may keep too."""
    layer = make(PrecisionPlan.preset("unified"))
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(256, 384).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x, "train")
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


@pytest.mark.parametrize("preset", ["unified", "bf16"])
def test_gradients_add_up_in_the_master(preset: str) -> None:
    """Gradients are added in place from the second backward on.

    A hook sees each; a frozen master gets none.
    """
    layer = make(PrecisionPlan.preset(preset))
    x, dy = torch.randn(130, 384).bfloat16().requires_grad_(), torch.randn(130, 256).bfloat16()
    layer(x, "train").backward(dy)
    total = layer.weight.grad
    once = total.clone()
    assert once.dtype == torch.float32
    layer(x, "train").backward(dy)
    assert layer.weight.grad is total
    assert torch.equal(total, 2 * once)
    seen: list[torch.Tensor] = []
    hook = layer.weight.register_hook(seen.append)
    layer(x, "train").backward(dy)
    hook.remove()
    assert torch.equal(seen[0], once)
    assert torch.equal(layer.weight.grad, 2 * once + once)
    layer.weight.grad = None
    layer.weight.requires_grad_(False)
    layer(x, "train").backward(dy)
    assert layer.weight.grad is None


def test_quantized_weight_changes_only_with_requantize() -> None:
    layer = make(PrecisionPlan.preset("unified"))
    before = layer.operand("train").codes.clone()
    with torch.no_grad():
        layer.weight.mul_(-1)
    assert torch.equal(layer.operand("train").codes.float(), before.float())
    layer.quantized.requantize()
    expected = quantize(layer.weight.detach(), (128, 128))
    assert torch.equal(layer.operand("train").codes.float(), expected.codes.float())
    assert torch.equal(layer.operand("train").codes.float(), -before.float())


def test_bias_is_added_after_rounding_and_gets_its_gradient() -> None:
    layer, plain = make(PrecisionPlan.preset("jet"), bias=True), make(PrecisionPlan.preset("jet"))
    x = torch.randn(5, 384).bfloat16()
    y = layer(x, "train")
    assert torch.equal(y, plain(x, "train") + layer.bias.bfloat16())
    y.sum().backward()
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 5.0))


@pytest.mark.parametrize("n,k", [(96, 128), (128, 96), (192, 32)])
def test_refuses_dimensions_fp8_cannot_take(n: int, k: int) -> None:
    with pytest.raises(UserError, match=r"layers.0.test.*multiples of 64, not.*use.*preset=bf16$"):
        make(PrecisionPlan.preset("unified"), n, k)
    make(PrecisionPlan.preset("bf16"), n, k)
