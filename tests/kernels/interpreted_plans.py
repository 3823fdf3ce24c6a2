"""Compare kernels of GPUs from sm_80 on with references, by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_plans.py

It prints a JSON object: case -> what differs. Training attention, gradients and BF16 products are
compared within rounding errors; decode and prefill with training, and tiles of the backward with
each other, bit for bit.
"""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest import mock

import numpy as np
import torch
from gluon_interpreter import set_rows_per_warp  # before the kernels
from portable_rows import extreme
from tests.kernels.bits import different
from torch import Tensor

from jetrl.kernels.attention import backward, decode, forward_triton, pages, staging
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.reference import attend_dense, quantize_keys_and_values, stored_values
from jetrl.precision import adapter as adapter_reference
from jetrl.precision import saved
from jetrl.precision.adapter_weight import AdapterShape, AdapterWeight
from jetrl.precision.gemm import fp8_matmul
from jetrl.precision.quantize import QTensor, dequantize, quantize
from jetrl.precision.triton import adapter, float_tiles, tile
from jetrl.precision.triton import saved as saved_triton

SPLIT = 128  # keys; lengths below cross it
LENGTHS = (1, 63, 270)


def widen_codes(codes: Any) -> Any:
    import triton.language as tl

    return codes.to(tl.float16)


def to_bfloat16(x: Any) -> Any:
    import triton.language as tl

    return x.to(tl.bfloat16)


def prepare() -> None:
    """Replace instructions in PTX, and what wrappers ask about a GPU."""
    pages.widen_codes = staging.widen_codes = widen_codes
    tile.to_bfloat16 = to_bfloat16
    for module in (backward, decode, forward_triton):
        module.check_queries = lambda q, codes: q.shape[1] // codes.num_heads
    decode.overlapped = adapter.overlapped = dict
    adapter.wait_for_previous = adapter.let_next_start = lambda: None
    decode.gluon_let_next_start = decode.gluon_wait_for_previous = lambda: None


def stored(tokens: int, groups: int, head_dim: int, kv: str) -> KeyValueCodes:
    g = torch.Generator().manual_seed(tokens)
    k = torch.randn(tokens, groups, head_dim, generator=g).bfloat16()
    v = torch.randn(tokens, groups, head_dim, generator=g)
    v = (v * torch.randn(tokens, groups, 1, generator=g).exp2()).bfloat16()
    (k_codes, k_scales), (v_codes, v_scales) = quantize_keys_and_values(k, v, kv)
    return KeyValueCodes(k_codes, k_scales, v_codes, v_scales)


