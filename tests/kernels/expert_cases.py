"""Kernels of experts next to their references, on any device: how many values differ.

The references are loops over experts of the operations of a dense layer. Memory for outputs has NaN
before a kernel runs. FP8 products are compared with those of a dense layer on a GPU, and elsewhere
with `fused_matmul`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tests.kernels.bits import different, random
from tests.precision.test_experts import layer
from torch import Tensor, nn
from torch.nn.functional import pad

from jetrl.kernels.portable import routing
from jetrl.kernels.routing import route as reference_route
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.precision import PrecisionPlan
from jetrl.precision import experts as reference
from jetrl.precision.adapter_experts import adapted_grouped_linear
from jetrl.precision.adapter_weight import AdapterShape, AdapterWeight
from jetrl.precision.backend import selected_backend
from jetrl.precision.exact import fma
from jetrl.precision.groups import Groups, TokenGroups
from jetrl.precision.int8 import int8_matmul, int8_rows, int8_squares_turned, int8_tokens
from jetrl.precision.quantize import FP8_BLOCK, QTensor, codes_as_float64, quantize
from jetrl.precision.triton import (
    expert_rows,
    float_tiles,
    grouped_bf16,
    grouped_fp8,
    grouped_int8,
    int8,
)
from jetrl.precision.triton.portable_int8 import Tile


class Case(NamedTuple):
    """Tokens, slots and experts; N and K of a matrix; which experts tokens prefer."""

    tokens: int
    slots: int
    experts: int
    n: int
    k: int
    preferred: slice = slice(None)


CASES = {
    "experts without rows": Case(11, 2, 5, 70, 128, slice(1, None, 2)),
    "one row": Case(1, 1, 3, 40, 64),
    "one expert": Case(130, 1, 4, 33, 64, slice(2, 3)),
}
# Of FP8: rows of experts below, at and above a group of 128.
FP8_CASES = {
    "one row": Case(1, 1, 3, 40, 64),
    "63 tokens": Case(63, 2, 3, 70, 192),
    "experts without rows": Case(129, 1, 5, 66, 64, slice(1, None, 2)),
    "one expert has all": Case(129, 1, 4, 128, 128, slice(2, 3)),
    "1000 tokens": Case(1000, 1, 5, 64, 64),
}
LARGE = {
    "decode": Case(8, 8, 128, 1536, 2048),
    "more sequences": Case(256, 8, 128, 1536, 2048),
    "prefill": Case(2000, 8, 128, 256, 768),
    "training": Case(6000, 8, 64, 320, 576),
    "one expert has most": Case(5000, 2, 16, 200, 320, slice(3, 4)),
    "OLMoE": Case(777, 8, 64, 2048, 1024),
    "512 experts": Case(300, 10, 512, 128, 192),
    "many rows": Case(70_000, 2, 3, 64, 64),
}
# Of Hopper's own kernel, whose tiles have 128 rows of an expert: N is a multiple of 8.
HOPPER_CASES = {
    "experts without rows": Case(150, 2, 5, 72, 128, slice(1, None, 2)),
    "one row": Case(1, 1, 3, 40, 64),
    "one expert": Case(130, 1, 4, 128, 192, slice(2, 3)),
    "one expert has most": Case(5000, 2, 16, 200, 320, slice(3, 4)),
    "many experts": Case(6000, 8, 64, 320, 576),
    "wide": Case(2000, 8, 32, 1536, 2048),
}
SQUARES = ((1, 64, 128), (3, 192, 320), (5, 200, 64))  # experts, N and K of a matrix
TILES = (Tile(16, 32, 64, 4, 2), Tile(64, 32, 128, 4, 2))


@contextmanager
def filled_memory() -> Iterator[None]:
    """Fill new memory with NaN or the largest integer within the block."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compare(case: Case, device: torch.device) -> dict[str, int]:
    """Return how many values of each result differ; references run on the same device."""
    chosen = chosen_by(case, device)
    with filled_memory(), selected_backend("reference"):
        groups = Groups.of(chosen, case.experts)
        # A token's sums do not depend on others, and the interpreter takes long for each.
        several = device.type == "cuda" or len(chosen) < 100
        rows = compare_rows(groups, chosen) if several else {}
        return rows | compare_products(groups, case) | compare_wgrad(groups, case)


