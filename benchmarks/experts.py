"""Products and whole layers of experts, against torch's BF16 and DeepGEMM's FP8.

    jetrl bench experts [--shape qwen3-30b-a3b] [--tokens 16384 2048 256 8] [--plan int8]
    jetrl bench experts --tiles --tokens 16384  # times other tiles as well

With 128 rows per expert or more, all experts have the same number of rows; with fewer, tokens
choose at random, as in decode. Operands of `fprop` are ready. `quantize` rounds dY, `dgrad` also
transposes the weight, and `wgrad` also rounds X, and adds to an FP32 sum; with INT8 gradients it
rounds dY as well. BF16 products read rows that are sorted already. `router` is the product and the
choice of experts. `forward` and `both` are layers from routes on: sort, both products, SwiGLU,
combination; `both` includes the backward. `of_floor` compares with reading the matrices of experts
that have rows at the bandwidth of a copy. DeepGEMM, if it is installed, has whole groups of 128
rows only. The bits of each plan are first compared with those of the dense layers of experts, one
by one, on the same device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from benchmarks.harness import Row, begins, bench_parser, command_typed, print_table, write_results
from benchmarks.policies import add_plan_argument, backend_of, plan_of, plans_of
from benchmarks.timing import copy_bandwidth, seconds_eager, seconds_in_turn, seconds_per_call
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from jetrl.errors import MismatchError, UserError
from jetrl.kernels.routing import route
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.kernels.swiglu import swiglu
from jetrl.memory.out_of_memory import release
from jetrl.models.experts_fused import fuses_experts, gated_rows_fused
from jetrl.precision import PrecisionPlan, experts
from jetrl.precision.backend import has_kernels, selected_backend
from jetrl.precision.experts import (
    GroupedWeight,
    combine,
    group_rows,
    grouped_dgrad,
    grouped_fprop,
    grouped_linear,
    grouped_wgrad,
    quantize_grouped_gradient,
)
from jetrl.precision.formats import Format, number_format
from jetrl.precision.gradients import Gradients
from jetrl.precision.groups import Groups
from jetrl.precision.linear import Linear, quantize_input
from jetrl.precision.plan import Side
from jetrl.precision.quantize import QTensor
from jetrl.precision.quantized_weight import QuantizedWeight
from jetrl.precision.router import router_logits

Call = Callable[[], Any]


class Sizes(NamedTuple):
    """The experts of a model's layer, experts per token, hidden size and width of an expert."""

    experts: int
    slots: int
    hidden: int
    width: int


SIZES = {
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768),
    "olmoe-1b-7b": Sizes(64, 8, 2048, 1024),
    "tiny": Sizes(4, 2, 128, 64),  # to try the benchmark out on a CPU
}
_EQUAL = 128  # rows per expert, from which on all experts have the same number
# Rows, columns, depth, warps, stages, and the limit of registers per thread (0: none).
_TILES = (
    *((128, 256, 128, 8, 3, 0), (128, 256, 64, 8, 4, 0), (128, 128, 128, 8, 3, 0)),
    *((128, 128, 128, 4, 3, 0), (64, 256, 128, 4, 2, 0), (64, 128, 128, 4, 3, 0)),
    *((64, 256, 128, 8, 3, 0), (64, 256, 64, 4, 4, 0), (64, 128, 128, 4, 4, 0)),
    *((64, 64, 256, 4, 3, 0), (32, 128, 128, 4, 4, 0), (32, 64, 256, 4, 4, 0)),
    *((16, 128, 128, 4, 4, 0), (16, 64, 256, 4, 4, 0)),
)
_BF16_TILES = (
    *((128, 256, 64, 8, 3, 0), (128, 256, 64, 8, 4, 0), (128, 128, 64, 8, 4, 0)),
    *((128, 128, 64, 8, 3, 0), (64, 256, 64, 4, 4, 0), (64, 128, 64, 4, 4, 0)),
    *((64, 64, 64, 4, 6, 0), (64, 64, 64, 4, 4, 0)),
)
_FP8_TILES = (
    *((128, 128, 128, 8, 3, 128), (64, 128, 128, 4, 3, 168), (64, 128, 128, 4, 3, 0)),
    *((64, 64, 128, 4, 3, 0), (64, 64, 128, 4, 6, 0)),
)
_INT8_WGRAD_TILES = (
    *((128, 128, 128, 8, 3, 128), (64, 256, 128, 4, 2, 0), (128, 256, 128, 8, 3, 0)),
    *((64, 128, 128, 4, 3, 128), (128, 256, 64, 8, 3, 0)),
)


