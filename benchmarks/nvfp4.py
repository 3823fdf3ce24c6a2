"""Products with NVFP4 weights beside FP8 and BF16 ones, by the number of rows.

    python -m benchmarks.nvfp4 --out FILE.json
    python -m benchmarks.nvfp4 --cuts --out FILE.json

Each call reads another copy of its weight, so that none is still cached. "nvfp4" is what layers
use; with its name come the two ways of which it chooses one by the number of rows: codes that the
product unpacks itself, and a weight that is widened to BF16 first. FP8 is timed without the
quantization of X, which kernels in front do. --cuts times the kernel of few rows with other tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.harness import Row, command_typed, print_table, seconds_in_turn, write_results

from jetrl.models.families import linear_shapes
from jetrl.precision.hopper.gemm import fp8_matmul_hopper
from jetrl.precision.hopper.nvfp4 import nvfp4_dgrad_hopper, nvfp4_matmul_hopper, widened_hopper
from jetrl.precision.hopper.nvfp4_rows import Tiles, nvfp4_rows_matmul
from jetrl.precision.hopper.quantize import quantize_rows, quantize_weight
from jetrl.precision.nvfp4 import hopper_order, parts_of, quantize_nvfp4

_MORE_THAN_CACHED = 2**28  # bytes; the L2 cache has 50 MB
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 4096)
_CUTS = {  # units, group, rounds, registers, 1 where parts are made side by side, sides
    8: [(1, 2, 4, 80), (2, 2, 4, 80), (2, 2, 4, 72), (2, 4, 2, 80), (2, 2, 3, 80), (1, 2, 4, 80, 1),
        (1, 2, 6, 80, 1), (1, 2, 8, 80, 1), (2, 2, 4, 80, 1), (1, 4, 3, 80, 1), (1, 4, 4, 80, 1),
        (2, 2, 4, 96, 0, 3)],
    16: [(2, 2, 4, 80), (2, 2, 3, 72), (1, 2, 4, 80, 1), (1, 2, 6, 80, 1), (1, 4, 3, 80, 1)],
    32: [(1, 2, 4, 80), (2, 1, 4, 80), (2, 2, 3, 80), (2, 2, 4, 128), (2, 1, 6, 112, 0, 3)],
    64: [(1, 2, 3, 128), (2, 1, 3, 80), (2, 1, 4, 128), (2, 2, 4, 128), (2, 1, 6, 112, 0, 3)],
    128: [(2, 1, 3, 128), (2, 2, 3, 168)],
}  # fmt: skip


def timed(
    where: dict[str, Any], weight_bytes: dict[str, float], forms: dict[str, list[Callable[[], Any]]]
) -> list[Row]:
    """Return a row for each form, timed in turn."""
    rows = []
    for name, seconds in zip(forms, seconds_in_turn(list(forms.values()), 7), strict=True):
        row = {**where, "name": name, "microseconds": round(seconds * 1e6, 2)}
        if name in weight_bytes and where["rows"] <= 512:
            row["gigabytes_per_s"] = round(weight_bytes[name] / seconds / 1e9)
        rows.append(row)
    return rows


def together(rows: Sequence[Row]) -> Row:
    """Return the row of all linears of a decoder layer, from the row of each."""
    microseconds = round(sum(row["microseconds"] for row in rows), 1)
    shared = {key: rows[0][key] for key in ("model", "rows", "name")}
    return {**shared, "layer": "together", "microseconds": microseconds}


def layer_rows(
    model: str, layer: str, shape: tuple[int, int], cuts: bool, numbers: Sequence[int]
) -> list[Row]:
    """Return the rows of one layer's products.

    Args:
        model: The name of the model's shape.
    """
    n, k = shape
    copies = 2 + int(_MORE_THAN_CACHED // (n * k * 0.5625))
    weight = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
    wide = [weight.clone() for _ in range(2 + _MORE_THAN_CACHED // (2 * n * k))]
    fp8 = [quantize_weight(weight) for _ in range(2 + _MORE_THAN_CACHED // (n * k))]
    first = hopper_order(quantize_nvfp4(weight))
    nvfp4 = [dataclasses.replace(first, codes=first.codes.clone()) for _ in range(copies)]
    size = {"bf16": 2.0 * n * k, "fp8": 1.0 * n * k}
    size |= dict.fromkeys(("nvfp4", "nvfp4 codes", "nvfp4 widened"), 0.5625 * n * k)
    out: list[Row] = []
    for rows in numbers:
        where = {"model": model, "layer": layer, "rows": rows}
        x = torch.randn(rows, k, device="cuda").bfloat16()
        few = rows <= 512
        if cuts:
            several = parts_of(n, k)[0] > 1
            tiles = [t for t in (Tiles(*cut) for cut in _CUTS[rows]) if several or not t.together]
            forms: dict[str, list[Callable[[], Any]]] = {
                f"units {t.units} group {t.group} rounds {t.rounds} registers {t.registers}"
                + f" sides {t.sides}"
                + ", parts together" * t.together: [
                    partial(nvfp4_rows_matmul, x, w, torch.bfloat16, t) for w in nvfp4
                ]
                for t in tiles
            }
            out += timed(where, {}, forms)
            continue
        codes = quantize_rows(x)
        forms = {
            "bf16": [partial(torch.mm, x, w.t()) for w in wide[: None if few else 1]],
            "fp8": [partial(fp8_matmul_hopper, codes, w) for w in fp8[: None if few else 1]],
            "nvfp4": [partial(nvfp4_matmul_hopper, x, w) for w in nvfp4[: None if few else 1]],
        }
        if 64 <= rows <= 512:
            for name, widen in (("nvfp4 codes", False), ("nvfp4 widened", True)):
                forms[name] = [
                    partial(nvfp4_matmul_hopper, x, w, torch.bfloat16, widen) for w in nvfp4[:4]
                ]
        if not few:
            dy = torch.randn(rows, n, device="cuda").bfloat16()
            forms["bf16 dgrad"] = [partial(torch.mm, dy, wide[0])]
            forms["nvfp4 dgrad"] = [partial(nvfp4_dgrad_hopper, dy, nvfp4[0])]
            forms["nvfp4 widening alone"] = [partial(widened_hopper, w) for w in nvfp4[:4]]
        out += timed(where, size, forms)
    return out


def main() -> None:
    """Time the products of the chosen models' layers, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "qwen3-32b"])
    parser.add_argument("--rows", nargs="+", type=int, help="of X; default: 1 to 4096")
    parser.add_argument("--cuts", action="store_true", help="other tiles of the few-row kernel")
    parser.add_argument("--out", default="build/bench/nvfp4.json", help="JSON file")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    numbers = args.rows or tuple(_CUTS if args.cuts else _ROWS)
    for model in args.models:
        of_layers = [
            layer_rows(model, *layer, args.cuts, numbers) for layer in linear_shapes(model).items()
        ]
        rows += [row for of_layer in of_layers for row in of_layer]
        if not args.cuts:
            rows += [together(same) for same in zip(*of_layers, strict=True)]
    command = command_typed("python -m benchmarks.nvfp4", None)
    write_results(args.out, "nvfp4", command, rows, weight_bits={"fp8": 8, "nvfp4": 4.5})
    print_table(rows)


if __name__ == "__main__":
    main()