def chosen_by(case: Case, device: torch.device) -> Tensor:
    """Return the experts that tokens choose."""
    scores = random(case.tokens, case.experts, device=device, seed=5)
    scores[:, case.preferred] += 100.0
    return scores.topk(case.slots).indices


def layer_results(
    case: Case, device: torch.device, plan: PrecisionPlan | None = None
) -> dict[str, Tensor]:
    """Return what two layers of experts compute, forward and backward, by default in `integer`."""
    made = {}
    plan = plan or PrecisionPlan.preset("integer")
    up = layer(plan, random(case.experts * case.n, case.k, device=device, seed=6))
    down = layer(plan, random(case.experts * case.k, case.n, device=device, seed=7))
    chosen = random(case.tokens, case.experts, device=device, seed=5).topk(case.slots).indices
    x = random(case.tokens, case.k, device=device, seed=8).bfloat16().requires_grad_()
    weights = random(*chosen.shape, device=device, seed=9).requires_grad_()
    groups = reference.group_rows(chosen, case.experts)
    inner = reference.grouped_linear(x, up, groups, "train", by_token=True)
    y = reference.grouped_linear(inner, down, groups, "train")
    made["out"] = reference.combine(y, weights, groups)
    made["out"].backward(random(case.tokens, case.k, device=device, seed=4).bfloat16())
    gradients = {"dx": x.grad, "dweights": weights.grad}
    gradients |= {"up": up.weight.grad, "down": down.weight.grad}
    return made | {name: grad for name, grad in gradients.items() if grad is not None}


def adapted_results(
    case: Case, device: torch.device, plan: PrecisionPlan, by_token: bool
) -> dict[str, Tensor]:
    """Return what a layer with two parts of adapters per expert computes, forward and backward."""
    rows, half, rank = case.experts * case.n, case.n // 2, 8
    parts = tuple((at, half) for at in range(0, rows, half))
    shape = AdapterShape(rank, 0.5, rows, case.k, parts)
    linear = layer(plan, random(rows, case.k, device=device, seed=6) / case.k**0.5)
    linear.weight.requires_grad_(False)
    a = nn.Parameter(random(*shape.a_shape, device=device, seed=7) / case.k**0.5)
    b = nn.Parameter(random(*shape.b_shape, device=device, seed=8))
    linear.adapter = AdapterWeight("test", a, b, shape, torch.bfloat16)
    groups = reference.group_rows(chosen_by(case, device), case.experts)
    entered = case.tokens if by_token else case.tokens * case.slots
    x = random(entered, case.k, device=device, seed=9).bfloat16().requires_grad_()
    y = adapted_grouped_linear(x, linear, groups, "train", by_token)
    y.backward(random(*y.shape, device=device, seed=4).bfloat16())
    found = {"y": y.detach(), "dx": x.grad, "a": a.grad, "b": b.grad}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def part(q: QTensor, rows: Tensor | slice) -> QTensor:
    return QTensor(q.codes[rows], q.scales[rows], q.block, q.rotated)


def compare_rows(groups: Groups, chosen: Tensor) -> dict[str, int]:
    """Compare the sort, and the sums over slots with their gradients."""
    made, device = expert_rows.group_rows(chosen, groups.num_experts), chosen.device
    found = {
        name: different(getattr(made, name), getattr(groups, name))
        for name in ("tokens", "ends", "places")
    }
    width = 1100 if len(chosen) < 100 else 70
    y = random(chosen.numel(), width, device=device, seed=2).bfloat16()
    dout = random(len(chosen), width, device=device, seed=4).bfloat16()
    weights = random(*chosen.shape, device=device, seed=3)
    y[0], weights[0, 0], dout[-1, 1], y[-1, 5] = -0.0, 1e-30, torch.inf, torch.nan
    weights.requires_grad_()
    y.requires_grad_()
    out = reference.combine(y, weights, groups)
    found["combine"] = different(expert_rows.combine(y, weights, groups), out.detach())
    out.backward(dout)
    dy, dweights = expert_rows.combine_backward(dout, y.detach(), weights.detach(), groups)
    found |= {"dy": different(dy, y.grad), "dweights": different(dweights, weights.grad)}
    dx = dout[groups.tokens.long()] * 1.5
    want = reference.sum_slots(dx, groups)
    return found | {"sum_slots": different(expert_rows.sum_slots(dx, groups), want)}


