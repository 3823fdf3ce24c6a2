"""The gradient of queries, dQ, with P and dS computed once more.

It is for sequences whose dS would take too much memory to be kept for `attention.backward_dq`:
seven products in place of five. The formulas are those of `attention.backward`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl.kernels.attention.backward_lists import BACKWARD_QUERIES
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.exponential_hopper import LOG2_E

_STEP = 64  # keys of a step


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
    """Return dQ of a block of queries of one head with one block of keys added.

    Args:
        k_desc, v_desc: bfloat16 [T, G * D], codes, by boxes [BLOCK_N, D].
        ks_ptr, vs_ptr: float32 [G, line_stride].
        k0: first key row.
        q, do: bfloat16 [BLOCK_M, D].
        lse, delta: float32 [BLOCK_M].
        dq: float32 [BLOCK_M, D], the sum before.
        row: int32 [BLOCK_M], the queries' rows.
    """
    # Keys are codes here: their scales are in the scores, and once more in what multiplies them.
    k = k_desc.load([k0, group * D])
    v = v_desc.load([k0, group * D])
    key = k0 + tl.arange(0, BLOCK_N)
    s = tl.dot(q, k.T)
    dp = tl.dot(do, v.T)
    if SCALED:
        line = group.to(tl.int64) * line_stride + key
        ks = tl.load(ks_ptr + line)
        p = tl.math.exp2(s * (ks * (scale * LOG2_E))[None, :] - lse[:, None])
        ds = p * (dp * tl.load(vs_ptr + line)[None, :] - delta[:, None]) * ks[None, :]
    else:
        p = tl.math.exp2(s * (scale * LOG2_E) - lse[:, None])
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
    SHARED: tl.constexpr,
):
    """Write dQ of one block of queries of one head, with P and dS computed once more.

    Args:
        q_ptr: bfloat16 [T, H, D].
        k_desc: bfloat16 [T, G * D], codes, by boxes [BLOCK_N, D].
        ks_ptr: float32 [G, line_stride], read with SCALED.
        do_ptr: bfloat16 [T, H, D].
        lse_ptr: float32 [H, line_stride], in base 2.
        delta_ptr: float32 [H, line_stride].
        dq_ptr: bfloat16 [T, H, D], written.
        tiles_ptr: int32 [., 5], `QueryTiles.query_tiles`.
        scale: 1 / sqrt(D).
        SCALED: whether keys and values are codes with scales.
        SHARED: whether some sequences share a stem.
    """
    # Rows past the end of the sequence have an infinite log-sum-exp, so weights of zero.
    H: tl.constexpr = G * GROUP
    # Heads are the fastest index of the programs; blocks of queries come longest first.
    head = tl.program_id(0) % H
    record = tiles_ptr + tl.program_id(0) // H * 5
    first, row0, end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
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
    # The stem, all of whose keys are seen; then whole blocks of keys of the run up to the diagonal,
    # then masked ones.
    if SHARED:
        for k0 in range(tl.load(record + 3), tl.load(record + 4), BLOCK_N):
            dq = _dq_step(
                k_desc, v_desc, ks_ptr, vs_ptr, line_stride, k0, group, q, do, lse, delta, dq, row,
                scale, False, SCALED, D, BLOCK_N,
            )  # fmt: skip
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


def recomputed_dq(
    q: Tensor,
    do: Tensor,
    codes: KeyValueCodes,
    lse2: Tensor,
    delta: Tensor,
    dq: Tensor,
    tiles: QueryTiles,
    width: int,
    scale: float,
    group: int,
) -> None:
    """Write dQ with P and dS computed once more.

    Args:
        q: bfloat16 [T, H, D], rotated.
        do: bfloat16 [T, H, D], the gradient of the output.
        codes: keys and values [T, G, D].
        lse2: float32 [H, width], the log-sum-exp in base 2.
        delta: float32 [H, width].
        dq: bfloat16 [T, H, D], written.
        scale: 1 / sqrt(D).
    """
    tokens, heads, head_dim = q.shape

    def rows(x: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.view(tokens, -1), [_STEP, head_dim])

    k_scales, v_scales = (
        delta if s is None else _lines(s, width) for s in (codes.k_scales, codes.v_scales)
    )
    dq_kernel[(heads * len(tiles.query_tiles),)](
        q, rows(codes.k.to(q.dtype)), rows(codes.v.to(q.dtype)), k_scales, v_scales, do, lse2,
        delta, dq, tiles.query_tiles, width, scale, codes.num_heads, group, head_dim, codes.scaled,
        BACKWARD_QUERIES, _STEP, tiles.shared,
        num_warps=4, num_stages=2,
    )  # fmt: skip


def _lines(scales: Tensor, width: int) -> Tensor:
    """Return scales [T, G] as lines [G, width], padded with zeros."""
    out = scales.new_zeros(scales.shape[1], width)
    out[:, : len(scales)] = scales.T
    return out
