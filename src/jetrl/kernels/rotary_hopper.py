"""From a layer's qkv to attention on Hopper: QK norm, rotary embedding, quantized keys and values.

A program takes 8 or 16 heads of a token. It reads their row of qkv once and writes the rotated
queries and, at the token's slot, keys and values as the cache stores them: FP8 or INT8 codes with
one scale per head, or BF16. Slots are places in the pages when sampling, and 0..T-1 of a dense
array when training: the same kernel makes the same bytes. The bits are those of the references
(`rms_norm`, `rotary`, `quantize_kv`).

The kernels are bound by memory if a value costs few instructions, so the layout is explicit
(Gluon): a head lies as two halves, the pairs that the rotation mixes, in four lanes of a warp, or
16 when tokens are few, so sums over a head are two shuffles (16,384 tokens of Qwen3-8B on one H200:
109 microseconds with 16 heads per program, 121 with eight).

Pages: codes [pages, page_size, G, D], scales [pages, page_size, G]; a slot is page * page_size +
the place in the page.
Legend: T tokens, H query heads, G key-value heads, D head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.attention.layout import CODES, stored_dtype
from jetrl.precision.hopper import tile
from jetrl.precision.hopper.launch import (
    OVERLAPPED,
    check_matrix,
    gluon_let_next_start,
    gluon_wait_for_previous,
)
from jetrl.precision.layout import cdiv
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS
from jetrl.settings.presets import key_and_value_formats

HEADS = 8  # heads of a program; no bit depends on it
_FEW_TOKENS = 256  # up to a decode step's: a program is launched for its latency
# The largest code of a cache's dtype; of bfloat16, which has no codes, a number that is not used.
_MAXIMA = {torch.bfloat16: 1.0} | {FORMATS[x][0]: FORMATS[x][1] for x in CODES.values()}


@dataclass(frozen=True)
class CacheSlots:
    """The tensors that keys and values are written to: a cache's pages, or one slot for each token.

    Attributes:
        k_codes: float8_e4m3fn or int8, or bfloat16 without scales, [pages, page_size, G, D].
        v_codes: like k_codes; FP8 next to INT8 is fine.
        k_scales: float32 [pages, page_size, G], or None with bfloat16.
    """

    k_codes: Tensor
    v_codes: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None


@functools.cache
def heads_layout(head_dim: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of one half of HEADS heads, [HEADS, D/2].

    A head lies in 4 * num_warps lanes of one warp, each with runs of up to eight pairs.

    Args:
        head_dim: a power of two, at least 8 * num_warps.
    """
    # Bits of a place, as a linear layout counts them: those inside a run are registers, those of
    # runs side by side are lanes, and what a head has beyond one run a lane is registers again.
    # A run of eight bfloat16 is 16 bytes, the widest load.
    pairs, lanes = head_dim // 2, 4 * num_warps
    run = min(8, pairs // lanes)
    assert run, f"heads of {head_dim} are too small for {num_warps} warps"

    def powers(first: int, end: int) -> list[list[int]]:
        return [] if first >= end else [[0, first], *powers(2 * first, end)]

    along, heads = powers(run, run * lanes), [[1, 0], [2, 0], [4, 0]]
    left = 5 - len(along)  # bits of a lane's number that tell heads
    return gl.DistributedLinearLayout(
        powers(1, run) + powers(run * lanes, pairs),
        along + heads[:left],
        heads[left:],
        [],
        [HEADS, pairs],
    )


@gluon.jit
def _head_maxima(first, second):
    """Return the maximum of |x| of each head, float32 [heads]; NaN if any is."""
    return gl.reduce(tile.larger(gl.abs(first), gl.abs(second)), 1, tile.larger)


@gluon.jit
def _grid_squares(x, factor):
    """Return the int64 squares of x in units of the grid, as `norm_hopper.grid_squares`."""
    # 1.5 * 2**23 leaves no room for a fraction: rounds to nearest even, the integer in low bits.
    rounded = gl.fma(x, factor, gl.full_like(x, 12582912.0))
    whole = (rounded.to(gl.int32, bitcast=True) - 0x4B400000).to(gl.int64)
    return whole * whole


@gluon.jit
def _inverse_root(x):
    """Return 1 / sqrt(x) of normal float64 x > 0, both operations rounded to nearest.

    The hardware's guess is right to 2**-20, and to a unit of the last place after one step of the
    third order; then Markstein's corrections, root first. What the compiler makes of `/` and `sqrt`
    is twice as long and leaves a branch for other x.
    """
    guess = gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [x], dtype=gl.float64, is_pure=True, pack=1
    )
    one = gl.full_like(x, 1.0)
    error = gl.fma(-x, guess * guess, one)
    series = gl.fma(error, gl.full_like(x, 0.375), gl.full_like(x, 0.5))
    guess = gl.fma(series, error * guess, guess)
    # The root and its correction by what its square lacks; then the inverse, of the rounded root.
    root = x * guess
    root = gl.fma(gl.fma(-root, root, x), guess * 0.5, root)
    return gl.fma(gl.fma(-root, guess, one), guess, guess)


