"""The arithmetic of one attention row, shared by all GPU attention kernels.

Decode, prefill and training must be bitwise equal for a query row. They run only the functions in
this file, on the same blocks of keys in the same order, with tensor-core instructions of K = 16.
Decode uses mma.sync m16n8k16 with keys and queries transposed; the others use wgmma (m64n64k16,
m64n128k16). On Hopper both give the same bits (tests/gpu/test_tensor_cores.py).

For one query row with raw scores `r_j` (the tensor core's float32 sum over head_dim of the 16-bit
query and key codes), per-key factors and a running state, a block of BLOCK_KEYS keys does:

    x_j  = fma(r_j, a_j, b_j)         a_j = key scale * log2(e) / sqrt(D) / QUERY_PRESCALE
                                      b_j = log2(value scale)
    m'   = max(m, max_j x_j)
    e_j  = exp2(x_j - (m' - 15))      in [0, 2**15]
    sum  = fma(sum, exp2(m - m'), sum_j e_j * c_j)      c_j = 2**-15 / value scale, the sum as
                                      four fused steps over keys j, j+16, j+32, j+48, then a tree
    acc  = acc * exp2(m - m') + FP16(e_j) @ value codes (FP16)

The value scale is added to the score in the exponent. So the FP16 weight is the contribution of a
key to the *output*, relative to the largest of the row, and covers contributions down to 2**-39: no
scale overflows, and scales from 2**-109 (the floor of the quantizer) to 2**20 are as accurate as 1.
Without scales (BF16 keys and values) the weights are BF16, m' = max(m, scale * max_j r_j),
e_j = exp2(fma(r_j, scale, -m')), and sum adds e_j, in the same order.

The context is divided into splits of SPLIT_KEYS keys at fixed positions. Each split starts from
(m, sum, acc) = (-inf, 0, 0); splits are folded in order into (M, L, O), from (-inf, 0, 0):

    M' = max(M, m);  u = exp2(M - M');  w = exp2(m - M')
    L' = fma(sum, w, L * u);  O' = fma(acc, w, O * u)

The output is O * 2**-15 * (1 / L), and the log-sum-exp is (M + log2 L) * ln 2. A masked key has
x_j = -inf and changes no bit of the state, so a row is independent of its tile. A row with one
split needs no fold, because folding into the empty state is exact.

These bits depend on BLOCK_KEYS and SPLIT_KEYS, on the channels of head_dim that each tensor-core
instruction adds (`channel_of_slot`), and on `enable_fp_fusion=False` at every launch, which leaves
only the fused multiply-adds written here.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# One warp handles one split in decode: 512 keys would give long contexts more warps, but double the
# folds of every other launch (docs/kernels.md).
SPLIT_KEYS = 1024

# Queries are multiplied by this before the cast to FP16: values up to 2**21 stay finite, and
# subnormal rounding errors stay below 2**-20.
QUERY_PRESCALE = 2.0**-5

# Weights are scaled by 2**15, the largest power of two in FP16, so that small weights keep their
# bits; the output is scaled back. c_j includes the same 2**-15, so the sum is not scaled.
_SHIFT = gl.constexpr(15.0)
_UNSHIFT = gl.constexpr(2.0**-15)
_LN_2 = gl.constexpr(0.6931471805599453)
_PRESCALE = gl.constexpr(QUERY_PRESCALE)


def score_scale(head_dim: int, scaled: bool) -> float:
    """Return the factor from raw scores to base-2 logits, without the per-key scales of codes."""
    scale = math.log2(math.e) / math.sqrt(head_dim)
    return scale / QUERY_PRESCALE if scaled else scale


@gluon.jit
def widen_codes(codes):
    """Return FP8 or INT8 codes as float16 (exact).

    Hopper converts FP8 codes in pairs, but INT8 codes slowly. So an INT8 code c becomes the low
    byte of the float16 1152 + c (three instructions for four codes), and 1152 is subtracted, two
    codes at a time.
    """
    if codes.dtype == gl.int8:
        wide = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes, low, high, offset;
            xor.b32 bytes, $2, 0x80808080;
            prmt.b32 low, bytes, 0x64646464, 0x4140;
            prmt.b32 high, bytes, 0x64646464, 0x4342;
            mov.b32 offset, 0x64806480;
            sub.rn.f16x2 $0, low, offset;
            sub.rn.f16x2 $1, high, offset;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = gl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
    return wide


@gluon.jit
def channel_of_slot(slot):
    """Return the channel at slot `slot` of the permuted head_dim of quantized keys.

    A decode thread reads 4 neighboring codes as one word and widens them to two FP16 pairs. This
    assigns channels to K = 16 instructions differently than FP16 keys in order. Prefill and
    training store widened keys in this order, and `slots_of_channels` permutes their queries.
    """
    # In each 32 channels, slot 16 i + 8 h + 2 t + b has channel 16 h + 4 t + 2 i + b: i is the
    # instruction, t the thread, and (h, b) one of its four operands. The words of thread t are
    # channels 16 h + 4 t to 16 h + 4 t + 3.
    word = (slot // 32) * 32
    return (
        word + ((slot >> 3) & 1) * 16 + ((slot >> 1) & 3) * 4 + ((slot >> 4) & 1) * 2 + (slot & 1)
    )


@gluon.jit
def slots_of_channels(q):
    """Return q [M, D] with columns permuted by `channel_of_slot`, which only renames registers."""
    parts = q.reshape([q.shape[0], q.shape[1] // 32, 8, 2, 2]).permute((0, 1, 3, 2, 4))
    return parts.reshape([q.shape[0], q.shape[1]])


@gluon.jit
def key_factors(k_scale, v_scale, SCORE_SCALE: gl.constexpr):
    """Return the factors a, b, c of the module docstring, float32 [...], for scales [...]."""
    return k_scale * SCORE_SCALE, gl.log2(v_scale), _UNSHIFT / v_scale


@gluon.jit
def query_codes(q, SCALED: gl.constexpr):
    """Return BF16 queries as a 16-bit operand: prescaled FP16 if SCALED, else unchanged."""
    if SCALED:
        q = (q.to(gl.float32) * _PRESCALE).to(gl.float16)
    return q


@gluon.jit
def _halves(x, axis: gl.constexpr):
    if axis == 0:
        x = x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute((1, 2, 0))
    else:
        x = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1))
    return x.split()


@gluon.jit
def _quarters(x, axis: gl.constexpr):
    """Return the quarters of x along an axis of 64: elements j, j + 16, j + 32 and j + 48."""
    low, high = _halves(x, axis)
    return _halves(low, axis) + _halves(high, axis)


@gluon.jit
def _sum_down(t):
    """Return the sum over the 16 rows of t, in the order in which the forward sums 16 columns."""
    # In the forward, thread i of four adds columns 2i, 2i + 1, 2i + 8 and 2i + 9; then threads i
    # and i + 2 are added, then both pairs. Here a thread has rows j and j + 8. With rows 2i and
    # 2i + 1 along axis 1, each of the three steps below adds one row to the running sum; if a step
    # needs one of two neighbors, a zero replaces the other.
    low, high = _halves(t, 0)  # rows j and j + 8 of a thread
    low = low.reshape([4, 2, t.shape[1]])
    high = high.reshape([4, 2, t.shape[1]])
    odd = (
        gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, high.type.layout)))[None, :, None] == 1
    )
    total = gl.sum(low, axis=1)
    total = total + gl.sum(gl.where(odd, 0.0, high), axis=1)
    total = total + gl.sum(gl.where(odd, high, 0.0), axis=1)
    # Add the four sums in the order of the four threads: i and i + 2 first.
    return gl.sum(total, axis=0)


@gluon.jit
def _factor(factors, i: gl.constexpr, s, KEYS: gl.constexpr):
    """Load the factors a, b or c (i = 0, 1 or 2) of the keys, broadcastable to scores s."""
    mma: gl.constexpr = s.type.layout
    if KEYS == 0:
        return factors[i].load(gl.SliceLayout(1, mma))[:, None]
    else:
        return factors.slice(i, 1, 0).load(mma)


@gluon.jit
def _raise_maximum(m, top):
    """Return the new maximum m', its subtrahend (0 if m' is -inf), and the decay exp2(m - m')."""
    new_m = gl.maximum(m, top)
    safe = gl.where(new_m == float("-inf"), 0.0, new_m)
    return new_m, safe, gl.exp2(m - safe)


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
    KEYS: gl.constexpr,
):
    """Return softmax weights e of a block, the new maximum and sum, and the decay of the old state.

    The caller multiplies acc by the decay before adding e @ v. Scores and weights are [M, N] with
    keys along axis KEYS = 1, or transposed [N, M] with KEYS = 0; both give the same bits.

    Args:
        s: float32 raw scores, in an accumulator layout of the tensor core.
        factors: float32 in shared memory, read if SCALED: rows a, b, c of [., N], or for KEYS = 0
            three vectors [N].
        m: float32 [M], running maximum; total is the running sum.
        position: int32 [M], last visible key of each query; read if MASKED.
        first_key: position of the first key of the block; used if MASKED.
    """
    # Scale scores to base-2 logits x. Without scales, fold the factor into the exponent below, at
    # no cost: one positive factor for all keys changes no comparison.
    if SCALED:
        s = gl.fma(s, _factor(factors, 0, s, KEYS), _factor(factors, 1, s, KEYS))
    if MASKED:
        line: gl.constexpr = gl.SliceLayout(1 - KEYS, s.type.layout)
        key = gl.expand_dims(first_key + gl.arange(0, s.shape[KEYS], line), 1 - KEYS)
        s = gl.where(key <= gl.expand_dims(position, KEYS), s, float("-inf"))
    # Update the maximum; `decay` rescales the old state.
    top = gl.max(s, axis=KEYS)
    if not SCALED:
        top *= SCORE_SCALE
    new_m, safe, decay = _raise_maximum(m, top)
    # Compute weights, and reduce them to 16 sums: quarters are 16 keys apart in one thread, in both
    # layouts, so these steps move no data.
    if SCALED:
        e = gl.exp2(s - gl.expand_dims(safe - _SHIFT, KEYS))
        c = _factor(factors, 2, s, KEYS).broadcast_to(e.shape)
        c0, c1, c2, c3 = _quarters(c, KEYS)
        e0, e1, e2, e3 = _quarters(e, KEYS)
        t = gl.fma(e3, c3, gl.fma(e2, c2, gl.fma(e1, c1, e0 * c0)))
    else:
        e = gl.exp2(gl.fma(s, SCORE_SCALE, gl.expand_dims(0.0 - safe, KEYS)))
        e0, e1, e2, e3 = _quarters(e, KEYS)
        t = e3 + (e2 + (e1 + e0))
    # The tree over 16 keys crosses threads, in the same order for both layouts.
    part = _sum_down(t) if KEYS == 0 else gl.sum(t, axis=1)
    return e, new_m, gl.fma(total, decay, gl.convert_layout(part, m.type.layout)), decay


@gluon.jit
def value_weights(e, acc, dtype: gl.constexpr):
    """Return weights [M, N] as the left operand of the product with values; moves no registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(e.to(dtype), layout, assert_trivial=True)


@gluon.jit
def fold_weights(big_m, big_total, m, total):
    """Fold m and total of a split into M and L; return these and the output weights u and w."""
    new_m, safe, u = _raise_maximum(big_m, m)
    w = gl.exp2(m - safe)
    return new_m, gl.fma(total, w, big_total * u), u, w


@gluon.jit
def inverse(total):
    """Return 1 / total, or 0 for a row without keys (padding)."""
    return gl.where(total == 0.0, 0.0, 1.0 / total)


@gluon.jit
def normalize(acc, inv, SCALED: gl.constexpr):
    """Return the normalized output for acc; inv = 1 / L must broadcast to it."""
    if SCALED:
        acc = acc * _UNSHIFT
    return acc * inv


@gluon.jit
def log_sum_exp(m, total):
    """Return the natural log-sum-exp from base-2 maxima and sums."""
    return (m + gl.log2(total)) * _LN_2