def compare_products(groups: Groups, case: Case) -> dict[str, int]:
    """Compare FProp with rows by token and by place, for tiles of several sizes."""
    device, n, found = groups.ends.device, case.n, {}
    w = int8_rows(random(case.experts * n, case.k, device=device, seed=1))
    by_token = int8_rows(random(case.tokens, case.k, device=device).bfloat16())
    by_token.scales[0], w.scales[-1] = torch.nan, torch.inf
    by_place = part(by_token, groups.tokens.long())
    for dtype in (torch.float32, torch.bfloat16):
        want = torch.empty(len(groups.tokens), n, dtype=dtype, device=device)
        for expert, rows in groups.rows():
            matrix = part(w, slice(expert * n, (expert + 1) * n))
            want[rows] = int8_matmul(part(by_place, rows), matrix, dtype)
        made = grouped_int8.int8_grouped_matmul(by_token, w, groups, True, dtype)
        found[f"by token, {dtype}"] = different(made, want)
        for tile in TILES:
            made = grouped_int8.product(by_place, w, groups, False, dtype, tile)
            found[f"by place, {dtype}, {tile}"] = different(made, want)
    return found


def compare_wgrad(groups: Groups, case: Case) -> dict[str, int]:
    """Compare codes along the rows of groups, and dW, with zero, tiny and non-finite values."""
    device, start, wrong = groups.ends.device, 0, 0
    dy = random(len(groups.tokens), case.n, device=device).bfloat16()
    x = random(case.tokens, case.k, device=device, seed=1).bfloat16()
    dy[:, 1], x[:, 2] = 0.0, 2.0**-110
    dy[0, 3], x[-1, 4], x[-1, 5] = torch.inf, torch.nan, -torch.inf
    want = torch.zeros(case.experts, case.n, case.k, dtype=torch.bfloat16, device=device)
    dy_codes = grouped_int8.group_tokens(dy, groups, by_token=False)
    x_codes = grouped_int8.group_tokens(x, groups, by_token=True)
    for expert, rows in groups.rows():
        a, b = int8_tokens(dy[rows]).mT, int8_tokens(x[groups.tokens[rows].long()]).mT
        want[expert] = int8_matmul(a, b)
        end = start + a.shape[1] + -a.shape[1] % 128
        for made, one in ((dy_codes, a), (x_codes, b)):
            expected = pad(one.codes, (0, end - start - one.shape[1]))
            wrong += different(made.codes[:, start:end], expected)
        start = end
    found = {"codes along tokens": wrong}
    for tile in (None, *TILES):
        operands = (dy_codes, x_codes, groups, tile)
        found |= compare_sums(f"wgrad, {tile}", grouped_int8.add_wgrad_product, operands, want)
    return found


def compare_sums(
    name: str, add: Callable[..., None], operands: tuple[object, ...], product: Tensor
) -> dict[str, int]:
    """Compare a product of WGrad [E, N, K] that is stored, or added to a sum with zeros and NaN."""
    product, found = product.flatten(0, 1), {}
    for dtype in (torch.bfloat16, torch.float32):
        total = torch.empty(product.shape, dtype=dtype, device=product.device)
        add(total, False, *operands)
        found[f"{name}, {dtype}"] = different(total, product.to(dtype))
    total = random(*product.shape, device=product.device, seed=3)
    total[:, ::3], total[0] = -0.0, torch.nan
    want = total + product
    add(total, True, *operands)
    return found | {f"{name}, added": different(total, want)}


def compare_squares(experts: int, n: int, k: int, device: torch.device) -> int:
    """Return how many codes and scales of stacked INT8 weights in transposed squares differ."""
    with selected_backend("reference"):
        w = int8_rows(random(experts * n, k, device=device))
        want = int8_squares_turned(w, experts)
    made = int8.int8_squares_turned(w, experts)
    return different(made.codes.contiguous(), want.codes.contiguous()) + different(
        made.scales.contiguous(), want.scales.contiguous()
    )


