"""The quantizer against the rule written out by hand, value by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetrl.precision import QTensor, dequantize, quantize
from jetrl.precision.quantize import dithered_bf16

MAXIMUM = {"e4m3": 448.0, "int8": 127.0}
BLOCKS = [(1, 128), (128, 128), (128, 1)]


def by_hand(x: torch.Tensor, block: tuple[int, int], format: str = "e4m3") -> QTensor:
    """The rule of docs/precision.md, one group at a time, in numpy float32."""
    values, maximum = x.float().numpy(), MAXIMUM[format]
    rows, columns = block
    shape = [-(-values.shape[0] // rows), -(-values.shape[1] // columns)]
    scales, scaled = np.zeros(shape, np.float32), np.zeros_like(values)
    with np.errstate(all="ignore"):
        for i in range(shape[0]):
            for j in range(shape[1]):
                part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                a = np.maximum(np.abs(values[part]).max(), np.float32(2.0**-100))
                scales[i, j] = a / np.float32(maximum)
                product = values[part] * (np.float32(maximum) / a)
                scaled[part] = np.clip(product, -maximum, maximum)
    if format == "int8":  # numpy rounds to even, as IEEE says
        codes = torch.from_numpy(np.rint(np.nan_to_num(scaled, nan=0.0)).astype(np.int8))
    else:
        codes = torch.from_numpy(scaled).to(torch.float8_e4m3fn)
    return QTensor(codes, torch.from_numpy(scales), block)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == torch.float8_e4m3fn:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("format", MAXIMUM)
@pytest.mark.parametrize("block", [*BLOCKS, (1, 64)], ids=str)
@pytest.mark.parametrize("std", [1e-30, 1e3])
@pytest.mark.parametrize("rows", [1, 129])
def test_matches_the_rule(block: tuple[int, int], std: float, rows: int, format: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 200, generator=generator) * std).bfloat16()  # cut groups too
    x[0, :128] = 0
    q, expected = quantize(x, block, format), by_hand(x, block, format)
    assert same_bits(q.codes, expected.codes)
    assert same_bits(q.scales, expected.scales)


def test_nan_and_inf_give_nan_codes_never_a_clamped_value() -> None:
    x = torch.ones(2, 256)
    x[0, 5], x[1, 200] = torch.nan, torch.inf
    q = quantize(x)
    assert q.codes.float()[0, 5].isnan()
    assert q.codes.float()[1, 200].isnan()
    assert not q.codes.float()[0, 128:].isnan().any(), "the next group is untouched"
    assert dequantize(q)[1, 200].isnan()


def test_int8_rounds_ties_to_even_and_uses_all_codes_but_the_lowest() -> None:
    codes = torch.arange(-127, 128).float()
    q = quantize(codes[None], (1, 255), "int8")
    assert q.scales.item() == 1.0
    assert q.codes.tolist() == [codes.int().tolist()]
    ties = torch.cat([codes[:-1] + 0.5, codes[-1:]])  # the last keeps the scale at 1
    halves = quantize(ties[None], (1, 255), "int8").codes[0, :-1]
    assert torch.all(halves % 2 == 0)
    assert torch.all((halves - ties[:-1]).abs() == 0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
def test_a_bad_value_shows_in_its_whole_int8_group(bad: float, scales: str) -> None:
    """Integers know no NaN, so the group's scale says it, and no code is a clamped value."""
    x = torch.ones(2, 256)
    x[1, 200] = bad
    q = quantize(x, format="int8", scales=scales)
    assert not q.scales[1, 1].isfinite()
    assert not q.codes[1, 128:].any()
    back = dequantize(q)
    assert back[1, 128:].isnan().all()
    assert back[0].isfinite().all(), "the other groups are untouched"
    assert back[1, :128].isfinite().all(), "the other groups are untouched"


def test_dequantize_is_within_half_a_step() -> None:
    # E4M3 has 4 significant bits: a relative error of at most 2**-4, or half the smallest step
    # (2**-10 codes) of the group's scale; 2**-20 covers the roundings of s and of x * r.
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    q = quantize(x)
    scale = q.scales.repeat_interleave(128, dim=1)
    bound = torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
    assert torch.all((dequantize(q) - x).abs() <= bound)


@pytest.mark.parametrize("format", MAXIMUM)
def test_pow2_scales_are_powers_of_two_and_not_smaller(format: str) -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    plain, rounded = (quantize(x, format=format, scales=s) for s in ("fp32", "pow2"))
    mantissa, _ = torch.frexp(rounded.scales)
    assert torch.all(mantissa == 0.5)
    assert torch.all(rounded.scales >= plain.scales)
    assert torch.all(rounded.scales < 2 * plain.scales)


def test_transpose_is_the_same_bytes() -> None:
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(4))
    q, transposed = quantize(w, (128, 128)), quantize(w.T.contiguous(), (128, 128))
    assert same_bits(q.mT.codes.contiguous(), transposed.codes)
    assert same_bits(q.mT.scales, transposed.scales)


def test_refuses_what_it_cannot_quantize() -> None:
    with pytest.raises(ValueError, match="quantize takes"):
        quantize(torch.zeros(128))
    with pytest.raises(ValueError, match="int64"):
        quantize(torch.zeros(2, 128, dtype=torch.int64))


def test_fixed_draws_keep_small_changes_of_values_on_the_grid() -> None:
    grid = (0.05 * torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))).bfloat16()
    assert torch.equal(dithered_bf16(grid.float(), "a"), grid)
    changed = grid.float() + 2e-5
    moved = dithered_bf16(changed, "a")
    assert abs((moved - grid.float()).mean() / 2e-5 - 1) < 0.05
    assert abs((changed.bfloat16() - grid.float()).mean() / 2e-5) < 0.2  # to nearest
    assert torch.equal(dithered_bf16(changed[7:], "a", 7), moved[7:])  # of a rank's rows
    assert not torch.equal(dithered_bf16(changed, "b"), moved)
    for kind in (0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FFFFFFF):
        bits = torch.tensor([kind, kind - 2**31])  # of both signs
        nans = bits.to(torch.int32).repeat(8, 500).view(torch.float32)
        assert nans.isnan().all()
        assert dithered_bf16(nans, "a").isnan().all(), hex(kind)
    ends = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0]])
    assert torch.equal(dithered_bf16(ends, "a").nan_to_num(7.0), ends.bfloat16().nan_to_num(7.0))
