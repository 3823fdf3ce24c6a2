"""QK norm, rotary embedding, key smoothing and the KV-cache write, fused, in Gluon.

A program handles 8 or 16 heads of a token. It reads their part of the qkv row once and writes the
rotated queries and, at the token's slot, keys and values in cache format: FP8 or INT8 codes with
one scale per head, or BF16. Slots index the pages in sampling, and a dense array in training.
Results are bitwise equal to the references (`rms_norm`, `rotary`, `smooth`, `quantize_kv`).

The kernels are memory-bound only with few instructions per value, so the layout is explicit: a head
is split into two halves, whose elements the rotation pairs, over four lanes of a warp (16 for few
tokens), so that a sum over a head takes two shuffles.

In backward, a program handles eight heads of several tokens. It sums the gradients of the norm
weights over its tokens and heads in registers; a second kernel sums over programs, in the same
order on every GPU. Gradients need no exact sums, so FMA fusion is allowed there.

Legend: T tokens, H query heads, G key-value heads, D head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.attention.layout import KeyValueCodes
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS
from jetrl.precision.triton import tile
from jetrl.precision.triton.launch import gluon_let_next_start, gluon_wait_for_previous, overlapped
from jetrl.precision.triton.layout import cdiv
from jetrl.settings.presets import DEFAULT_SCALES

_HEADS = 8  # heads per round of a program; changes no bits
_FEW_TOKENS = 256  # up to this many tokens (a decode step), launch for latency
# Largest code of each cache dtype (unused for bfloat16).
_MAXIMA = {torch.bfloat16: 1.0, **dict(FORMATS.values())}


@gluon.constexpr_function
def _run(pairs, num_warps):
    """Return the number of consecutive pairs of a head in one thread."""
    return min(8, pairs // (4 * num_warps))


@gluon.constexpr_function
def _log2(x):
    return x.bit_length() - 1


@functools.cache
def _heads_layout(head_dim: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of half-heads [_HEADS, D/2]: each head spans 4 * num_warps lanes."""
    # Bits of the pair index, as a linear layout counts them: bits within a run are registers, bits
    # that select a run are lanes, and the remaining high bits are registers again. A run of eight
    # bfloat16 is 16 bytes, the widest load.
    pairs, lanes = head_dim // 2, 4 * num_warps
    run = _run(pairs, num_warps)
    assert run, f"heads of {head_dim} are too small for {num_warps} warps"

    def powers(first: int, end: int) -> list[list[int]]:
        return [] if first >= end else [[0, first], *powers(2 * first, end)]

    along, heads = powers(run, run * lanes), [[1, 0], [2, 0], [4, 0]]
    left = 5 - len(along)  # remaining lane bits, which select the head
    return gl.DistributedLinearLayout(
        powers(1, run) + powers(run * lanes, pairs),
        along + heads[:left],
        heads[left:],
        [],
        [_HEADS, pairs],
    )


@gluon.jit
def _head_maxima(first, second):
    """Return the maximum of |x| per head, float32 [heads]; NaN propagates."""
    return gl.reduce(tile.larger(gl.abs(first), gl.abs(second)), 1, tile.larger)


@gluon.jit
def _grid_squares(x, factor):
    """Return int64 squares of x in grid units, as `norm_triton.grid_squares`."""
    # Adding 1.5 * 2**23 rounds to nearest even and leaves the integer in the low bits.
    rounded = gl.fma(x, factor, gl.full_like(x, 12582912.0))
    whole = (rounded.to(gl.int32, bitcast=True) - 0x4B400000).to(gl.int64)
    return whole * whole


