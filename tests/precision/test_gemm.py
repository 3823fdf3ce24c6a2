from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from jetrl.precision import QTensor, quantize
from jetrl.precision.gemm import bf16_matmul, fp8_matmul


def operands(m: int, n: int, k: int) -> tuple[QTensor, QTensor]:
    g = torch.Generator().manual_seed(m)
    return (
        quantize(torch.randn(m, k, generator=g), (1, 128)),
        quantize(torch.randn(n, k, generator=g), (128, 128)),
    )


def test_follows_the_canonical_order() -> None:
    """K blocks in order, one float32 multiply by the scales and one add for each."""
    a, b = operands(3, 128, 384)
    expected = torch.zeros(3, 128)
    for block in range(3):
        k = slice(128 * block, 128 * block + 128)
        partial = (a.codes[:, k].double() @ b.codes[:, k].double().T).float()
        expected = expected + partial * (a.scales[:, block, None] * b.scales[0, block])
    assert torch.equal(fp8_matmul(a, b, torch.float32), expected)


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
def test_a_short_group_has_the_bits_of_one_filled_up_with_zeros(scales: str) -> None:
    """FProp, DGrad and WGrad of a layer [960, 576]."""
    tokens, n, k = 130, 960, 576
    g = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(*size, generator=g) for size in ((tokens, k), (n, k), (tokens, n)))
    x[3], w[0, 512:] = 0, 50

    def products(n: int, k: int) -> list[torch.Tensor]:
        wide_x, wide_dy = pad(x, (0, k - x.shape[1])), pad(dy, (0, n - dy.shape[1]))
        wide_w = pad(w, (0, k - w.shape[1], 0, n - w.shape[0]))
        weight = quantize(wide_w, (128, 128), scales=scales)
        rows, tokens = (quantize(wide_dy, block, scales=scales) for block in ((1, 128), (128, 1)))
        squares = quantize(wide_x, (128, 128), scales=scales)
        return [
            fp8_matmul(quantize(wide_x, scales=scales), weight),
            fp8_matmul(rows, weight.mT),
            fp8_matmul(tokens.mT, squares.mT),
        ]

    for partial, whole in zip(products(n, k), products(1024, 640), strict=True):
        assert torch.equal(partial, whole[: partial.shape[0], : partial.shape[1]])


@pytest.mark.parametrize("product", ["fp8", "bf16"])
def test_a_row_has_the_same_bits_at_every_batch_size(product: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(70, 256, generator=g).bfloat16(),
        torch.randn(128, 256, generator=g).bfloat16(),
    )

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        if product == "bf16":
            return bf16_matmul(rows, w, torch.float32)
        return fp8_matmul(quantize(rows), quantize(w, (128, 128)), torch.float32)

    whole = multiply(x)
    for start, size in ((0, 1), (3, 2), (10, 60), (69, 1)):
        assert torch.equal(multiply(x[start : start + size]), whole[start : start + size])
