"""FProp, DGrad and WGrad of each linear layer under several plans, as layers call them.

    python -m benchmarks.products --shape qwen3-8b --shape smollm2-135m --out FILE.json
    jetrl bench products --plan integer --plan "integer backend=triton" --decode 64 4096

The operands of `fprop` are ready, as after a fused norm. `dgrad` includes the transposition of the
weight, as in a layer's backward, and `wgrad` adds to an FP32 sum. The other rows quantize operands:
`X` for FProp, `X for wgrad`, and `dY` for both. At the row counts of --decode only FProp is timed.
Calls alternate between the weights of several layers, so that few of them are in the cache. Under
`integer`, the kernels of `backend=triton` are compared with Hopper's before the timing. Allow two
minutes per plan and shape.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from benchmarks.harness import Row, add_tokens_argument, begins
from benchmarks.operations import Operation, main
from benchmarks.policies import backend_of, plan_of, random_source
from benchmarks.shapes import SHAPES
from benchmarks.timing import seconds_eager, seconds_per_call

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.precision.backend import selected_backend
from jetrl.precision.int8 import int8_matmul, int8_rows
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
    """Return the linear layers of the first decoder layers, by kind."""
    size = SHAPES[shape]["hidden_size"] ** 2
    layers = min(SHAPES[shape]["num_hidden_layers"], 1 + _NOT_CACHED // size)
    config = {**SHAPES[shape], "num_hidden_layers": layers, "vocab_size": 256}
    policy = Policy(random_source(config, device), plan_of(plan), device)
    found = defaultdict(list)
    for layer in policy.decoder.layers:
        for linear in layer.modules():
            if isinstance(linear, Linear):
                found[linear.name.rpartition(".")[2]].append(linear)
    return found


def product_seconds(linears: Sequence[Linear], rows: int, training: bool) -> dict[str, float]:
    """Return the seconds of each operation of layers of one kind at a number of rows."""
    first = linears[0]
    plan, weight = first.plan, first.operand("train")
    n, k = first.weight.shape
    device, coded = first.weight.device, isinstance(weight, QTensor)
    x, dy = (torch.randn(rows, size, device=device).bfloat16() for size in (k, n))
    entered = quantize_input(x, weight, plan) if coded else x
    weights = [linear.operand("train") for linear in linears]
    found = {"fprop": seconds_per_call([partial(fprop, entered, w, plan) for w in weights])}
    if coded:
        found["X"] = seconds_per_call([partial(quantize_input, x, weight, plan)] * 8)
    if not training:
        return found
    by_row, by_token = quantize_output_gradient(dy, weight, plan)
    squares = quantize_for_wgrad(x, plan) if coded else x
    found["dgrad"] = seconds_per_call([partial(dgrad, by_row, w) for w in weights])
    adding = partial(wgrad, by_token, squares, first.weight, first.gradients)
    found["wgrad"] = seconds_eager(adding)
    if coded:
        found["X for wgrad"] = seconds_eager(partial(quantize_for_wgrad, x, plan))
        both = partial(quantize_output_gradient, dy, weight, plan)
        found["dY"] = seconds_eager(both)
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


def rows_of_plans(shape: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all plans that support the widths of a shape, with ratios to `bf16`."""
    bf16: dict[tuple[str, int, str], float] = {}
    for plan in args.plan or PLANS:
        begins(f"{shape}, {plan}")
        try:
            with selected_backend(backend_of(plan), defined=plan_of(plan).defined):
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
            yield row
        release()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --plan, --tokens and --decode."""
    parser.add_argument("--plan", action="append", help=f"default: {', '.join(PLANS)}")
    add_tokens_argument(parser)
    parser.add_argument("--decode", type=int, nargs="*", default=[8, 64, 256], help="rows")


def different(args: argparse.Namespace) -> int:
    """Count values in which the INT8 products of two backends of `integer` differ."""
    inputs = [torch.randn(rows, 1024, device=args.device) for rows in (*args.decode, args.tokens)]
    weight = torch.randn(1536, 1024, device=args.device)
    found = []
    for plan in args.plan or PLANS:
        if plan_of(plan).defined:
            with selected_backend(backend_of(plan), defined=True):
                found.append([int8_matmul(int8_rows(x), int8_rows(weight)) for x in inputs])
    pairs = ((y, first) for each in found for y, first in zip(each, found[0], strict=True))
    return sum(int((y != first).sum()) for y, first in pairs)


OPERATION = Operation(__doc__, rows_of_plans, add_arguments, different)

if __name__ == "__main__":
    main("products", program="python -m benchmarks.products")