@gluon.jit
def _inverse_root(x):
    """Return 1 / sqrt(x) of normal float64 x > 0, with the float32 bits of IEEE operations."""
    # The hardware approximation is accurate to 2**-20, and to one ulp after a third-order step;
    # then Markstein corrections. The compiler's `/` and `sqrt` take twice as long. The root is
    # IEEE's for any guess as accurate; the last bit of its inverse, wrong for a few x, does not
    # reach the float32 (tests/kernels/test_inverse_root.py). So GPUs whose guesses differ agree.
    guess = gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [x], dtype=gl.float64, is_pure=True, pack=1
    )
    one = gl.full_like(x, 1.0)
    error = gl.fma(-x, guess * guess, one)
    series = gl.fma(error, gl.full_like(x, 0.375), gl.full_like(x, 0.5))
    guess = gl.fma(series, error * guess, guess)
    # Correct the root by the residual of its square, then invert the rounded root.
    root = x * guess
    root = gl.fma(gl.fma(-root, root, x), guess * 0.5, root)
    return gl.fma(gl.fma(-root, guess, one), guess, guess)


@gluon.jit
def _head_inverse_rms(first, second, D: gl.constexpr, EPS: gl.constexpr):
    """Return 1 / rms per head, float32 [heads], by the operations of `norm_triton`."""
    # Scale the head so that rounding to integers makes the sum of squares exact. Exponent field of
    # the factor: 272 minus the exponent field of the maximum, clamped to normal numbers.
    amax_bits = _head_maxima(first, second).to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum(272 - (amax_bits >> 23), 1), 254)
    factor = (exponent << 23).to(gl.float32, bitcast=True)
    each = factor[:, None] + gl.full_like(first, 0.0)
    total = gl.sum(_grid_squares(first, each) + _grid_squares(second, each), 1)
    # Scale back from grid units in float64, rounding each operation once; D is a power of two.
    unit = ((1150 - exponent).to(gl.int64) << 52).to(gl.float64, bitcast=True)  # 1 / factor
    mean = total.to(gl.float64) * unit * unit
    mean = mean * gl.full_like(mean, 1.0 / D)
    inverse = _inverse_root(mean + gl.full_like(mean, EPS)).to(gl.float32)
    # Integers cannot represent NaN or Inf: a NaN makes the head NaN, an Inf makes inverse rms 0.
    special = gl.where(amax_bits > 0x7F800000, float("nan"), 0.0)
    return gl.where(amax_bits >= 0x7F800000, special, inverse)