@gluon.jit
def _head_inverse_rms(first, second, D: gl.constexpr, EPS: gl.constexpr):
    """Return 1 / rms of heads, float32 [heads], by the operations of `norm_hopper`."""
    # The grid of the head's maximum, on which squares are integers and their sum is exact: the
    # factor's exponent field is 272 - the maximum's, within what a normal number can have.
    amax_bits = _head_maxima(first, second).to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum(272 - (amax_bits >> 23), 1), 254)
    factor = (exponent << 23).to(gl.float32, bitcast=True)
    each = factor[:, None] + gl.full_like(first, 0.0)
    total = gl.sum(_grid_squares(first, each) + _grid_squares(second, each), 1)
    # Back from grid units in float64, and each operation rounded once; D is a power of two.
    unit = ((1150 - exponent).to(gl.int64) << 52).to(gl.float64, bitcast=True)  # 1 / factor
    mean = total.to(gl.float64) * unit * unit
    mean = mean * gl.full_like(mean, 1.0 / D)
    inverse = _inverse_root(mean + gl.full_like(mean, EPS)).to(gl.float32)
    # Integers know no NaN: one makes the head NaN, an Inf makes its inverse rms 0.
    special = gl.where(amax_bits > 0x7F800000, float("nan"), 0.0)
    return gl.where(amax_bits >= 0x7F800000, special, inverse)


