"""FP8 GEMMs beside BF16, alone and with the quantization of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jetrl.bench._bits import gemms
from jetrl.bench._timing import Row, report, seconds_per_call
from jetrl.precision.gemm_hopper import Backend, deep_gemm_installed, fp8_matmul_hopper
from jetrl.precision.quantize import QTensor
from jetrl.precision.quantize_hopper import (
    quantize_rows,
    quantize_rows_and_tokens,
    quantize_tokens,
    quantize_weight,
    turned_weight,
)

# (N, K) of Qwen3-8B's linears: qkv, o, gate_up, down
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}

_MORE_THAN_CACHED = 2**28  # bytes; the L2 cache has 50 MB


def backends() -> list[Backend]:
    return ["cublas", "deep_gemm"] if deep_gemm_installed() else ["cublas"]


def _row(
    name: str, layer: str, rows: int, flops: int, base: float, calls: Sequence[Callable[[], Any]]
) -> Row:
    seconds = seconds_per_call(calls) if calls else base
    return {
        "name": name,
        "layer": layer,
        "rows": rows,
        "microseconds": round(seconds * 1e6, 1),
        "teraflops": round(flops / seconds / 1e12),
        "times_bf16": round(base / seconds, 2),
    }


def _forward_rows(layer: str, xs: list[Tensor], weights: list[Tensor]) -> list[Row]:
    """FProp of `layer`, or its DGrad when the weights are transposes. Calls go round the inputs and
    the weights, so that neither is still cached when it is read again."""
    rows = len(xs[0])
    turns = [(xs[i % len(xs)], i % len(weights)) for i in range(max(len(xs), len(weights)))]
    flops = 2 * rows * weights[0].numel()
    base = seconds_per_call([partial(torch.mm, x, weights[i].t()) for x, i in turns])
    quantized = [quantize_weight(w) for w in weights]
    operands = [quantize_rows(x) for x, _ in turns]
    out = [_row("bf16", layer, rows, flops, base, [])]
    few: list[Backend] = ["triton"] if rows <= 256 else []
    for backend in [*backends(), *few]:
        alone = [
            partial(fp8_matmul_hopper, a, quantized[i], torch.bfloat16, backend)
            for a, (_, i) in zip(operands, turns, strict=True)
        ]
        out.append(_row(f"fp8 {backend}", layer, rows, flops, base, alone))

    def with_input(x: Tensor, w: QTensor) -> Tensor:
        return fp8_matmul_hopper(quantize_rows(x), w)

    calls = [partial(with_input, x, quantized[i]) for x, i in turns]
    out.append(_row("fp8 with quantization", layer, rows, flops, base, calls))
    if rows <= 256:  # bound by reading the weight
        for row, size in zip(out, (2, *[1] * len(out)), strict=False):
            seconds = row["microseconds"] / 1e6
            row["terabytes_per_s"] = round(size * weights[0].numel() / seconds / 1e12, 2)
    return out


def _weight_gradient_rows(layer: str, rows: int, n: int, k: int) -> list[Row]:
    dys = [torch.randn(rows, n, device="cuda").bfloat16() for _ in range(2)]
    xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in range(2)]
    flops = 2 * rows * n * k
    pairs = list(zip(dys, xs, strict=True))
    base = seconds_per_call([partial(torch.mm, dy.t(), x) for dy, x in pairs])
    base32 = seconds_per_call([partial(torch.mm, dy.t(), x, out_dtype=torch.float32)
                               for dy, x in pairs])  # fmt: skip
    kept = [quantize_tokens(x) for x in xs]
    operands = [quantize_tokens(dy) for dy in dys]
    name = f"{layer} wgrad"
    out = [
        _row("bf16", name, rows, flops, base, []),
        {**_row("bf16, fp32 out", name, rows, flops, base32, []),
         "times_bf16": round(base / base32, 2)},
    ]  # fmt: skip
    for backend in backends():
        calls = [
            partial(fp8_matmul_hopper, a.mT, b.mT, torch.float32, backend)
            for a, b in zip(operands, kept, strict=True)
        ]
        out.append(_row(f"fp8 {backend}, fp32 out", name, rows, flops, base, calls))
    if deep_gemm_installed():
        gradient = torch.zeros(n, k, device="cuda")
        calls = [
            partial(fp8_matmul_hopper, a.mT, b.mT, torch.float32, "deep_gemm", gradient)
            for a, b in zip(operands, kept, strict=True)
        ]
        out.append(_row("fp8 deep_gemm, accumulating", name, rows, flops, base, calls))
    return [*out, _backward_row(layer, rows, n, k, dys, kept)]


def _backward_row(
    layer: str, rows: int, n: int, k: int, dys: list[Tensor], kept: list[QTensor]
) -> Row:
    """DGrad and WGrad together with the one pass that quantizes dY both ways."""
    weight = torch.randn(n, k, device="cuda").bfloat16()
    x = torch.randn(rows, k, device="cuda").bfloat16()
    quantized = quantize_weight(weight)

    def bf16(dy: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(dy, weight), torch.mm(dy.t(), x)

    def fp8(dy: Tensor, x_kept: QTensor) -> tuple[Tensor, Tensor]:
        by_row, by_token = quantize_rows_and_tokens(dy)
        dw = fp8_matmul_hopper(by_token.mT, x_kept.mT, torch.float32)
        return fp8_matmul_hopper(by_row, turned_weight(quantized)), dw

    base = seconds_per_call([partial(bf16, dy) for dy in dys])
    calls = [partial(fp8, dy, x_kept) for dy, x_kept in zip(dys, kept, strict=True)]
    name = f"{layer} dgrad + wgrad"
    return _row("fp8 with quantization of dY", name, rows, 4 * rows * n * k, base, calls)


def run(tokens: int = 16384, decode_rows: tuple[int, ...] = (8, 64, 256)) -> list[Row]:
    """Rows for FProp, DGrad and WGrad at `tokens`, and FProp at decode sizes."""
    out: list[Row] = []
    for layer, (n, k) in SHAPES.items():
        copies = 1 + _MORE_THAN_CACHED // (n * k)
        weights = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(copies)]
        for rows in (tokens, *decode_rows):
            xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in range(3)]
            out += _forward_rows(layer, xs, weights if rows <= 256 else weights[:1])
        dys = [torch.randn(tokens, n, device="cuda").bfloat16() for _ in range(2)]
        out += _forward_rows(f"{layer} dgrad", dys, [weights[0].t().contiguous()])
        del xs, dys, weights
        out += _weight_gradient_rows(layer, tokens, n, k)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """`jetrl bench gemm`."""
    report("gemm", run, argv, gemms)


if __name__ == "__main__":
    main()