def in_pages(codes: KeyValueCodes, starts: list[int]) -> tuple[KeyValueCodes, list[list[int]]]:
    """Return the same codes in pages, in an order of their own, and the pages of each sequence."""
    counts = [-(-(b - a) // 64) for a, b in itertools.pairwise(starts)]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]

    def scattered(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        pool = torch.full((sum(counts), 64, *x.shape[1:]), 77.0).to(x.dtype)
        for start, end, table in zip(starts[:-1], starts[1:], tables, strict=True):
            for i in range(end - start):
                pool[table[i // 64], i % 64] = x[start + i]
        return pool

    found = (codes.k, codes.k_scales, codes.v, codes.v_scales)
    return KeyValueCodes(*map(scattered, found)), tables


def reference(q: Tensor, codes: KeyValueCodes, rows: slice) -> tuple[Tensor, Tensor]:
    """Return attention of a sequence, and the sum of |weight * value|, float32 [T, H, D]."""

    def attended(v: Tensor) -> Tensor:
        def one(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[None, rows]

        positions = torch.arange(rows.stop - rows.start)[None]
        keys = (codes.k[None, rows], one(codes.k_scales))
        return attend_dense(q[None, rows], keys, (v[None, rows], one(codes.v_scales)), positions)[0]

    size = codes.v.float().abs().to(codes.v.dtype)
    return attended(codes.v).float(), attended(size).float()


def compare(kv: str, heads: int, groups: int, head_dim: int) -> dict[str, Any]:
    starts = [0, *np.cumsum(LENGTHS).tolist()]
    codes = stored(starts[-1], groups, head_dim, kv)
    g = torch.Generator().manual_seed(7)
    q = (1.5 * torch.randn(starts[-1], heads, head_dim, generator=g)).bfloat16()
    tiles = QueryTiles.packed(starts, "cpu")
    staged = forward_triton.stage_keys(codes, tiles)
    trained, _ = forward_triton.attend_tiles(q, staged, tiles, SPLIT)
    # Weights are rounded to FP16 or BF16, by 2**-11 or 2**-8 of themselves; scores err by less than
    # 2**-16. Both outputs are rounded to BF16, by at most 2**-8 of a value each.
    weight = 2.0**-11 if codes.scaled else 2.0**-8
    beyond = 0
    for start, end in itertools.pairwise(starts):
        true, size = reference(q, codes, slice(start, end))
        limit = (weight + 2.0**-16) * 1.01 * size + 2.0**-7 * 1.01 * true.abs()
        beyond += int((~((trained[start:end].float() - true).abs() <= limit)).sum())  # or NaN
    set_rows_per_warp(512 // (head_dim * codes.k.element_size()))  # 16 bytes per thread
    pool, tables = in_pages(codes, starts)
    paged = QueryTiles.paged(LENGTHS, LENGTHS, tables, "cpu")
    prompts = forward_triton.attend_prefill(q, pool, paged, SPLIT)
    width = max(map(len, tables))
    table = torch.tensor([pages + [0] * (width - len(pages)) for pages in tables]).int()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    last = lengths.long().cumsum(0) - 1
    drawn = decode.attend_decode(q[last], pool, table, lengths, max(LENGTHS), SPLIT)
    return {
        "beyond rounding": beyond,
        "prefill": different(prompts, trained),
        "decode": different(drawn, trained[last]),
    }


def true_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, ends: list[list[int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return dQ, dK and dV in float64, and bounds of the error of roundings to BF16.

    `ends`: rows of each sequence, those of a stem first; only rows of the last run of a sequence,
    and of the stem in the first, have gradients.
    """
    scale, u = q.shape[-1] ** -0.5, 2.0**-8
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    bounds = [torch.zeros_like(x) for x in found]
    delta, slack = (o * do).sum(-1), u * (o * do).abs().sum(-1)
    seen: set[int] = set()
    for rows in ends:
        new = torch.tensor([row not in seen for row in rows])
        seen.update(rows)
        at = torch.tensor(rows)
        hidden = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        s = torch.einsum("thd,sd->hts", q[at], k[at, 0]) * scale
        p = s.masked_fill(hidden, -torch.inf).softmax(-1) * new[None, :, None]
        dp = torch.einsum("thd,sd->hts", do[at], v[at, 0])
        ds = p * (dp - delta[at].T[..., None]) * scale
        # P and dS are rounded to BF16, O was before delta, and keys are for dQ.
        error = u * p, p * slack[at].T[..., None] * scale + u * ds.abs()
        found[0][at] += torch.einsum("hts,sd->thd", ds, k[at, 0])
        bounds[0][at] += torch.einsum("hts,sd->thd", error[1] + u * ds.abs(), k[at, 0].abs())
        for i, (weights, wrong, other) in enumerate(((ds, error[1], q), (p, error[0], do)), 1):
            found[i][at, 0] += torch.einsum("hts,thd->sd", weights, other[at])
            bounds[i][at, 0] += torch.einsum("hts,thd->sd", wrong, other[at].abs())
    return found, bounds


def compare_gradients(kv: str, heads: int, head_dim: int, recomputed: bool) -> dict[str, Any]:
    """Compare dQ, dK and dV of a stem, two branches and a short sequence."""
    cuts = [0, 128, 197, 260, 291]
    ends = [[*range(128), *range(128, 197)], [*range(128), *range(197, 260)], [*range(260, 291)]]
    codes = stored(cuts[-1], 1, head_dim, kv)
    g = torch.Generator().manual_seed(8)
    q, do = (torch.randn(cuts[-1], heads, head_dim, generator=g).bfloat16() for _ in range(2))
    tiles = QueryTiles.packed(cuts, "cpu", [-1, 0, 0, -1])
    o, lse = forward_triton.attend_batch(q, codes, tiles)
    work = (do, q, codes, o, lse, tiles)
    kept, backward.STORED_DS_BYTES = backward.STORED_DS_BYTES, 0 if recomputed else 2**30
    small = backward.attention_backward(*work)
    others, backward._OTHERS = backward._OTHERS, backward._HOPPER
    large = backward.attention_backward(*work)
    backward._OTHERS, backward.STORED_DS_BYTES = others, kept
    k, v = stored_values((codes.k, codes.k_scales)), stored_values((codes.v, codes.v_scales))
    true, bounds = true_gradients(*(x.double() for x in (do, q, k, v, o)), ends)
    beyond = 0
    for found, expected, bound in zip(small, true, bounds, strict=True):
        # Scores err by less than 2**-14; the result is rounded once more.
        limit = 1.1 * bound + 2.0**-8 * (expected.abs() + bound) + 2.0**-12
        beyond += int((~((found.double() - expected).abs() <= limit)).sum())
    return {
        "beyond rounding": beyond,
        "tiles": sum(different(a, b) for a, b in zip(small, large, strict=True)),
    }


def compare_products(rows: int, columns: int, k: int) -> dict[str, Any]:
    """Compare a BF16 product with float64, and a row alone with the same row among others."""
    g = torch.Generator().manual_seed(9)
    a, b = (torch.randn(n, k, generator=g).bfloat16() for n in (rows, columns))
    y = float_tiles.bf16_matmul(a, b, torch.float32)
    true, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    steps = -(-k // float_tiles.MANY_ROWS.depth)  # float32 roundings of a sum
    alone = float_tiles.bf16_matmul(a[-1:], b, torch.float32)
    return {
        "beyond rounding": int((~((y.double() - true).abs() <= steps * 2.0**-24 * size)).sum()),
        "batch": int((alone != y[-1:]).sum()),
    }


def compare_fp8_products(rows: int, columns: int, k: int) -> dict[str, Any]:
    """Compare an E4M3 product with its reference, which adds in two roundings instead of one."""
    g = torch.Generator().manual_seed(10)
    a = quantize(torch.randn(rows, k, generator=g).bfloat16())
    b = quantize(torch.randn(columns, k, generator=g).bfloat16(), (128, 128))
    y, true = float_tiles.fp8_matmul(a, b, torch.float32), fp8_matmul(a, b, torch.float32)
    size = dequantize(a).double().abs() @ dequantize(b).double().abs().T
    blocks = -(-k // 128)  # each rounds a block, its scales and two sums of both sides
    last = QTensor(a.codes[-1:], a.scales[-1:], a.block)
    alone = float_tiles.fp8_matmul(last, b, torch.float32)
    return {
        "beyond rounding": int((~((y - true).abs() <= (2 * blocks + 4) * 2.0**-24 * size)).sum()),
        "batch": int((alone != y[-1:]).sum()),
    }


def compare_adapters(
    rank: int, rows: int, columns: int, parts: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    """Compare both products of an adapter with exact sums, and a row alone with the same row."""
    g, outputs = torch.Generator().manual_seed(13), 256

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    shape = AdapterShape(rank, 0.5, num_rows=outputs, num_columns=columns, parts=parts)
    a, b = torch.nn.Parameter(normal(*shape.a_shape)), torch.nn.Parameter(normal(*shape.b_shape))
    weight = AdapterWeight("test", a, b, shape, torch.bfloat16)
    x, y = normal(rows, columns).bfloat16(), normal(rows, outputs).bfloat16()

    def added(rows: slice) -> tuple[Tensor, Tensor]:
        u = adapter.project_down(x[rows], weight.down, weight.arrived)
        return u, adapter.project_up(y[rows].clone(), u, weight.up, weight.columns)

    (u, made), (last_u, last) = added(slice(None)), added(slice(rows - 1, rows))
    true = adapter_reference.project_down(x, weight).float()
    expected = adapter_reference.project_up(y.clone(), u, weight)
    # A float32 sum is within a few 2**-24 of the sum of its terms; then BF16 rounds it.
    limit = 2.0**-7 * true.abs() + 2.0**-18 * (x.float().abs() @ weight.down.float().abs().mT)
    without = torch.ones(outputs, dtype=torch.bool)
    for first, count in parts:
        without[first : first + count] = False
    return {
        "u beyond rounding": int(((u.float() - true).abs() > limit).sum()),
        "y rounded otherwise": int((made != expected).double().mean() > 0.01),
        "y beyond rounding": int(((made - expected).abs() > 2.0**-6 * expected.abs() + 0.1).sum()),
        "one program": different(u, adapter.project_down_whole(x, weight.down)),
        "batch": different(last, made[-1:]) + different(last_u, u[-1:]),
        "outside": different(made[:, without], y[:, without]),
    }


def compare_saved(rows: int, columns: int, first: int) -> dict[str, Any]:
    """Compare codes of some columns of a matrix, and their values, with their references."""
    x = 4 * torch.randn(rows, first + columns + 64, generator=torch.Generator().manual_seed(11))
    x = extreme((x * torch.randn(x.shape, generator=torch.Generator().manual_seed(12)).exp2())
                .bfloat16())[:, first : first + columns]  # fmt: skip
    wanted = saved.saved_codes(x)
    with mock.patch.object(saved, "arithmetic_of", return_value=saved_triton):
        found = saved.saved_codes(x)
        within = torch.full((rows, columns + 8), 7.0).bfloat16()
        saved.saved_values(found, within[:, :columns])
        values = saved.saved_values(found)
    expected = saved.saved_values(wanted)
    return {
        "codes": different(found[:, :columns], wanted[:, :columns]),
        "scales": different(*(x[:, columns:].view(torch.float32) for x in (found, wanted))),
        "values": different(values, expected),
        "values within": different(within[:, :columns], expected),
        "outside": int((within[:, columns:] != 7).sum()),
    }


# Keys and values, query heads, key-value heads, head size; whether dS is recomputed; matrices.
KINDS: dict[Any, tuple[Any, ...]] = {
    compare: (("bf16", 2, 1, 64), ("int8", 2, 1, 128), ("int8+fp8", 1, 1, 64)),
    compare_gradients: (("bf16", 1, 64, False), ("int8", 2, 64, False), ("int8", 1, 64, True)),
    compare_products: ((1, 40, 64), (70, 130, 200), (64, 128, 1032)),
    compare_fp8_products: ((3, 130, 128), (70, 140, 576)),
    compare_adapters: (
        (8, 70, 1040, ((0, 128), (128, 64), (192, 64))),
        (20, 3, 512, ((64, 128),)),
        (100, 66, 600, ((0, 256),)),
    ),
    compare_saved: ((1, 64, 0), (70, 320, 64), (33, 128, 0)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    prepare()
    results = {}
    for function, cases in KINDS.items():
        for case in cases:
            results[" ".join(map(str, (function.__name__, *case)))] = function(*case)
    print(json.dumps(results))
