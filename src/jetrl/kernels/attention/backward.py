"""Gradients of packed causal attention, from the output and log-sum-exp of the forward.

The backward does not have to match other kernels bitwise, so it uses BF16 tensor cores and
recomputes the weights P from the log-sum-exp:

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        delta = sum_d O * dO
    dQ = scale * dS K                     dK = scale * dS^T Q

One kernel processes blocks of keys (dK and dV over all query heads of the group) and stores dS in
BF16, in the tiles of `attention.layout`; a second processes blocks of queries and multiplies dS by
the keys. If dS would take too much memory (at about 20,000 tokens per sequence), P and dS are
recomputed: 7 GEMMs instead of 5. If many branches share a stem, their queries are divided among
programs (`backward_lists`), whose float32 sums are added in order. The order of every sum depends
only on the lengths in a batch, so gradients are deterministic.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl.kernels.attention.backward_lists import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    DS_TILE_BYTES,
    STORED_DS_BYTES,
)
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles, check_queries
from jetrl.kernels.exponential_triton import LOG2_E
from jetrl.precision.backend import HOPPER, backend_of
from jetrl.precision.triton.layout import cdiv, round_up

_ROWS = 16  # keys per program that adds parts: 16 KB of each part for head_dim 128
_STEP = 64  # rows per step of the inner loops
_LINES = 64  # vectors per program that scales keys: reads 8 KB of codes, writes 16 KB


class _Tile(NamedTuple):
    """Keys of a program at a time, warps of dQ's programs, and pipeline stages."""

    keys: int
    dq_warps: int
    stages: int


_HOPPER = _Tile(keys=BACKWARD_KEYS, dq_warps=4, stages=3)
# Without wgmma, operands and sums share registers; shared memory may be 99 KB.
_OTHERS = _Tile(keys=64, dq_warps=8, stages=2)


