"""The speed of INT8 products with one scale per row, next to DeepGEMM's FP8 and cuBLAS's BF16.

    python -m benchmarks.int8_products --out FILE.json

One plain Triton kernel (no Hopper instruction by hand) multiplies INT8 rows along the whole K into
int32 and scales by row and column at the end, so its sums are exact in any order; every element is
compared with torch's integer product first. `quantize` rounds BF16 rows to INT8 with a scale per
row, with a Hadamard rotation in blocks of 64 and without. Operands are Gaussian, as activations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.eight_bits import hadamard
from benchmarks.harness import Row, command_typed, print_table, require_same_bits, write_results
from torch import Tensor
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl.precision.hopper.gemm import fp8_matmul_hopper
from jetrl.precision.hopper.quantize import quantize_rows, quantize_weight

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
# Rows and columns of a tile, warps, stages, halves in which a tile is written.
TILES = [(128, 256, 8, 3, 1), (128, 256, 8, 4, 2), (256, 128, 8, 4, 2), (128, 128, 4, 4, 1)]
TILES += [(64, 128, 4, 5, 1), (64, 256, 4, 4, 1)]


@triton.jit
def product_kernel(
    a,
    b,
    a_scales,
    b_scales,
    out,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Multiply a [M, K] by b [N, K] transposed: int8, exact in int32, then scaled to bfloat16."""
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        first = tile // (8 * across) * 8
        height = min(down - first, 8)
        m = (first + tile % (8 * across) % height) * ROWS
        n = tile % (8 * across) // height * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.int32)
        for k in range(0, K, 128):
            sums = tl.dot(a.load([m, k]), b.load([n, k]).T, sums, out_dtype=tl.int32)
        s = tl.load(a_scales + m + tl.arange(0, ROWS), mask=m + tl.arange(0, ROWS) < M)[:, None]
        if HALVES == 1:
            t = tl.load(b_scales + n + tl.arange(0, COLUMNS))[None, :]
            out.store([m, n], (sums.to(tl.float32) * s * t).to(tl.bfloat16))
        else:
            HALF: tl.constexpr = COLUMNS // 2
            parts = tl.permute(tl.reshape(sums, (ROWS, 2, HALF)), (0, 2, 1))
            low, high = tl.split(parts)
            t = tl.load(b_scales + n + tl.arange(0, HALF))[None, :]
            out.store([m, n], (low.to(tl.float32) * s * t).to(tl.bfloat16))
            t = tl.load(b_scales + n + HALF + tl.arange(0, HALF))[None, :]
            out.store([m, n + HALF], (high.to(tl.float32) * s * t).to(tl.bfloat16))


@triton.jit
def quantize_kernel(
    x, matrix, codes, scales, K: tl.constexpr, WIDTH: tl.constexpr, TURN: tl.constexpr
):
    """Round one row per program to int8 with one scale, after a rotation in blocks of 64."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    values = tl.load(x + row * K + column, mask=column < K, other=0.0)
    if TURN:
        i = tl.arange(0, 64)
        turn = tl.load(matrix + i[:, None] * 64 + i[None, :])
        values = tl.reshape(tl.dot(tl.reshape(values, (WIDTH // 64, 64)), turn), (WIDTH,))
    values = values.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values)), 1e-30)
    rounded = libdevice.rint(values * (127.0 / largest)).to(tl.int8)
    tl.store(codes + row * K + column, rounded, mask=column < K)
    tl.store(scales + row, largest / 127.0)


def product(a: Tensor, b: Tensor, s: Tensor, t: Tensor, out: Tensor, tile: Sequence[int]) -> Tensor:
    rows, columns, warps, stages, halves = tile
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    product_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [rows, 128]),
        TensorDescriptor.from_tensor(b, [columns, 128]),
        s,
        t,
        TensorDescriptor.from_tensor(out, [rows, columns // halves]),
        *(len(a), len(b), a.shape[1]),
        *(rows, columns, halves, programs),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def microseconds(call: Callable[[], Any]) -> float:
    return 1e3 * triton.testing.do_bench(call, warmup=15, rep=80, return_mode="median")


def product_rows(layer: str, rows: int) -> list[Row]:
    """Time the forms of one product; raise MismatchError if an INT8 sum is not exact."""
    n, k = LAYERS[layer]
    x, w = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (rows, n))
    a, b = ((32 * one).round().clamp(-127, 127).to(torch.int8) for one in (x, w))
    s, t = (torch.rand(size, device="cuda") + 0.5 for size in (rows, n))
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    exact = (torch._int_mm(a, b.T).float() * s[:, None] * t).to(torch.bfloat16)
    times, different = [], 0
    for tile in TILES:
        call = functools.partial(product, a, b, s, t, out.zero_(), tile)
        different += int((call() != exact).sum())
        times.append((microseconds(call), tile))
    require_same_bits("int8_products", different)
    best, tile = min(times)
    q, v = quantize_rows(x), quantize_weight(w)
    forms = {
        "bf16": microseconds(lambda: x @ w.T),
        "fp8": microseconds(lambda: fp8_matmul_hopper(q, v)),
        "int8": best,
    }
    return [
        {
            "layer": layer,
            "rows": rows,
            "name": name,
            "microseconds": round(time, 1),
            "teraops": round(2e-6 * rows * n * k / time),
            "tile": "x".join(map(str, tile)) if name == "int8" else "",
        }
        for name, time in forms.items()
    ]


def quantize_row(rows: int, k: int, turn: bool) -> Row:
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    codes, scales = torch.empty_like(x, dtype=torch.int8), torch.empty(rows, device="cuda")
    matrix = hadamard(64, x.device).bfloat16()
    width = triton.next_power_of_2(k)
    grid, operands = (rows,), (x, matrix, codes, scales)
    calls = [
        functools.partial(quantize_kernel[grid], *operands, k, width, turn, num_warps=warps)
        for warps in (4, 8)
    ]
    time = min(microseconds(call) for call in calls)
    name = "quantize, rotated" if turn else "quantize"
    return {
        "layer": f"K {k}",
        "rows": rows,
        "name": name,
        "microseconds": round(time, 1),
        "terabytes_per_s": round(3e-6 * rows * k / time, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8_products", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 2048, 16384])
    parser.add_argument("--out", default="build/bench/int8_products.json")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = [row for count in args.rows for layer in LAYERS for row in product_rows(layer, count)]
    rows += [
        quantize_row(n, k, turn) for n in args.rows for k in (4096, 12288) for turn in (False, True)
    ]
    command = command_typed("python -m benchmarks.int8_products", argv)
    write_results(args.out, "int8_products", command, rows)
    print_table(rows)


if __name__ == "__main__":
    main()
