"""Quantizers against the copy bandwidth: activations, both groupings, weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from benchmarks._bits import quantizers
from benchmarks._timing import Row, memory_row, report

from jetrl.precision.hopper.quantize import (
    quantize_rows,
    quantize_rows_and_tokens,
    quantize_squares,
    quantize_tokens,
    quantize_weight,
    turned_weight,
)

WIDTHS = (4096, 12288, 24576)
WEIGHTS = ((6144, 4096), (24576, 4096), (4096, 12288))


def run(tokens: int = 16384) -> list[Row]:
    """Return rows for BF16 activations [tokens, K] and FP32 weights [N, K]."""
    rows = []
    for width in WIDTHS:
        shape, size = f"{tokens} x {width}", tokens * width
        xs = [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(3)]
        scales = size // 128 * 4
        for name, function, num_bytes in (
            ("rows", quantize_rows, 3 * size + scales),
            ("tokens", quantize_tokens, 3 * size + scales),
            ("squares, turned", quantize_squares, 3 * size),
            ("rows and tokens", quantize_rows_and_tokens, 4 * size + 2 * scales),
        ):
            rows.append(memory_row(name, shape, num_bytes, [partial(function, x) for x in xs]))
        del xs
    for n, k in WEIGHTS:
        weights = [torch.randn(n, k, device="cuda") for _ in range(3)]
        rows.append(
            memory_row(
                "weight, from FP32",
                f"{n} x {k}",
                5 * n * k,
                [partial(quantize_weight, w) for w in weights],
            )
        )
        codes = [quantize_weight(w) for w in weights * 3]
        rows.append(
            memory_row(
                "weight turned for DGrad",
                f"{n} x {k}",
                2 * n * k,
                [partial(turned_weight, q) for q in codes],
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench quantize`."""
    report("quantize", run, argv, quantizers)


if __name__ == "__main__":
    main()
