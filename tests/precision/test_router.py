"""The router's product in integers: its definition in NumPy, and its error."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from jetrl.precision import PrecisionPlan
from jetrl.precision.formats import BF16
from jetrl.precision.gradients import Gradients
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import QuantizedWeight
from jetrl.precision.router import router_logits

E, D = 13, 192


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(preset: str = "integer") -> Linear:
    plan = PrecisionPlan.preset(preset)
    rounding = plan.rounding("train", BF16)
    weight = nn.Parameter(normal(E, D, seed=1) / math.sqrt(D))
    sides = dict.fromkeys(("rollout", "train"), BF16)
    quantized = QuantizedWeight("router", weight, sides, dict.fromkeys(sides, rounding))
    return Linear(quantized, None, plan, torch.bfloat16, Gradients())


def rotated(x: np.ndarray) -> np.ndarray:
    """Blocks of 64 along the last axis, pairs at growing distances, then divided by 8."""
    y = x.astype(np.float32).reshape(*x.shape[:-1], -1, 64)
    for distance in (1, 2, 4, 8, 16, 32):
        pairs = y.reshape(*y.shape[:-1], -1, 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([low + high, low - high], axis=-2).reshape(y.shape)
    return (y * np.float32(0.125)).reshape(x.shape)


def fifteen_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integers of planes, int64, and the scale of each row."""
    amax = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(2.0**-100))
    top = np.float32(32512)
    codes = np.rint(np.clip(x * (top / amax), -top, top)).astype(np.int64)
    return codes, amax / top


def in_bf16(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


def test_the_products_are_those_of_the_definition() -> None:
    router = make()
    x = normal(70, D).bfloat16().requires_grad_()
    logits = router_logits(x, router, "train")
    dlogits = normal(70, E, seed=2).bfloat16()
    logits.backward(dlogits)

    stored = router.operand("train").float().numpy()
    x_codes, x_scales = fifteen_bits(rotated(x.detach().float().numpy()))
    w_codes, w_scales = fifteen_bits(rotated(stored))
    expected = (x_codes @ w_codes.T).astype(np.float32) * x_scales * w_scales.T
    assert torch.equal(logits, in_bf16(expected))
    dl = dlogits.float().numpy()
    codes, scales = fifteen_bits(dl * w_scales.T)
    assert torch.equal(x.grad, in_bf16(rotated((codes @ w_codes).astype(np.float32) * scales)))
    codes, scales = fifteen_bits((dl * x_scales).T)
    dw = rotated((codes @ x_codes).astype(np.float32) * scales)
    assert torch.equal(router.weight.grad, torch.from_numpy(dw))


def test_the_error_is_far_below_that_of_bf16_logits() -> None:
    router, x = make(), normal(200, D).bfloat16()
    true = x.double() @ router.operand("train").double().mT
    found = router_logits(x, router, "rollout").double()
    # Rounding to BF16 errs by at most 2**-9 of a logit. A rotated row's maximum is at most 8 times
    # its root mean square here, so each operand errs by less than 8 / 32512 of it.
    bound = 2.0**-9 * true.abs() + 2 * 8 / 32512 * x.double().norm(dim=1, keepdim=True)
    assert bool(((found - true).abs() <= bound).all())
    assert (found - true).norm() <= 2.0**-8 / math.sqrt(3) * true.norm()


def test_a_row_does_not_depend_on_the_others_nor_on_the_side() -> None:
    for preset in ("integer", "int8"):
        router, x = make(preset), normal(65, D).bfloat16()
        whole = router_logits(x, router, "train")
        for row in (0, 31, 64):
            alone = router_logits(x[row : row + 1], router, "rollout")
            assert torch.equal(alone, whole[row : row + 1])
