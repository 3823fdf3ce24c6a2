"""The arithmetic of one attention row, shared by every GPU attention kernel.

Decode, prefill and training must give a query row the same bits. They do because they run the
functions of this file, and nothing else, on the same blocks of keys in the same order, with tensor
cores that add 16 products at a time. Decode does so by mma.sync m16n8k16, with keys and queries
turned (`softmax_turned_block`), the others by wgmma (m64n64k16, m64n128k16): on Hopper the two give
the same bits (measured: docs/notes-attention.md).

For one query row with raw scores `r_j` (the tensor core's float32 sum over head_dim of the 16-bit
query and key codes), per-key factors and a running state, a block of BLOCK_KEYS keys does:

    x_j  = fma(r_j, a_j, b_j)         a_j = key scale * log2(e) / sqrt(D) / QUERY_PRESCALE
                                      b_j = log2(value scale)
    m'   = max(m, max_j x_j)
    e_j  = exp2(x_j - (m' - 15))      in [0, 2**15]
    sum  = fma(sum, exp2(m - m'), sum_j e_j * c_j)      c_j = 2**-15 / value scale, the sum as
                                      four fused steps over keys j, j+16, j+32, j+48, then a tree
    acc  = acc * exp2(m - m') + FP16(e_j) @ value codes (FP16)

The value scale lives in the exponent, next to the score. So what is rounded to FP16 is the key's
contribution to the *output*, relative to the row's largest, and everything down to 2**-39 of it is
represented: no scale overflows it, and scales from 2**-109 (the quantizer's floor) to 2**20 are all
as accurate as 1. Without scales (BF16 keys and values) the products are BF16,
m' = max(m, scale * max_j r_j), e_j = exp2(fma(r_j, scale, -m')), and sum adds e_j, in the same
order.

A row's context is cut into splits of SPLIT_KEYS keys at fixed positions. Each split starts from
(m, sum, acc) = (-inf, 0, 0); splits are folded in order into (M, L, O), from (-inf, 0, 0):

    M' = max(M, m);  u = exp2(M - M');  w = exp2(m - M')
    L' = fma(sum, w, L * u);  O' = fma(acc, w, O * u)

The output is O * 2**-15 * (1 / L), the log-sum-exp (M + log2 L) * ln 2. A key that a row cannot
see has x_j = -inf and changes no bit of the state, so a row is independent of its tile; and a row
with one split needs no fold, because folding into the empty state is exact.

Three things are pinned for these bits: BLOCK_KEYS and SPLIT_KEYS, which channels of head_dim a
tensor-core instruction adds (see `channel_of_slot`), and `enable_fp_fusion=False` at every launch,
so that the only fused multiply-adds are those written here.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.attention_layout import BLOCK_KEYS

SPLIT_KEYS = 1024
SPLIT_BLOCKS = SPLIT_KEYS // BLOCK_KEYS

# Queries are multiplied by this before the cast to FP16: finite up to 2**21, and rounding errors
# below 2**-20 whatever the magnitude of an entry.
QUERY_PRESCALE = 2.0**-5

_SHIFT = gl.constexpr(15.0)
_UNSHIFT = gl.constexpr(2.0**-15)
_LN_2 = gl.constexpr(0.6931471805599453)
_PRESCALE = gl.constexpr(QUERY_PRESCALE)


def score_scale(head_dim: int, scaled: bool) -> float:
    """What turns a raw score (without the key's own scale) into a base-2 logit."""
    scale = math.log2(math.e) / math.sqrt(head_dim)
    return scale / QUERY_PRESCALE if scaled else scale


@gluon.jit
def channel_of_slot(slot):
    """Channel held by slot `slot` of the permuted head_dim used with FP8 keys.

    A thread of the decode kernel reads 4 neighbouring FP8 codes as one word and widens them to two
    FP16 pairs. That lands channels in another one of the two instructions of 16 than FP16 keys read
    in order would. So keys that are widened before the kernel (prefill, training) are stored in
    this order, and their queries too: `slots_of_channels`.
    """
    word = (slot // 32) * 32
    return (
        word + ((slot >> 3) & 1) * 16 + ((slot >> 1) & 3) * 4 + ((slot >> 4) & 1) * 2 + (slot & 1)
    )


@gluon.jit
def slots_of_channels(q):
    """Rows [M, D] with columns in the order of `channel_of_slot`: renames registers."""
    parts = q.reshape([q.shape[0], q.shape[1] // 32, 8, 2, 2]).permute((0, 1, 3, 2, 4))
    return parts.reshape([q.shape[0], q.shape[1]])


@gluon.jit
def key_factors(k_scale, v_scale, SCORE_SCALE: gl.constexpr):
    """(a, b, c) of the module's formula for keys with these scales."""
    return k_scale * SCORE_SCALE, gl.log2(v_scale), _UNSHIFT / v_scale


@gluon.jit
def query_codes(q, SCALED: gl.constexpr):
    """The 16-bit query operand: FP16 of the prescaled query with FP8 keys, else BF16 as it is."""
    if SCALED:
        q = (q.to(gl.float32) * _PRESCALE).to(gl.float16)
    return q


@gluon.jit
def _halves(x):
    """Columns [0, N/2) and [N/2, N) of x [M, N]; names registers, moves nothing."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _weighted_row_sum(e, c):
    """sum_j e_j * c_j per row: columns j, j + 16, j + 32, j + 48 as one chain of fused steps."""
    c01, c23 = _halves(c.broadcast_to(e.shape))
    e01, e23 = _halves(e)
    c0, c1 = _halves(c01)
    c2, c3 = _halves(c23)
    e0, e1 = _halves(e01)
    e2, e3 = _halves(e23)
    t = gl.fma(e3, c3, gl.fma(e2, c2, gl.fma(e1, c1, e0 * c0)))
    return gl.convert_layout(gl.sum(t, axis=1), gl.SliceLayout(1, e.type.layout))


@gluon.jit
def _row_sum(e):
    """sum_j e_j per row, in the same order."""
    e01, e23 = _halves(e)
    e0, e1 = _halves(e01)
    e2, e3 = _halves(e23)
    t = e3 + (e2 + (e1 + e0))
    return gl.convert_layout(gl.sum(t, axis=1), gl.SliceLayout(1, e.type.layout))


@gluon.jit
def softmax_block(
    s,
    factors,
    m,
    total,
    position,
    first_key,
    MASKED: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    mma: gl.constexpr,
):
    """One block's softmax: raw scores [M, N], m and sum -> (weights e [M, N], m, sum, decay [M]).

    The caller multiplies its rows of acc by decay before it adds e @ v. `factors` is shared memory
    [4, N] with rows a, b, c (unused without scales). `position` [M] is the last visible key of each
    row; it is looked at only when MASKED.
    """
    if SCALED:
        s = gl.fma(s, factors.slice(0, 1, 0).load(mma), factors.slice(1, 1, 0).load(mma))
    if MASKED:
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        s = gl.where(keys[None, :] <= position[:, None], s, float("-inf"))
    top = gl.max(s, axis=1)
    if SCALED:
        new_m = gl.maximum(m, top)
    else:
        new_m = gl.maximum(m, top * SCORE_SCALE)
    safe = gl.where(new_m == float("-inf"), 0.0, new_m)
    decay = gl.exp2(m - safe)
    if SCALED:
        e = gl.exp2(s - (safe - _SHIFT)[:, None])
        part = _weighted_row_sum(e, factors.slice(2, 1, 0).load(mma))
    else:
        e = gl.exp2(gl.fma(s, SCORE_SCALE, (0.0 - safe)[:, None]))
        part = _row_sum(e)
    return e, new_m, gl.fma(total, decay, part), decay


@gluon.jit
def _upper_lower(x):
    """Rows [0, N/2) and [N/2, N) of x [N, M]; names registers, moves nothing."""
    return x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute((1, 2, 0)).split()


@gluon.jit
def _turned_tree(t, mma: gl.constexpr):
    """The sums of t's 16 rows, [M], in the order in which a sum along 16 columns adds: thread i has
    columns 2i, 2i + 1, 2i + 8, 2i + 9 there, one after the other, then threads i and i + 2, then
    both pairs. Here these are rows of two threads, and zeros stand in for the other's."""
    low, high = _upper_lower(t)  # rows j and j + 8 of a thread
    low = low.reshape([4, 2, t.shape[1]])
    high = high.reshape([4, 2, t.shape[1]])
    odd = (
        gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, high.type.layout)))[None, :, None] == 1
    )
    total = gl.sum(low, axis=1)
    total = total + gl.sum(gl.where(odd, 0.0, high), axis=1)
    total = total + gl.sum(gl.where(odd, high, 0.0), axis=1)
    return gl.convert_layout(gl.sum(total, axis=0), gl.SliceLayout(0, mma))


@gluon.jit
def softmax_turned_block(
    s, factors, m, total, position, first_key, MASKED: gl.constexpr, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr, BLOCK_N: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """`softmax_block`, the same bits, of scores [N, M]: a key a row, a query a column. `factors` is
    shared memory [3, N]; `position` a scalar, the last visible key of all columns."""
    row: gl.constexpr = gl.SliceLayout(1, mma)
    if SCALED:
        a, b = factors.index(0).load(row), factors.index(1).load(row)
        s = gl.fma(s, a[:, None], b[:, None])
    if MASKED:
        visible = first_key + gl.arange(0, BLOCK_N, row) <= position
        s = gl.where(visible[:, None], s, float("-inf"))
    top = gl.max(s, axis=0)
    if SCALED:
        new_m = gl.maximum(m, top)
    else:
        new_m = gl.maximum(m, top * SCORE_SCALE)
    safe = gl.where(new_m == float("-inf"), 0.0, new_m)
    decay = gl.exp2(m - safe)
    if SCALED:
        e = gl.exp2(s - (safe - _SHIFT)[None, :])
        c01, c23 = _upper_lower(factors.index(2).load(row)[:, None].broadcast_to(e.shape))
        c0, c1 = _upper_lower(c01)
        c2, c3 = _upper_lower(c23)
    else:
        e = gl.exp2(gl.fma(s, SCORE_SCALE, (0.0 - safe)[None, :]))
    e01, e23 = _upper_lower(e)
    e0, e1 = _upper_lower(e01)
    e2, e3 = _upper_lower(e23)
    if SCALED:
        t = gl.fma(e3, c3, gl.fma(e2, c2, gl.fma(e1, c1, e0 * c0)))
    else:
        t = e3 + (e2 + (e1 + e0))
    return e, new_m, gl.fma(total, decay, _turned_tree(t, mma)), decay


@gluon.jit
def value_weights(e, dtype: gl.constexpr, mma: gl.constexpr):
    """The 16-bit weights as the left operand of their product with the values: moves nothing."""
    return gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def fold_weights(big_m, big_total, m, total):
    """Fold a split's (m, sum) into (M, L): returns (M', L', u, w)."""
    new_m = gl.maximum(big_m, m)
    safe = gl.where(new_m == float("-inf"), 0.0, new_m)
    u = gl.exp2(big_m - safe)
    w = gl.exp2(m - safe)
    return new_m, gl.fma(total, w, big_total * u), u, w


@gluon.jit
def inverse(total):
    """1 / L, and 0 for a row without keys (a padding row)."""
    return gl.where(total == 0.0, 0.0, 1.0 / total)


@gluon.jit
def normalize(acc, inv, SCALED: gl.constexpr):
    """The output rows from O and 1 / L broadcast to its shape."""
    if SCALED:
        acc = acc * _UNSHIFT
    return acc * inv


@gluon.jit
def log_sum_exp(m, total):
    """Natural log-sum-exp of the scaled scores."""
    return (m + gl.log2(total)) * _LN_2
