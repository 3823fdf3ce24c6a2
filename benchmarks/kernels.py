"""Kernels against their limits: FP8 GEMMs and fused layers.

Bits are checked before each measurement: a fast wrong kernel is not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.harness import Row, memory_row, report, seconds_in_turn
from torch import Tensor

from jetrl.kernels.attention.layout import KeyValueCodes
from jetrl.kernels.norm import rms_norm_ref
from jetrl.kernels.norm_hopper import rms_norm_backward, rms_norm_quantize, rms_norm_squares
from jetrl.kernels.rotary_hopper import qk_norm_rotary_backward, qk_norm_rotary_cache
from jetrl.kernels.swiglu_hopper import swiglu_backward_quantize, swiglu_forward, swiglu_quantize
from jetrl.precision.hopper.add import add_products
from jetrl.precision.hopper.gemm import Backend, deep_gemm_installed, fp8_matmul_hopper
from jetrl.precision.hopper.quantize import (
    quantize_rows,
    quantize_rows_and_tokens,
    quantize_squares,
    quantize_weight,
    turned_weight,
)
from jetrl.precision.quantize import QTensor, quantize

# (N, K) of Qwen3-8B's linears: qkv, o, gate_up, down
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}

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


def gemm_rows(tokens: int = 16384, decode_rows: tuple[int, ...] = (8, 64, 256)) -> list[Row]:
    """Return rows for FProp, DGrad and WGrad at `tokens`, and FProp at decode sizes."""
    out: list[Row] = []
    for layer, (n, k) in SHAPES.items():
        copies = 1 + _MORE_THAN_CACHED // (n * k)
        weights = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(copies)]
        for rows in (tokens, *decode_rows):
            xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in range(3)]
            out += _forward_rows(layer, xs, weights if rows <= 256 else weights[:1])
        dys = [torch.randn(tokens, n, device="cuda").bfloat16() for _ in range(2)]
        out += _forward_rows(f"{layer} dgrad", dys, [weights[0].t().contiguous()])
        del xs
        out += _backward_rows(layer, dys, weights[0], k)
    return out


HIDDEN, INTERMEDIATE, HEADS, GROUPS, HEAD_DIM, EPS = 4096, 12288, 32, 8, 128, 1e-6


def _sets(*shape: int, sets: int = 3) -> list[torch.Tensor]:
    return [torch.randn(*shape, device="cuda").bfloat16() for _ in range(sets)]


def _norm_rows(tokens: int) -> list[Row]:
    size, shape = tokens * HIDDEN, f"{tokens} x {HIDDEN}"
    xs, deltas = _sets(tokens, HIDDEN), _sets(tokens, HIDDEN)
    weight = torch.ones(HIDDEN, device="cuda").bfloat16()
    inverse = torch.ones(tokens, device="cuda")
    forward = [
        partial(rms_norm_quantize, x, weight, EPS, d) for x, d in zip(xs, deltas, strict=True)
    ]
    again = [partial(rms_norm_squares, x, weight, inverse) for x in (*xs, *deltas)]
    backward = [
        partial(rms_norm_backward, x, d, weight, inverse, x)
        for x, d in zip(xs, deltas, strict=True)
    ]
    return [
        memory_row("add, norm, quantize", shape, 7 * size, forward),
        memory_row("norm, quantize for WGrad", shape, 3 * size, again),
        memory_row("norm backward with residual", shape, 8 * size, backward),
    ]


def _swiglu_rows(tokens: int) -> list[Row]:
    size, shape = tokens * INTERMEDIATE, f"{tokens} x {INTERMEDIATE}"
    xs, dys = _sets(tokens, 2 * INTERMEDIATE, sets=2), _sets(tokens, INTERMEDIATE, sets=2)
    return [
        memory_row("swiglu, quantize", shape, 5 * size, [partial(swiglu_quantize, x) for x in xs]),
        memory_row(
            "swiglu backward, quantize both, and y",
            shape,
            11 * size,
            [partial(swiglu_backward_quantize, dy, x) for dy, x in zip(dys, xs, strict=True)],
        ),
    ]


def _rotary_rows(tokens: int) -> list[Row]:
    width = (HEADS + 2 * GROUPS) * HEAD_DIM
    shape = f"{tokens} x {width}"
    xs = _sets(tokens, width)
    table = torch.randn(tokens, 2, HEAD_DIM // 2, device="cuda")
    positions = torch.arange(tokens, device="cuda") % 4096
    weights = (torch.ones(HEAD_DIM, device="cuda").bfloat16(),) * 2
    sizes = tokens, GROUPS, HEAD_DIM
    caches = (KeyValueCodes.empty(*sizes, kv, "cuda") for kv in ("fp8", "int8"))
    forward, to_int8 = (
        [
            partial(qk_norm_rotary_cache, x, positions, table, weights, EPS, HEADS, cache, None)
            for x in xs
        ]
        for cache in caches
    )
    q, k = _sets(tokens, HEADS, HEAD_DIM, sets=1)[0], _sets(tokens, GROUPS, HEAD_DIM, sets=1)[0]
    backward = [
        partial(qk_norm_rotary_backward, q, k, k, x, positions, table, weights, EPS) for x in xs
    ]
    written = HEADS * HEAD_DIM * 2 + 2 * GROUPS * (HEAD_DIM + 4)
    moved = 2 * width * 2 + (HEADS + GROUPS) * HEAD_DIM * 2
    return [
        memory_row("qk norm, rotary, quantize kv", shape, tokens * (2 * width + written), forward),
        memory_row("the same to int8", shape, tokens * (2 * width + written), to_int8),
        memory_row("qk norm and rotary backward", shape, tokens * moved, backward),
    ]


def _decode_rows(tokens: int) -> list[Row]:
    return [_norm_rows(tokens)[0], _swiglu_rows(tokens)[0], _rotary_rows(tokens)[0]]


def norm_rows(tokens: int = 16384, decode_rows: tuple[int, ...] = (8, 64, 256)) -> list[Row]:
    """Return rows for every fused kernel of a decoder layer.

    Kernels that run in decode are also measured at its sizes, at which inputs come from the cache
    and most of the measured time is the launch.
    """
    few = [row for n in decode_rows for row in _decode_rows(n)]
    return [*_norm_rows(tokens), *_swiglu_rows(tokens), *_rotary_rows(tokens), *few]


_SLICES = (slice(0, 1), slice(3, 10), slice(5, 69), slice(0, 200))
_ROWS = 300


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _apart(a: Tensor, b: Tensor) -> int:
    return int((_bytes(a) != _bytes(b)).sum())


def _groups_apart(ours: QTensor, true: QTensor) -> int:
    """Count the bytes that differ, without rows of padding after the last token."""
    rows, blocks = true.codes.shape[0], true.scales.shape[0]
    return _apart(ours.codes[:rows], true.codes) + _apart(ours.scales[:blocks], true.scales)


def gemms() -> int:
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


def fused() -> int:
    """Compare fused norm and SwiGLU with the reference and its quantizer."""
    x, delta, weight = _random(_ROWS, 4096), _random(_ROWS, 4096), _random(4096)
    true = quantize(rms_norm_ref(x + delta, weight, 1e-6)[0], (1, 128))
    gate_up = _random(_ROWS, 2 * 4096)
    gated = quantize(swiglu_forward(gate_up), (1, 128))
    wrong = _groups_apart(swiglu_quantize(gate_up), gated)
    for training in (False, True):
        rows = rms_norm_quantize(x, weight, 1e-6, delta, training)[2]
        wrong += _groups_apart(rows, true)
    return wrong


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench NAME` of one kind of kernel."""
    benchmarks: dict[str, tuple[Callable[[], list[Row]], Callable[[], int]]] = {
        "gemm": (gemm_rows, gemms),
        "norm": (norm_rows, fused),
    }
    run, differences = benchmarks[name]
    report(name, run, argv, differences)
