"""Block formats against an independent version in NumPy, packing, and stochastic rounding."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.bits import different, random
from tests.precision.numpy_blocks import E2M1, E4M3, by_numpy

from jetrl.precision.block_formats import (
    BLOCK_FORMATS,
    MXFP4,
    MXFP8,
    NVFP4_ROWS,
    NVFP4_SQUARES,
    BlockFormat,
    Blocks,
    block_rotation,
    block_values,
    quantize_blocks,
    uniform_draws,
)

ALL = pytest.mark.parametrize("format", BLOCK_FORMATS, ids=lambda f: f.words)


@ALL
def test_all_bf16_values_are_those_of_numpy(format: BlockFormat) -> None:
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    finite = every.float().isfinite().all(1)
    assert different(quantize_blocks(every, format).values, by_numpy(every, format)) == 0
    # In order, values have the size of their block's maximum. Larger ones make them smaller codes.
    for shift in range(1, 8):
        x = every[finite].clone()
        x.view(-1, 16)[:, 0] *= 2.0**shift
        x = x[x.float().isfinite().all(1)]
        x = x[: len(x) // 16 * 16]
        assert different(quantize_blocks(x, format).values, by_numpy(x, format)) == 0
    # Any sizes next to each other: a multiple of an odd number is the place in memory.
    flat = every[finite][:1008].flatten()
    x = flat[torch.arange(len(flat)) * 40_503 % len(flat)].view(-1, 64)
    assert different(quantize_blocks(x, format).values, by_numpy(x, format)) == 0


@ALL
@pytest.mark.parametrize("size", [1e-36, 1e-3, 1.0, 1e37], ids=str)
def test_random_blocks_are_those_of_numpy(format: BlockFormat, size: float) -> None:
    x = random(64, 192) * random(64, 192, seed=1).mul(4).exp2() * size
    x[0], x[1, :32], x[2, 5], x[3, 0] = 0.0, 0.0, -0.0, 2.0**-140
    for values in (x, x.bfloat16()):
        assert different(quantize_blocks(values, format).values, by_numpy(values, format)) == 0
        assert different(block_values(values, format), by_numpy(values, format)) == 0


@ALL
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_values_that_are_not_finite_spoil_all_that_share_a_scale(
    format: BlockFormat, value: float
) -> None:
    x = random(32, 64)
    x[3, 5] = value
    spoiled = block_values(x, format).isnan()
    assert torch.equal(spoiled, by_numpy(x, format).isnan())
    expected = {NVFP4_ROWS: 64, NVFP4_SQUARES: 32 * 64}.get(format, 32)
    assert int(spoiled.sum()) == expected


@ALL
def test_bytes_are_those_of_the_format_and_come_back(format: BlockFormat) -> None:
    x = random(32, 128) * random(32, 128, seed=1).mul(3).exp2()
    x[5] = 0.0
    q = quantize_blocks(x, format)
    codes, scales, _ = packed = q.packed()
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    assert codes.numel() + scales.numel() == format.bytes_per_value * x.numel()
    assert different(Blocks.unpack(packed, format).values, q.values) == 0
    assert set(q.codes.abs().unique().tolist()) <= set(E4M3 if format is MXFP8 else E2M1)
    x[0, 0] = math.nan
    q = quantize_blocks(x, format)
    assert different(Blocks.unpack(q.packed(), format).values, q.values) == 0


# Error over the value's size of normal numbers, at least so many dB: half the distance of E2M1's
# values of up to a quarter of the maximum, as a uniform error, gives 17 dB; E4M3's 2**-4 gives 29.
FLOORS = {NVFP4_ROWS: 19.0, NVFP4_SQUARES: 18.0, MXFP4: 17.0, MXFP8: 29.0}


@ALL
def test_errors_are_above_the_floor_of_the_format(format: BlockFormat) -> None:
    x = random(256, 256)
    error = (block_values(x, format).float() - x).square().mean()
    decibel = 10 * math.log10(x.square().mean() / error)
    assert FLOORS[format] <= decibel < FLOORS[format] + 4


def test_rows_have_the_same_bits_in_any_batch() -> None:
    x = random(48, 64)
    whole = block_values(x, NVFP4_ROWS)
    for rows in (slice(0, 1), slice(7, 30)):
        assert different(block_values(x[rows], NVFP4_ROWS), whole[rows]) == 0
    squares = block_values(x, NVFP4_SQUARES)
    assert different(block_values(x.mT.contiguous(), NVFP4_SQUARES).mT, squares) == 0


def test_the_rotation_is_orthogonal_to_the_bit() -> None:
    """Each sum is one of 16 products of 1/4 and 1/4: exact."""
    rotation = block_rotation(torch.eye(16))
    assert set(rotation.abs().unique().tolist()) == {0.25}
    assert torch.equal(rotation @ rotation.mT, torch.eye(16))
    assert torch.equal(rotation @ rotation, torch.eye(16))
    a, b = torch.randint(-9, 9, (2, 5, 64)).float()
    assert torch.equal(block_rotation(a) @ block_rotation(b).mT, a @ b.mT)
    expected = block_values(block_rotation(a), NVFP4_ROWS)
    assert different(block_values(a, NVFP4_ROWS, rotated=True), expected) == 0


def test_draws_depend_on_every_part_of_their_key_and_not_on_the_part_of_a_matrix() -> None:
    device = torch.device("cpu")
    key = (7, "policy", 3, 1, 4, "dgrad")
    draws = uniform_draws(key, range(8), 32, device)
    assert torch.equal(uniform_draws(key, range(8), 32, device), draws)
    assert torch.equal(uniform_draws(key, range(5, 8), 32, device), draws[5:])
    assert draws.min() >= 0
    assert draws.max() < 1
    for place in range(len(key)):
        other = tuple("x" if i == place else part for i, part in enumerate(key))
        shared = (uniform_draws(other, range(8), 32, device) == draws).double().mean()
        assert shared < 0.05, f"part {place}"


@pytest.mark.parametrize("format", [NVFP4_ROWS, MXFP4, MXFP8], ids=lambda f: f.words)
def test_stochastic_rounding_is_unbiased(format: BlockFormat) -> None:
    """The mean of n draws is off by sqrt(p (1 - p) / n) of the distance of codes, 5 times at most.

    Elements of one draw and draws of one element are both tried.
    """
    n, row = 4096, random(1, 64) * random(1, 64, seed=1).mul(2).exp2()
    row[0, 3] = 0.0
    x = row.expand(n, 64)
    single = quantize_blocks(row, format, torch.full((1, 64), 1.0)).values.double()
    raised = quantize_blocks(row, format, torch.zeros(1, 64)).values.double()
    assert raised[0, 3] == 0  # a value that is a code stays
    distance, wide = raised - single, row.double()
    share = torch.where(distance > 0, (wide - single) / distance, 0.0)
    assert ((share >= 0) & (share < 1)).all()
    bound = 5 * distance * (share * (1 - share) / n).sqrt() + distance * 2.0**-23
    by_element = block_values(x, format, ("seed", 1)).double()
    assert ((by_element == single) | (by_element == raised)).all()
    by_key = torch.cat([block_values(row, format, ("seed", key)) for key in range(n)]).double()
    for values in (by_element, by_key):
        assert ((values.mean(0) - wide[0]).abs() <= bound[0]).all()
    # Draws of different elements are independent: the error of a sum is that of its variances.
    off = (by_element - wide).sum(1)
    variance = (distance.square() * share * (1 - share)).sum()
    assert off.var() == pytest.approx(float(variance), rel=5 * math.sqrt(2 / n))


def test_blocks_must_divide_a_matrix() -> None:
    with pytest.raises(AssertionError, match=r"\[16, 40\]"):
        quantize_blocks(random(16, 40), NVFP4_ROWS)
