"""The gradient of queries: from stored dS, or with P and dS computed again.

    dQ = scale * dS K

dS lies in tiles of 128 keys x 64 queries, keys first, bfloat16: for each head and sequence with n
blocks of queries, block of keys j by block of queries m from the diagonal on is tile
j * (n - j - 1) + m (`attention.layout`). A program owns 128 queries of a head. It reads 64 KB per
step and multiplies 2 x [64, 128] by [128, D], so it is bound by memory. Sums go over the blocks of
keys in order. Sequences whose dS would take too much memory take seven products, not five.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS, BACKWARD_QUERIES
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.exponential_hopper import LOG2_E
from jetrl.precision.layout import cdiv

_LINES = 64  # of a program: 8 KB of codes, 16 KB written


@triton.jit(do_not_specialize=["first_group", "num_heads", "head_tiles"])
def dq_stored_kernel(
    ds_desc,
    k_desc,
    dq_ptr,
    tiles_ptr,
    scale,
    first_group,
    num_heads,
    head_tiles,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Write dQ of two neighboring blocks of BLOCK_M queries of one head.

    Args:
        ds_desc: bfloat16 [tiles * BLOCK_N, BLOCK_M], by boxes of a tile.
        k_desc: bfloat16 [T, G * D], keys with their scales, by boxes [BLOCK_N, D].
        dq_ptr: bfloat16 [T, H, D], written.
        tiles_ptr: int32 [., 8], `QueryTiles.stored_query_tiles`.
    """
    # Blocks of queries m and m + 1 end at the same block of keys, the one on their diagonal, and
    # share each block of keys that is loaded. Their tiles are neighbors.
    # Heads are counted among those whose dS is stored: all, or a share of the key-value heads.
    head_here = tl.program_id(0) % num_heads
    head = first_group * GROUP + head_here
    record = tiles_ptr + tl.program_id(0) // num_heads * 8
    first, row0 = tl.load(record), tl.load(record + 1)
    end = tl.load(record + 2)
    blocks = tl.cdiv(end - first, BLOCK_M)
    m = (row0 - first) // BLOCK_M
    tile0 = tl.load(record + 3) + head_here * head_tiles + m
    low = tl.zeros([BLOCK_M, D], tl.float32)
    high = tl.zeros([BLOCK_M, D], tl.float32)
    # The keys of the stem come first, as in the sequence.
    if SHARED:
        stem_row, stem_blocks = tl.load(record + 4), tl.load(record + 5)
        with_stem = tl.load(record + 6) + head_here * head_tiles
        step = tl.load(record + 7)
        for j in range(0, stem_blocks):
            k = k_desc.load([stem_row + j * BLOCK_N, (head // GROUP) * D])
            place = (with_stem + j * step) * BLOCK_N
            low = tl.dot(ds_desc.load([place, 0]).T, k, low)
            high = tl.dot(ds_desc.load([place + BLOCK_N, 0]).T, k, high)
    # In the last turn keys past a query, or past the sequence's end, have a dS of zero. If block
    # m + 1 does not exist, its tiles are others', and no row of the product is stored.
    for j in range(0, (row0 - first) // BLOCK_N + 1):
        k = k_desc.load([first + j * BLOCK_N, (head // GROUP) * D])
        place = (tile0 + j * (blocks - j - 1)) * BLOCK_N
        low = tl.dot(ds_desc.load([place, 0]).T, k, low)
        high = tl.dot(ds_desc.load([place + BLOCK_N, 0]).T, k, high)
    # The scale of the scores comes last, in float32; the keys' own scales are in the keys.
    row = row0 + tl.arange(0, BLOCK_M)
    at = row.to(tl.int64)[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(dq_ptr + at, (low * scale).to(tl.bfloat16), mask=(row < end)[:, None])
    at += BLOCK_M * H * D
    tl.store(dq_ptr + at, (high * scale).to(tl.bfloat16), mask=(row + BLOCK_M < end)[:, None])


@triton.jit(do_not_specialize=["num_lines"])
def scaled_keys_kernel(k_ptr, scales_ptr, out_ptr, num_lines, D: tl.constexpr, LINES: tl.constexpr):
    """Write keys with their scales, LINES pairs of a token and a head in a program.

    Args:
        k_ptr: FP8 or int8 [num_lines, D].
        scales_ptr: float32 [num_lines].
        out_ptr: bfloat16 [num_lines, D], written.
    """
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    ok = line < num_lines
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    k *= tl.load(scales_ptr + line, mask=ok, other=0.0)[:, None]
    tl.store(out_ptr + at, k.to(tl.bfloat16), mask=ok[:, None])


def scaled_keys(codes: KeyValueCodes) -> Tensor:
    """Return keys [T, G, D] in bfloat16, scales included: the float32 product, rounded once."""
    if codes.k_scales is None:
        return codes.k
    out = torch.empty_like(codes.k, dtype=torch.bfloat16)
    lines = codes.k_scales.numel()
    scaled_keys_kernel[(cdiv(lines, _LINES),)](
        codes.k, codes.k_scales, out, lines, codes.head_dim, _LINES, num_warps=4
    )
    return out


def dq_of_stored(
    stored: Tensor,
    keys: Tensor,
    dq: Tensor,
    tiles: QueryTiles,
    scale: float,
    first_group: int,
    num_groups: int,
    group: int,
) -> None:
    """Write dQ of the query heads of some neighboring key-value heads.

    Args:
        stored: bfloat16 [num_groups * group * tiles * 128, 64], dS of these heads.
        keys: bfloat16 [T, G, D], with their scales.
        dq: bfloat16 [T, H, D], written.
        scale: 1 / sqrt(D).
    """
    tokens, heads, head_dim = dq.shape
    heads_here = num_groups * group
    dq_stored_kernel[(heads_here * len(tiles.stored_query_tiles),)](
        TensorDescriptor.from_tensor(stored, [BACKWARD_KEYS, BACKWARD_QUERIES]),
        TensorDescriptor.from_tensor(keys.view(tokens, -1), [BACKWARD_KEYS, head_dim]),
        dq, tiles.stored_query_tiles, scale, first_group, heads_here, tiles.stored_tiles,
        heads, group, head_dim, BACKWARD_QUERIES, BACKWARD_KEYS, tiles.shared,
        num_warps=4, num_stages=3,
    )  # fmt: skip


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
    """Return dQ of a block of queries of one head with one block of keys added."""
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
        tiles_ptr: int32 [., 5], `QueryTiles.query_tiles`.
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