@gluon.jit
def _load_halves(row_ptr, first_head, COUNT: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Load both halves, [_HEADS, D/2], of heads of a row [COUNT, D]; zeros past COUNT."""
    # Pair i consists of channels i and i + D / 2, so one thread holds both.
    heads = first_head + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    pairs = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    places = row_ptr + (heads[:, None] * D + pairs[None, :])
    mask = (heads < COUNT)[:, None]
    return gl.load(places, mask=mask, other=0.0), gl.load(places + D // 2, mask=mask, other=0.0)


@gluon.jit
def _store_halves(
    row_ptr, first_head, first, second, COUNT: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr
):
    """Store both halves, [_HEADS, D/2], of heads to a row [COUNT, D]; skips heads past COUNT."""
    heads = first_head + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    pairs = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    places = row_ptr + (heads[:, None] * D + pairs[None, :])
    mask = (heads < COUNT)[:, None]
    gl.store(places, first, mask=mask)
    gl.store(places + D // 2, second, mask=mask)


@gluon.jit
def _angles(table_ptr, position, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the cosines and sines of a position, float32 [1, D/2]."""
    places = table_ptr + position * D + gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    return gl.load(places)[None, :], gl.load(places + D // 2)[None, :]


@gluon.jit
def _halves_of(vector_ptr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Load both halves of a norm weight [D], float32 [1, D/2]."""
    places = vector_ptr + gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    first, second = tile.widen(gl.load(places)), tile.widen(gl.load(places + D // 2))
    return first[None, :], second[None, :]


@gluon.jit
def _add_and_subtract(x, DISTANCE: gl.constexpr, LAYOUT: gl.constexpr):
    """Apply a Hadamard stage whose pairs are in one thread."""
    PAIRS: gl.constexpr = x.shape[1]
    blocks = gl.reshape(x, [8, PAIRS // (2 * DISTANCE), 2, DISTANCE])
    even, odd = gl.split(gl.permute(blocks, [0, 1, 3, 2]))
    joined = gl.permute(gl.join(even + odd, even - odd), [0, 1, 3, 2])
    return gl.convert_layout(gl.reshape(joined, [8, PAIRS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _add_and_subtract_lanes(x, LANE: gl.constexpr, DISTANCE: gl.constexpr, LAYOUT: gl.constexpr):
    """Apply a Hadamard stage whose pairs are LANE lanes apart."""
    # The lane with the second value of a pair computes the difference: the other minus its own.
    pairs = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    sign = (((pairs // DISTANCE) & 1) << 31)[None, :] + gl.zeros_like(x).to(gl.int32)
    lane = gl.full_like(sign, LANE)
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; shfl.sync.bfly.b32 a, $1, $3, 31, -1; xor.b32 b, $1, $2; "
        "add.rn.f32 $0, a, b; }",
        "=r,r,r,r", [x, sign, lane], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _stage(x, DISTANCE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return sums and differences of elements of x [_HEADS, D/2] that are DISTANCE apart."""
    RUN: gl.constexpr = _run(x.shape[1], gl.num_warps())
    END: gl.constexpr = RUN * 4 * gl.num_warps()  # larger distances are registers again
    if DISTANCE < RUN or END <= DISTANCE:
        y = _add_and_subtract(x, DISTANCE, LAYOUT)
    else:
        y = _add_and_subtract_lanes(x, DISTANCE // RUN, DISTANCE, LAYOUT)
    return y


@gluon.jit
def _half_hadamard(x, LAYOUT: gl.constexpr):
    """Return x [_HEADS, D/2] times a Hadamard matrix with entries 1 and -1."""
    STAGES: gl.constexpr = _log2(x.shape[1])
    for stage in gl.static_range(STAGES):
        x = _stage(x, 1 << stage, LAYOUT)
    return x


@gluon.jit
def _hadamard(first, second, LAYOUT: gl.constexpr):
    """Return both halves, float32, after the Hadamard transform of each head."""
    first, second = _half_hadamard(first, LAYOUT), _half_hadamard(second, LAYOUT)
    return first + second, first - second


@gluon.jit
def _factors(exponents_ptr, first_head, COUNT: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the smoothing factors of rotary pairs, float32 [_HEADS, D/2]."""
    heads = first_head + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    pairs = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    places = exponents_ptr + (heads[:, None] * (D // 2) + pairs[None, :])
    exponents = gl.load(places, mask=(heads < COUNT)[:, None], other=0)
    return ((exponents.to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _norm_and_rotate(
    first, second, cosine, sine, weight_ptr, exponents_ptr, head, COUNT: gl.constexpr,
    NORM: gl.constexpr, SMOOTH: gl.constexpr, D: gl.constexpr, EPS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return bfloat16 halves of heads after the norm (if NORM), rotation and smoothing (SMOOTH)."""
    # The output of the norm is rounded before the rotation, as in the reference.
    first, second = tile.widen(first), tile.widen(second)
    if NORM:
        inverse = _head_inverse_rms(first, second, D, EPS)[:, None]
        first_weight, second_weight = _halves_of(weight_ptr, D, LAYOUT)
        first = tile.widen(tile.to_bfloat16(first * inverse * first_weight))
        second = tile.widen(tile.to_bfloat16(second * inverse * second_weight))
    # The rotation of each pair: (x, y) to (x cos - y sin, y cos + x sin).
    turned_first, turned_second = first * cosine - second * sine, second * cosine + first * sine
    if SMOOTH:
        factors = _factors(exponents_ptr, head, COUNT, D, LAYOUT)
        turned_first, turned_second = _hadamard(
            turned_first * factors, turned_second * factors, LAYOUT
        )
    return tile.to_bfloat16(turned_first), tile.to_bfloat16(turned_second)


@gluon.jit
def _store_cache(
    first, second, slot, first_head, codes_ptr, scales_ptr, G: gl.constexpr,
    QUANTIZE: gl.constexpr, D: gl.constexpr,
    MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    if QUANTIZE:
        # One quantization group per head, over both halves.
        first, second = tile.widen(first), tile.widen(second)
        amax = _head_maxima(first, second)
        scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
        heads = first_head + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
        gl.store(scales_ptr + slot * G + heads, scale, mask=heads < G)
        first = tile.to_codes(first * multiplier[:, None], codes_ptr.dtype.element_ty)
        second = tile.to_codes(second * multiplier[:, None], codes_ptr.dtype.element_ty)
    _store_halves(codes_ptr + slot * G * D, first_head, first, second, G, D, LAYOUT)


@gluon.jit
def _store_key(
    k_ptr, table_ptr, position, weight_ptr, exponents_ptr, slot, head, codes_ptr, scales_ptr,
    G: gl.constexpr, QUANTIZE: gl.constexpr, NORM: gl.constexpr, SMOOTH: gl.constexpr,
    D: gl.constexpr, EPS: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr,
    POW2: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load, normalize, rotate and smooth keys, and store them at a slot."""
    cosine, sine = _angles(table_ptr, position, D, LAYOUT)
    first, second = _load_halves(k_ptr, head, G, D, LAYOUT)
    first, second = _norm_and_rotate(
        first, second, cosine, sine, weight_ptr, exponents_ptr, head,
        G, NORM, SMOOTH, D, EPS, LAYOUT,
    )  # fmt: skip
    _store_cache(
        first, second, slot, head, codes_ptr, scales_ptr,
        G, QUANTIZE, D, MAXIMUM, FLOOR, POW2, LAYOUT,
    )  # fmt: skip


@gluon.jit
def _forward_kernel(
    qkv_ptr, positions_ptr, table_ptr, q_weight_ptr, k_weight_ptr, exponents_ptr, slots_ptr,
    q_ptr, k_codes_ptr, k_scales_ptr, v_codes_ptr, v_scales_ptr,
    H: gl.constexpr, G: gl.constexpr, HAS_SLOTS: gl.constexpr, QUANTIZE: gl.constexpr,
    NORM: gl.constexpr, SMOOTH: gl.constexpr, D: gl.constexpr, ROUNDS: gl.constexpr,
    EPS: gl.constexpr, K_MAXIMUM: gl.constexpr, V_MAXIMUM: gl.constexpr, FLOOR: gl.constexpr,
    POW2: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Process eight heads of a token per round; with two ROUNDS, keys and values share a program.

    Args:
        qkv_ptr: bfloat16 [T, (H + 2G) * D].
        exponents_ptr: int8 [H + G, D/2], read if SMOOTH.
        slots_ptr: int64 [T], read if HAS_SLOTS; otherwise token t has slot t.
        k_codes_ptr, v_codes_ptr: FP8, int8 or bfloat16 [slots, G, D], written.
        k_scales_ptr, v_scales_ptr: float32 [slots, G], written if QUANTIZE.
    """
    # Neighboring programs share a token, so that its row is in cache.
    Q_PARTS: gl.constexpr = (H + 8 * ROUNDS - 1) // (8 * ROUNDS)
    KV_PARTS: gl.constexpr = (G + 7) // 8
    PARTS: gl.constexpr = Q_PARTS + (3 - ROUNDS) * KV_PARTS
    token = (gl.program_id(0) // PARTS).to(gl.int64)
    part = gl.program_id(0) % PARTS
    # Read nothing before the previous kernel has ended: reading the angles early was slower.
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
        cosine, sine = _angles(table_ptr, position, D, LAYOUT)
        rounds = ()
        for i in gl.static_range(ROUNDS):
            halves = _load_halves(row_ptr, (part * ROUNDS + i) * 8, H, D, LAYOUT)
            rounds += (halves,)  # type: ignore[assignment]
        for i in gl.static_range(ROUNDS):
            head = (part * ROUNDS + i) * 8
            first, second = _norm_and_rotate(
                rounds[i][0], rounds[i][1], cosine, sine, q_weight_ptr, exponents_ptr, head,
                H, NORM, SMOOTH, D, EPS, LAYOUT,
            )  # fmt: skip
            _store_halves(q_ptr + token * H * D, head, first, second, H, D, LAYOUT)
    elif slot >= 0:  # padding has a negative slot
        head = (part - Q_PARTS) % KV_PARTS * 8
        k_ptr, v_ptr = row_ptr + H * D, row_ptr + (H + G) * D
        # With two rounds, a program has keys and values, and loads the values first.
        if ROUNDS > 1:
            v_first, v_second = _load_halves(v_ptr, head, G, D, LAYOUT)
            _store_key(
                k_ptr, table_ptr, position, k_weight_ptr, exponents_ptr + H * (D // 2), slot, head,
                k_codes_ptr, k_scales_ptr, G, QUANTIZE, NORM, SMOOTH, D, EPS, K_MAXIMUM, FLOOR,
                POW2, LAYOUT,
            )  # fmt: skip
            _store_cache(
                v_first, v_second, slot, head, v_codes_ptr, v_scales_ptr,
                G, QUANTIZE, D, V_MAXIMUM, FLOOR, POW2, LAYOUT,
            )  # fmt: skip
        elif part < Q_PARTS + KV_PARTS:
            _store_key(
                k_ptr, table_ptr, position, k_weight_ptr, exponents_ptr + H * (D // 2), slot, head,
                k_codes_ptr, k_scales_ptr, G, QUANTIZE, NORM, SMOOTH, D, EPS, K_MAXIMUM, FLOOR,
                POW2, LAYOUT,
            )  # fmt: skip
        else:
            first, second = _load_halves(v_ptr, head, G, D, LAYOUT)
            _store_cache(
                first, second, slot, head, v_codes_ptr, v_scales_ptr,
                G, QUANTIZE, D, V_MAXIMUM, FLOOR, POW2, LAYOUT,
            )  # fmt: skip


def qk_norm_rotary_cache(
    qkv: Tensor, positions: Tensor, table: Tensor, norm_weights: tuple[Tensor, Tensor] | None,
    eps: float, num_heads: int, cache: KeyValueCodes, slots: Tensor | None,
    scales: str = DEFAULT_SCALES, exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return normalized, rotated queries, bfloat16 [T, H, D]; write keys and values to the cache.

    Args:
        qkv: bfloat16 [T, (H + 2G) * D], contiguous.
        positions: int64 [T].
        table: float32 [positions, 2, D/2], from `rotary_table`.
        norm_weights: bfloat16 [D] of the query and key norms, or None without norms.
        cache: pages [P, 64, G, D], or one slot per token [T, G, D]; written.
        slots: int64 [T], cache slots, negative for padding (nothing is written); None: token t has
            slot t.
        scales: "fp32", or "pow2" for power-of-two scales.
        exponents: int8 [H + G, D/2] for smoothing of queries and keys (`rotary.smooth`), or None.
    """
    head_dim, groups = cache.head_dim, cache.num_heads
    tokens = qkv.shape[0]
    width = (num_heads + 2 * groups) * head_dim
    assert (qkv.dtype, qkv.shape[1], qkv.is_contiguous()) == (torch.bfloat16, width, True)
    assert (table.dtype, table.shape[-1] * 2) == (torch.float32, head_dim)
    for index in (positions, positions if slots is None else slots):
        assert (index.dtype, index.shape) == (torch.int64, (tokens,))
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    # A kernel cannot take None, so any tensor is a placeholder for unused arguments.
    q_weight, k_weight = norm_weights or (qkv, qkv)
    smooth = exponents is not None
    exponents = _checked(exponents, num_heads + groups, head_dim, qkv)
    # Few tokens: many small programs, four warps per eight heads. Many: one warp per 16 heads.
    num_warps, rounds = (4, 1) if tokens <= _FEW_TOKENS else (1, 2)
    # Programs per token: for its queries, and for its keys and values, together or separate.
    parts = cdiv(num_heads, _HEADS * rounds) + (3 - rounds) * cdiv(groups, _HEADS)
    _forward_kernel[(tokens * parts,)](
        qkv, positions, table, q_weight, k_weight, exponents,
        positions if slots is None else slots, q,
        cache.k, cache.k if cache.k_scales is None else cache.k_scales,
        cache.v, cache.v if cache.v_scales is None else cache.v_scales,
        num_heads, groups, slots is not None, cache.scaled,
        norm_weights is not None, smooth, head_dim, rounds, eps,
        _MAXIMA[cache.k.dtype], _MAXIMA[cache.v.dtype], AMAX_FLOOR, scales == "pow2",
        _heads_layout(head_dim, num_warps),
        num_warps=num_warps, maxnreg=104 if smooth else 88, enable_fp_fusion=False, **overlapped(),
    )  # fmt: skip
    return q


def _checked(exponents: Tensor | None, heads: int, head_dim: int, other: Tensor) -> Tensor:
    """Return exponents after checking their layout, or `other` as a placeholder for None."""
    if exponents is None:
        return other
    assert (exponents.dtype, exponents.shape) == (torch.int8, (heads, head_dim // 2))
    assert exponents.is_contiguous()
    return exponents


# Tokens per program: fixed, so that the weight gradients have the same bits on every GPU.
_TOKENS = 16
_NUM_WARPS = 4
_SUM_COLUMNS, _SUM_ROWS = 8, 1024  # 8 columns are 32 bytes, one memory sector


@gluon.jit
def _norm_backward(
    dfirst, dsecond, first, second, first_weight, second_weight, D: gl.constexpr, EPS: gl.constexpr
):
    """Return both halves of dx of a per-head RMSNorm, then of dy times the normalized input."""
    # With n = x / rms and g = dy * weight, dx = (g - n * mean(g * n)) / rms. The kernel computes
    # mean(g * x) and divides by the rms later, so that the two sums over a head are independent.
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
    grad_ptr, x_ptr, out_ptr, positions_ptr, table_ptr, weight_ptr, exponents_ptr, partial_ptr,
    first_token, last_token, first_head, grad_stride, row_stride, COUNT: gl.constexpr,
    NORM: gl.constexpr, SMOOTH: gl.constexpr, D: gl.constexpr, EPS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of eight query or key heads over tokens, and their part of dW."""
    if NORM:
        first_weight, second_weight = _halves_of(weight_ptr, D, LAYOUT)
        first_sum = gl.zeros([8, D // 2], gl.float32, LAYOUT)
        second_sum = gl.zeros([8, D // 2], gl.float32, LAYOUT)
    if SMOOTH:
        factors = _factors(exponents_ptr, first_head, COUNT, D, LAYOUT)
    # Advance pointers per token, so that 64-bit addresses are computed once.
    token = first_token.to(gl.int64)
    grad_ptr += token * grad_stride
    x_ptr += token * row_stride
    out_ptr += token * row_stride
    positions_ptr += token
    for _ in range(first_token, last_token):
        dfirst, dsecond = _load_halves(grad_ptr, first_head, COUNT, D, LAYOUT)
        if NORM:
            first, second = _load_halves(x_ptr, first_head, COUNT, D, LAYOUT)
        dfirst, dsecond = tile.widen(dfirst), tile.widen(dsecond)
        if SMOOTH:  # the transpose: the Hadamard matrix is symmetric
            dfirst, dsecond = _hadamard(dfirst, dsecond, LAYOUT)
            dfirst, dsecond = dfirst * factors, dsecond * factors
        # Rotate back: the inverse of a rotation is its transpose.
        cosine, sine = _angles(table_ptr, gl.load(positions_ptr), D, LAYOUT)
        turned = dsecond * cosine - dfirst * sine
        dfirst, dsecond = dfirst * cosine + dsecond * sine, turned
        if NORM:
            first, second = tile.widen(first), tile.widen(second)
            dfirst, dsecond, first_part, second_part = _norm_backward(
                dfirst, dsecond, first, second, first_weight, second_weight, D, EPS
            )
            first_sum += first_part
            second_sum += second_part
        # Round once, after the norm: until then the gradients are float32.
        dfirst, dsecond = tile.to_bfloat16(dfirst), tile.to_bfloat16(dsecond)
        _store_halves(out_ptr, first_head, dfirst, dsecond, COUNT, D, LAYOUT)
        grad_ptr += grad_stride
        x_ptr += row_stride
        out_ptr += row_stride
        positions_ptr += 1
    # Heads past COUNT were loaded as zeros and contribute nothing.
    if NORM:
        pairs = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
        gl.store(partial_ptr + pairs, gl.sum(first_sum, 0))
        gl.store(partial_ptr + D // 2 + pairs, gl.sum(second_sum, 0))


@gluon.jit(do_not_specialize=["num_tokens"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, dqkv_ptr, positions_ptr, table_ptr,
    q_weight_ptr, k_weight_ptr, exponents_ptr, partial_ptr, num_tokens,
    H: gl.constexpr, G: gl.constexpr, TOKENS: gl.constexpr, NORM: gl.constexpr,
    SMOOTH: gl.constexpr, D: gl.constexpr, EPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute dqkv for TOKENS tokens and eight heads of queries, keys or values (copied).

    Writes dqkv, bfloat16 [T, (H + 2G) * D], and, if NORM, partial sums of the weight gradients,
    float32 [T / TOKENS, parts of queries and keys, D].
    """
    Q_PARTS: gl.constexpr = (H + 7) // 8
    KV_PARTS: gl.constexpr = (G + 7) // 8
    PARTS: gl.constexpr = Q_PARTS + 2 * KV_PARTS
    ROW: gl.constexpr = (H + 2 * G) * D
    # Neighboring programs share a chunk of tokens. Each query or key part has a partial sum.
    chunk = gl.program_id(0) // PARTS
    part = gl.program_id(0) % PARTS
    first = chunk * TOKENS
    last = gl.minimum(first + TOKENS, num_tokens)
    partial_ptr += (chunk.to(gl.int64) * (Q_PARTS + KV_PARTS) + part) * D
    if part < Q_PARTS:
        _backward_heads(
            dq_ptr, qkv_ptr, dqkv_ptr, positions_ptr, table_ptr, q_weight_ptr, exponents_ptr,
            partial_ptr, first, last, part * 8, H * D, ROW, H, NORM, SMOOTH, D, EPS, LAYOUT,
        )  # fmt: skip
    elif part < Q_PARTS + KV_PARTS:
        _backward_heads(
            dk_ptr, qkv_ptr + H * D, dqkv_ptr + H * D, positions_ptr, table_ptr, k_weight_ptr,
            exponents_ptr + H * (D // 2), partial_ptr, first, last, (part - Q_PARTS) * 8, G * D,
            ROW, G, NORM, SMOOTH, D, EPS, LAYOUT,
        )  # fmt: skip
    else:
        # Values have no norm and no rotation. Load four tokens at once; past the end, the last
        # token is copied again, which is harmless.
        head = (part - Q_PARTS - KV_PARTS) * 8
        dv_ptr += first.to(gl.int64) * (G * D)
        dqkv_ptr += first.to(gl.int64) * ROW + (H + G) * D
        for start in gl.static_range(0, TOKENS, 4):
            rows = ()
            for i in gl.static_range(4):
                row = gl.minimum(start + i, last - first - 1)
                halves = _load_halves(dv_ptr + row * (G * D), head, G, D, LAYOUT)
                rows += (halves,)  # type: ignore[assignment]
            for i in gl.static_range(4):
                row = gl.minimum(start + i, last - first - 1)
                _store_halves(dqkv_ptr + row * ROW, head, rows[i][0], rows[i][1], G, D, LAYOUT)


@triton.jit(do_not_specialize=["chunks"])
def _sum_kernel(
    partial_ptr, out_ptr, chunks, Q_PARTS: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum float32 partials [chunks, PARTS, D] of queries and of keys to [2, D]."""
    # Each of ROWS accumulators adds every ROWS-th partial sum in order; a fixed tree adds those.
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.program_id(1)
    count = tl.where(key == 0, Q_PARTS, PARTS - Q_PARTS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, chunks * count, ROWS):
        # Partial sum r of queries (or keys) is part r % count of chunk r // count.
        rows = start + tl.arange(0, ROWS)
        places = (rows // count * PARTS + key * Q_PARTS + rows % count).to(tl.int64) * D
        mask = (rows < chunks * count)[:, None] & (columns < D)[None, :]
        total += tl.load(partial_ptr + places[:, None] + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + key * D + columns, tl.sum(total, 0), mask=columns < D)


def qk_norm_rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, positions: Tensor, table: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None, eps: float, exponents: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of qkv, bfloat16, and of both norm weights, float32 [D] or None.

    Args:
        dq: bfloat16 [T, H, D], gradient of the rotated queries.
        dk: bfloat16 [T, G, D], straight-through gradient of the stored keys; dv likewise.
        qkv: bfloat16 [T, (H + 2G) * D], input of the forward.
        positions: int64 [T].
        table: float32 [positions, 2, D/2], from `rotary_table`.
        norm_weights: bfloat16 [D] of the query and key norms, or None without norms.
        exponents: int8 [H + G, D/2] of the forward's smoothing, or None.
    """
    assert all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (dq, dk, dv, qkv))
    tokens, num_heads, head_dim = dq.shape
    groups = dk.shape[1]
    dqkv = torch.empty_like(qkv)
    q_parts, kv_parts = cdiv(num_heads, _HEADS), cdiv(groups, _HEADS)
    chunks = cdiv(tokens, _TOKENS)
    parts = q_parts + kv_parts
    partial = torch.empty(chunks, parts, head_dim, dtype=torch.float32, device=dq.device)
    # Without norms, weights are not read and partial sums are not written.
    q_weight, k_weight = norm_weights or (qkv, qkv)
    smooth = exponents is not None
    exponents = _checked(exponents, num_heads + groups, head_dim, qkv)
    if tokens:
        _backward_kernel[(chunks * (q_parts + 2 * kv_parts),)](
            dq, dk, dv, qkv, dqkv, positions, table, q_weight, k_weight, exponents, partial,
            tokens, num_heads, groups, _TOKENS, norm_weights is not None, smooth, head_dim, eps,
            _heads_layout(head_dim, _NUM_WARPS),
            num_warps=_NUM_WARPS, maxnreg=56,
        )  # fmt: skip
    if norm_weights is None:
        return dqkv, None, None
    sums = torch.empty(2, head_dim, dtype=torch.float32, device=dq.device)
    _sum_kernel[(cdiv(head_dim, _SUM_COLUMNS), 2)](
        partial, sums, chunks, q_parts, parts, head_dim, _SUM_COLUMNS, _SUM_ROWS, num_warps=16
    )
    return dqkv, sums[0], sums[1]
