"""Inputs of the portable attention forward, and where it differs from its reference.

The interpreter's program and the tests of GPUs share them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.integer import _attend_codes, _quantize_queries
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.portable.attention_core import query_codes
from jetrl.kernels.portable.attention_forward import attend_batch, attend_prefill

SPLIT_KEYS = 1024


@dataclass(frozen=True)
class Case:
    """A packed batch: lengths and stems of runs; or chunks of queries at the ends of contexts.

    Attributes:
        contexts: of prefill chunks whose queries are `lengths`; None for a packed batch.
        sharpness: factor of the queries.
        special: rows of zeros, tiny and huge rows, and rows with NaN and Inf.
    """

    lengths: Sequence[int]
    stems: Sequence[int] | None = None
    contexts: Sequence[int] | None = None
    heads: int = 2
    groups: int = 1
    head_dim: int = 64
    sharpness: float = 1.0
    special: bool = False


def random_rows(case: Case, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, H, D], k and v [T, G, D] in bfloat16."""
    g = torch.Generator().manual_seed(tokens * case.heads)
    q, k, v = (
        torch.randn(tokens, heads, case.head_dim, generator=g)
        for heads in (case.heads, case.groups, case.groups)
    )
    q *= case.sharpness
    v *= torch.rand(tokens, case.groups, 1, generator=g) * 4
    if case.special:
        rows = torch.randperm(tokens, generator=g)
        for x, first in ((q, 0), (k, 6), (v, 12)):
            for i, factor in enumerate((0.0, 1e-30, 1e20, 2.0**-30)):
                x[rows[(first + i) % tokens]] *= factor
        late = torch.arange(tokens * 3 // 4, tokens)
        late = late[torch.randperm(len(late), generator=g)]
        values = (math.nan, math.inf, -math.inf)
        for i, (x, value) in enumerate(itertools.product((q, k, v), values)):
            x[late[i % len(late)], i % x.shape[1], 3] = value
    q, k, v = (x.bfloat16().to(device) for x in (q, k, v))
    return q, k, v


def quantized(k: Tensor, v: Tensor) -> KeyValueCodes:
    """Return k and v [T, G, D] as INT8 codes."""
    (k, k_scales), (v, v_scales) = _quantize_queries(k), _quantize_queries(v)
    return KeyValueCodes(k=k, k_scales=k_scales, v=v, v_scales=v_scales)


def differences(case: Case, device: str) -> dict[str, int]:
    """Return the number of different values of out, N and L."""
    if case.contexts is not None:
        return _prefill_differences(case, case.contexts, device)
    starts = [0, *itertools.accumulate(case.lengths)]
    q, k, v = random_rows(case, starts[-1], device)
    codes = quantized(k, v)
    tiles = QueryTiles.packed(starts, device, case.stems)
    out, statistics = attend_batch(q, codes, tiles)
    found = {"out": 0, "N": 0, "L": 0}
    for i, length in enumerate(case.lengths):
        rows = torch.arange(starts[i], starts[i] + length, device=device)
        stem = -1 if case.stems is None else case.stems[i]
        if stem >= 0:
            rows = torch.cat((torch.arange(starts[stem], starts[stem + 1], device=device), rows))
        expected, reference, mass = _reference(q, codes, rows, length)
        own = rows[-length:]
        found["out"] += different(out[own], expected)
        found["L"] += different(statistics[1, own], mass)
        known = ~mass.isnan()  # N of other rows is not defined
        found["N"] += different(statistics[0, own][known], reference[known])
    return found


def _prefill_differences(case: Case, contexts: Sequence[int], device: str) -> dict[str, int]:
    """Write the contexts to pages in any order, among others of NaN, and attend the last rows."""
    starts = [0, *itertools.accumulate(contexts)]
    q, k, v = random_rows(case, starts[-1], device)
    codes = quantized(k, v)
    g = torch.Generator().manual_seed(1)
    free = torch.randperm(sum(-(-n // 64) for n in contexts) + 3, generator=g).tolist()
    num_slots = len(free) * 64
    pages = KeyValueCodes(
        k=torch.full((num_slots, case.groups, case.head_dim), 99, dtype=torch.int8, device=device),
        k_scales=torch.full((num_slots, case.groups), math.nan, device=device),
        v=torch.full((num_slots, case.groups, case.head_dim), 99, dtype=torch.int8, device=device),
        v_scales=torch.full((num_slots, case.groups), math.nan, device=device),
    )
    tables = []
    for start, length in zip(starts, contexts, strict=False):
        tables.append([free.pop() for _ in range(0, length, 64)])
        position = torch.arange(length)
        slots = torch.tensor(tables[-1])[position // 64] * 64 + position % 64
        for name, stored in vars(pages).items():
            stored[slots.to(device)] = getattr(codes, name)[start : start + length]
    tiles = QueryTiles.paged(case.lengths, contexts, tables, device)
    ends = zip(starts[1:], case.lengths, strict=True)
    queries = torch.cat([torch.arange(end - length, end) for end, length in ends]).to(device)
    paged = KeyValueCodes(
        k=pages.k.unflatten(0, (-1, 64)), k_scales=_paged(pages.k_scales),
        v=pages.v.unflatten(0, (-1, 64)), v_scales=_paged(pages.v_scales),
    )  # fmt: skip
    out = attend_prefill(q[queries].contiguous(), paged, tiles, SPLIT_KEYS)
    found, first = 0, 0
    for i, length in enumerate(case.lengths):
        rows = torch.arange(starts[i], starts[i + 1], device=device)
        expected, _, _ = _reference(q, codes, rows, length)
        found += different(out[first : first + length], expected)
        first += length
    return {"out": found}


def _paged(scales: Tensor | None) -> Tensor:
    assert scales is not None
    return scales.unflatten(0, (-1, 64))


def _reference(
    q: Tensor, codes: KeyValueCodes, rows: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, N and L of the last `count` rows of a sequence."""
    queries, scales = _quantize_queries(q)
    assert scales is not None
    assert codes.k_scales is not None
    assert codes.v_scales is not None
    own = rows[-count:]
    positions = torch.arange(len(rows) - count, len(rows), device=rows.device)
    attended = _attend_codes(
        (queries[own][None], scales[own][None]),
        (codes.k[rows][None], codes.k_scales[rows][None]),
        (codes.v[rows][None], codes.v_scales[rows][None]),
        positions[None],
    )
    return attended.out[0], attended.reference[0], attended.mass[0]


def different(ours: Tensor, theirs: Tensor) -> int:
    """Return the number of values that differ: zeros are equal, and so are NaN."""
    return int(((ours != theirs) & ~(ours.isnan() & theirs.isnan())).sum())


@triton.jit
def _query_kernel(q_ptr, codes_ptr, scales_ptr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantize a row of q, bfloat16 [., D]; COLUMNS is a power of two, at least D."""
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, COLUMNS)
    at, inside = row[:, None] * D + column[None, :], (column < D)[None, :]
    codes, scales = query_codes(tl.load(q_ptr + at, mask=inside, other=0.0))
    tl.store(codes_ptr + at, codes, mask=inside)
    tl.store(scales_ptr + row, scales)


def query_differences(rows: int, heads: int, head_dim: int, device: str) -> dict[str, int]:
    """Return the number of different codes and scales of quantized queries."""
    case = Case([rows], heads=heads, head_dim=head_dim, special=True)
    q, _, _ = random_rows(case, rows, device)
    codes, scales = torch.empty_like(q, dtype=torch.int8), q.new_empty(q.shape[:2]).float()
    columns = triton.next_power_of_2(head_dim)
    _query_kernel[(rows * heads,)](q, codes, scales, head_dim, columns, enable_fp_fusion=False)
    expected, expected_scales = _quantize_queries(q)
    assert expected_scales is not None
    return {"codes": different(codes, expected), "scales": different(scales, expected_scales)}
