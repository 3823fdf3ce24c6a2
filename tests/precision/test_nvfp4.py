"""NVFP4: the quantizer against a brute force in float64, exact widening, and the kernels' order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from jetrl.errors import UserError
from jetrl.precision.formats import NVFP4, Rounding
from jetrl.precision.nvfp4 import (
    WIDENED_FACTOR,
    NVFP4Tensor,
    RowFactors,
    dequantize_nvfp4,
    e2m1_codes,
    hopper_order,
    parts_of,
    quantize_nvfp4,
    stacked_nvfp4,
    unpacked_codes,
    widened,
)
from jetrl.precision.nvfp4_products import nvfp4_dgrad, nvfp4_matmul
from jetrl.precision.quantized_weight import QuantizedWeight

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def matrix(rows: int, columns: int, std: float = 0.02, seed: int = 0) -> torch.Tensor:
    """Return values whose groups differ in size by many orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * std
    powers = torch.randint(-20, 1, (rows, columns // 16), generator=g).float().exp2()
    return x * powers.repeat_interleave(16, 1)


def nearest(value: float, grid: list[float]) -> int:
    """Return the index of the value of a grid that is nearest to another; of two the even one."""
    distances = [abs(value - point) for point in grid]
    best = min(distances)
    near = [index for index, distance in enumerate(distances) if distance == best]
    return near[0] if len(near) == 1 else next(index for index in near if index % 2 == 0)


@pytest.mark.parametrize("std", [1e-30, 0.02, 1e3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_scales_are_the_nearest(std: float, dtype: torch.dtype) -> None:
    """Every code is the value of E2M1 nearest to the quotient, every scale that of E4M3."""
    x = matrix(5, 96, std).to(dtype)
    q = quantize_nvfp4(x)
    f32 = np.float32
    scale = f32(x.abs().max().item()) / f32(6 * 448)
    assert f32(q.scale) == scale
    codes = unpacked_codes(q.codes)
    for row in range(5):
        for group in range(6):
            values = x[row, group * 16 : group * 16 + 16].float().numpy()
            ratio = f32(np.abs(values).max()) / f32(f32(6) * scale)
            expected = E4M3[max(1, nearest(float(ratio), E4M3.tolist()))]
            assert q.scales[row, group].double() == expected
            divisor = f32(float(expected)) * scale
            for value, code in zip(values, codes[row, group * 16 :], strict=False):
                quotient = f32(value) / divisor
                assert int(code) & 7 == nearest(abs(float(quotient)), E2M1)
                assert int(code) >> 3 == int(np.signbit(value))


def test_ties_go_to_even_codes_and_large_values_saturate() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 1e30, math.inf, -0.25, -0.0])
    assert e2m1_codes(x).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 8, 8]
    every = torch.tensor(E2M1)
    assert e2m1_codes(torch.cat((every, -every))).tolist() == list(range(16))


def test_every_product_of_a_code_and_a_scale_is_exact_in_bfloat16() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    q = NVFP4Tensor(packed, scales, torch.tensor(1.0))
    signed = torch.tensor(E2M1 + [-value for value in E2M1], dtype=torch.float64)
    assert torch.equal(widened(q).double(), signed * E4M3[:, None])
    q = NVFP4Tensor(packed, scales, torch.tensor(0.3))
    assert torch.equal(dequantize_nvfp4(q), (signed * E4M3[:, None]).float() * torch.tensor(0.3))


def test_groups_far_below_the_matrix_keep_what_the_smallest_scale_can_say() -> None:
    x = torch.full((1, 32), 2.0**-140)  # subnormal in float32
    x[0, 16:] = 6 * 448 * 2.0**-10
    x[0, 0] = 6 * 2.0**-19
    q = quantize_nvfp4(x)
    assert q.scales[0, 0].float() == 2.0**-9
    assert dequantize_nvfp4(q)[0, :2].tolist() == [6 * 2.0**-19, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_shows_in_all(value: float) -> None:
    x = matrix(4, 32)
    x[2, 5] = value
    assert dequantize_nvfp4(quantize_nvfp4(x)).isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_base_with_a_value_that_is_not_finite_is_refused_by_layer(value: float) -> None:
    x = matrix(128, 128)
    x[2, 5] = value
    master, nvfp4 = nn.Parameter(x, requires_grad=False), Rounding(NVFP4)
    with pytest.raises(UserError, match=r"layer up: the weight has values that are NaN or Inf"):
        QuantizedWeight("up", master, {"train": NVFP4}, {"train": nvfp4}, fixed=True)


def test_the_error_is_that_of_the_formats() -> None:
    """A value is off by half the distance of its neighbours at most, and by its scale's rounding.

    Codes are apart by 2 at most, and a group's maximum has code 6 if its scale were exact; the
    scale is off by 2**-4 of itself, which saturation can cost in full: so a sixth and a sixteenth
    of the group's maximum, with float32's rounding.
    """
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    error = (dequantize_nvfp4(quantize_nvfp4(x)) - x).abs().unflatten(1, (-1, 16)).amax(2)
    largest = x.abs().unflatten(1, (-1, 16)).amax(2)
    assert (error <= (1 / 6 + 1 / 16 + 1e-5) * largest).all()
    assert error.max() > 0


@pytest.mark.parametrize("k", [256, 384, 8192, 8320, 25600])
def test_sums_of_narrow_weights_have_equal_parts(k: int) -> None:
    """The kernels have one, two or four, each of whole stages of 256 columns but the last."""
    parts, columns = parts_of(4096, k)
    assert parts in (1, 2, 4)
    assert (parts == 1) == (k <= 256)
    assert (parts == 4) == (k > 8192)
    assert columns % 256 == 0
    assert (parts - 1) * columns < k <= parts * columns
    assert parts * columns - k < 256 * parts, "as equal as whole stages can be"
    assert parts_of(24576, k) == (1, k)


def test_rows_have_the_same_bits_in_any_batch_and_are_the_products_of_the_values() -> None:
    """The error is float32's rounding of a sum and BF16's, as of `exact_matmul`."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(37, 256, generator=g).bfloat16(), torch.randn(64, 256, generator=g)
    weight = quantize_nvfp4(w)
    y = nvfp4_matmul(x, weight)
    for rows in (slice(0, 1), slice(5, 22), slice(36, 37)):
        assert torch.equal(nvfp4_matmul(x[rows], weight), y[rows])
    values = dequantize_nvfp4(weight).double()
    true = x.double() @ values.mT
    terms = x.double().abs() @ values.abs().mT
    assert ((y.double() - true).abs() <= 2.0**-8 * true.abs() + 2.0**-20 * terms).all()
    wide = nvfp4_matmul(x, weight, torch.float32)
    assert torch.equal(wide.bfloat16(), y)
    dy = torch.randn(37, 64, generator=g).bfloat16()
    dx = nvfp4_dgrad(dy, weight)
    true, terms = dy.double() @ values, dy.double().abs() @ values.abs()
    assert ((dx.double() - true).abs() <= 2.0**-8 * true.abs() + 2.0**-17 * terms).all()


def test_matrices_with_scales_of_their_own_are_stacked_as_they_are() -> None:
    weights = [matrix(rows, 256, std, rows) for rows, std in ((96, 0.02), (48, 3.0), (112, 1e-4))]
    parts = [quantize_nvfp4(weight) for weight in weights]
    whole = stacked_nvfp4(parts)
    assert whole.rows == (96, 48, 112)
    assert torch.equal(dequantize_nvfp4(whole), torch.cat([dequantize_nvfp4(p) for p in parts]))
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    products = [nvfp4_matmul(x, part) for part in parts]
    assert torch.equal(nvfp4_matmul(x, whole), torch.cat(products, 1))
    dy = torch.randn(9, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    values = dequantize_nvfp4(whole).double()
    exact, terms = dy.double() @ values, dy.double().abs() @ values.abs()
    bound = 2.0**-8 * exact.abs() + 256 * 2.0**-24 * terms  # BF16's rounding, and float32 sums
    assert ((nvfp4_dgrad(dy, whole).double() - exact).abs() <= bound).all()
    factor = hopper_order(whole).factor
    assert isinstance(factor, RowFactors)
    assert [(start, end) for start, end, _ in factor.ranges] == [(0, 96), (96, 144), (144, 256)]
    scales = torch.cat([p.scale.expand(len(p.codes)) for p in parts])
    assert torch.equal(factor.of_rows * WIDENED_FACTOR, scales)
    assert all((factor.of_rows[s:e] == own).all() for s, e, own in factor.ranges)