@gluon.jit
def load_halves(row_ptr, first_head, COUNT: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the two halves [HEADS, D/2] of some heads of a row, as stored; zeros past its heads.

    Args:
        row_ptr: [COUNT, D], the row.
    """
    # Pair i of a head is channels i and i + D / 2, so both of a pair are in one thread.
    heads = first_head + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    pairs = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    places = row_ptr + (heads[:, None] * D + pairs[None, :])
    mask = (heads < COUNT)[:, None]
    return gl.load(places, mask=mask, other=0.0), gl.load(places + D // 2, mask=mask, other=0.0)


@gluon.jit
def store_halves(
    row_ptr, first_head, first, second, COUNT: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr
):
    """Store the two halves of some heads to a row; what lies past the row's heads is dropped.

    Args:
        row_ptr: [COUNT, D], the row, written.
        first: [HEADS, D/2], of the row's dtype.
        second: [HEADS, D/2], of the row's dtype.
    """
    heads = first_head + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    pairs = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    places = row_ptr + (heads[:, None] * D + pairs[None, :])
    mask = (heads < COUNT)[:, None]
    gl.store(places, first, mask=mask)
    gl.store(places + D // 2, second, mask=mask)


@gluon.jit
def angles(table_ptr, position, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the cosines and sines of a position, float32 [1, D/2].

    Args:
        table_ptr: float32 [positions, 2, D/2].
    """
    places = table_ptr + position * D + gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    return gl.load(places)[None, :], gl.load(places + D // 2)[None, :]


@gluon.jit
def halves_of(vector_ptr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the halves of a norm's weight, float32 [1, D/2].

    Args:
        vector_ptr: bfloat16 [D].
    """
    places = vector_ptr + gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    first, second = tile.widen(gl.load(places)), tile.widen(gl.load(places + D // 2))
    return first[None, :], second[None, :]


@gluon.jit
def _norm_and_rotate(
    first, second, cosine, sine, weight_ptr,
    NORM: gl.constexpr, D: gl.constexpr, EPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the halves of heads, normed with NORM and rotated, in bfloat16."""
    # The norm's output is rounded before the rotation, since the reference has it in bfloat16.
    first, second = tile.widen(first), tile.widen(second)
    if NORM:
        inverse = _head_inverse_rms(first, second, D, EPS)[:, None]
        first_weight, second_weight = halves_of(weight_ptr, D, LAYOUT)
        first = tile.widen(tile.to_bfloat16(first * inverse * first_weight))
        second = tile.widen(tile.to_bfloat16(second * inverse * second_weight))
    # The rotation of each pair: (x, y) to (x cos - y sin, y cos + x sin).
    turned_first = tile.to_bfloat16(first * cosine - second * sine)
    return turned_first, tile.to_bfloat16(second * cosine + first * sine)


@gluon.jit
def _store_cache(
    first, second, slot, first_head, codes_ptr, scales_ptr, G: gl.constexpr,
    QUANTIZE: gl.constexpr, D: gl.constexpr,
    MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    if QUANTIZE:
        # One group for each head: its maximum over both halves, its scale, its codes.
        first, second = tile.widen(first), tile.widen(second)
        amax = _head_maxima(first, second)
        scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
        heads = first_head + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
        gl.store(scales_ptr + slot * G + heads, scale, mask=heads < G)
        first = tile.to_codes(first * multiplier[:, None], codes_ptr.dtype.element_ty)
        second = tile.to_codes(second * multiplier[:, None], codes_ptr.dtype.element_ty)
    store_halves(codes_ptr + slot * G * D, first_head, first, second, G, D, LAYOUT)


@gluon.jit
def _store_key(
    k_ptr, table_ptr, position, weight_ptr, slot, head, codes_ptr, scales_ptr, G: gl.constexpr,
    QUANTIZE: gl.constexpr, NORM: gl.constexpr, D: gl.constexpr, EPS: gl.constexpr,
    MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load keys, norm and rotate them, and store them to a slot."""
    cosine, sine = angles(table_ptr, position, D, LAYOUT)
    first, second = load_halves(k_ptr, head, G, D, LAYOUT)
    first, second = _norm_and_rotate(first, second, cosine, sine, weight_ptr, NORM, D, EPS, LAYOUT)
    _store_cache(
        first, second, slot, head, codes_ptr, scales_ptr,
        G, QUANTIZE, D, MAXIMUM, FLOOR, POW2, LAYOUT,
    )  # fmt: skip


@gluon.jit
def _forward_kernel(
    qkv_ptr, positions_ptr, table_ptr, q_weight_ptr, k_weight_ptr, slots_ptr,
    q_ptr, k_codes_ptr, k_scales_ptr, v_codes_ptr, v_scales_ptr,
    H: gl.constexpr, G: gl.constexpr, HAS_SLOTS: gl.constexpr, QUANTIZE: gl.constexpr,
    NORM: gl.constexpr, D: gl.constexpr, ROUNDS: gl.constexpr, EPS: gl.constexpr,
    K_MAXIMUM: gl.constexpr, V_MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Take one token's queries, keys or values, eight heads in each of ROUNDS rounds (1 or 2).

    With two rounds eight keys go together with their values.

    Args:
        qkv_ptr: bfloat16 [T, (H + 2G) * D].
        positions_ptr: int64 [T].
        q_weight_ptr, k_weight_ptr: bfloat16 [D], the norms' weights, read with NORM.
        slots_ptr: int64 [T], read with HAS_SLOTS; else token t has slot t.
        q_ptr: bfloat16 [T, H, D], written.
        k_codes_ptr, v_codes_ptr: FP8, int8 or bfloat16 [slots, G, D], written.
        k_scales_ptr, v_scales_ptr: float32 [slots, G], written with QUANTIZE.
    """
    # Programs of a token are neighbors, so that its row is read by them at about the same time.
    Q_PARTS: gl.constexpr = (H + 8 * ROUNDS - 1) // (8 * ROUNDS)
    KV_PARTS: gl.constexpr = (G + 7) // 8
    PARTS: gl.constexpr = Q_PARTS + (3 - ROUNDS) * KV_PARTS
    token = (gl.program_id(0) // PARTS).to(gl.int64)
    part = gl.program_id(0) % PARTS
    # Nothing is read before the previous kernel has ended: reading the angles was slower.
    gluon_let_next_start()
    gluon_wait_for_previous()
    position = gl.load(positions_ptr + token)
    slot = token
    if HAS_SLOTS:
        slot = gl.load(slots_ptr + token)
    # A row of qkv is all queries, then all keys, then all values.
    row_ptr = qkv_ptr + token * (H + 2 * G) * D
    if part < Q_PARTS:
        # Queries: all loads first, since many tokens are bound by how much is asked for at once.
        cosine, sine = angles(table_ptr, position, D, LAYOUT)
        rounds = ()
        for i in gl.static_range(ROUNDS):
            halves = load_halves(row_ptr, (part * ROUNDS + i) * 8, H, D, LAYOUT)
            rounds += (halves,)  # type: ignore[assignment]
        for i in gl.static_range(ROUNDS):
            first, second = _norm_and_rotate(
                rounds[i][0], rounds[i][1], cosine, sine, q_weight_ptr, NORM, D, EPS, LAYOUT
            )
            head = (part * ROUNDS + i) * 8
            store_halves(q_ptr + token * H * D, head, first, second, H, D, LAYOUT)
    elif slot >= 0:  # padding has a negative slot
        head = (part - Q_PARTS) % KV_PARTS * 8
        k_ptr, v_ptr = row_ptr + H * D, row_ptr + (H + G) * D
        # Keys and values: with two rounds both, and the values' loads before the keys' work.
        if ROUNDS > 1:
            v_first, v_second = load_halves(v_ptr, head, G, D, LAYOUT)
            _store_key(
                k_ptr, table_ptr, position, k_weight_ptr, slot, head, k_codes_ptr, k_scales_ptr,
                G, QUANTIZE, NORM, D, EPS, K_MAXIMUM, FLOOR, POW2, LAYOUT,
            )  # fmt: skip
            _store_cache(
                v_first, v_second, slot, head, v_codes_ptr, v_scales_ptr,
                G, QUANTIZE, D, V_MAXIMUM, FLOOR, POW2, LAYOUT,
            )  # fmt: skip
        elif part < Q_PARTS + KV_PARTS:
            _store_key(
                k_ptr, table_ptr, position, k_weight_ptr, slot, head, k_codes_ptr, k_scales_ptr,
                G, QUANTIZE, NORM, D, EPS, K_MAXIMUM, FLOOR, POW2, LAYOUT,
            )  # fmt: skip
        else:
            first, second = load_halves(v_ptr, head, G, D, LAYOUT)
            _store_cache(
                first, second, slot, head, v_codes_ptr, v_scales_ptr,
                G, QUANTIZE, D, V_MAXIMUM, FLOOR, POW2, LAYOUT,
            )  # fmt: skip


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
    """Return the normed and rotated queries, and write the keys and values into a cache.

    Args:
        qkv: bfloat16 [T, (H + 2G) * D], contiguous.
        positions: int64 [T].
        table: float32 [positions, 2, D/2], of `rotary_table`.
        norm_weights: bfloat16 [D] of the query and the key norm, or None without norms.
        slots: int64 [T], places in the cache, negative to write nothing (padding); None for the
            tokens' own numbers.
        scales: "fp32", or "pow2" for scales that are powers of two.

    Returns:
        Queries, bfloat16 [T, H, D].
    """
    head_dim, groups = table.shape[-1] * 2, cache.k_codes.shape[2]
    _check(qkv, positions, table, num_heads, cache, slots)
    tokens = qkv.shape[0]
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    # A kernel takes no None: tensors that it does not read stand for weights, slots and scales.
    q_weight, k_weight = norm_weights or (qkv, qkv)
    # Few tokens: many small programs, four warps to eight heads. Many: a warp takes 16 heads.
    num_warps, rounds = (4, 1) if tokens <= _FEW_TOKENS else (1, 2)
    # Programs of a token: of its queries, and of its keys and values, together or apart.
    parts = cdiv(num_heads, HEADS * rounds) + (3 - rounds) * cdiv(groups, HEADS)
    _forward_kernel[(tokens * parts,)](
        qkv, positions, table, q_weight, k_weight, positions if slots is None else slots, q,
        cache.k_codes, cache.k_codes if cache.k_scales is None else cache.k_scales,
        cache.v_codes, cache.v_codes if cache.v_scales is None else cache.v_scales,
        num_heads, groups, slots is not None, cache.k_scales is not None,
        norm_weights is not None, head_dim, rounds, eps,
        _MAXIMA[cache.k_codes.dtype], _MAXIMA[cache.v_codes.dtype], AMAX_FLOOR, scales == "pow2",
        heads_layout(head_dim, num_warps),
        num_warps=num_warps, maxnreg=88, enable_fp_fusion=False, **OVERLAPPED,
    )  # fmt: skip
    return q


def dense_cache(
    tokens: int, groups: int, head_dim: int, kv_format: str, device: torch.device | str
) -> CacheSlots:
    """Return an empty cache of one slot for each token, for training: codes [T, 1, G, D].

    Args:
        kv_format: `PrecisionPlan.kv`, the stored formats.
    """

    def codes(stored: str) -> Tensor:
        shape = (tokens, 1, groups, head_dim)
        return torch.empty(shape, dtype=stored_dtype(stored), device=device)

    def scales(stored: str) -> Tensor | None:
        if stored not in CODES:
            return None
        return torch.empty(tokens, 1, groups, dtype=torch.float32, device=device)

    keys, values = key_and_value_formats(kv_format)
    return CacheSlots(codes(keys), codes(values), scales(keys), scales(values))


def _check(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    num_heads: int,
    cache: CacheSlots,
    slots: Tensor | None,
) -> None:
    """Raise a ValueError if the arguments of `qk_norm_rotary_cache` do not fit each other."""
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
        known = codes.dtype in _MAXIMA and (codes.dtype == torch.bfloat16) == (scales is None)
        if not known or codes.dim() != 4 or codes.shape[3] != head_dim:
            expected = "bfloat16" if scales is None else "float8_e4m3fn or int8"
            raise ValueError(f"{name}_codes: {expected} [pages, page_size, G, {head_dim}], not "
                             f"{codes.dtype} {list(codes.shape)}")  # fmt: skip
        if not codes.is_contiguous() or (scales is not None and not scales.is_contiguous()):
            raise ValueError(f"{name} cache: contiguous, not strides {list(codes.stride())}")
        if scales is not None and scales.shape != codes.shape[:3]:
            raise ValueError(f"{name}_scales: {list(codes.shape[:3])}, not {list(scales.shape)}")
