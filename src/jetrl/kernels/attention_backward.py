"""Gradients of packed causal attention, from the forward's output and log-sum-exp.

Needs no agreement of bits with any other kernel, so it uses the fast matrix instructions (wgmma,
BF16) and recomputes the weights P from the log-sum-exp:

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        delta = sum_d O * dO
    dQ = scale * dS K                     dK = scale * dS^T Q

Key and value codes are exact in BF16; their scales multiply the float32 scores, dP and dS. Two
kernels, one owning blocks of keys (dK, dV, over all query heads of the group), one owning blocks of
queries (dQ): 7 products where 5 would do with atomic additions, but every sum has one order, so the
gradients are deterministic.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl.kernels.attention_layout import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    KeyValueCodes,
    QueryTiles,
    check_queries,
)

_STEP = 64  # rows of the inner loops
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def delta_kernel(
    o_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    lse2_ptr,
    num_rows,
    line_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """delta [H, line_stride] and the log-sum-exp in base 2, likewise padded."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    ok = row < num_rows
    at = row[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    o = tl.load(o_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    line = head.to(tl.int64) * line_stride + row
    lse = tl.load(lse_ptr + head.to(tl.int64) * num_rows + row, mask=ok, other=0.0)
    tl.store(delta_ptr + line, tl.sum(o * do, axis=1), mask=row < line_stride)
    tl.store(lse2_ptr + line, lse * _LOG2_E, mask=row < line_stride)


@triton.jit
def _dkdv_step(
    q_desc,
    do_desc,
    lse_ptr,
    delta_ptr,
    line_stride,
    q0,
    end,
    head,
    k,
    v,
    a,
    vs,
    dk,
    dv,
    key,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = q0 + tl.arange(0, BLOCK_M)
    q = q_desc.load([q0, head * D])
    do = do_desc.load([q0, head * D])
    line = head.to(tl.int64) * line_stride + row
    s = tl.dot(k, q.T)
    p = tl.math.exp2(s * a[:, None] - tl.load(lse_ptr + line)[None, :])
    if MASKED:
        p = tl.where((key[:, None] <= row[None, :]) & (row < end)[None, :], p, 0.0)
    dp = tl.dot(v, do.T)
    dv = tl.dot(p.to(tl.bfloat16), do, dv)
    if SCALED:
        dp = dp * vs[:, None]
    ds = p * (dp - tl.load(delta_ptr + line)[None, :])
    dk = tl.dot(ds.to(tl.bfloat16), q, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_desc,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    do_desc,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    line_stride,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dK and dV of one block of keys: over the query heads of its group and the queries."""
    group = tl.program_id(0)
    row0 = tl.load(tiles_ptr + tl.program_id(1) * 2)
    end = tl.load(tiles_ptr + tl.program_id(1) * 2 + 1)
    key = row0 + tl.arange(0, BLOCK_N)
    ok = key < end
    at = key.to(tl.int64)[:, None] * (G * D) + group * D + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + at, mask=ok[:, None], other=0.0).to(tl.bfloat16)
    v = tl.load(v_ptr + at, mask=ok[:, None], other=0.0).to(tl.bfloat16)
    if SCALED:
        line = key.to(tl.int64) * G + group
        a = tl.load(ks_ptr + line, mask=ok, other=0.0) * (scale * _LOG2_E)
        vs = tl.load(vs_ptr + line, mask=ok, other=0.0)
    else:
        a = tl.full([BLOCK_N], _LOG2_E, tl.float32) * scale
        vs = a
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    # Blocks of queries: the first ones meet the diagonal, the last one may be cut by the end.
    num_blocks = tl.cdiv(end - row0, BLOCK_M)
    diagonal = tl.minimum(num_blocks, BLOCK_N // BLOCK_M)
    whole = tl.maximum((end - row0) // BLOCK_M, diagonal)
    edges = diagonal + num_blocks - whole
    for t in range(edges * GROUP):
        i = t % edges
        q0 = row0 + tl.where(i < diagonal, i, whole) * BLOCK_M
        dk, dv = _dkdv_step(
            q_desc, do_desc, lse_ptr, delta_ptr, line_stride, q0, end, group * GROUP + t // edges,
            k, v, a, vs, dk, dv, key, True, SCALED, D, BLOCK_M,
        )  # fmt: skip
    steps = whole - diagonal
    for t in range(steps * GROUP):
        q0 = row0 + (diagonal + t % steps) * BLOCK_M
        dk, dv = _dkdv_step(
            q_desc, do_desc, lse_ptr, delta_ptr, line_stride, q0, end, group * GROUP + t // steps,
            k, v, a, vs, dk, dv, key, False, SCALED, D, BLOCK_M,
        )  # fmt: skip
    tl.store(dk_ptr + at, (dk * scale).to(tl.bfloat16), mask=ok[:, None])
    tl.store(dv_ptr + at, dv.to(tl.bfloat16), mask=ok[:, None])


@triton.jit
def _dq_step(
    k_desc,
    v_desc,
    ks_ptr,
    vs_ptr,
    line_stride,
    k0,
    group,
    q,
    do,
    lse,
    delta,
    dq,
    row,
    scale,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    k = k_desc.load([k0, group * D])
    v = v_desc.load([k0, group * D])
    key = k0 + tl.arange(0, BLOCK_N)
    s = tl.dot(q, k.T)
    dp = tl.dot(do, v.T)
    if SCALED:
        line = group.to(tl.int64) * line_stride + key
        ks = tl.load(ks_ptr + line)
        p = tl.math.exp2(s * (ks * (scale * _LOG2_E))[None, :] - lse[:, None])
        ds = p * (dp * tl.load(vs_ptr + line)[None, :] - delta[:, None]) * ks[None, :]
    else:
        p = tl.math.exp2(s * (scale * _LOG2_E) - lse[:, None])
        ds = p * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(key[None, :] <= row[:, None], ds, 0.0)
    return tl.dot(ds.to(tl.bfloat16), k, dq)


@triton.jit
def dq_kernel(
    q_ptr,
    k_desc,
    v_desc,
    ks_ptr,
    vs_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    tiles_ptr,
    line_stride,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dQ of one block of queries of one head, over the keys it sees."""
    H: tl.constexpr = G * GROUP
    head = tl.program_id(0)
    first = tl.load(tiles_ptr + tl.program_id(1) * 3)
    row0 = tl.load(tiles_ptr + tl.program_id(1) * 3 + 1)
    end = tl.load(tiles_ptr + tl.program_id(1) * 3 + 2)
    group = head // GROUP
    row = row0 + tl.arange(0, BLOCK_M)
    ok = row < end
    at = row.to(tl.int64)[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + at, mask=ok[:, None], other=0.0)
    do = tl.load(do_ptr + at, mask=ok[:, None], other=0.0)
    line = head.to(tl.int64) * line_stride + row
    lse = tl.load(lse_ptr + line, mask=ok, other=float("inf"))
    delta = tl.load(delta_ptr + line, mask=ok, other=0.0)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    middle = first + (row0 + 1 - first) // BLOCK_N * BLOCK_N
    for k0 in range(first, middle, BLOCK_N):
        dq = _dq_step(
            k_desc, v_desc, ks_ptr, vs_ptr, line_stride, k0, group, q, do, lse, delta, dq, row,
            scale, False, SCALED, D, BLOCK_N,
        )  # fmt: skip
    for k0 in range(middle, tl.minimum(row0 + BLOCK_M, end), BLOCK_N):
        dq = _dq_step(
            k_desc, v_desc, ks_ptr, vs_ptr, line_stride, k0, group, q, do, lse, delta, dq, row,
            scale, True, SCALED, D, BLOCK_N,
        )  # fmt: skip
    tl.store(dq_ptr + at, (dq * scale).to(tl.bfloat16), mask=ok[:, None])


def attention_backward(
    do: Tensor,
    q: Tensor,
    codes: KeyValueCodes,
    o: Tensor,
    lse: Tensor,
    tiles: QueryTiles,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of the keys and values that `codes` stand for (straight-through).

    do, q, o: bfloat16 [T, H, D]; lse: float32 [H, T]; codes: [T, G, D]; tiles: those of the forward
    (`QueryTiles.packed`). Returns dq [T, H, D], dk and dv [T, G, D], bfloat16.
    """
    group = check_queries(q, codes)
    if do.dtype != q.dtype or do.shape != q.shape or not do.is_contiguous():
        raise ValueError(
            f"do: contiguous {q.dtype} {list(q.shape)} expected, got {do.dtype} {list(do.shape)}"
        )
    if codes.k.ndim != 3 or not len(tiles.query_tiles):
        raise ValueError("the backward is for packed sequences, not for pages")
    tokens, heads, head_dim = q.shape
    groups = codes.num_heads
    scale = 1.0 / math.sqrt(head_dim)
    # Lines are padded so that the inner loops read them without a mask.
    width = -(-tokens // _STEP) * _STEP + _STEP
    delta, lse2 = (q.new_empty(heads, width, dtype=torch.float32) for _ in range(2))
    delta_kernel[(triton.cdiv(width, 64), heads)](
        o, do, lse, delta, lse2, tokens, width, heads, head_dim, 64
    )
    dq, dk, dv = torch.empty_like(q), q.new_empty(codes.k.shape), q.new_empty(codes.v.shape)

    def rows(x: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.view(tokens, -1), [_STEP, head_dim])

    k_scales, v_scales = (delta if s is None else s for s in (codes.k_scales, codes.v_scales))
    dkdv_kernel[(groups, len(tiles.key_tiles))](
        rows(q), codes.k, codes.v, k_scales, v_scales, rows(do), lse2, delta, dk, dv,
        tiles.key_tiles, width, scale, groups, group, head_dim, codes.scaled, _STEP, BACKWARD_KEYS,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    if codes.scaled:
        k_scales, v_scales = (_lines(s, width) for s in (k_scales, v_scales))
    dq_kernel[(heads, len(tiles.query_tiles))](
        q, rows(codes.k.to(q.dtype)), rows(codes.v.to(q.dtype)), k_scales, v_scales, do, lse2,
        delta, dq, tiles.query_tiles, width, scale, groups, group, head_dim, codes.scaled,
        BACKWARD_QUERIES, _STEP,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


def _lines(scales: Tensor, width: int) -> Tensor:
    """Scales [T, G] as zero-padded lines [G, width]."""
    out = scales.new_zeros(scales.shape[1], width)
    out[:, : len(scales)] = scales.T
    return out
