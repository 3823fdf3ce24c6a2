"""Rotated INT8 with a scale per row: its rule, its exact sums, and its error."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.bits import random as normal

from jetrl import Policy
from jetrl.errors import UserError
from jetrl.models.tiny import PRINTABLE
from jetrl.precision import PrecisionPlan, dequantize, quantize
from jetrl.precision.int8 import (
    int8_matmul,
    int8_rows,
    int8_squares_turned,
    int8_tokens,
    int8_turned,
)
from jetrl.precision.quantize import ROTATION, rotate
from jetrl.session.parity import measure


def test_a_rotation_is_the_hadamard_matrix_and_its_own_inverse() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATION:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    assert torch.equal(rotate(torch.eye(ROTATION)), matrix / 8)
    x = normal(3, 2 * ROTATION)
    # Six stages of float32 additions there and back, of values at most 8 times as large.
    assert (rotate(rotate(x)) - x).abs().max() <= 12 * 2**-24 * 8 * x.abs().max()


def rotated_by(x: torch.Tensor, distances: list[int]) -> torch.Tensor:
    """Each stage replaces values i and i + distance by their sum and difference; then / 8."""
    y = x.unflatten(-1, (-1, ROTATION)).clone()
    for distance in distances:
        low = [i for i in range(ROTATION) if not i & distance]
        high = [i + distance for i in low]
        y[..., low], y[..., high] = y[..., low] + y[..., high], y[..., low] - y[..., high]
    return (y / 8).flatten(-2)


def test_the_documented_orders_decide_the_bits() -> None:
    """Stages, scales and DGrad's weight follow docs/precision.md; other orders give other bits."""
    heavy = normal(300, ROTATION) ** 5
    distances = [1, 2, 4, 8, 16, 32]
    assert torch.equal(rotate(heavy), rotated_by(heavy, distances))
    scales, reversed_scales = (
        rotated_by(heavy, order).abs().amax(-1) / 127 for order in (distances, distances[::-1])
    )
    assert torch.equal(int8_rows(heavy).scales[:, 0], scales)
    assert (scales != reversed_scales).sum() > 50

    a, b = int8_rows(normal(40, 128)), int8_rows(normal(64, 128, seed=1))
    sums = (a.codes.double() @ b.codes.double().mT).float()
    product = int8_matmul(a, b, torch.float32)
    assert torch.equal(product, (sums * a.scales) * b.scales.mT)
    assert not torch.equal(product, sums * (a.scales * b.scales.mT))

    weight = int8_rows(normal(128, 256))
    back = rotated_by(weight.codes.float() * weight.scales, distances)
    turned, narrow = (quantize(values, (128, 128)).mT for values in (back, back.bfloat16()))
    made = int8_squares_turned(weight)
    assert torch.equal(made.codes.view(torch.uint8), turned.codes.view(torch.uint8))
    assert torch.equal(made.scales, turned.scales)
    assert not torch.equal(made.codes.view(torch.uint8), narrow.codes.view(torch.uint8))


def test_sums_do_not_depend_on_other_rows_or_on_the_order() -> None:
    a, b = int8_rows(normal(9, 576)), int8_rows(normal(70, 576, seed=1))
    whole = int8_matmul(a, b)
    assert torch.equal(int8_matmul(int8_rows(normal(9, 576)[4:5]), b), whole[4:5])
    order = torch.randperm(576, generator=torch.Generator().manual_seed(2))
    for q in (a, b):
        q.codes.copy_(q.codes[:, order])
    assert torch.equal(int8_matmul(a, b), whole)