def fused_matmul(a: QTensor, b: QTensor) -> Tensor:
    """Return a @ b^T in bfloat16: a product of 128 values is exact, and added by one fma."""
    height = b.block[0]
    b_scales = b.scales.repeat_interleave(height, dim=0)[: b.shape[0]]
    total = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
    for block in range(a.scales.shape[1]):
        k = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        product = (codes_as_float64(a.codes[:, k]) @ codes_as_float64(b.codes[:, k]).mT).float()
        total = fma(product, a.scales[:, block, None] * b_scales[None, :, block], total)
    return total.bfloat16()


def compare_fp8(
    case: Case, device: torch.device, matmul: Callable[[QTensor, QTensor], Tensor] = fused_matmul
) -> dict[str, int]:
    """Return how many values differ of FP8 codes and products of experts; `matmul` is dense."""
    with filled_memory(), selected_backend("reference"):
        groups = Groups.of(chosen_by(case, device), case.experts)
        dy = random(len(groups.tokens), case.n, device=device).bfloat16()
        x = random(case.tokens, case.k, device=device, seed=1).bfloat16()
        found = compare_fp8_fprop(groups, x, matmul)
        found |= compare_fp8_dgrad(groups, dy, case, matmul)
        dy[:, 1], x[:, 2] = 0.0, 2.0**-110
        dy[0, 3], x[-1, 4], x[-1, 5] = torch.inf, torch.nan, -torch.inf
        return found | compare_fp8_wgrad(groups, dy, x, matmul)


def compare_fp8_fprop(
    groups: Groups, x: Tensor, matmul: Callable[[QTensor, QTensor], Tensor]
) -> dict[str, int]:
    """Compare products with a weight in FP8, with rows by token and by place."""
    experts, device = groups.num_experts, x.device
    rows = quantize(x, (1, FP8_BLOCK))
    by_place = part(rows, groups.tokens.long())
    w = quantize(random(experts * FP8_BLOCK, x.shape[1], device=device, seed=3), (128, 128))
    want = torch.empty(len(groups.tokens), FP8_BLOCK, dtype=torch.bfloat16, device=device)
    for expert, own in groups.rows():
        matrix = w.codes[expert * FP8_BLOCK : (expert + 1) * FP8_BLOCK]
        matrix = QTensor(matrix, w.scales[expert : expert + 1], w.block)
        want[own] = matmul(part(by_place, own), matrix)
    made = {
        "by token": grouped_fp8.fp8_grouped_matmul(rows, w, groups, True),
        "by place": grouped_fp8.fp8_grouped_matmul(by_place, w, groups, False),
    }
    return {f"fprop {name}": different(each, want) for name, each in made.items()}


def compare_fp8_dgrad(
    groups: Groups, dy: Tensor, case: Case, matmul: Callable[[QTensor, QTensor], Tensor]
) -> dict[str, int]:
    """Compare dX of INT8 weights, for both sizes of tiles."""
    experts, n, device = groups.num_experts, case.n, dy.device
    w = int8_rows(random(experts * n, case.k, device=device, seed=1))
    rows = quantize(dy, (1, FP8_BLOCK))
    want = torch.empty(len(dy), case.k, dtype=torch.bfloat16, device=device)
    for expert, own in groups.rows():
        matrix = int8_squares_turned(part(w, slice(expert * n, (expert + 1) * n)))
        matrix = QTensor(matrix.codes.contiguous(), matrix.scales, matrix.block)
        want[own] = matmul(part(rows, own), matrix)
    matrices, tiles = grouped_fp8.turned_matrices(w, experts), grouped_fp8.TILES["small"]
    made = {tile: grouped_fp8.product(rows, matrices, groups, False, tile) for tile in tiles}
    made[None] = grouped_fp8.fp8_grouped_dgrad(rows, w, groups)
    return {f"dgrad, {tile}": different(each, want) for tile, each in made.items()}


