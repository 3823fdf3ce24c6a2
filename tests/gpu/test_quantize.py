"""The Triton quantizers give the bits of the reference, NaN and ragged shapes included."""

from __future__ import annotations

import pytest
import torch
from linears import assert_same
from tests.kernels.bits import different

from jetrl.precision.quantize import QTensor, dithered_bf16, quantize
from jetrl.precision.saved import saved_codes, saved_values

pytestmark = pytest.mark.gpu

KERNELS = "jetrl.precision.triton.quantize"
TOKENS = [1, 63, 129, 1000]


def values(tokens: int, columns: int, std: float, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + columns)
    x = torch.randn(tokens, columns, generator=generator) * std
    x[:, :128] *= (torch.arange(tokens) % 3 > 0)[:, None]  # whole zero groups
    return x.to(dtype)


@pytest.mark.parametrize("std", [1e-30, 1e-10, 1e-2, 1.0, 1e3])
@pytest.mark.parametrize("tokens", TOKENS)
def test_activations_have_the_bits_of_the_reference(kernels, tokens: int, std: float) -> None:
    for columns in (64, 128, 192, 576, 640):
        x = values(tokens, columns, std, torch.bfloat16)
        rows, by_token = kernels.quantize_rows_and_tokens(x.cuda())
        assert_same(rows, quantize(x), f"rows {columns}")
        assert_same(by_token, quantize(x, (128, 1)), f"tokens {columns}")
        assert_same(kernels.quantize_rows(x.cuda()), quantize(x), f"rows alone {columns}")
        squares = kernels.quantize_squares(x.cuda())
        assert_same(squares, quantize(x, (128, 128)), f"squares {columns}")
        assert squares.codes.mT.is_contiguous()


@pytest.mark.parametrize("tokens", TOKENS)
def test_saved_codes_have_the_bits_of_the_reference(tokens: int) -> None:
    for columns in (64, 192, 5120):
        x = values(tokens, columns + 64, 3.0, torch.bfloat16)[:, :columns]
        x[-1, 0] = torch.nan
        found, wanted = saved_codes(x.cuda()), saved_codes(x)
        assert different(found[:, :columns].cpu(), wanted[:, :columns]) == 0
        assert different(saved_values(found).cpu(), saved_values(wanted)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("columns", [384, 960])
def test_formats_scales_and_dtypes(kernels, dtype, format: str, scales: str, columns: int) -> None:
    x = values(129, columns, 0.3, dtype)
    rows, by_token = kernels.quantize_rows_and_tokens(x.cuda(), format, scales)
    assert_same(rows, quantize(x, (1, 128), format, scales))
    assert_same(by_token, quantize(x, (128, 1), format, scales))
    x = x.bfloat16()
    assert_same(kernels.quantize_squares(x.cuda(), scales), quantize(x, (128, 128), scales=scales))


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
def test_every_bfloat16_as_a_group_maximum(kernels, scales: str) -> None:
    """Scales and codes for all 65536 bfloat16 values, NaN and Inf included, alone in a group."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(every), 128, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = every, every / 3
    assert_same(kernels.quantize_rows(x.cuda(), "e4m3", scales), quantize(x, scales=scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("n, k", [(384, 896), (960, 576), (192, 1536), (64, 64)])
def test_weight_and_its_byte_transpose(kernels, dtype, scales: str, n: int, k: int) -> None:
    w = values(n, k, 0.01, dtype)
    direct = kernels.quantize_weight(w.cuda(), scales=scales)
    turned = kernels.turned_weight(direct)
    reference = quantize(w, (128, 128), scales=scales)
    assert_same(direct, reference)
    assert_same(turned, reference.mT)
    assert turned.codes.stride() == (-(-n // 128) * 128, 1)
    again = kernels.quantize_weight(2 * w.cuda(), scales=scales, out=direct)
    assert again.codes.data_ptr() == direct.codes.data_ptr()
    assert_same(again, quantize(2 * w, (128, 128), scales=scales))


def test_a_ranks_rows_are_those_of_the_whole_weight(kernels) -> None:
    """Rows 512 to 960 of a weight [960, 576], written into the whole one."""
    w = values(960, 576, 0.01, torch.float32)
    whole = kernels.quantize_weight(w.cuda())
    own = QTensor(whole.codes[512:], whole.scales[4:], whole.block)
    kernels.quantize_weight(3 * w[512:].cuda(), out=own)
    w[512:] *= 3
    assert_same(whole, quantize(w, (128, 128)))
    assert_same(kernels.turned_weight(whole), quantize(w, (128, 128)).mT)
    draws = kernels.dithered_bf16(w[512:].cuda(), "embed", 2**22 + 512)
    assert torch.equal(draws.cpu(), dithered_bf16(w, "embed", 2**22)[512:])


@pytest.mark.usefixtures("one_large_test_at_a_time")
def test_more_than_two_to_the_31_elements(kernels) -> None:
    columns, rows = 2**12, 2**19 + 300
    x = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda")
    tail = values(200, columns, 1.0, torch.bfloat16)
    x[-200:] = tail.cuda()
    by_row, by_token = kernels.quantize_rows_and_tokens(x)
    assert_same(QTensor(by_row.codes[-200:], by_row.scales[-200:], (1, 128)), quantize(tail))
    last = rows // 128 * 128
    reference = quantize(x[last:].cpu(), (128, 1))
    assert_same(QTensor(by_token.codes[last:], by_token.scales[-1:], (128, 1)), reference)
    del by_row, by_token
    squares = kernels.quantize_squares(x)
    reference = quantize(x[last:].cpu(), (128, 128))
    assert_same(QTensor(squares.codes[last:], squares.scales[-1:], (128, 128)), reference)
