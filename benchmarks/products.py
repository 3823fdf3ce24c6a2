"""The three products of each linear layer under some plans, by the functions that layers call.

    python -m benchmarks.products --shape qwen3-8b --shape smollm2-135m --out FILE.json

`fprop` has its operands ready, as behind a fused norm. `dgrad` includes the turning of the weight,
as in a layer's backward, and `wgrad` is added to an FP32 sum. The other rows round operands: `X`
for FProp, `X for wgrad`, and `dY` for both. At the numbers of rows of --decode only FProp is timed.
A call takes the weights of one layer after the other, so that few of them are in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.harness import (
    Row,
    begins,
    command_typed,
    print_table,
    seconds_eager,
    seconds_per_call,
    write_results,
)
from benchmarks.parity import plan_of
from benchmarks.shapes import SHAPES

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.precision.linear import (
    Linear,
    dgrad,
    fprop,
    quantize_for_wgrad,
    quantize_input,
    quantize_output_gradient,
    wgrad,
)
from jetrl.precision.quantize import QTensor

PLANS = ["bf16", "unified", "int8", "int8 grad_output=int8"]
_NOT_CACHED = 2**27  # bytes of the weights of one kind of layer; the L2 cache has 50 MB


def linears_of(shape: str, plan: str, device: str) -> dict[str, list[Linear]]:
    """Return the linear layers of some decoder layers, by kind."""
    size = SHAPES[shape]["hidden_size"] ** 2
    layers = min(SHAPES[shape]["num_hidden_layers"], 1 + _NOT_CACHED // size)
    config = {**SHAPES[shape], "num_hidden_layers": layers, "vocab_size": 256}
    policy = Policy.from_config(config, plan_of(plan), 0, device)
    found = defaultdict(list)
    for layer in policy.decoder.layers:
        for linear in layer.modules():
            if isinstance(linear, Linear):
                found[linear.name.rpartition(".")[2]].append(linear)
    return found


def seconds(calls: Sequence[Callable[[], Any]], graphed: bool = True) -> float:
    """Return the seconds of one call, on a GPU the median."""
    if torch.cuda.is_available():
        return seconds_per_call(calls) if graphed else seconds_eager(calls[0])
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def product_seconds(linears: Sequence[Linear], rows: int, training: bool) -> dict[str, float]:
    """Return the seconds of what layers of one kind do with some rows."""
    first = linears[0]
    plan, weight = first.plan, first.operand("train")
    n, k = first.weight.shape
    device, coded = first.weight.device, isinstance(weight, QTensor)
    x, dy = (torch.randn(rows, size, device=device).bfloat16() for size in (k, n))
    entered = quantize_input(x, weight, plan) if coded else x
    weights = [linear.operand("train") for linear in linears]
    found = {"fprop": seconds([partial(fprop, entered, w, plan) for w in weights])}
    if coded:
        found["X"] = seconds([partial(quantize_input, x, weight, plan)] * 8)
    if not training:
        return found
    by_row, by_token = quantize_output_gradient(dy, weight, plan)
    squares = quantize_for_wgrad(x, plan) if coded else x
    found["dgrad"] = seconds([partial(dgrad, by_row, w) for w in weights])
    adding = partial(wgrad, by_token, squares, first.weight, first.gradients)
    found["wgrad"] = seconds([adding], graphed=False)
    if coded:
        found["X for wgrad"] = seconds([partial(quantize_for_wgrad, x, plan)], graphed=False)
        both = partial(quantize_output_gradient, dy, weight, plan)
        found["dY"] = seconds([both], graphed=False)
    first.weight.grad = None
    return found


@torch.no_grad()
def rows_of(shape: str, plan: str, device: str, tokens: int, decode: Sequence[int]) -> list[Row]:
    made = []
    for layer, linears in linears_of(shape, plan, device).items():
        n, k = linears[0].weight.shape
        for rows in (*decode, tokens):
            for name, spent in product_seconds(linears, rows, rows == tokens).items():
                row: Row = {"shape": shape, "plan": plan, "layer": layer, "N x K": f"{n} x {k}"}
                row |= {"rows": rows, "operation": name, "microseconds": round(1e6 * spent, 2)}
                if name in ("fprop", "dgrad", "wgrad"):
                    row["teraops"] = round(2e-12 * rows * n * k / spent, 1)
                made.append(row)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: qwen3-8b")
    parser.add_argument("--plan", action="append", help=f"default: {', '.join(PLANS)}")
    parser.add_argument("--tokens", type=int, default=16384, help="rows in training")
    parser.add_argument("--decode", type=int, nargs="*", default=[8, 64, 256], help="rows")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out")
    parser.add_argument("--out", default="build/bench/products.json")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for shape in args.shape or ["qwen3-8b"]:
        bf16: dict[tuple[str, int, str], float] = {}
        for plan in args.plan or PLANS:
            begins(f"{shape}, {plan}")
            try:
                made = rows_of(shape, plan, args.device, args.tokens, args.decode)
            except UserError as error:  # widths that a plan does not take
                print(f"{shape}, {plan}: left out: {error}", flush=True)
                continue
            for row in made:
                key = (row["layer"], row["rows"], row["operation"])
                if plan == "bf16":
                    bf16[key] = row["microseconds"]
                elif key in bf16:
                    row["times_bf16"] = round(bf16[key] / row["microseconds"], 2)
            rows += made
            release()
            command = command_typed("python -m benchmarks.products", argv)
            write_results(args.out, "products", command, rows)
    print_table(rows)


if __name__ == "__main__":
    main()
