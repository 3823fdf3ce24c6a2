"""The backward of QK norm and rotary embedding on Hopper: the gradients of qkv and norm weights.

A program takes eight heads of some tokens, one token after the other, in the layout of
`rotary_hopper`. The gradients of the norms' weights are summed over its tokens and heads in
registers, and over programs by a second kernel, in an order that is the same on every GPU.

Gradients need no exact sums, and products may be fused here.
Legend: T tokens, H query heads, G key-value heads, D head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.rotary_hopper import (
    HEADS,
    angles,
    halves_of,
    heads_layout,
    load_halves,
    store_halves,
)
from jetrl.precision.hopper import tile
from jetrl.precision.hopper.launch import check_tensor
from jetrl.precision.layout import cdiv

# Tokens of a program: fixed, so that the weights' gradients have the same bits on every GPU.
_TOKENS = 16
_NUM_WARPS = 4
_SUM_COLUMNS, _SUM_ROWS = 8, 1024  # 32 bytes of a row of partial sums: a sector


@gluon.jit
def _norm_backward(
    dfirst, dsecond, first, second, first_weight, second_weight, D: gl.constexpr, EPS: gl.constexpr
):
    """Return the gradients of a head-wise RMSNorm: of x, and of the weight before its sum.

    Returns:
        Halves of dx, then halves of the normed input times the gradient of the output.
    """
    # With n = x / rms and g = dy * weight, dx = (g - n * mean(g * n)) / rms. The mean is taken of
    # g * x and divided by rms after, so that the two sums over a head do not wait for each other.
    first_scaled, second_scaled = dfirst * first_weight, dsecond * second_weight
    mean_square = gl.sum(first * first + second * second, 1) * (1.0 / D)
    mean_product = gl.sum(first_scaled * first + second_scaled * second, 1) * (1.0 / D)
    inverse = gl.rsqrt(mean_square + EPS)
    mean = (inverse * mean_product)[:, None]
    inverse = inverse[:, None]
    first, second = first * inverse, second * inverse
    dx_first = inverse * (first_scaled - first * mean)
    dx_second = inverse * (second_scaled - second * mean)
    return dx_first, dx_second, dfirst * first, dsecond * second


@gluon.jit
def _backward_heads(
    grad_ptr, x_ptr, out_ptr, positions_ptr, table_ptr, weight_ptr, partial_ptr,
    first_token, last_token, first_head, grad_stride, row_stride, COUNT: gl.constexpr,
    NORM: gl.constexpr, D: gl.constexpr, EPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Take eight query or key heads of some tokens, and their share of the weight's gradient."""
    if NORM:
        first_weight, second_weight = halves_of(weight_ptr, D, LAYOUT)
        first_sum = gl.zeros([8, D // 2], gl.float32, LAYOUT)
        second_sum = gl.zeros([8, D // 2], gl.float32, LAYOUT)
    # Pointers move from token to token: 64-bit addresses are computed once.
    token = first_token.to(gl.int64)
    grad_ptr += token * grad_stride
    x_ptr += token * row_stride
    out_ptr += token * row_stride
    positions_ptr += token
    for _ in range(first_token, last_token):
        dfirst, dsecond = load_halves(grad_ptr, first_head, COUNT, D, LAYOUT)
        if NORM:
            first, second = load_halves(x_ptr, first_head, COUNT, D, LAYOUT)
        # The rotation turned back, whose matrix is the transpose.
        cosine, sine = angles(table_ptr, gl.load(positions_ptr), D, LAYOUT)
        dfirst, dsecond = tile.widen(dfirst), tile.widen(dsecond)
        turned = dsecond * cosine - dfirst * sine
        dfirst, dsecond = dfirst * cosine + dsecond * sine, turned
        if NORM:
            first, second = tile.widen(first), tile.widen(second)
            dfirst, dsecond, first_part, second_part = _norm_backward(
                dfirst, dsecond, first, second, first_weight, second_weight, D, EPS
            )
            first_sum += first_part
            second_sum += second_part
        # Rounded once, after the norm: between the two gradients stay in float32.
        dfirst, dsecond = tile.to_bfloat16(dfirst), tile.to_bfloat16(dsecond)
        store_halves(out_ptr, first_head, dfirst, dsecond, COUNT, D, LAYOUT)
        grad_ptr += grad_stride
        x_ptr += row_stride
        out_ptr += row_stride
        positions_ptr += 1
    # Heads past COUNT were loaded as zeros and add zeros.
    if NORM:
        pairs = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
        gl.store(partial_ptr + pairs, gl.sum(first_sum, 0))
        gl.store(partial_ptr + D // 2 + pairs, gl.sum(second_sum, 0))


@gluon.jit(do_not_specialize=["num_tokens"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, dqkv_ptr, positions_ptr, table_ptr,
    q_weight_ptr, k_weight_ptr, partial_ptr, num_tokens,
    H: gl.constexpr, G: gl.constexpr, TOKENS: gl.constexpr, NORM: gl.constexpr,
    D: gl.constexpr, EPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Take TOKENS tokens and eight heads of queries, keys or values (whose gradient is copied).

    Args:
        dq_ptr: bfloat16 [T, H, D].
        dk_ptr, dv_ptr: bfloat16 [T, G, D].
        qkv_ptr, dqkv_ptr: bfloat16 [T, (H + 2G) * D]; the second is written.
        positions_ptr: int64 [T].
        table_ptr: float32 [positions, 2, D/2].
        q_weight_ptr, k_weight_ptr: bfloat16 [D], read with NORM.
        partial_ptr: float32 [T / TOKENS, parts of queries and keys, D], written with NORM.
    """
    Q_PARTS: gl.constexpr = (H + 7) // 8
    KV_PARTS: gl.constexpr = (G + 7) // 8
    PARTS: gl.constexpr = Q_PARTS + 2 * KV_PARTS
    ROW: gl.constexpr = (H + 2 * G) * D
    # Programs of a chunk of tokens are neighbors. Each of queries and keys has a partial sum.
    chunk = gl.program_id(0) // PARTS
    part = gl.program_id(0) % PARTS
    first = chunk * TOKENS
    last = gl.minimum(first + TOKENS, num_tokens)
    partial_ptr += (chunk.to(gl.int64) * (Q_PARTS + KV_PARTS) + part) * D
    if part < Q_PARTS:
        _backward_heads(
            dq_ptr, qkv_ptr, dqkv_ptr, positions_ptr, table_ptr, q_weight_ptr, partial_ptr,
            first, last, part * 8, H * D, ROW, H, NORM, D, EPS, LAYOUT,
        )  # fmt: skip
    elif part < Q_PARTS + KV_PARTS:
        _backward_heads(
            dk_ptr, qkv_ptr + H * D, dqkv_ptr + H * D, positions_ptr, table_ptr, k_weight_ptr,
            partial_ptr, first, last, (part - Q_PARTS) * 8, G * D, ROW, G, NORM, D, EPS, LAYOUT,
        )  # fmt: skip
    else:
        # Values have no norm and no rotation. Four tokens are asked for at once; past the end the
        # last one is copied again, the same bytes to the same place.
        head = (part - Q_PARTS - KV_PARTS) * 8
        dv_ptr += first.to(gl.int64) * (G * D)
        dqkv_ptr += first.to(gl.int64) * ROW + (H + G) * D
        for start in gl.static_range(0, TOKENS, 4):
            rows = ()
            for i in gl.static_range(4):
                row = gl.minimum(start + i, last - first - 1)
                halves = load_halves(dv_ptr + row * (G * D), head, G, D, LAYOUT)
                rows += (halves,)  # type: ignore[assignment]
            for i in gl.static_range(4):
                row = gl.minimum(start + i, last - first - 1)
                store_halves(dqkv_ptr + row * ROW, head, rows[i][0], rows[i][1], G, D, LAYOUT)


@triton.jit(do_not_specialize=["chunks"])
def _sum_kernel(
    partial_ptr,
    out_ptr,
    chunks,
    Q_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum the norm weights' partial gradients, over chunks of tokens and over parts of heads.

    Args:
        partial_ptr: float32 [chunks, PARTS, D], of each chunk the parts of queries, then of keys.
        out_ptr: float32 [2, D], for queries and for keys, written.
    """
    # Each of ROWS places adds every ROWS-th partial sum, in order, and a fixed tree the places.
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.program_id(1)
    count = tl.where(key == 0, Q_PARTS, PARTS - Q_PARTS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, chunks * count, ROWS):
        # Partial sum r of queries or keys: of chunk r / count, part r % count.
        rows = start + tl.arange(0, ROWS)
        places = (rows // count * PARTS + key * Q_PARTS + rows % count).to(tl.int64) * D
        mask = (rows < chunks * count)[:, None] & (columns < D)[None, :]
        total += tl.load(partial_ptr + places[:, None] + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + key * D + columns, tl.sum(total, 0), mask=columns < D)


def qk_norm_rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of qkv and of the norms' weights.

    Args:
        dq: bfloat16 [T, H, D], the gradient of the rotated queries.
        dk: bfloat16 [T, G, D], of the keys that were quantized (passed straight through).
        dv: bfloat16 [T, G, D], of the values, likewise.
        qkv: bfloat16 [T, (H + 2G) * D], the input of the forward.
        positions: int64 [T].
        table: float32 [positions, 2, D/2], of `rotary_table`.
        norm_weights: bfloat16 [D] of the query and the key norm, or None without norms.

    Returns:
        The gradient of qkv, bfloat16, and those of the two weights, float32 [D], or None.
    """
    for name, x in {"dq": dq, "dk": dk, "dv": dv, "qkv": qkv}.items():
        check_tensor("qk_norm_rotary_backward", name, x, torch.bfloat16, x.shape)
    tokens, num_heads, head_dim = dq.shape
    groups = dk.shape[1]
    dqkv = torch.empty_like(qkv)
    q_parts, kv_parts = cdiv(num_heads, HEADS), cdiv(groups, HEADS)
    chunks = cdiv(tokens, _TOKENS)
    parts = q_parts + kv_parts
    partial = torch.empty(chunks, parts, head_dim, dtype=torch.float32, device=dq.device)
    # Without norms the weights are not read, nor the partial sums written.
    q_weight, k_weight = norm_weights or (qkv, qkv)
    if tokens:
        _backward_kernel[(chunks * (q_parts + 2 * kv_parts),)](
            dq, dk, dv, qkv, dqkv, positions, table, q_weight, k_weight, partial, tokens,
            num_heads, groups, _TOKENS, norm_weights is not None, head_dim, eps,
            heads_layout(head_dim, _NUM_WARPS),
            num_warps=_NUM_WARPS, maxnreg=56,
        )  # fmt: skip
    if norm_weights is None:
        return dqkv, None, None
    sums = torch.empty(2, head_dim, dtype=torch.float32, device=dq.device)
    _sum_kernel[(cdiv(head_dim, _SUM_COLUMNS), 2)](
        partial, sums, chunks, q_parts, parts, head_dim, _SUM_COLUMNS, _SUM_ROWS, num_warps=16
    )
    return dqkv, sums[0], sums[1]