def compare_fp8_wgrad(
    groups: Groups, dy: Tensor, x: Tensor, matmul: Callable[[QTensor, QTensor], Tensor]
) -> dict[str, int]:
    """Compare codes of dY and X along the rows of experts, and dW."""
    rows, dy_codes = grouped_fp8.fp8_grouped_gradient(dy, groups, "fp32")
    x_codes = grouped_fp8.quantized_input(x, groups, True, "fp32")
    expected = quantize(dy, (1, FP8_BLOCK))
    found = {
        "codes of dY": different(rows.codes, expected.codes),
        "scales of dY": different(rows.scales, expected.scales),
        "dY along rows": 0,
        "X along rows": 0,
    }
    shape = (groups.num_experts, dy.shape[1], x.shape[1])
    want = torch.zeros(shape, dtype=torch.bfloat16, device=dy.device)
    first = 0
    for expert, own in groups.rows():
        a = quantize(dy[own], (FP8_BLOCK, 1)).mT
        b = quantize(x[groups.tokens[own].long()], (FP8_BLOCK, FP8_BLOCK)).mT
        want[expert] = matmul(_whole(a), _whole(b))
        last = first + a.scales.shape[1]
        found["dY along rows"] += _different_groups(dy_codes, a, first, last, squares=False)
        found["X along rows"] += _different_groups(x_codes, b, first, last, squares=True)
        first = last
    for tile in (None, *grouped_fp8.TILES["small"]):
        operands = (dy_codes, x_codes, groups, tile)
        found |= compare_sums(f"wgrad, {tile}", grouped_fp8.add_wgrad_product, operands, want)
    return found


def _whole(q: QTensor) -> QTensor:
    """Return codes [C, r] padded with zeros to whole groups along r."""
    codes = pad(q.codes.view(torch.uint8), (0, -q.shape[1] % FP8_BLOCK)).view(q.codes.dtype)
    return QTensor(codes.contiguous(), q.scales, q.block)


def _different_groups(
    made: TokenGroups, want: QTensor, first: int, last: int, *, squares: bool
) -> int:
    """Return how many codes and scales differ in the groups [first, last) along rows.

    Padding is zeros, or NaN in a group whose scale is NaN.
    """
    codes = made.codes[:, first * FP8_BLOCK : last * FP8_BLOCK]
    scales = made.scales[:, first:last] if squares else made.scales[first:last].mT
    padding = codes[:, want.shape[1] :].float()
    wrong = int(((padding != 0) & ~padding.isnan()).sum())
    wrong += different(codes[:, : want.shape[1]].contiguous(), want.codes.contiguous())
    return wrong + different(scales, want.scales)


def compare_bf16(case: Case, device: torch.device, memory: str = "small") -> dict[str, int]:
    """Return how many values differ from dense products with one order, and are beyond rounding."""
    with filled_memory(), selected_backend("reference"):
        groups = Groups.of(chosen_by(case, device), case.experts)
        x = random(case.tokens, case.k, device=device).bfloat16()
        dy = random(len(groups.tokens), case.n, device=device, seed=1).bfloat16()
        w = random(case.experts * case.n, case.k, device=device, seed=2).bfloat16()
        found = compare_bf16_rows(groups, x, dy, w, grouped_bf16.TILES[memory])
        dy[:, 1], x[:, 2] = 0.0, 2.0**-110
        dy[0, 3], x[-1, 4], x[-1, 5] = torch.inf, torch.nan, -torch.inf
        return found | compare_bf16_wgrad(groups, x, dy, grouped_bf16.WGRAD[memory])


