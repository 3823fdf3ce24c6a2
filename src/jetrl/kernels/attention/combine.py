"""The second kernel of decode: it folds the splits of long contexts, as `attention.core` says.

A program for each head of each row. A context of one split was finished by the first kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.attention.core import fold_weights, inverse, normalize
from jetrl.precision.hopper import tile
from jetrl.precision.hopper.launch import gluon_let_next_start, gluon_wait_for_previous


@gluon.jit(do_not_specialize=["scale_stride", "max_splits"])
def combine_kernel(
    part_ptr,
    state_ptr,
    keys_ptr,
    o_ptr,
    scales_ptr,
    scale_stride,
    max_splits,
    H: gl.constexpr,
    D: gl.constexpr,
    SPLIT_LENGTH: gl.constexpr,
    SCALED: gl.constexpr,
    CHUNK: gl.constexpr,
    QUANTIZE: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Fold the splits of one head of one row in order, by one warp.

    Rows are sequences, or their queries where they have several. All queries of a sequence left as
    many splits as its last one has: for a query that sees fewer, empty ones, which change no bit.

    Args:
        part_ptr: float32 [R, max_splits, H, D], the splits' accumulators.
        state_ptr: float32 [R, max_splits, H, 2], the splits' maxima and sums.
        keys_ptr: int32 [R], keys of the context that each row belongs to; 0 for padding.
        o_ptr: bfloat16 or, with QUANTIZE, FP8 [R, H, D], written.
        scales_ptr: float32 [H, scale_stride], written with QUANTIZE.
        scale_stride: from one head's line of scales to the next.
        SCALED: whether keys and values are codes with scales.
        QUANTIZE: whether the output is a row of 1 x 128 groups.
        POW2: whether scales are rounded up to a power of two.
    """
    # Neighbouring channels in a lane: 16 bytes of a float32 row with head_dim 128.
    layout: gl.constexpr = gl.BlockedLayout([D // 32], [32], [1], [0])
    head = gl.program_id(0)
    row = gl.program_id(1)
    gluon_let_next_start()
    gluon_wait_for_previous()
    length = gl.load(keys_ptr + row)
    num_splits = (length + SPLIT_LENGTH - 1) // SPLIT_LENGTH
    # Decode finished the contexts of one split, and those too long for its launch (as NaN).
    if (num_splits > 1) & (num_splits <= max_splits):
        # Every lane keeps the row's maximum and sum, which saves handing the weights round.
        d = gl.arange(0, D, layout)
        zero = gl.zeros([D], gl.int32, layout)
        big_m = gl.full([D], float("-inf"), gl.float32, layout)
        big_total = gl.zeros([D], gl.float32, layout)
        out = gl.zeros([D], gl.float32, layout)
        for start in range(0, num_splits, CHUNK):
            # All loads of a chunk before the first fold: a fold waits for the one before it, and
            # the latency of memory would add to each.
            accs = ()
            ms = ()
            totals = ()
            for i in gl.static_range(CHUNK):
                line = (row.to(gl.int64) * max_splits + start + i) * H + head
                ok = (zero + (start + i)) < num_splits
                state = state_ptr + line * 2 + zero
                accs += (gl.load(part_ptr + line * D + d, mask=ok, other=0.0),)  # type: ignore[assignment]
                ms += (gl.load(state, mask=ok, other=float("-inf")),)  # type: ignore[assignment]
                totals += (gl.load(state + 1, mask=ok, other=0.0),)  # type: ignore[assignment]
            for i in gl.static_range(CHUNK):
                # Splits past the last are empty states: folding them changes nothing.
                big_m, big_total, u, w = fold_weights(big_m, big_total, ms[i], totals[i])
                out = gl.fma(accs[i], w, out * u)
        # Rounded to BF16 before the codes are made, as the quantizer would read the row; the group
        # of 128 is the head (QUANTIZE is set with head_dim 128 only).
        o = normalize(out, inverse(big_total), SCALED).to(gl.bfloat16).to(gl.float32)
        if QUANTIZE:
            amax = gl.zeros([D], gl.float32, layout) + tile.largest(o, 0)
            scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
            o = o * multiplier
            gl.store(scales_ptr + head.to(gl.int64) * scale_stride + row + d, scale, mask=d == 0)
        places = o_ptr + (row.to(gl.int64) * H + head) * D + d
        gl.store(places, o.to(o_ptr.dtype.element_ty))
