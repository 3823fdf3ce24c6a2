"""The router's product in integers: its definition in NumPy, and its error."""

from __future__ import annotations

import math

import numpy as np
import torch
from tests.kernels.bits import random as normal
from tests.precision.test_int8_planes import integers, rotated
from torch import Tensor, nn

from jetrl.precision import PrecisionPlan
from jetrl.precision.formats import BF16
from jetrl.precision.gradients import Gradients
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import QuantizedWeight
from jetrl.precision.router import router_logits

E, D = 13, 192


def make(preset: str = "integer") -> Linear:
    plan = PrecisionPlan.preset(preset)
    rounding = plan.rounding("train", BF16)
    weight = nn.Parameter(normal(E, D, seed=1) / math.sqrt(D))
    sides = dict.fromkeys(("rollout", "train"), BF16)
    quantized = QuantizedWeight("router", weight, sides, dict.fromkeys(sides, rounding))
    return Linear(quantized, None, plan, torch.bfloat16, Gradients())


def in_bf16(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


def test_the_products_are_those_of_the_definition() -> None:
    router = make()
    x = normal(70, D).bfloat16().requires_grad_()
    logits = router_logits(x, router, "train")
    dlogits = normal(70, E, seed=2).bfloat16()
    logits.backward(dlogits)

    stored = router.operand("train").float().numpy()
    x_codes, x_scales = integers(rotated(x.detach().float().numpy()))
    w_codes, w_scales = integers(rotated(stored))
    expected = (x_codes @ w_codes.T).astype(np.float32) * x_scales * w_scales.T
    assert torch.equal(logits, in_bf16(expected))
    dl = dlogits.float().numpy()
    codes, scales = integers(dl * w_scales.T)
    assert torch.equal(x.grad, in_bf16(rotated((codes @ w_codes).astype(np.float32) * scales)))
    codes, scales = integers((dl * x_scales).T)
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
