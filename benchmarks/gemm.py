"""FP8 products of a decoder layer, by the libraries and kernels that compute them, beside BF16.

    jetrl bench gemm [--shape qwen3-8b] [--out FILE]

FProp, DGrad and WGrad of each linear layer at --tokens rows, with operands that are ready and with
their quantization, and FProp at the numbers of rows of decode.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.harness import Row, add_tokens_argument, seconds_in_turn
from benchmarks.operations import Operation
from benchmarks.shapes import linear_shapes
from torch import Tensor

from jetrl.precision.hopper.gemm import Backend, deep_gemm_installed, fp8_matmul_hopper
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton.add import add_products
from jetrl.precision.triton.quantize import (
    quantize_rows,
    quantize_rows_and_tokens,
    quantize_squares,
    quantize_weight,
    turned_weight,
)

DECODE_ROWS = (8, 64, 256)
_MORE_THAN_CACHED = 2**28  # bytes; the L2 cache has 50 MB


def backends() -> list[Backend]:
    """Return the libraries with an FP8 GEMM of many rows that are installed."""
    return ["cublas", "deep_gemm"] if deep_gemm_installed() else ["cublas"]


def _gemm_rows(
    layer: str, rows: int, flops: int, forms: dict[str, list[Callable[[], Any]]]
) -> list[Row]:
    """Return a row for each form, measured in turn; the first form is BF16."""
    seconds = seconds_in_turn(list(forms.values()))
    return [
        {
            "name": name,
            "layer": layer,
            "rows": rows,
            "microseconds": round(each * 1e6, 1),
            "teraflops": round(flops / each / 1e12),
            "times_bf16": round(seconds[0] / each, 2),
        }
        for name, each in zip(forms, seconds, strict=True)
    ]


def _forward_rows(layer: str, xs: list[Tensor], weights: list[Tensor]) -> list[Row]:
    """Return the rows of FProp of a layer, or of its DGrad when the weights are transposes."""
    rows = len(xs[0])
    turns = [(xs[i % len(xs)], i % len(weights)) for i in range(max(len(xs), len(weights)))]
    quantized = [quantize_weight(w) for w in weights]
    operands = [quantize_rows(x) for x, _ in turns]
    forms: dict[str, list[Callable[[], Any]]] = {
        "bf16": [partial(torch.mm, x, weights[i].t()) for x, i in turns]
    }
    few: list[Backend] = ["triton"] if rows <= 256 else []
    for backend in [*backends(), *few]:
        forms[f"fp8 {backend}"] = [
            partial(fp8_matmul_hopper, a, quantized[i], torch.bfloat16, backend)
            for a, (_, i) in zip(operands, turns, strict=True)
        ]

    def with_input(x: Tensor, w: QTensor) -> Tensor:
        return fp8_matmul_hopper(quantize_rows(x), w)

    forms["fp8 with quantization"] = [partial(with_input, x, quantized[i]) for x, i in turns]
    out = _gemm_rows(layer, rows, 2 * rows * weights[0].numel(), forms)
    if rows <= 256:  # bound by reading the weight
        for row, size in zip(out, (2, *[1] * len(out)), strict=False):
            seconds = row["microseconds"] / 1e6
            row["terabytes_per_s"] = round(size * weights[0].numel() / seconds / 1e12, 2)
    return out


def _wide_product(dy: Tensor, x: Tensor) -> Tensor:
    return torch.mm(dy.t(), x, out_dtype=torch.float32)


def _backward_rows(layer: str, dys: list[Tensor], weight: Tensor, k: int) -> list[Row]:
    """Return the rows of WGrad, DGrad, and both as backward makes them, beside BF16 products."""
    rows, n = dys[0].shape
    xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in dys]
    flops, quantized = 2 * rows * n * k, quantize_weight(weight)
    pairs = list(zip(dys, xs, strict=True))
    total = torch.zeros(n, k, device="cuda")
    operands = [(quantize_rows_and_tokens(dy)[1].mT, quantize_squares(x).mT) for dy, x in pairs]
    inputs = [(a, x) for (a, _), x in zip(operands, xs, strict=True)]

    def wgrad(a: QTensor, x: Tensor, into: Tensor | None) -> Tensor:
        return add_products(fp8_matmul_hopper(a, quantize_squares(x).mT)[None], into)

    def bf16_adding(dy: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.addmm.dtype_out(total, dy.t(), x, torch.float32, out=total)

    def dgrad(dy: Tensor) -> Tensor:
        return fp8_matmul_hopper(quantize_rows(dy), turned_weight(quantized))

    def bf16_both(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(dy, weight), _wide_product(dy, x)

    def fp8_both(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        by_row, by_token = quantize_rows_and_tokens(dy)
        dx = fp8_matmul_hopper(by_row, turned_weight(quantized))
        return dx, wgrad(by_token.mT, x, None)

    alone: dict[str, list[Callable[[], Any]]] = {
        f"fp8 {b}": [partial(fp8_matmul_hopper, *pair, torch.bfloat16, b) for pair in operands]
        for b in backends()
    }
    products: dict[str, list[Callable[[], Any]]] = {
        "bf16, fp32 out": [partial(_wide_product, *pair) for pair in pairs],
        **alone,
        "fp8 with quantization of X, fp32 out": [partial(wgrad, a, x, None) for a, x in inputs],
    }
    adding: dict[str, list[Callable[[], Any]]] = {
        "bf16, adding": [partial(bf16_adding, *pair) for pair in pairs],
        "fp8 with quantization of X, adding": [partial(wgrad, a, x, total) for a, x in inputs],
    }
    out = _gemm_rows(f"{layer} wgrad", rows, flops, products)
    out += _gemm_rows(f"{layer} wgrad", rows, flops, adding)
    del operands, inputs, products, alone, adding
    through: dict[str, list[Callable[[], Any]]] = {
        "bf16, W as it lies": [partial(torch.mm, dy, weight) for dy in dys],
        "fp8 with quantization of dY, turning of W": [partial(dgrad, dy) for dy in dys],
    }
    both: dict[str, list[Callable[[], Any]]] = {
        "bf16, fp32 out": [partial(bf16_both, *pair) for pair in pairs],
        "fp8 with quantization, turning, fp32 out": [partial(fp8_both, *pair) for pair in pairs],
    }
    out += _gemm_rows(f"{layer} dgrad", rows, flops, through)
    return out + _gemm_rows(f"{layer} dgrad + wgrad", rows, 2 * flops, both)


def gemm_rows(shape: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for FProp, DGrad and WGrad at --tokens, and FProp at decode sizes."""
    tokens = args.tokens
    for layer, (n, k) in linear_shapes(shape).items():
        copies = 1 + _MORE_THAN_CACHED // (n * k)
        weights = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(copies)]
        for rows in (tokens, *DECODE_ROWS):
            xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in range(3)]
            yield from _forward_rows(layer, xs, weights if rows <= 256 else weights[:1])
        dys = [torch.randn(tokens, n, device="cuda").bfloat16() for _ in range(2)]
        yield from _forward_rows(f"{layer} dgrad", dys, [weights[0].t().contiguous()])
        del xs
        yield from _backward_rows(layer, dys, weights[0], k)


_SLICES = (slice(0, 1), slice(3, 10), slice(5, 69), slice(0, 200))
_ROWS = 300


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _apart(a: Tensor, b: Tensor) -> int:
    return int((_bytes(a) != _bytes(b)).sum())


def gemms(args: argparse.Namespace) -> int:
    """Compare GEMMs of rows alone with the batch, and the libraries with each other."""
    x, w = _random(_ROWS, 4096), quantize_weight(_random(4096, 4096))
    whole = fp8_matmul_hopper(quantize_rows(x), w)
    names: list[Backend | None] = [None, "cublas"]
    if deep_gemm_installed():
        names.append("deep_gemm")
    return sum(
        _apart(fp8_matmul_hopper(quantize_rows(x[rows]), w, backend=name), whole[rows])
        for rows in _SLICES
        for name in names
    )


OPERATION = Operation(__doc__, gemm_rows, add_tokens_argument, gemms, on_cpu=False)