@pytest.mark.parametrize("n, k, tokens", [(320, 576, 100), (64, 64, 130), (128, 1536, 65)])
def test_products_are_near_the_true_ones(n: int, k: int, tokens: int) -> None:
    """A code is off by half a step, uniformly: a step / sqrt(12) of each of two operands."""
    x, w, dy = normal(tokens, k), normal(n, k, seed=1), normal(tokens, n, seed=2).bfloat16()
    weight = int8_rows(w)

    def steps(*operands: torch.Tensor) -> float:
        """Return the relative error of a product of operands, by their largest values."""
        parts = [rotate(o).abs().amax(-1).square().mean() / o.square().mean() for o in operands]
        return math.sqrt(sum(float(p) for p in parts) / 12) / 127

    padded = torch.nn.functional.pad(x.T, (0, -tokens % 64))
    padded_dy = torch.nn.functional.pad(dy.float().T, (0, -tokens % 64))
    products = {
        "fprop": (int8_matmul(int8_rows(x), weight, torch.float32), x @ w.T, steps(x, w)),
        "dgrad": (
            int8_matmul(int8_rows(dy), int8_turned(weight), torch.float32),
            dy.float() @ w,
            steps(dy.float(), w.T, w),  # a weight is rounded twice
        ),
        "wgrad": (
            int8_matmul(int8_tokens(dy).mT, int8_tokens(x).mT, torch.float32),
            dy.float().T @ x,
            steps(padded_dy, padded),
        ),
    }
    for name, (made, true, expected) in products.items():
        error = float((made - true).norm() / true.norm())
        assert 0.3 * expected < error < 1.5 * expected, (name, error, expected)


def test_codes_say_the_values_that_were_rounded() -> None:
    x = normal(100, 576)
    step = rotate(x).abs().amax(1, keepdim=True) / 127
    assert ((rotate(dequantize(int8_rows(x))) - rotate(x)).abs() <= 0.501 * step).all()
    tokens = dequantize(int8_tokens(x))
    assert tokens.shape == (128, 576)
    assert (tokens[:100] - x).norm() < 0.02 * x.norm()
    assert torch.equal(dequantize(int8_tokens(x).mT), tokens.mT)


def test_an_outlier_costs_other_values_an_eighth_of_what_it_would() -> None:
    x = normal(4, 576)
    x[:, 7] = 100.0
    error = (dequantize(int8_rows(x)) - x)[:, 64:].abs().max()
    assert error < 0.5 * 100 / 8 / 127 * 4  # the outlier's share of each of 64, four signs at most


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_spoils_its_row_only(bad: float) -> None:
    x = normal(3, 128)
    x[1, 5] = bad
    y = int8_matmul(int8_rows(x), int8_rows(normal(64, 128, seed=1)))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_a_sum_that_may_not_fit_is_refused() -> None:
    few, many = (int8_rows(torch.ones(1, k)) for k in (133_120, 133_184))
    assert int8_matmul(few, few, torch.float32).item() == pytest.approx(133_120, rel=1e-6)
    with pytest.raises(UserError, match=r"133,144 values, not 133,184: lower train\.tokens_per"):
        int8_matmul(many, many)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(PRINTABLE) + 2,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "preset, gradients", [("int8", "int8"), ("int8", "e4m3"), ("unified", "e4m3"), ("jet", "e5m2")]
)
def test_a_model_of_short_groups_is_exact(preset: str, gradients: str) -> None:
    plan = PrecisionPlan.preset(preset)
    plans = (plan.replace(grad_output=gradients), plan.replace(grad_output="bf16"))
    policies = [Policy.from_config(CONFIG, plan, seed=1) for plan in plans]
    assert measure(policies[0], num_prompts=3, samples=2, max_tokens=20).different == 0
    gradients = []
    for policy in policies:
        policy.logprobs([list(range(2, 40))])[0].mean().backward()
        gradients.append(policy.master_weights()["layers.0.qkv.weight"].grad)
    assert (gradients[0] - gradients[1]).norm() < 0.1 * gradients[1].norm()
    name = "INT8" if preset == "int8" else "FP8"
    with pytest.raises(UserError, match=rf"{name} needs.*multiples of 64, not.*use.*preset=bf16$"):
        Policy.from_config({**CONFIG, "intermediate_size": 96}, plan)


@pytest.mark.parametrize(
    "preset, option",
    [
        ("int8", {"grad_output": "e5m2"}),
        ("int8", {"scales": "pow2"}),
        ("int8", {"wgrad_input": "1x128"}),
        ("unified", {"grad_output": "int8"}),
    ],
)
def test_options_of_the_other_format_are_refused(preset: str, option: dict[str, str]) -> None:
    (key,) = option
    with pytest.raises(UserError, match=rf"precision.{key} = {option[key]} .*precision.preset = "):
        PrecisionPlan.preset(preset).replace(**option)