def compare_bf16_rows(
    groups: Groups, x: Tensor, dy: Tensor, w: Tensor, tiles: tuple[Tile, ...]
) -> dict[str, int]:
    """Compare FProp and DGrad in BF16, for each size of tiles."""
    matrices, by_place = w.unflatten(0, (groups.num_experts, -1)), x[groups.tokens.long()]
    y = torch.empty(dy.shape, dtype=torch.float32, device=x.device)
    dx, beyond = torch.empty_like(by_place), 0
    for expert, own in groups.rows():
        matrix = matrices[expert]
        y[own] = float_tiles.bf16_matmul(by_place[own], matrix, torch.float32)
        dx[own] = float_tiles.bf16_matmul(dy[own], matrix.mT.contiguous())
        # A step adds 16 products, and is cut off below 23 bits.
        steps, (a, b) = -(-x.shape[1] // 16), (each.double() for each in (by_place[own], matrix))
        limit = steps * 2.0**-22 * (a.abs() @ b.abs().mT)
        beyond += int((~((y[own] - a @ b.mT).abs() <= limit)).sum())
    found = {"beyond rounding": beyond}
    for tile in (None, *tiles):
        for dtype in (torch.float32, torch.bfloat16):
            for name, rows in {"by token": x, "by place": by_place}.items():
                made = grouped_bf16.bf16_grouped_matmul(rows, w, groups, rows is x, dtype, tile)
                found[f"fprop {name}, {dtype}, {tile}"] = different(made, y.to(dtype))
        made = grouped_bf16.bf16_grouped_dgrad(dy, w, groups, tile)
        found[f"dgrad, {tile}"] = different(made, dx)
    return found


def compare_bf16_wgrad(groups: Groups, x: Tensor, dy: Tensor, tile: Tile) -> dict[str, int]:
    """Compare sums of dW in float32, with zero, tiny and non-finite values."""
    before = random(groups.num_experts * dy.shape[1], x.shape[1], device=x.device, seed=3)
    by_place, want = x[groups.tokens.long()], before.clone()
    for expert, own in groups.rows():
        padding = (0, 0, 0, -len(dy[own]) % 64)  # zeros change no sum
        a, b = (pad(values[own], padding).mT.contiguous() for values in (dy, by_place))
        product = float_tiles.bf16_matmul(a, b, torch.float32)
        want[expert * dy.shape[1] : (expert + 1) * dy.shape[1]] += product
    found = {}
    for name, rows in {"by token": x, "by place": by_place}.items():
        total = before.clone()
        grouped_bf16.add_bf16_grouped_wgrad(total, dy, rows, groups, rows is x, tile)
        found[f"wgrad {name}"] = different(total, want)
    return found


def far_from(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, int]:
    """Return 1 for each result that is far from another by its norm: more than a few roundings."""
    limit = {name: 2.0**-6 * want.float().norm() for name, want in wanted.items()}
    near = {name: (found[name] - want).norm() <= limit[name] for name, want in wanted.items()}
    return {name: int(not is_near) for name, is_near in near.items()}


ROUTES = (
    RoutingRule(3),
    RoutingRule(8, normalized=False),
    RoutingRule(3, "sigmoid", floor=1e-20, scale=2.5),
    RoutingRule(1, "sigmoid", normalized=False),
)


def compare_routes(
    tokens: int, experts: int, device: torch.device, dtype: torch.dtype, rule: RoutingRule
) -> dict[str, int]:
    """Compare choices, weights and gradients, with ties, zeros of both signs, Inf and NaN."""
    logits = random(tokens, experts, device=device, seed=1).mul(4).round().div(4)
    logits[0, ::2], logits[0, 1::2], logits[-1] = -0.0, 0.0, 0.0
    if tokens > 9:
        logits[1, 2], logits[2, 3], logits[3, 1] = torch.inf, -torch.inf, torch.nan
        logits[4:8] *= 30.0
    logits = logits.to(dtype).requires_grad_()
    bias = random(experts, device=device, seed=2) if rule.scores == "sigmoid" else None
    dweights = random(tokens, rule.num_chosen, device=device, seed=3)
    with filled_memory(), selected_backend("reference"):
        want, want_weights = reference_route(logits, rule, bias)
        want_weights.backward(dweights)
        chosen, weights, scores = routing.route(logits.detach(), rule, bias)
        dlogits = routing.route_backward(dweights, scores, chosen, rule, dtype)
    wrong = {
        "chosen": int((chosen != want).sum()),
        "weights": different(weights, want_weights.detach()),
        "dlogits": different(dlogits, logits.grad),
    }
    return {f"{tokens} x {experts} {dtype} {rule}: {name}": n for name, n in wrong.items()}
