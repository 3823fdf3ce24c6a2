"""From a layer's qkv to attention on Hopper: QK norm, rotary embedding, quantized keys and values.

One program a token reads its row of qkv once, and writes the rotated queries and, at the token's
slot, its keys and values as the cache stores them: FP8 codes with one scale for each head, or
BF16. The slots of sampling are places in the pages; of training, 0..T-1 of a dense array: the same
kernel makes the same bytes for both. The bits are the reference's throughout (`rms_norm`,
`rotary`, `quantize_kv`): exact integer sums of squares, IEEE operations, no fusion.

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
from jetrl.precision.quantize_hopper import (
    abs_bits,
    check_matrix,
    round_to_bfloat16,
    rule,
    scale_and_multiplier,
)

_BACKWARD_PROGRAMS = 1024  # fixed, so that the weights' gradients have the same bits everywhere


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
    amax_bits = tl.maximum(tl.max(abs_bits(first), 1), tl.max(abs_bits(second), 1))
    factor = grid_factor(amax_bits)
    total = tl.sum(grid_squares(first, factor[:, None] + tl.zeros_like(first)), 1)
    total += tl.sum(grid_squares(second, factor[:, None] + tl.zeros_like(second)), 1)
    return inverse_rms_of(total, factor, amax_bits, D, EPS)


@triton.jit
def _load_halves(row_ptr, heads, pairs, mask, D: tl.constexpr):
    places = heads[:, None] * D + pairs[None, :]
    first = tl.load(row_ptr + places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + places + D // 2, mask=mask, other=0.0).to(tl.float32)
    return first, second


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
    turned = round_to_bfloat16(first * cosine - second * sine)
    return turned, round_to_bfloat16(second * cosine + first * sine)


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
        amax_bits = tl.maximum(tl.max(abs_bits(first), 1), tl.max(abs_bits(second), 1))
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
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    EPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, D // 2)
    angles_ptr = table_ptr + tl.load(positions_ptr + token) * D
    cosine = tl.load(angles_ptr + pairs)[None, :]
    sine = tl.load(angles_ptr + D // 2 + pairs)[None, :]
    row_ptr = qkv_ptr + token * (H + 2 * G) * D

    heads = tl.arange(0, Q_HEADS)
    mask = (heads < H)[:, None]
    first, second = _load_halves(row_ptr, heads, pairs, mask, D)
    first, second = _norm_and_rotate(first, second, cosine, sine, q_weight_ptr, pairs, NORM, D, EPS)
    q_ptr += token * H * D
    places = heads[:, None] * D + pairs[None, :]
    tl.store(q_ptr + places, first.to(tl.bfloat16), mask=mask)
    tl.store(q_ptr + places + D // 2, second.to(tl.bfloat16), mask=mask)

    slot = token
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + token)
    if slot >= 0:
        groups = tl.arange(0, KV_HEADS)
        kv_mask = (groups < G)[:, None]
        k_first, k_second = _load_halves(row_ptr + H * D, groups, pairs, kv_mask, D)
        k_first, k_second = _norm_and_rotate(
            k_first, k_second, cosine, sine, k_weight_ptr, pairs, NORM, D, EPS
        )
        _store_cache(
            k_first, k_second, slot, groups, pairs, kv_mask, k_codes_ptr, k_scales_ptr, G,
            QUANTIZE, D, MAXIMUM, FLOOR_BITS, POW2,
        )  # fmt: skip
        v_first, v_second = _load_halves(row_ptr + (H + G) * D, groups, pairs, kv_mask, D)
        _store_cache(
            v_first, v_second, slot, groups, pairs, kv_mask, v_codes_ptr, v_scales_ptr, G,
            QUANTIZE, D, MAXIMUM, FLOOR_BITS, POW2,
        )  # fmt: skip


@triton.jit
def _norm_backward(
    dfirst, dsecond, first, second, weight_ptr, pairs, D: tl.constexpr, EPS: tl.constexpr
):
    """(dx halves, normed * dy halves) of a head-wise RMSNorm."""
    inverse = _head_inverse_rms(first, second, D, EPS)[:, None]
    first, second = first * inverse, second * inverse
    first_scaled = dfirst * tl.load(weight_ptr + pairs).to(tl.float32)[None, :]
    second_scaled = dsecond * tl.load(weight_ptr + pairs + D // 2).to(tl.float32)[None, :]
    mean = (tl.sum(first_scaled * first, 1) + tl.sum(second_scaled * second, 1))[:, None] / D
    dx_first = inverse * (first_scaled - first * mean)
    dx_second = inverse * (second_scaled - second * mean)
    return dx_first, dx_second, tl.sum(dfirst * first, 0), tl.sum(dsecond * second, 0)


@triton.jit
def _backward_kernel(
    grad_ptr,
    qkv_ptr,
    dqkv_ptr,
    positions_ptr,
    table_ptr,
    weight_ptr,
    partial_ptr,
    num_tokens,
    tokens_per_program,
    HEADS: tl.constexpr,
    row_heads,
    offset,
    NORM: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    EPS: tl.constexpr,
):
    program = tl.program_id(0)
    pairs = tl.arange(0, D // 2)
    heads = tl.arange(0, PADDED)
    mask = (heads < HEADS)[:, None]
    first_sum = tl.zeros([D // 2], tl.float32)
    second_sum = tl.zeros([D // 2], tl.float32)
    start = program * tokens_per_program
    for index in range(start, tl.minimum(start + tokens_per_program, num_tokens)):
        token = tl.cast(index, tl.int64)
        angles_ptr = table_ptr + tl.load(positions_ptr + token) * D
        cosine = tl.load(angles_ptr + pairs)[None, :]
        sine = tl.load(angles_ptr + D // 2 + pairs)[None, :]
        first, second = _load_halves(grad_ptr + token * HEADS * D, heads, pairs, mask, D)
        dfirst = first * cosine + second * sine
        dsecond = second * cosine - first * sine
        place = (token * row_heads + offset) * D
        if NORM:
            first, second = _load_halves(qkv_ptr + place, heads, pairs, mask, D)
            dfirst, dsecond, first_part, second_part = _norm_backward(
                dfirst, dsecond, first, second, weight_ptr, pairs, D, EPS
            )
            first_sum += first_part
            second_sum += second_part
        out_ptr = dqkv_ptr + place
        places = heads[:, None] * D + pairs[None, :]
        tl.store(out_ptr + places, dfirst.to(tl.bfloat16), mask=mask)
        tl.store(out_ptr + places + D // 2, dsecond.to(tl.bfloat16), mask=mask)
    if NORM:
        tl.store(partial_ptr + program * D + pairs, first_sum)
        tl.store(partial_ptr + program * D + D // 2 + pairs, second_sum)


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
    _forward_kernel[(tokens,)](
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
        triton.next_power_of_2(num_heads),
        triton.next_power_of_2(groups),
        eps,
        **rule("e4m3", scales),
        num_warps=4,
        enable_fp_fusion=False,
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
    row_heads = num_heads + 2 * groups
    dqkv = torch.empty_like(qkv)
    per_program = max(1, triton.cdiv(tokens, _BACKWARD_PROGRAMS))
    programs = triton.cdiv(tokens, per_program)
    sums: list[Tensor | None] = []
    for index, (grad, heads, offset) in enumerate([(dq, num_heads, 0), (dk, groups, num_heads)]):
        partial = torch.empty(programs, head_dim, dtype=torch.float32, device=dq.device)
        if tokens:
            _backward_kernel[(programs,)](
                grad,
                qkv,
                dqkv,
                positions,
                table,
                qkv if norm_weights is None else norm_weights[index],
                partial,
                tokens,
                per_program,
                heads,
                row_heads,
                offset,
                norm_weights is not None,
                head_dim,
                triton.next_power_of_2(heads),
                eps,
                num_warps=4,
            )
        sums.append(partial.sum(0) if norm_weights is not None else None)
    dqkv.view(tokens, row_heads, head_dim)[:, num_heads + groups :].copy_(dv)
    return dqkv, sums[0], sums[1]


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
