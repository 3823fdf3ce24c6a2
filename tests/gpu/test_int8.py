"""`precision.int8` on a GPU: the bits of the reference, for any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linears import assert_same

from jetrl.kernels.norm import rms_norm
from jetrl.kernels.norm_triton import rms_norm_quantize
from jetrl.kernels.swiglu_triton import swiglu_forward, swiglu_quantize, swiglu_quantize_with_values
from jetrl.precision.hopper import int8_rows
from jetrl.precision.int8 import int8_matmul, int8_squares_turned, int8_tokens, int8_turned
from jetrl.precision.int8 import int8_rows as rows_of
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton import int8

pytestmark = pytest.mark.gpu


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=g, device="cuda")
    x[:, columns // 3] *= 50
    return x.bfloat16()


def there(q: QTensor) -> QTensor:
    return replace(q, codes=q.codes.cuda(), scales=q.scales.cuda())


@pytest.mark.parametrize(
    "rows, k", [(1, 64), (63, 576), (129, 1536), (300, 4096), (5, 12288), (3, 24576), (2, 51200)]
)
def test_rows_have_the_references_bits(rows: int, k: int) -> None:
    x = normal(rows, k)
    x[0, 1], x[-1] = float("nan"), 0.0
    assert_same(int8.int8_rows(x), rows_of(x.cpu()))
    w = normal(rows, k, seed=1).float() * 1e-3
    out = int8.int8_rows(normal(rows, k).float())
    assert_same(int8.int8_rows(w, out), rows_of(w.cpu()))


@pytest.mark.parametrize("tokens, n", [(1, 64), (63, 576), (1000, 960), (9000, 128)])
def test_tokens_have_the_references_bits(
    tokens: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(tokens, n)
    want = int8_tokens(x.cpu())
    assert_same(int8.int8_tokens(x), want)
    monkeypatch.setattr(int8, "multiprocessors", lambda device: 1)  # too many tokens for one pass
    assert_same(int8.int8_tokens(x), want)


@pytest.mark.parametrize("n, k", [(64, 64), (960, 576), (576, 1536)])
def test_a_turned_weight_has_the_references_bits(n: int, k: int) -> None:
    w = rows_of(normal(n, k).float().cpu())
    assert_same(int8.int8_turned(there(w)), int8_turned(w))


@pytest.mark.parametrize("n, k", [(384, 640), (960, 576), (64, 192)])
def test_squares_of_an_fp8_backward_have_the_references_bits(n: int, k: int) -> None:
    w = rows_of(normal(n, k).float().cpu())
    assert_same(int8.int8_squares_turned(there(w)), int8_squares_turned(w))


@pytest.mark.parametrize("m", [1, 63, 65, 200, 257, 1000])
@pytest.mark.parametrize("n, k", [(960, 576), (64, 64), (1152, 4096)])
def test_products_have_the_references_bits(m: int, n: int, k: int) -> None:
    a, b = rows_of(normal(m, k).cpu()), rows_of(normal(n, k, seed=1).cpu())
    for dtype in (torch.bfloat16, torch.float32):
        made = int8_rows.int8_matmul(there(a), there(b), dtype)
        assert torch.equal(made.cpu(), int8_matmul(a, b, dtype))


@pytest.mark.parametrize("m", [8, 100, 256])
def test_cuts_change_no_bit(m: int) -> None:
    a, b = int8.int8_rows(normal(m, 4096)), int8.int8_rows(normal(6144, 4096, seed=1))
    cuts = [(64, 1, 32, 8, 2), (64, 3, 64, 3, 1), (128, 3, 64, 5, 1), (256, 3, 64, 4, 1)]
    found = [int8_rows.rows_matmul(a, b, tiles=int8_rows.Tiles(*cut)) for cut in cuts]
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("rows, width", [(3, 576), (64, 4096), (3, 6144), (300, 4096)])
def test_the_fused_norm_has_the_bits_of_its_parts(rows: int, width: int) -> None:
    x, delta = normal(rows, width), normal(rows, width, seed=1)
    weight = 1 + 0.1 * normal(1, width, seed=2)[0]
    total, _, codes, values = rms_norm_quantize(x, weight, 1e-6, delta, True, None, True)
    y = rms_norm(x + delta, weight, 1e-6)
    assert torch.equal(total, x + delta)
    assert values is not None
    assert torch.equal(values, y)
    assert_same(codes, int8.int8_rows(y))


@pytest.mark.parametrize("rows, inner", [(3, 320), (300, 1536), (70, 12288), (2, 18944)])
def test_the_fused_swiglu_has_the_bits_of_its_parts(rows: int, inner: int) -> None:
    gate_up = normal(rows, 2 * inner)
    y = swiglu_forward(gate_up)
    codes, values = swiglu_quantize_with_values(gate_up, None)
    assert torch.equal(values, y)
    assert_same(codes, int8.int8_rows(y))
    assert_same(swiglu_quantize(gate_up, None), codes)