@dataclass(frozen=True)
class Load:
    """Tokens with their routes: experts int64 and weights float32, [T, k]."""

    x: Tensor
    chosen: Tensor
    weights: Tensor

    @staticmethod
    def of(sizes: Sizes, tokens: int, device: str) -> Load:
        """Return a load of some tokens."""
        if tokens * sizes.slots >= _EQUAL * sizes.experts:
            slots = torch.arange(tokens * sizes.slots, device=device)
            chosen = (slots % sizes.experts).view(tokens, sizes.slots)
        else:
            scores = torch.rand(tokens, sizes.experts, device=device)
            chosen = scores.topk(sizes.slots).indices
        weights = torch.rand(tokens, sizes.slots, device=device)
        x = torch.randn(tokens, sizes.hidden, device=device).bfloat16()
        return Load(x, chosen, weights)


class Layer:
    """A layer's router and stacked matrices under a plan, and copies in BF16 [E, N, K].

    `weight_bytes` are those of one value of its matrices.
    """

    def __init__(self, sizes: Sizes, plan: PrecisionPlan, device: str) -> None:
        self.sizes, self.plan = sizes, plan
        formats, count = plan.linear_formats(0, 1), sizes.experts
        self.gate_up = self._linear(2 * count * sizes.width, sizes.hidden, formats, device)
        self.down = self._linear(count * sizes.hidden, sizes.width, formats, device)
        self.weight_bytes = 1 if formats["train"].coded else 2
        rest = number_format(plan.rest)
        self.router = self._linear(count, sizes.hidden, dict.fromkeys(formats, rest), device)
        self.values = [
            nn.Parameter(linear.weight.detach().bfloat16().unflatten(0, (count, -1)))
            for linear in (self.gate_up, self.down)
        ]

    def _linear(self, rows: int, columns: int, formats: dict[Side, Format], device: str) -> Linear:
        master = torch.randn(rows, columns, device=device).mul_(columns**-0.5)
        rounding = {side: self.plan.rounding(side, format) for side, format in formats.items()}
        weight = QuantizedWeight("experts", nn.Parameter(master), formats, rounding)
        return Linear(weight, None, self.plan, torch.bfloat16, Gradients())

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts that tokens choose, and their weights."""
        return route(router_logits(x, self.router, "rollout"), RoutingRule(self.sizes.slots))

    def routed_in_bf16(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same by torch's operations, as transformers does."""
        logits = x @ self.router.weight.detach().bfloat16().mT
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.sizes.slots)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def forward(self, load: Load) -> Tensor:
        """Return the outputs of tokens, from their routes on."""
        groups = group_rows(load.chosen, self.sizes.experts)
        linears = (self.gate_up, self.down)
        if fuses_experts(load.x, linears, "train"):
            rows = gated_rows_fused(load.x, linears, groups, "train", None)
        else:
            gates = grouped_linear(load.x, self.gate_up, groups, "train", by_token=True)
            rows = grouped_linear(swiglu(gates), self.down, groups, "train")
        return combine(rows, load.weights, groups)

    def forward_in_bf16(self, load: Load) -> Tensor:
        """Return the same in BF16, by torch's operations."""
        order = load.chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.sizes.experts, dtype=torch.int32, device=load.x.device)
        counts.index_add_(0, load.chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
        offsets, tokens = counts.cumsum(0).int(), order // self.sizes.slots
        gate, up = grouped_mm(load.x[tokens], self.values[0].mT, offs=offsets).chunk(2, -1)
        rows = grouped_mm(silu(gate) * up, self.values[1].mT, offs=offsets)
        rows = rows * load.weights.flatten()[order][:, None].bfloat16()
        return torch.zeros_like(load.x).index_add(0, tokens, rows)

    def clear(self) -> None:
        """Clear the gradients of weights."""
        for weight in (self.gate_up.weight, self.down.weight, *self.values):
            weight.grad = None


def trained(forward: Callable[[Load], Tensor], load: Load) -> list[Tensor]:
    """Run forward and backward; return the output, and the gradients of tokens and routes."""
    x, weights = (each.detach().requires_grad_() for each in (load.x, load.weights))
    out = forward(Load(x, load.chosen, weights))
    out.backward(load.x)
    assert x.grad is not None, "tokens have gradients"
    assert weights.grad is not None, "routes have gradients"
    return [out.detach(), x.grad, weights.grad]


def coded_calls(linear: Linear, groups: Groups, x: Tensor, by_token: bool) -> dict[str, Call]:
    """Return the products of a layer's matrices; x is bfloat16 [T, K] if `by_token`, or [R, K]."""
    plan, weight = linear.plan, linear.operand("train")
    grouped = GroupedWeight(weight, groups, plan, by_token)
    dy = torch.randn(len(groups.tokens), grouped.num_outputs, device=x.device).bfloat16()
    rows, values = quantize_grouped_gradient(dy, grouped)
    return {
        "fprop": partial(grouped_fprop, quantize_input(x, weight, plan), grouped),
        "quantize": partial(quantize_grouped_gradient, dy, grouped),
        "dgrad": partial(grouped_dgrad, rows, grouped),
        "wgrad": partial(grouped_wgrad, values, x, grouped, linear.weight, linear.gradients),
    }


def bf16_calls(values: Tensor, groups: Groups, x: Tensor) -> dict[str, Call]:
    """Return the same products in BF16, of matrices [E, N, K] and sorted rows x [R, K]."""
    dy = torch.randn(len(x), values.shape[1], device=x.device).bfloat16()
    return {
        "fprop": lambda: grouped_mm(x, values.mT, offs=groups.ends),
        "dgrad": lambda: grouped_mm(dy, values, offs=groups.ends),
        "wgrad": lambda: grouped_mm(dy.mT, x, offs=groups.ends),
    }


def fp8_call(values: Tensor, groups: Groups, x: Tensor) -> Call | None:
    """Return FProp in DeepGEMM's FP8, or None if it has no such product here."""
    experts, n, k = values.shape
    rows = len(x) // experts
    if not x.is_cuda or not rows or rows % 128 or n % 128 or k % 128:
        return None
    try:
        import deep_gemm
    except ImportError:
        return None
    a = (x.to(torch.float8_e4m3fn), torch.rand(len(x), k // 128, device=x.device))
    scales = torch.rand(experts, n // 128, k // 128, device=x.device)
    b = (values.to(torch.float8_e4m3fn), scales)
    out = torch.empty(len(x), n, dtype=torch.bfloat16, device=x.device)
    numbers = torch.arange(experts, dtype=torch.int32, device=x.device)
    owners = numbers.repeat_interleave(rows)
    return partial(deep_gemm.m_grouped_fp8_gemm_nt_contiguous, a, b, out, owners)


def tile_calls(linear: Linear, groups: Groups, x: Tensor, by_token: bool) -> dict[str, Call]:
    """Return FProp of INT8 or BF16 weights, and gradients of INT8 weights, with other tiles."""
    from jetrl.precision.triton.grouped_bf16 import bf16_grouped_matmul
    from jetrl.precision.triton.grouped_int8 import product

    weight, plan = linear.operand("train"), linear.plan
    if isinstance(weight, Tensor):
        bf16 = partial(bf16_grouped_matmul, x, weight, groups, by_token, torch.bfloat16)
        return _with_tiles("fprop", bf16, _BF16_TILES)
    codes = quantize_input(x, weight, plan)
    assert isinstance(codes, QTensor), "rows of INT8"
    assert isinstance(weight, QTensor), "a weight of INT8"
    int8 = partial(product, codes, weight, groups, by_token, torch.bfloat16)
    calls = _with_tiles("fprop", int8, _TILES)
    grouped = GroupedWeight(weight, groups, plan, by_token)
    dy = torch.randn(len(groups.tokens), grouped.num_outputs, device=x.device).bfloat16()
    gradients = int8_gradient_calls if plan.gradient.integer else fp8_gradient_calls
    return calls | gradients(grouped, weight, dy, x)


def fp8_gradient_calls(
    grouped: GroupedWeight, weight: QTensor, dy: Tensor, x: Tensor
) -> dict[str, Call]:
    """Return DGrad and WGrad in FP8 with other tiles, and two of the passes before them."""
    from jetrl.precision.triton import grouped_fp8
    from jetrl.precision.triton.int8 import int8_squares_turned

    groups, total = grouped.groups, torch.zeros(weight.shape, device=x.device)
    rows, along = grouped_fp8.fp8_grouped_gradient(dy, groups, "fp32")
    quantize = partial(grouped_fp8.quantized_input, x, groups, grouped.by_token, "fp32")
    matrices = grouped_fp8.turned_matrices(weight, groups.num_experts)
    dgrad = partial(grouped_fp8.product, rows, matrices, groups, False)
    add = partial(grouped_fp8.add_wgrad_product, total, True, along, quantize(), groups)
    turn = partial(int8_squares_turned, weight, groups.num_experts)
    calls: dict[str, Call] = {"turn": turn, "quantize x": quantize}
    tiles = _with_tiles("dgrad", dgrad, _FP8_TILES) | _with_tiles("wgrad", add, _FP8_TILES)
    return calls | tiles


def int8_gradient_calls(
    grouped: GroupedWeight, weight: QTensor, dy: Tensor, x: Tensor
) -> dict[str, Call]:
    """Return WGrad in INT8 with other tiles, and the passes before the products."""
    from jetrl.precision.triton import grouped_int8
    from jetrl.precision.triton.int8 import int8_turned

    groups, total = grouped.groups, torch.zeros(weight.shape, device=x.device)
    quantize_x = partial(grouped_int8.group_tokens, x, groups, grouped.by_token)
    quantize_dy = partial(grouped_int8.group_tokens, dy, groups, False)
    add = partial(grouped_int8.add_wgrad_product, total, True, quantize_dy(), quantize_x(), groups)
    turn = partial(int8_turned, weight, groups.num_experts)
    calls: dict[str, Call] = {"turn": turn, "quantize x": quantize_x, "quantize dy": quantize_dy}
    return calls | _with_tiles("wgrad", add, _INT8_WGRAD_TILES)


def _with_tiles(
    operation: str, call: Callable[..., Any], tiles: Sequence[tuple[int, int, int, int, int, int]]
) -> dict[str, Call]:
    """Return a product with each of the tiles, which is its last argument."""
    from jetrl.precision.triton.portable_int8 import Tile

    return {
        f"{operation} {rows} x {columns} x {depth}, {warps} warps, {stages} stages, "
        f"{registers} registers": partial(
            call, Tile(rows, columns, depth, warps, stages, registers=registers)
        )
        for rows, columns, depth, warps, stages, registers in tiles
    }


def product_rows(layer: Layer, load: Load, tiles: bool) -> Iterator[Row]:
    """Yield a row per product."""
    groups = group_rows(load.chosen, layer.sizes.experts)
    touched = int((groups.ends.diff(prepend=groups.ends.new_zeros(1)) > 0).sum())
    by_token = {"gate_up": True, "down": False}
    for values, (name, of_token) in zip(layer.values, by_token.items(), strict=True):
        linear: Linear = getattr(layer, name)
        _, n, k = values.shape
        rows = torch.randn(len(groups.tokens), k, device=load.x.device).bfloat16()
        x = load.x if of_token else rows
        bf16 = {
            operation: seconds_per_call([call])
            for operation, call in bf16_calls(values.detach(), groups, rows).items()
        }
        calls = coded_calls(linear, groups, x, of_token)
        if tiles:
            calls = tile_calls(linear, groups, x, of_token) | calls
        for operation, call in calls.items():
            # A sum of gradients is kept, which a graph's memory could not be.
            timed = seconds_eager if operation == "wgrad" else lambda f: seconds_per_call([f])
            spent = timed(call)
            row: Row = {"layer": name, "operation": operation, "experts": touched}
            moves = operation.startswith(("quantize", "turn"))
            operations = 0 if moves else 2 * len(rows) * n * k
            row |= _speeds(spent, bf16.get(operation), operations)
            if operation.startswith("fprop") and load.x.is_cuda:
                row["of_floor"] = round(
                    spent * copy_bandwidth() / (layer.weight_bytes * touched * n * k), 2
                )
            if operation == "fprop" and (fp8 := fp8_call(values.detach(), groups, rows)):
                row["fp8_microseconds"] = round(1e6 * seconds_per_call([fp8]), 1)
            yield row
        layer.clear()


def layer_rows(layer: Layer, load: Load) -> Iterator[Row]:
    """Yield the rows of the router, and of whole layers without and with a backward."""
    with torch.no_grad():
        routes = (layer.routed, layer.routed_in_bf16)
        spent, bf16 = seconds_in_turn([[partial(form, load.x)] for form in routes])
        yield {"layer": "router", "operation": "forward"} | _speeds(spent, bf16)
        forms = (layer.forward, layer.forward_in_bf16)
        spent, bf16 = seconds_in_turn([[partial(form, load)] for form in forms])
    row: Row = {"layer": "both", "operation": "forward"} | _speeds(spent, bf16)
    if load.x.is_cuda:
        touched = len(load.chosen.unique())
        weights = 3 * touched * layer.sizes.width * layer.sizes.hidden
        floor = layer.weight_bytes * weights / copy_bandwidth()
        row |= {"experts": touched, "of_floor": round(spent / floor, 2)}
    yield row
    spent, bf16 = (seconds_eager(partial(trained, form, load)) for form in forms)
    yield {"layer": "both", "operation": "both"} | _speeds(spent, bf16)
    layer.clear()


def _speeds(spent: float, bf16: float | None, operations: int = 0) -> Row:
    row: Row = {"microseconds": round(1e6 * spent, 1)}
    if operations:
        row["teraops"] = round(1e-12 * operations / spent, 1)
    if bf16 is not None:
        row |= {"bf16_microseconds": round(1e6 * bf16, 1), "times_bf16": round(bf16 / spent, 2)}
    return row


def check(sizes: Sizes, plan: PrecisionPlan, device: str, tokens: int = 40) -> None:
    """Raise MismatchError if a layer does not have the bits of its experts' dense layers.

    In BF16 those are cuBLAS's, whose sums may have another order: results are compared by norms.
    """
    torch.manual_seed(1)
    layer = Layer(sizes._replace(experts=min(sizes.experts, 16)), plan, device)
    load = Load.of(layer.sizes, tokens, device)
    found = [_trained_with_weights(layer, load)]
    with patch.object(experts, "arithmetic_of", lambda _: None):  # the loops of references
        found.append(_trained_with_weights(layer, load))
    if layer.weight_bytes == 1:
        different = sum(int((a != b).sum()) for a, b in zip(*found, strict=True))
    else:
        near = (bool((a - b).norm() <= 2.0**-6 * b.norm()) for a, b in zip(*found, strict=True))
        different = sum(not each for each in near)
    if different:
        raise MismatchError(f"jetrl bench experts: {different} elements differ; nothing measured")


def _trained_with_weights(layer: Layer, load: Load) -> list[Tensor]:
    """Return the results of `trained`, and the gradients of weights."""
    made = trained(layer.forward, load)
    for linear in (layer.gate_up, layer.down):
        assert linear.weight.grad is not None, "matrices have gradients"
        made.append(linear.weight.grad)
    layer.clear()
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser("experts", __doc__)
    parser.add_argument("--shape", choices=sorted(SIZES), default="qwen3-30b-a3b")
    add_plan_argument(parser, "integer")
    tokens_help = "tokens of a load (default 16384 2048 256 8)"
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16384, 2048, 256, 8], help=tokens_help
    )
    parser.add_argument("--tiles", action="store_true", help="time other tiles as well, on a GPU")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out")
    parser.add_argument("--out", default="build/bench/experts.json", help="JSON file")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for words in plans_of(args):
        plan = plan_of(words)
        with selected_backend(backend_of(words), defined=plan.defined):
            for row in _rows_of_plan(args, words, plan):
                rows.append(row)
                command = command_typed("jetrl bench experts", argv)
                write_results(args.out, "experts", command, rows)
    print_table(rows)


def _rows_of_plan(args: argparse.Namespace, words: str, plan: PrecisionPlan) -> Iterator[Row]:
    sizes = SIZES[args.shape]
    on_gpu = has_kernels(torch.device(args.device))
    if args.tiles and not on_gpu:
        raise UserError("jetrl bench experts --tiles: the references on a CPU have no tiles")
    if on_gpu:
        begins(f"{words}, bits")
        check(sizes, plan, args.device)
    torch.manual_seed(0)
    layer = Layer(sizes, plan, args.device)
    for tokens in args.tokens:
        begins(f"{words}, {args.shape}, {tokens} tokens")
        load = Load.of(sizes, tokens, args.device)
        for row in (*product_rows(layer, load, args.tiles), *layer_rows(layer, load)):
            yield {"plan": words, "shape": args.shape, "tokens": tokens, **row}
        release()


if __name__ == "__main__":
    main()
