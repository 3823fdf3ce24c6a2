"""FP4 with a scale per row against an independent version in NumPy: codes, outliers, estimator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.shapes import SHAPES
from tests.kernels.bits import different, random
from tests.precision.numpy_blocks import E2M1, F32, nearest
from tests.precision.test_emulated import policy, results
from torch import Tensor, nn

from jetrl import Policy
from jetrl.precision import PrecisionPlan
from jetrl.precision.exact import exact_matmul
from jetrl.precision.fp4 import (
    clamped,
    clamped_operands,
    derivative,
    estimate,
    fp4_values,
    num_outliers,
)

FP4 = PrecisionPlan.preset("fp4")
QUANTILE = 0.99
SWITCHES = {"gradient_estimator": False, "outlier_quantile": 1.0, "outlier_compensation": False}
LINEARS = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight")


def scale_by_numpy(row: np.ndarray) -> np.float32:
    largest = np.maximum(np.abs(row).max(), F32(2.0**-100))
    if not np.isfinite(largest):
        return F32(np.nan)
    fraction, exponent = math.frexp(float(F32(largest) / F32(6)))
    return F32(math.ldexp(float(np.rint(fraction * 64)) / 64, exponent))


def scales_by_numpy(x: Tensor) -> Tensor:
    return torch.tensor([scale_by_numpy(row) for row in x.float().numpy()])[:, None]


@np.errstate(all="ignore")
def by_numpy(x: Tensor) -> Tensor:
    """Return the values of a matrix, row by row."""
    values = x.float().numpy()
    out = np.empty_like(values)
    for number, row in enumerate(values):
        scale = scale_by_numpy(row)
        if np.isnan(scale):
            out[number] = np.nan
            continue
        codes = np.copysign(nearest(np.abs(row / scale), E2M1), row)
        out[number] = codes.astype(F32) * scale
    return torch.from_numpy(out).bfloat16()


def clamped_by_numpy(x: Tensor, count: int) -> Tensor:
    values = np.sort(x.float().numpy(), 1)
    low, high = values[:, count, None], values[:, -1 - count, None]
    return torch.from_numpy(np.clip(x.float().numpy(), low, high)).to(x.dtype)


def with_outliers(rows: int, columns: int) -> Tensor:
    """Values of all sizes: most of a row near 1, some up to 2**40 larger or smaller."""
    x = random(rows, columns)
    x[:, ::37] *= random(rows, columns, seed=1)[:, ::37].mul(10).exp2()
    x[1], x[2], x[3, : columns // 2] = 0.0, x[2].abs(), -1.0
    x[4, 0], x[5, 1] = 2.0**40, -(2.0**-40)
    return x.bfloat16()


def test_all_bf16_values_are_those_of_numpy() -> None:
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    assert different(fp4_values(every), by_numpy(every)) == 0
    finite = every[every.float().isfinite().all(1)]
    # In order, values have the size of their row's maximum. Larger ones make them smaller codes.
    for shift in range(1, 8):
        x = finite.clone()
        x[:, 0] *= 2.0**shift
        assert different(fp4_values(x), by_numpy(x)) == 0
    flat = finite.flatten()
    x = flat[torch.arange(len(flat)) * 40_503 % len(flat)].view(-1, 64)
    assert different(fp4_values(x), by_numpy(x)) == 0


@pytest.mark.parametrize("size", [1e-36, 1e-3, 1.0, 1e37], ids=str)
def test_random_rows_are_those_of_numpy_in_any_batch(size: float) -> None:
    x = random(64, 192) * random(64, 192, seed=1).mul(4).exp2() * size
    x[0], x[1, :32], x[2, 5], x[3, 0] = 0.0, 0.0, -0.0, 2.0**-140
    for values in (x, x.bfloat16()):
        whole = fp4_values(values)
        assert different(whole, by_numpy(values)) == 0
        assert different(fp4_values(values[7:30]), whole[7:30]) == 0


def test_codes_have_the_error_of_their_distances() -> None:
    """18.7 dB for normal numbers, of which the largest of 1,024 is 3.24: code 6.

    A standard deviation is 1.85, so 72%, 25% and 3% lie where codes are 1/2, 1 and 2 apart, and the
    mean square of uniform errors is 0.0458.
    """
    x = random(256, 1024)
    decibel = 10 * math.log10(x.square().mean() / (fp4_values(x).float() - x).square().mean())
    assert decibel == pytest.approx(18.7, abs=0.3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_value_that_is_not_finite_spoils_its_row_clamped_or_not(value: float) -> None:
    x = random(32, 512).bfloat16()
    x[3, 5] = value
    bad = torch.arange(32) == 3
    for rounded in (fp4_values(x), fp4_values(clamped(x, QUANTILE)), clamped_operands(x, 0.9)[0]):
        assert torch.equal(rounded.isnan().any(1), bad)
    assert fp4_values(clamped(x, QUANTILE))[3].isnan().all()


@pytest.mark.parametrize(
    "columns, quantile, count",
    [(512, 0.99, 5), (100, 0.99, 1), (99, 0.99, 0), (300, 0.99, 3), (100, 0.97, 3), (512, 1.0, 0)],
)
def test_the_share_of_values_is_clamped_at_each_end(
    columns: int, quantile: float, count: int
) -> None:
    assert num_outliers(columns, quantile) == count
    for x in (random(8, columns), with_outliers(8, columns)):
        assert torch.equal(clamped(x, quantile), clamped_by_numpy(x, count))
    x = random(8, columns)  # float32: no two values of a row are equal
    assert ((x != clamped(x, quantile)).sum(1) == 2 * count).all()


def test_clamped_values_and_residual_are_the_original_exactly() -> None:
    """In float64, which has the bits of all these sums."""
    x = with_outliers(64, 512)
    inside = clamped_by_numpy(x, 5)
    main, rest = clamped_operands(x, QUANTILE)
    away = main.double() - by_numpy(inside).double() + rest.double()
    assert torch.equal(inside.double() + away, x.double())
    assert int((away != 0).sum(1).max()) == 10
    assert different(main[7:30], clamped_operands(x[7:30], QUANTILE)[0]) == 0


def smooth(x: np.ndarray) -> np.ndarray:
    """Return f of magnitudes in float64."""
    high = np.searchsorted(E2M1, x, side="right").clip(1, len(E2M1) - 1)
    low, step = E2M1[high - 1], E2M1[high] - E2M1[high - 1]
    u = 2 * (x - low) / step - 1
    return low + step / 2 * (1 + np.sign(u) * np.abs(u) ** 0.2)


def test_the_derivative_is_that_of_the_smooth_quantizer_by_finite_differences() -> None:
    assert np.allclose(smooth(E2M1), E2M1, atol=1e-12)
    x = np.linspace(0, 6, 100_003)[1:-1]
    x = x[np.abs(x[:, None] - E2M1).min(1) > 1e-5]
    # Less than the distance of the middles, near which the difference is steep.
    slope = (smooth(x + 1e-7) - smooth(x - 1e-7)) / 2e-7
    found = derivative(torch.from_numpy(x).float()).double().numpy()
    steep = slope > 3.001
    assert 0.02 < steep.mean() < 0.04
    assert (found[steep] == 3).all()
    assert np.allclose(found[slope < 2.999], slope[slope < 2.999], rtol=1e-4)
    negative = derivative(-torch.from_numpy(x).float()).double().numpy()
    assert (negative == found).all()


def test_the_derivative_has_the_same_bits_at_every_place_and_its_limits() -> None:
    x = random(1037).mul(3)
    whole = derivative(x)
    for part in (slice(0, 1), slice(3, 50), slice(1000, 1037)):
        assert torch.equal(derivative(x[part]), whole[part])
    middles = torch.tensor([0.25, -0.75, 1.75, 2.5, 3.5, -5.0])
    assert torch.equal(derivative(middles), torch.full((6,), 3.0))
    codes = torch.tensor([0.0, -0.5, 1.5, 2.0, 3.0, 4.0, 6.0, -6.1])
    assert torch.equal(derivative(codes), torch.full((8,), 0.2))
    assert derivative(torch.tensor([math.nan])).isnan()


def test_gradients_are_multiplied_row_by_row() -> None:
    weight, gradient = random(40, 96) * random(40, 1, seed=2).exp(), random(40, 96, seed=1)
    expected = gradient * derivative(weight / scales_by_numpy(weight))
    estimate(gradient, weight)
    assert different(gradient, expected) == 0


@pytest.mark.parametrize("options", [{}, *({k: v} for k, v in SWITCHES.items())], ids=str)
def test_products_are_those_of_the_operands_that_numpy_rounds(options: Any) -> None:
    p = policy(FP4, **options)
    linear: Any = p.decoder.layer(1).block.down
    x, master = with_outliers(41, 512).requires_grad_(), linear.weight.detach()
    dy = random(41, 256, seed=1).mul(0.01).bfloat16()
    gradients = p.weights.gradients
    gradients.begin_update()
    y = linear(x, "train")
    y.backward(dy)
    gradients.end_update()
    w, values = by_numpy(master), x.detach()
    inside = values if "outlier_quantile" in options else clamped_by_numpy(values, 5)
    main = by_numpy(inside)
    total = exact_matmul(main, w.mT).float()
    if "outlier_compensation" not in options:
        outlier = values != inside
        main = torch.where(outlier, main - inside, main)
        rest = torch.where(outlier, values, 0.0)
        total = exact_matmul(main, w.mT).float() + exact_matmul(rest, w.mT).float()
        main = (main.float() + rest.float()).bfloat16()
    assert different(y.detach(), total.bfloat16()) == 0
    assert different(x.grad, exact_matmul(dy, w).float().bfloat16()) == 0
    expected = exact_matmul(dy.mT, main).float()
    if "gradient_estimator" not in options:
        expected *= derivative(master / scales_by_numpy(master))
    assert different(linear.weight.grad, expected) == 0


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_what_it_says(switch: str) -> None:
    on, again = results(policy(FP4)), results(policy(FP4), recomputed=True)
    assert not any(different(on[name], again[name]) for name in on)
    off = results(policy(FP4, **{switch: SWITCHES[switch]}))
    in_forward = switch != "gradient_estimator"
    assert (different(on["logprobs"], off["logprobs"]) > 0) == in_forward
    changed = {name for name in on if different(on[name], off[name])}
    assert {name for name in on if name.endswith(LINEARS)} <= changed
    if not in_forward:
        assert all(name.endswith(LINEARS) for name in changed)


def test_gradients_point_where_those_of_bf16_do() -> None:
    bf16, found = results(policy(PrecisionPlan.preset("bf16"))), results(policy(FP4))
    straight = results(policy(FP4, gradient_estimator=False))
    for name in (name for name in bf16 if name.endswith(LINEARS)):
        alike = nn.functional.cosine_similarity
        by_rounding = alike(straight[name].flatten(), bf16[name].flatten(), dim=0)
        assert 0.85 < by_rounding < 0.95
        # Over an interval f' has the mean 0.593 and the mean square 0.746: 0.593 / sqrt(0.746).
        estimated = alike(found[name].flatten(), straight[name].flatten(), dim=0)
        assert estimated == pytest.approx(0.687, abs=0.01)


def test_a_row_narrower_than_its_quantile_is_not_clamped() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    shape = SHAPES["tiny"] | sizes | {"num_key_value_heads": 2, "head_dim": 32}
    found = []
    for quantile in (QUANTILE, 1.0):
        p = Policy.from_config(shape, plan=FP4.replace(outlier_quantile=quantile), seed=0)
        found.append(p.logprobs([[1, 2, 3]])[0])
    assert different(found[0], found[1]) == 0
