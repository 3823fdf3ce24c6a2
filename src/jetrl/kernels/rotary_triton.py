"""From a layer's qkv to attention on Hopper: QK norm, rotary embedding, quantized keys and values.

A program takes eight heads of a token. Together they read its row of qkv once, and write the
rotated queries and, at the token's slot, its keys and values as the cache stores them: FP8 codes
with one scale for each head, or BF16. The slots of sampling are places in the pages; of training,
0..T-1 of a dense array: the same kernel makes the same bytes for both. The bits are the reference's
throughout (`rms_norm`, `rotary`, `quantize_kv`): exact integer sums of squares, IEEE operations, no
fusion.

Pages: codes [pages, page_size, G, D], scales [pages, page_size, G]; a slot is page * page_size +
the place in the page.
Legend: T tokens, H query heads, G key-value heads, D head size. A head is handled as two halves,
the pairs that the rotation mixes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.norm_triton import grid_factor, grid_squares, inverse_rms_of
from jetrl.precision.launch_hopper import OVERLAPPED, let_next_start, wait_for_previous
from jetrl.precision.quantize_hopper import (
    abs_bits,
    check_matrix,
    round_to_bfloat16,
    rule,
    scale_and_multiplier,
)

_HEADS = 8  # heads of a program; no bit depends on it
_FEW_TOKENS = 256
# Tokens of a program of the backward: fixed, so that the weights' gradients have the same bits on
# every card.
_BACKWARD_TOKENS = 16


@dataclass(frozen=True)
class CacheSlots:
    """Where keys and values go. codes: [pages, page_size, G, D] float8_e4m3fn with float32 scales
    [pages, page_size, G], or bfloat16 with None."""

    k_codes: Tensor
    v_codes: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None


@triton.jit
def _head_inverse_rms(first, second, D: tl.constexpr, EPS: tl.constexpr):
    """float32 [heads] of float32 halves [heads, D/2]."""
    amax_bits = tl.max(tl.maximum(abs_bits(first), abs_bits(second)), 1)
    factor = grid_factor(amax_bits)
    each = factor[:, None] + tl.zeros_like(first)
    total = tl.sum(grid_squares(first, each) + grid_squares(second, each), 1)
    return inverse_rms_of(total, factor, amax_bits, D, EPS)


@triton.jit
def _load_halves(row_ptr, heads, pairs, mask, D: tl.constexpr):
    places = heads[:, None] * D + pairs[None, :]
    first = tl.load(row_ptr + places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + places + D // 2, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _angles(table_ptr, position, pairs, D: tl.constexpr):
    """Cosines and sines [1, D/2] of a position."""
    places = table_ptr + position * D + pairs
    return tl.load(places)[None, :], tl.load(places + D // 2)[None, :]


@triton.jit
def _norm_and_rotate(
    first, second, cosine, sine, weight_ptr, pairs,
    NORM: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    if NORM:
        inverse = _head_inverse_rms(first, second, D, EPS)[:, None]
        first_weight = tl.load(weight_ptr + pairs).to(tl.float32)[None, :]
        second_weight = tl.load(weight_ptr + pairs + D // 2).to(tl.float32)[None, :]
        first = round_to_bfloat16(first * inverse * first_weight)
        second = round_to_bfloat16(second * inverse * second_weight)
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def _store_cache(
    first, second, slot, heads, pairs, mask, codes_ptr, scales_ptr, G,
    QUANTIZE: tl.constexpr, D: tl.constexpr,
    MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    scales_ptr += slot * G
    codes_ptr += slot * G * D
    places = heads[:, None] * D + pairs[None, :]
    if QUANTIZE:
        amax_bits = tl.max(tl.maximum(abs_bits(first), abs_bits(second)), 1)
        scale, multiplier = scale_and_multiplier(amax_bits, MAXIMUM, FLOOR_BITS, POW2)
        tl.store(scales_ptr + heads, scale, mask=heads < G)
        first, second = first * multiplier[:, None], second * multiplier[:, None]
    tl.store(codes_ptr + places, first.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(codes_ptr + places + D // 2, second.to(codes_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    qkv_ptr,
    positions_ptr,
    table_ptr,
    q_weight_ptr,
    k_weight_ptr,
    slots_ptr,
    q_ptr,
    k_codes_ptr,
    k_scales_ptr,
    v_codes_ptr,
    v_scales_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    EPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """HEADS heads of one token: of its queries, its keys or its values."""
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (G + HEADS - 1) // HEADS
    PARTS: tl.constexpr = Q_PARTS + 2 * KV_PARTS
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    pairs = tl.arange(0, D // 2)
    wait_for_previous()
    let_next_start()
    position = tl.load(positions_ptr + token)
    slot = token
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + token)
    row_ptr = qkv_ptr + token * (H + 2 * G) * D
    if part < Q_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = (heads < H)[:, None]
        first, second = _load_halves(row_ptr, heads, pairs, mask, D)
        cosine, sine = _angles(table_ptr, position, pairs, D)
        first, second = _norm_and_rotate(
            first, second, cosine, sine, q_weight_ptr, pairs, NORM, D, EPS
        )
        places = q_ptr + token * H * D + (heads[:, None] * D + pairs[None, :])
        tl.store(places, first.to(tl.bfloat16), mask=mask)
        tl.store(places + D // 2, second.to(tl.bfloat16), mask=mask)
    elif slot >= 0:
        if part < Q_PARTS + KV_PARTS:
            heads = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
            mask = (heads < G)[:, None]
            first, second = _load_halves(row_ptr + H * D, heads, pairs, mask, D)
            cosine, sine = _angles(table_ptr, position, pairs, D)
            first, second = _norm_and_rotate(
                first, second, cosine, sine, k_weight_ptr, pairs, NORM, D, EPS
            )
            first, second = round_to_bfloat16(first), round_to_bfloat16(second)
            _store_cache(
                first, second, slot, heads, pairs, mask, k_codes_ptr, k_scales_ptr, G,
                QUANTIZE, D, MAXIMUM, FLOOR_BITS, POW2,
            )  # fmt: skip
        else:
            heads = (part - Q_PARTS - KV_PARTS) * HEADS + tl.arange(0, HEADS)
            mask = (heads < G)[:, None]
            first, second = _load_halves(row_ptr + (H + G) * D, heads, pairs, mask, D)
            _store_cache(
                first, second, slot, heads, pairs, mask, v_codes_ptr, v_scales_ptr, G,
                QUANTIZE, D, MAXIMUM, FLOOR_BITS, POW2,
            )  # fmt: skip


@triton.jit
def _norm_backward(
    dfirst, dsecond, first, second, weight_ptr, pairs, D: tl.constexpr, EPS: tl.constexpr
):
    """(dx halves, normed * dy halves) of a head-wise RMSNorm; gradients need no exact sums. The two
    sums over a head do not wait for each other."""
    first_scaled = dfirst * tl.load(weight_ptr + pairs).to(tl.float32)[None, :]
    second_scaled = dsecond * tl.load(weight_ptr + pairs + D // 2).to(tl.float32)[None, :]
    mean_square = tl.sum(first * first + second * second, 1) / D
    mean_product = tl.sum(first_scaled * first + second_scaled * second, 1) / D
    inverse = tl.math.rsqrt(mean_square + EPS)
    mean = (inverse * mean_product)[:, None]
    inverse = inverse[:, None]
    first, second = first * inverse, second * inverse
    dx_first = inverse * (first_scaled - first * mean)
    dx_second = inverse * (second_scaled - second * mean)
    return dx_first, dx_second, dfirst * first, dsecond * second


@triton.jit
def _backward_heads(
    grad_ptr, x_ptr, out_ptr, positions_ptr, table_ptr, weight_ptr, partial_ptr,
    first_token, last_token, first_head, grad_stride, row_stride, COUNT: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """HEADS query or key heads of some tokens; their share of the norm weight's gradient."""
    pairs = tl.arange(0, D // 2)
    heads = first_head + tl.arange(0, HEADS)
    mask = (heads < COUNT)[:, None]
    first_sum = tl.zeros([HEADS, D // 2], tl.float32)
    second_sum = tl.zeros([HEADS, D // 2], tl.float32)
    for index in tl.range(first_token, last_token, num_stages=2):
        token = tl.cast(index, tl.int64)
        first, second = _load_halves(grad_ptr + token * grad_stride, heads, pairs, mask, D)
        cosine, sine = _angles(table_ptr, tl.load(positions_ptr + token), pairs, D)
        dfirst = first * cosine + second * sine
        dsecond = second * cosine - first * sine
        if NORM:
            first, second = _load_halves(x_ptr + token * row_stride, heads, pairs, mask, D)
            dfirst, dsecond, first_part, second_part = _norm_backward(
                dfirst, dsecond, first, second, weight_ptr, pairs, D, EPS
            )
            first_sum += first_part
            second_sum += second_part
        places = out_ptr + token * row_stride + (heads[:, None] * D + pairs[None, :])
        tl.store(places, dfirst.to(tl.bfloat16), mask=mask)
        tl.store(places + D // 2, dsecond.to(tl.bfloat16), mask=mask)
    if NORM:
        tl.store(partial_ptr + pairs, tl.sum(first_sum, 0))
        tl.store(partial_ptr + D // 2 + pairs, tl.sum(second_sum, 0))


@triton.jit
def _backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    dqkv_ptr,
    positions_ptr,
    table_ptr,
    q_weight_ptr,
    k_weight_ptr,
    partial_ptr,
    num_tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
):
    """TOKENS tokens and HEADS heads: of queries, keys or values (whose gradient is copied)."""
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (G + HEADS - 1) // HEADS
    PARTS: tl.constexpr = Q_PARTS + 2 * KV_PARTS
    ROW: tl.constexpr = (H + 2 * G) * D
    chunk = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    first = chunk * TOKENS
    last = tl.minimum(first + TOKENS, num_tokens)
    partial_ptr += (chunk.to(tl.int64) * (Q_PARTS + KV_PARTS) + part) * D
    if part < Q_PARTS:
        _backward_heads(
            dq_ptr, qkv_ptr, dqkv_ptr, positions_ptr, table_ptr, q_weight_ptr, partial_ptr,
            first, last, part * HEADS, H * D, ROW, H, HEADS, NORM, D, EPS,
        )  # fmt: skip
    elif part < Q_PARTS + KV_PARTS:
        _backward_heads(
            dk_ptr, qkv_ptr + H * D, dqkv_ptr + H * D, positions_ptr, table_ptr, k_weight_ptr,
            partial_ptr, first, last, (part - Q_PARTS) * HEADS, G * D, ROW, G, HEADS, NORM, D, EPS,
        )  # fmt: skip
    else:
        columns = (part - Q_PARTS - KV_PARTS) * HEADS * D + tl.arange(0, HEADS * D)
        for start in range(0, TOKENS, 4):
            tokens = (first + start + tl.arange(0, 4)).to(tl.int64)[:, None]
            mask = (tokens < num_tokens) & (columns < G * D)[None, :]
            dv = tl.load(dv_ptr + tokens * (G * D) + columns[None, :], mask=mask)
            places = dqkv_ptr + (H + G) * D + tokens * ROW + columns[None, :]
            tl.store(places, dv, mask=mask)


def qk_norm_rotary_cache(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    num_heads: int,
    cache: CacheSlots,
    slots: Tensor | None,
    scales: str = "fp32",
) -> Tensor:
    """Rotated queries bfloat16 [T, H, D]; keys and values written into `cache`.

    qkv: bfloat16 [T, (H + 2G) * D] contiguous. positions: int64 [T]. table: float32
    [positions, 2, D/2] (`rotary_table`). norm_weights: bfloat16 [D] of the query and the key norm,
    or None. slots: int64 [T], places in the cache, negative to write nothing (padding); None for
    0..T-1.

    Raises:
        ValueError: a layout or dtype other than these, with what was given.
    """
    head_dim, groups = table.shape[-1] * 2, cache.k_codes.shape[2]
    _check(qkv, positions, table, num_heads, cache, slots)
    tokens = qkv.shape[0]
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    q_weight, k_weight = norm_weights or (qkv, qkv)
    parts = triton.cdiv(num_heads, _HEADS) + 2 * triton.cdiv(groups, _HEADS)
    _forward_kernel[(tokens * parts,)](
        qkv,
        positions,
        table,
        q_weight,
        k_weight,
        positions if slots is None else slots,
        q,
        cache.k_codes,
        cache.k_codes if cache.k_scales is None else cache.k_scales,
        cache.v_codes,
        cache.v_codes if cache.v_scales is None else cache.v_scales,
        num_heads,
        groups,
        slots is not None,
        cache.k_scales is not None,
        norm_weights is not None,
        head_dim,
        _HEADS,
        eps,
        **rule("e4m3", scales),
        num_warps=4 if tokens <= _FEW_TOKENS else 1,  # one: a quarter fewer instructions an element
        maxnreg=88,  # without it 96: two programs fewer a multiprocessor
        enable_fp_fusion=False,
        **OVERLAPPED,
    )
    return q


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
    """(dqkv bfloat16 like qkv, gradients float32 [D] of the query and the key norm or None).

    dq: bfloat16 [T, H, D]; dk, dv: bfloat16 [T, G, D], the gradients of the keys and values that
    were quantized (passed straight through).
    """
    for name, x in {"dq": dq, "dk": dk, "dv": dv, "qkv": qkv}.items():
        if x.dtype != torch.bfloat16 or not x.is_contiguous() or not x.is_cuda:
            raise ValueError(f"qk_norm_rotary_backward: {name} is {x.dtype} {list(x.shape)} with "
                             f"strides {list(x.stride())} on {x.device}")  # fmt: skip
    tokens, num_heads, head_dim = dq.shape
    groups = dk.shape[1]
    dqkv = torch.empty_like(qkv)
    q_parts, kv_parts = triton.cdiv(num_heads, _HEADS), triton.cdiv(groups, _HEADS)
    chunks = triton.cdiv(tokens, _BACKWARD_TOKENS)
    partial = torch.empty(
        chunks, q_parts + kv_parts, head_dim, dtype=torch.float32, device=dq.device
    )
    q_weight, k_weight = norm_weights or (qkv, qkv)
    if tokens:
        _backward_kernel[(chunks * (q_parts + 2 * kv_parts),)](
            dq,
            dk,
            dv,
            qkv,
            dqkv,
            positions,
            table,
            q_weight,
            k_weight,
            partial,
            tokens,
            num_heads,
            groups,
            _BACKWARD_TOKENS,
            _HEADS,
            norm_weights is not None,
            head_dim,
            eps,
            num_warps=2,
            maxnreg=80,  # without it 95: two programs fewer a multiprocessor
        )
    if norm_weights is None:
        return dqkv, None, None
    return dqkv, partial[:, :q_parts].sum((0, 1)), partial[:, q_parts:].sum((0, 1))


def dense_cache(
    tokens: int, groups: int, head_dim: int, kv_format: str, device: torch.device | str
) -> CacheSlots:
    """A cache of one slot for each token, for training: codes [T, 1, G, D]."""
    dtype = torch.float8_e4m3fn if kv_format == "fp8" else torch.bfloat16

    def codes() -> Tensor:
        return torch.empty(tokens, 1, groups, head_dim, dtype=dtype, device=device)

    def scales() -> Tensor | None:
        if kv_format != "fp8":
            return None
        return torch.empty(tokens, 1, groups, dtype=torch.float32, device=device)

    return CacheSlots(codes(), codes(), scales(), scales())


def _check(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    num_heads: int,
    cache: CacheSlots,
    slots: Tensor | None,
) -> None:
    check_matrix("qk_norm_rotary_cache", qkv, (torch.bfloat16,))
    head_dim, groups = table.shape[-1] * 2, cache.k_codes.shape[2]
    width = (num_heads + 2 * groups) * head_dim
    if qkv.shape[1] != width or not qkv.is_contiguous() or head_dim & (head_dim - 1):
        raise ValueError(
            f"qk_norm_rotary_cache: {num_heads} + 2 * {groups} heads of {head_dim} (a power of 2) "
            f"are {width} columns, not {list(qkv.shape)} with strides {list(qkv.stride())}"
        )
    fields: dict[str, Any] = {"positions": positions, "slots": slots}
    for name, index in fields.items():
        if index is not None and (index.dtype != torch.int64 or index.shape != qkv.shape[:1]):
            raise ValueError(f"{name}: int64 [{qkv.shape[0]}], not {index.dtype} {index.shape}")
    if table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(f"table: contiguous float32, not {table.dtype} {table.stride()}")
    for name, codes, scales in (
        ("k", cache.k_codes, cache.k_scales),
        ("v", cache.v_codes, cache.v_scales),
    ):
        expected = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        if codes.dtype != expected or codes.dim() != 4 or codes.shape[3] != head_dim:
            raise ValueError(f"{name}_codes: {expected} [pages, page_size, G, {head_dim}], not "
                             f"{codes.dtype} {list(codes.shape)}")  # fmt: skip
        if not codes.is_contiguous() or (scales is not None and not scales.is_contiguous()):
            raise ValueError(f"{name} cache: contiguous, not strides {list(codes.stride())}")
        if scales is not None and scales.shape != codes.shape[:3]:
            raise ValueError(f"{name}_scales: {list(codes.shape[:3])}, not {list(scales.shape)}")