@triton.jit(do_not_specialize=["first_group", "num_groups"])
def _add_parts_kernel(
    sums_ptr, dk_ptr, dv_ptr, divided_ptr, scale, first_group, num_groups,
    G: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dK and dV [T, G, D] for ROWS keys of a block whose queries are divided into parts.

    Args:
        sums_ptr: float32 [num_parts, num_groups, 2, BLOCK_N, D], dK before dV.
    """
    group_here = tl.program_id(0) % num_groups
    record = divided_ptr + tl.program_id(0) // num_groups * 3
    row0, place, parts = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    within = row[:, None] * D + tl.arange(0, D)[None, :]
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    for part in range(0, parts):
        first = ((place + part).to(tl.int64) * num_groups + group_here) * (2 * BLOCK_N * D)
        dk += tl.load(sums_ptr + first + within)
        dv += tl.load(sums_ptr + first + BLOCK_N * D + within)
    # All keys of a stem's blocks are valid.
    key = (row0 + row).to(tl.int64)
    at = key[:, None] * (G * D) + (first_group + group_here) * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(tl.bfloat16))
    tl.store(dv_ptr + at, dv.to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_rows"])
def _delta_kernel(
    o_ptr, do_ptr, lse_ptr, delta_ptr, lse2_ptr, num_rows, line_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write delta and the base-2 log-sum-exp for BLOCK rows of a head, zeros past the rows.

    Args:
        o_ptr: bfloat16 [num_rows, H, D], like do_ptr.
        lse_ptr: float32 [H, num_rows], natural log-sum-exp.
        delta_ptr: float32 [H, line_stride], written, like lse2_ptr.
    """
    # Base 2 saves the kernels below a multiplication before exp2. They read the padding without a
    # mask and discard the results, so it is written too.
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    ok = row < num_rows
    at = row[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    o = tl.load(o_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    line = head.to(tl.int64) * line_stride + row
    lse = tl.load(lse_ptr + head.to(tl.int64) * num_rows + row, mask=ok, other=0.0)
    tl.store(delta_ptr + line, tl.sum(o * do, axis=1), mask=row < line_stride)
    tl.store(lse2_ptr + line, lse * LOG2_E, mask=row < line_stride)


@triton.jit
def _dkdv_step(
    q_desc, do_desc, ds_desc, ds_row, lse_ptr, delta_ptr, line_stride, q0, end, head,
    k, v, a, vs, dk, dv, key,
    MASKED: tl.constexpr, SCALED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Return dK and dV of some keys, with one block of queries of one head added."""
    # P and dS are [keys, queries], so that they are left operands of the products that sum over
    # queries. Rows past the end belong to the next sequence (or are zeros): finite, and masked.
    row = q0 + tl.arange(0, BLOCK_M)
    q = q_desc.load([q0, head * D])
    do = do_desc.load([q0, head * D])
    line = head.to(tl.int64) * line_stride + row
    # P from raw scores: `a` combines key scale, 1 / sqrt(D) and log2(e). The log-sum-exp is known,
    # so no maximum is needed. Masked scores are arbitrary, so P is set to zero there.
    s = tl.dot(k, q.T)
    p = tl.math.exp2(s * a[:, None] - tl.load(lse_ptr + line)[None, :])
    if MASKED:
        p = tl.where((key[:, None] <= row[None, :]) & (row < end)[None, :], p, 0.0)
    # dP needs the scales of the values, since v holds codes. dV is the gradient of the dequantized
    # values and needs none.
    dp = tl.dot(v, do.T)
    dv = tl.dot(p.to(tl.bfloat16), do, dv)
    if SCALED:
        dp = dp * vs[:, None]
    ds = (p * (dp - tl.load(delta_ptr + line)[None, :])).to(tl.bfloat16)
    # Store the same BF16 dS for dQ that dK uses here.
    if STORE:
        ds_desc.store([ds_row, 0], ds)
    dk = tl.dot(ds, q, dk)
    return dk, dv


# Counts differ from batch to batch; line_stride is always a multiple of 64, so it compiles once.
@triton.jit(do_not_specialize=["first_group", "num_groups", "head_tiles"])
def _dkdv_kernel(
    q_desc, k_ptr, v_ptr, ks_ptr, vs_ptr, do_desc, ds_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    sums_ptr, tiles_ptr, branches_ptr, line_stride, scale, first_group, num_groups, head_tiles,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr, STORE: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of KEYS keys of a block, summed over queries and query heads of the group.

    Args:
        q_desc: bfloat16 [T, H * D], in boxes [BLOCK_M, D], like do_desc.
        k_ptr: FP8, int8 or bfloat16 [T, G, D], like v_ptr; scales are float32 [T, G].
        ds_desc: bfloat16 [tiles * BLOCK_N, BLOCK_M], in boxes of KEYS rows, written if STORE.
        lse_ptr: float32 [H, line_stride], base 2; delta_ptr has the same shape.
        sums_ptr: float32 [num_parts, num_groups, 2, BLOCK_N, D], written for parts if SHARED.
    """
    # Keys and values are loaded once for all queries; codes are exact in BF16. Keys past the end of
    # the sequence are zeros, with a scale of zero, and masked below. Key-value heads are the
    # fastest program index; blocks of keys are sorted longest first.
    group_here = tl.program_id(0) % num_groups
    group = first_group + group_here
    record = tiles_ptr + tl.program_id(0) // num_groups * 7
    row0, end = tl.load(record), tl.load(record + 1)
    stored = tl.load(record + 2) + group_here * GROUP * head_tiles
    skip = tl.program_id(1) * KEYS
    key = row0 + skip + tl.arange(0, KEYS)
    ok = key < end
    at = key.to(tl.int64)[:, None] * (G * D) + group * D + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + at, mask=ok[:, None], other=0.0).to(tl.bfloat16)
    v = tl.load(v_ptr + at, mask=ok[:, None], other=0.0).to(tl.bfloat16)
    if SCALED:
        line = key.to(tl.int64) * G + group
        a = tl.load(ks_ptr + line, mask=ok, other=0.0) * (scale * LOG2_E)
        vs = tl.load(vs_ptr + line, mask=ok, other=0.0)
    else:
        a = tl.full([KEYS], LOG2_E, tl.float32) * scale
        vs = a
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    # The first blocks of queries cross the diagonal, and the last may be cut by the end. Masked
    # steps of all heads come first, then unmasked ones, each in one loop over heads and blocks, so
    # that the compiler pipelines loads across heads.
    num_own = end - row0
    if SHARED:  # only the first part of a divided block has the run's own queries
        num_own = tl.where(tl.load(record + 2) >= 0, num_own, 0)
    num_blocks = tl.cdiv(num_own, BLOCK_M)
    diagonal = tl.minimum(num_blocks, BLOCK_N // BLOCK_M)
    whole = tl.maximum(num_own // BLOCK_M, diagonal)
    edges = diagonal + num_blocks - whole  # masked blocks per head: diagonal, and cut by the end
    for t in range(edges * GROUP):
        i = tl.where(t % edges < diagonal, t % edges, whole)
        dk, dv = _dkdv_step(
            q_desc, do_desc, ds_desc, (stored + t // edges * head_tiles + i) * BLOCK_N + skip,
            lse_ptr,
            delta_ptr, line_stride, row0 + i * BLOCK_M, end, group * GROUP + t // edges,
            k, v, a, vs, dk, dv, key, True, SCALED, D, BLOCK_M, STORE,
        )  # fmt: skip
    steps = whole - diagonal
    for t in range(steps * GROUP):
        i = diagonal + t % steps
        dk, dv = _dkdv_step(
            q_desc, do_desc, ds_desc, (stored + t // steps * head_tiles + i) * BLOCK_N + skip,
            lse_ptr,
            delta_ptr, line_stride, row0 + i * BLOCK_M, end, group * GROUP + t // steps,
            k, v, a, vs, dk, dv, key, False, SCALED, D, BLOCK_M, STORE,
        )  # fmt: skip
    # For a stem, add the queries of its branches, which attend to all keys of the block. Branches
    # go in a fixed order; within a branch, whole blocks of all heads come before those that its end
    # cuts. Addresses depend only on t: loading an address first would shorten the load pipeline.
    if SHARED:
        tile0 = tl.load(record + 5) + group_here * GROUP * head_tiles
        for b in range(tl.load(record + 4)):
            branch = branches_ptr + (tl.load(record + 3) + b) * 3
            first_query, end_query = tl.load(branch), tl.load(branch + 1)
            tile = tile0 + tl.load(branch + 2)
            num_whole = (end_query - first_query) // BLOCK_M
            for t in range(num_whole * GROUP):
                i = t % num_whole
                dk, dv = _dkdv_step(
                    q_desc, do_desc, ds_desc,
                    (tile + t // num_whole * head_tiles + i) * BLOCK_N + skip,
                    lse_ptr, delta_ptr, line_stride, first_query + i * BLOCK_M, end_query,
                    group * GROUP + t // num_whole,
                    k, v, a, vs, dk, dv, key, False, SCALED, D, BLOCK_M, STORE,
                )  # fmt: skip
            num_cut = tl.cdiv(end_query - first_query, BLOCK_M) - num_whole
            for t in range(num_cut * GROUP):
                dk, dv = _dkdv_step(
                    q_desc, do_desc, ds_desc,
                    (tile + t * head_tiles + num_whole) * BLOCK_N + skip,
                    lse_ptr, delta_ptr, line_stride, first_query + num_whole * BLOCK_M, end_query,
                    group * GROUP + t,
                    k, v, a, vs, dk, dv, key, True, SCALED, D, BLOCK_M, STORE,
                )  # fmt: skip
        # A part stores float32 sums instead of gradients.
        place = tl.load(record + 6)
        if place >= 0:
            within = (skip + tl.arange(0, KEYS))[:, None] * D + tl.arange(0, D)[None, :]
            sums = (place.to(tl.int64) * num_groups + group_here) * (2 * BLOCK_N * D)
            tl.store(sums_ptr + sums + within, dk)
            tl.store(sums_ptr + sums + BLOCK_N * D + within, dv)
            ok = key < row0
    # dK is the gradient of the dequantized keys (straight-through), so it has no key scales.
    tl.store(dk_ptr + at, (dk * scale).to(tl.bfloat16), mask=ok[:, None])
    tl.store(dv_ptr + at, dv.to(tl.bfloat16), mask=ok[:, None])


@triton.jit(do_not_specialize=["first_group", "num_heads", "head_tiles"])
def _dq_stored_kernel(
    ds_desc, k_desc, dq_ptr, tiles_ptr, scale, first_group, num_heads, head_tiles,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEYS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write dQ [T, H, D] of two neighboring blocks of BLOCK_M queries of one head.

    Args:
        ds_desc: bfloat16 [tiles * BLOCK_N, BLOCK_M], in boxes of KEYS rows.
        k_desc: bfloat16 [T, G * D], dequantized keys, in boxes [KEYS, D].
    """
    # Blocks of queries m and m + 1 end at the same block of keys, on their diagonal, and share each
    # loaded block of keys. Their tiles are neighbors. Heads are counted among those whose dS is
    # stored at the time: all heads, or those of some key-value heads.
    PARTS: tl.constexpr = BLOCK_N // KEYS
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
    # The keys of the stem first, as in the sequence.
    if SHARED:
        stem_row, stem_blocks = tl.load(record + 4), tl.load(record + 5)
        with_stem = tl.load(record + 6) + head_here * head_tiles
        step = tl.load(record + 7)
        for t in range(0, stem_blocks * PARTS):
            j, skip = t // PARTS, t % PARTS * KEYS
            k = k_desc.load([stem_row + t * KEYS, (head // GROUP) * D])
            place = (with_stem + j * step) * BLOCK_N + skip
            low = tl.dot(ds_desc.load([place, 0]).T, k, low)
            high = tl.dot(ds_desc.load([place + BLOCK_N, 0]).T, k, high)
    # In the last iteration, dS is zero for keys past a query or past the end of the sequence. If
    # block m + 1 does not exist, its tiles belong to others, and its product is not stored.
    for t in range(0, ((row0 - first) // BLOCK_N + 1) * PARTS):
        j, skip = t // PARTS, t % PARTS * KEYS
        k = k_desc.load([first + t * KEYS, (head // GROUP) * D])
        place = (tile0 + j * (blocks - j - 1)) * BLOCK_N + skip
        low = tl.dot(ds_desc.load([place, 0]).T, k, low)
        high = tl.dot(ds_desc.load([place + BLOCK_N, 0]).T, k, high)
    # Apply the score scale last, in float32; the keys already include their own scales.
    row = row0 + tl.arange(0, BLOCK_M)
    at = row.to(tl.int64)[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(dq_ptr + at, (low * scale).to(tl.bfloat16), mask=(row < end)[:, None])
    at += BLOCK_M * H * D
    tl.store(dq_ptr + at, (high * scale).to(tl.bfloat16), mask=(row + BLOCK_M < end)[:, None])


@triton.jit(do_not_specialize=["num_lines"])
def _scaled_keys_kernel(
    k_ptr, scales_ptr, out_ptr, num_lines, D: tl.constexpr, LINES: tl.constexpr
):
    """Write codes [num_lines, D] times scales [num_lines] as bfloat16, LINES rows per program."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    ok = line < num_lines
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    k *= tl.load(scales_ptr + line, mask=ok, other=0.0)[:, None]
    tl.store(out_ptr + at, k.to(tl.bfloat16), mask=ok[:, None])


def _scaled_keys(codes: KeyValueCodes) -> Tensor:
    """Return dequantized keys [T, G, D] in bfloat16: the float32 product, rounded once."""
    if codes.k_scales is None:
        return codes.k
    out = torch.empty_like(codes.k, dtype=torch.bfloat16)
    lines = codes.k_scales.numel()
    _scaled_keys_kernel[(cdiv(lines, _LINES),)](
        codes.k, codes.k_scales, out, lines, codes.head_dim, _LINES, num_warps=4
    )
    return out


@triton.jit
def _dq_step(
    k_desc, v_desc, ks_ptr, vs_ptr, line_stride, k0, group, q, do, lse, delta, dq, row, scale,
    MASKED: tl.constexpr, SCALED: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return dQ of a block of queries of one head, with one block of keys added."""
    # Keys are codes, so their scales multiply both the scores and dS.
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
def _dq_kernel(
    q_ptr, k_desc, v_desc, ks_ptr, vs_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr,
    line_stride, scale,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write dQ of one block of queries of one head, recomputing P and dS.

    Args:
        q_ptr: bfloat16 [T, H, D], like do_ptr and dq_ptr.
        k_desc: bfloat16 [T, G * D], codes, in boxes [BLOCK_N, D].
        ks_ptr: float32 [G, line_stride], read if SCALED.
        lse_ptr: float32 [H, line_stride], base 2; delta_ptr has the same shape.
    """
    # Rows past the end of the sequence have an infinite log-sum-exp, so their weights are zero.
    H: tl.constexpr = G * GROUP
    # Heads are the fastest program index; blocks of queries are sorted longest first.
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
    # The stem without a mask, then blocks of the run up to the diagonal, then masked blocks.
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


def _lines(scales: Tensor, width: int) -> Tensor:
    """Return scales [T, G] transposed to [G, width], padded with zeros."""
    out = scales.new_zeros(scales.shape[1], width)
    out[:, : len(scales)] = scales.T
    return out


def attention_backward(
    do: Tensor, q: Tensor, codes: KeyValueCodes, o: Tensor, lse: Tensor, tiles: QueryTiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ [T, H, D], dK and dV [T, G, D], bfloat16, straight-through at the quantizer.

    Args:
        do: bfloat16 [T, H, D], contiguous, gradient of the output o.
        q: bfloat16 [T, H, D], rotated.
        codes: keys and values [T, G, D] of the forward.
        lse: float32 [H, T], natural log-sum-exp of the forward.
    """
    group = check_queries(q, codes)
    tile = _HOPPER if backend_of(q).name == HOPPER.name else _OTHERS
    assert (do.dtype, do.shape, do.is_contiguous()) == (q.dtype, q.shape, True)
    assert len(tiles.query_tiles), "paged attention has no backward"
    tokens, heads, head_dim = q.shape
    groups = codes.num_heads
    scale = 1.0 / math.sqrt(head_dim)
    # Pad lse and delta so that the inner loops need no mask: blocks of queries start at any row, so
    # the last one may extend almost one step past the last token.
    width = round_up(tokens, _STEP) + _STEP
    delta, lse2 = (q.new_empty(heads, width, dtype=torch.float32) for _ in range(2))
    _delta_kernel[(cdiv(width, 64), heads)](
        o, do, lse, delta, lse2, tokens, width, heads, head_dim, 64
    )
    dq, dk, dv = torch.empty_like(q), q.new_empty(codes.k.shape), q.new_empty(codes.v.shape)

    def rows(x: Tensor, height: int = _STEP) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.view(tokens, -1), [height, head_dim])

    # Store dS for all key-value heads at once, or for as many as fit, in several rounds. If not
    # even one fits, dQ recomputes it. A kernel cannot take None, so other tensors are placeholders.
    k_scales, v_scales = (delta if s is None else s for s in (codes.k_scales, codes.v_scales))
    of_parts = tiles.num_parts * 2 * BACKWARD_KEYS * head_dim * 4
    at_once = STORED_DS_BYTES // (group * tiles.stored_tiles * DS_TILE_BYTES + of_parts)
    store, count = at_once > 0, min(groups, max(1, at_once)) if at_once else groups
    q_rows, do_rows = rows(q), rows(do)
    ds_rows, key_rows = q_rows, q_rows
    if store:
        key_rows = rows(_scaled_keys(codes), tile.keys)
        stored = q.new_empty(count * group * tiles.stored_tiles * BACKWARD_KEYS, _STEP)
        ds_rows = TensorDescriptor.from_tensor(stored, [tile.keys, _STEP])
    sums = delta if not of_parts else q.new_empty(count * of_parts // 4, dtype=torch.float32)
    # Each round overwrites dS and the sums of the previous one, which have been read by then.
    for first in range(0, groups, count):
        here = min(count, groups - first)
        _dkdv_kernel[(here * len(tiles.key_tiles), BACKWARD_KEYS // tile.keys)](
            q_rows, codes.k, codes.v, k_scales, v_scales, do_rows, ds_rows, lse2, delta,
            dk, dv, sums, tiles.key_tiles, tiles.branches, width, scale, first, here,
            tiles.stored_tiles, groups, group, head_dim, codes.scaled, _STEP, BACKWARD_KEYS,
            tile.keys, store, tiles.shared,
            num_warps=8, num_stages=tile.stages,
        )  # fmt: skip
        if of_parts:
            grid = (here * len(tiles.divided_key_tiles), BACKWARD_KEYS // _ROWS)
            _add_parts_kernel[grid](
                sums, dk, dv, tiles.divided_key_tiles, scale, first, here, groups, head_dim,
                BACKWARD_KEYS, _ROWS, num_warps=4,
            )  # fmt: skip
        if store:
            _dq_stored_kernel[(here * group * len(tiles.stored_query_tiles),)](
                ds_rows, key_rows, dq, tiles.stored_query_tiles, scale, first, here * group,
                tiles.stored_tiles, heads, group, head_dim, BACKWARD_QUERIES, BACKWARD_KEYS,
                tile.keys, tiles.shared, num_warps=tile.dq_warps, num_stages=tile.stages,
            )  # fmt: skip
    if not store:
        k_scales, v_scales = (
            delta if s is None else _lines(s, width) for s in (codes.k_scales, codes.v_scales)
        )
        _dq_kernel[(heads * len(tiles.query_tiles),)](
            q, rows(codes.k.to(q.dtype)), rows(codes.v.to(q.dtype)), k_scales, v_scales, do, lse2,
            delta, dq, tiles.query_tiles, width, scale, groups, group, head_dim, codes.scaled,
            BACKWARD_QUERIES, _STEP, tiles.shared,
            num_warps=tile.dq_warps, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv
