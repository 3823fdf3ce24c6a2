"""The output head's FProp, DGrad and WGrad in `int8x2` against BF16.

    jetrl bench head [--shape qwen3-8b] [--rows 832 4096] [--out FILE]

BF16 products are torch's, with FP32 results for FProp and WGrad. `int8x2` runs as in training, in
chunks of `rows_per_chunk`, from ready operands of FProp; DGrad and WGrad include the quantization
of dY. `teraops` counts the INT8 products: two for DGrad, three for FProp and WGrad. `X` quantizes
hidden rows, `W` the weight. Kernels are compared with the references before the timing. Allow five
minutes on a GPU, most of them for compiling.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.harness import Row, begins
from benchmarks.operations import Operation
from benchmarks.shapes import SHAPES
from benchmarks.timing import seconds_eager
from torch import Tensor

from jetrl.precision import int8_planes
from jetrl.precision.backend import selected_backend
from jetrl.precision.gemm import free_matmul
from jetrl.precision.gradients import matmul_product
from jetrl.precision.int8_planes import (
    add_planes_wgrad,
    planes_dgrad,
    planes_fprop,
    planes_of_rows,
    rows_per_chunk,
)

PRODUCTS = {"fprop": 3, "dgrad": 2, "wgrad": 3}
CHECKED = (100, 1024, 5001)  # rows, hidden size, vocabulary

Call = Callable[[], Any]


def operands(rows: int, width: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden rows, bfloat16 [R, D], dY, float32 [R, V], and a weight, float32 [V, D]."""
    hidden = torch.randn(rows, width, device=device).bfloat16()
    dy = torch.randn(rows, vocabulary, device=device) * 1e-6
    return hidden, dy, torch.randn(vocabulary, width, device=device)


def bf16_calls(hidden: Tensor, dy: Tensor, weight: Tensor, total: Tensor) -> dict[str, Call]:
    """Return the products of BF16; WGrad adds to `total`, float32 [V, D]."""
    values, dy = weight.bfloat16(), dy.bfloat16()
    return {
        "fprop": lambda: matmul_product(hidden.mT, values.mT),
        "dgrad": lambda: free_matmul(dy, values),
        "wgrad": lambda: matmul_product(dy, hidden, total),
    }


def integer_calls(hidden: Tensor, dy: Tensor, weight: Tensor, total: Tensor) -> dict[str, Call]:
    """Return the same products in `int8x2`, and the quantization of hidden rows and weight."""
    w = planes_of_rows(weight)
    size = rows_per_chunk(len(weight))
    rows, gradients = hidden.split(size), dy.split(size)
    entered = [planes_of_rows(chunk) for chunk in rows]

    def add_wgrad() -> None:
        for x, gradient in zip(entered, gradients, strict=True):
            add_planes_wgrad(total, gradient, x)

    return {
        "fprop": lambda: [planes_fprop(x, w) for x in entered],
        "dgrad": lambda: [planes_dgrad(gradient, w) for gradient in gradients],
        "wgrad": add_wgrad,
        "X": lambda: [planes_of_rows(chunk) for chunk in rows],
        "W": lambda: planes_of_rows(weight, w),
    }


def different(args: argparse.Namespace) -> int:
    """Count elements in which the kernels of `int8x2` differ from their references."""
    with selected_backend(defined=True):
        hidden, dy, weight = operands(*CHECKED, args.device)
        w, x = planes_of_rows(weight), planes_of_rows(hidden)
        dw, expected = torch.zeros_like(weight), torch.zeros_like(weight)
        add_planes_wgrad(dw, dy, x)
        int8_planes.add_planes_wgrad_ref(expected, dy, x)
        pairs = [
            (planes_fprop(x, w), int8_planes.planes_fprop_ref(x, w)),
            (planes_dgrad(dy, w), int8_planes.planes_dgrad_ref(dy, w)),
            (dw, expected),
            *zip(w.tensors(), int8_planes.planes_of_rows_ref(weight).tensors(), strict=True),
        ]
        return sum(int((found != true).sum()) for found, true in pairs)


def head_rows(shape: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row per operation and number of hidden rows."""
    width, vocabulary = SHAPES[shape]["hidden_size"], SHAPES[shape]["vocab_size"]
    for count in args.rows:
        begins(f"{shape}, {count} rows")
        hidden, dy, weight = operands(count, width, vocabulary, args.device)
        total = torch.zeros_like(weight)
        of_bf16 = bf16_calls(hidden, dy, weight, total)
        bf16 = {name: seconds_eager(call) for name, call in of_bf16.items()}
        del of_bf16
        with selected_backend(defined=True):
            calls = integer_calls(hidden, dy, weight, total)
            for name, call in calls.items():
                spent = seconds_eager(call)
                row: Row = {"shape": shape, "rows": count, "operation": name}
                row["milliseconds"] = round(1e3 * spent, 3)
                if name in bf16:
                    operations = 2 * PRODUCTS[name] * count * vocabulary * width
                    row["teraops"] = round(1e-12 * operations / spent, 1)
                    row["bf16_milliseconds"] = round(1e3 * bf16[name], 3)
                    row["of_bf16_time"] = round(spent / bf16[name], 3)
                yield row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --rows."""
    default = [832, 4096]
    parser.add_argument("--rows", type=int, nargs="+", default=default, help="default 832 4096")


OPERATION = Operation(__doc__, head_rows, add_arguments, different)
