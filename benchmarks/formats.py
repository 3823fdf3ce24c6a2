"""The errors of number formats, on random numbers and on the operands of a model's linear layers.

    python -m benchmarks.formats build/smollm2 build/qwen2.5-0.5b --out formats.json

The error is the root mean square of the differences over that of the values, in percent. Random
values have 1,024 rows of 1,024: normal ones, and those of Student's t with 3 degrees of freedom.
Activations are the inputs of all linear layers of the model in FP32, on the first tokens of GSM8K's
training questions and answers, and their output gradients are those of cross-entropy; the error is
the mean over layers. A value is rounded once, from FP32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import Row, command_typed, print_table, write_results
from benchmarks.plan_error import sequences
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from jetrl.precision.block_formats import BLOCK_FORMATS, BlockFormat, block_values
from jetrl.precision.fp4 import clamped, clamped_operands, fp4_values
from jetrl.precision.int8 import int8_rows
from jetrl.precision.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from jetrl.precision.quantize import FP8_BLOCK, INT8_CODES, CodeFormat, dequantize, quantize

Rounds = Callable[[Tensor], Tensor]
SCALE = 4  # bytes of a float32 scale


def _codes(block: tuple[int, int], format: CodeFormat) -> Rounds:
    return lambda x: dequantize(quantize(x, block, format))


def _blocks(format: BlockFormat, *key: str) -> Rounds:
    return lambda x: block_values(x, format, key or None).float()


def _of_rows(k: int) -> float:
    return 1 + SCALE / k


def _compensated(x: Tensor) -> Tensor:
    main, rest = clamped_operands(x, QUANTILE)
    return main.float() + rest.float()


GROUP = FP8_BLOCK
QUANTILE = 0.99  # of the plan fp4
OF_FP4 = 0.5 + 2 / 1024  # without what compensation takes
# A format's name, the bytes of a value in rows of 1,024, and its rounding.
FORMATS: list[tuple[str, float, Rounds]] = [
    ("BF16", 2.0, lambda x: x.bfloat16().float()),
    ("FP8 E4M3 1 x 128", _of_rows(GROUP), _codes((1, GROUP), "e4m3")),
    ("FP8 E4M3 128 x 128", _of_rows(GROUP**2), _codes((GROUP, GROUP), "e4m3")),
    ("FP8 E5M2 1 x 128", _of_rows(GROUP), _codes((1, GROUP), "e5m2")),
    ("INT8 1 x 128", _of_rows(GROUP), _codes((1, GROUP), INT8_CODES)),
    ("INT8 rows, rotated", _of_rows(1024), lambda x: dequantize(int8_rows(x))),
    *((f.words, f.bytes_per_value, _blocks(f)) for f in BLOCK_FORMATS),
    ("NVFP4 1 x 16, stochastic", BLOCK_FORMATS[0].bytes_per_value, _blocks(BLOCK_FORMATS[0], "d")),
    ("NVFP4 of a frozen base", 0.5 + 1 / 16, lambda x: dequantize_nvfp4(quantize_nvfp4(x))),
    ("FP4 rows", OF_FP4, lambda x: fp4_values(x).float()),
    ("FP4 rows, clamped", OF_FP4, lambda x: fp4_values(clamped(x, QUANTILE)).float()),
    ("FP4 rows, compensated", OF_FP4, _compensated),
]


def error(x: Tensor, rounds: Rounds) -> float:
    """Return the error of a matrix [M, K], in percent; rows and columns without blocks are left."""
    values = x[: len(x) // 16 * 16, : x.shape[1] // 64 * 64].contiguous()
    return 100 * ((rounds(values) - values).norm() / values.norm()).item()


def random_matrices() -> dict[str, list[Tensor]]:
    g = np.random.default_rng(0)
    drawn = {"normal": g.standard_normal((1024, 1024)), "heavy": g.standard_t(3, (1024, 1024))}
    return {name: [torch.from_numpy(x).float()] for name, x in drawn.items()}


def operands(path: str, tokens: int) -> dict[str, list[Tensor]]:
    """Return the matrices of a model's linear layers by operand; a shared X is there once."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    name = Path(path).name
    found: dict[str, list[Tensor]] = {f"{name}_X": [], f"{name}_W": [], f"{name}_dY": []}

    def entered(layer: Any, given: tuple[Tensor, ...]) -> None:
        found[f"{name}_X"].append(given[0].detach()[0])

    def left(layer: Any, dx: Any, dy: tuple[Tensor, ...]) -> None:
        found[f"{name}_dY"].append(dy[0].detach()[0])

    for layer in model.model.layers:
        for part in ("q_proj", "o_proj"):
            getattr(layer.self_attn, part).register_forward_pre_hook(entered)
        for part in ("gate_proj", "down_proj"):
            getattr(layer.mlp, part).register_forward_pre_hook(entered)
        linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        found[f"{name}_W"] += [linear.weight.detach() for linear in linears]
        for linear in linears:
            linear.register_full_backward_hook(left)
    (ids,) = sequences(path, Path("data/gsm8k/train.jsonl"), tokens, tokens)
    logits = model(ids[None]).logits[0, :-1]
    functional.cross_entropy(logits, ids[1:]).backward()
    return found


def add_errors(rows: list[Row], operand: str, matrices: list[Tensor]) -> None:
    for row, (_, _, rounds) in zip(rows, FORMATS, strict=True):
        row[operand] = round(statistics.mean(error(x, rounds) for x in matrices), 2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="*", help="Hugging Face directories")
    parser.add_argument("--tokens", type=int, default=1024, help="of one sequence per model")
    parser.add_argument("--out", default="build/bench/formats.json")
    args = parser.parse_args(argv)
    rows: list[Row] = [{"format": n, "bytes": round(b, 4)} for n, b, _ in FORMATS]
    for operand, matrices in random_matrices().items():
        add_errors(rows, operand, matrices)
    for path in args.models:
        for operand, matrices in operands(path, args.tokens).items():
            add_errors(rows, operand, matrices)
    command = command_typed("python -m benchmarks.formats", argv)
    write_results(args.out, "formats", command, rows, tokens=args.tokens)
    print_table(rows)


if __name__ == "__main__":
    main()
