"""Conversion of NVFP4 codes to BF16 in registers, shared by kernels that read NVFP4 weights.

`precision.nvfp4` explains the memory order of codes and scales, which keeps unpacking cheap: eight
BF16 values of one word of codes take eleven integer instructions and four packed multiplications.

Dimensions, as there: w warps; g and t lanes; q groups of 16 along K (bits q2, q1, q0 in a block of
128); h halves of a group; p halves of a register.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.precision.nvfp4 import SCALE_OFFSET

# Per half word: mask the sign, exponent and mantissa bits of three codes in place, and assemble the
# fourth from pieces.
_WORD = (
    "{ .reg .b32 a, b, c, d, e, f;"
    " and.b32 a, $4, 0x81c081c0;"
    " shl.b32 b, $4, 3; and.b32 b, b, 0x81c081c0;"
    " shl.b32 c, $4, 6; and.b32 c, c, 0x81c081c0;"
    " shl.b32 d, $4, 1; and.b32 d, d, 0x80008000;"
    " shr.u32 e, $4, 5; and.b32 e, e, 0x01000100; or.b32 d, d, e;"
    " shr.u32 f, $4, 4; and.b32 f, f, 0x00c000c0; or.b32 d, d, f;"
    " mul.rn.bf16x2 $0, a, $12; mul.rn.bf16x2 $1, b, $12;"
    " mul.rn.bf16x2 $2, c, $16; mul.rn.bf16x2 $3, d, $16; }"
)
_OFFSETS = SCALE_OFFSET << 16 | SCALE_OFFSET
# Expand the four scales of a word into pairs of equal BF16.
_SCALES = (
    "{ .reg .b32 z; mov.b32 z, 0;"
    + "".join(f" prmt.b32 ${q}, $4, z, 0x4{q}4{q};" for q in range(4))
    + "".join(f" mad.lo.s32 ${q}, ${q}, 16, {_OFFSETS};" for q in range(4))
    + " }"
)
UNPACK_WORD = gl.constexpr(_WORD)
UNPACK_SCALES = gl.constexpr(_SCALES)
_WORD_REGISTERS = gl.constexpr("=r,=r,=r,=r," + ",".join(["r"] * 16))
_SCALE_REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,r")
_FOUR = gl.constexpr((gl.int32, gl.int32, gl.int32, gl.int32))

# Layout of the values of a step of 64 along K, [w, g, t, q1, q0, h, p].
_P, _H, _Q0, _Q1 = [0] * 6 + [1], [0] * 5 + [1, 0], [0] * 4 + [1, 0, 0], [0] * 3 + [1, 0, 0, 0]
_T = [[0, 0, 1, 0, 0, 0, 0], [0, 0, 2, 0, 0, 0, 0]]
_G = [[0, 1, 0, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0, 0], [0, 4, 0, 0, 0, 0, 0]]
_W = [[1, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0]]
VALUES = gl.constexpr(
    gl.DistributedLinearLayout([_P, _H, _Q0, _Q1], _T + _G, _W, [], [4, 8, 4, 2, 2, 2, 2])
)
# Layouts of the code words of one block of a unit, [16, 32], and of its scale words, [64].
_CODE_LANES, _CODE_WARPS = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]]
CODE_WORDS = gl.DistributedLinearLayout([[0, 1], [0, 2]], _CODE_LANES, _CODE_WARPS, [], [16, 32])
_SCALE_LANES, _SCALE_WARPS = [[0], [0], [2], [4], [8]], [[16], [32]]
SCALE_WORDS = gl.DistributedLinearLayout([[1]], _SCALE_LANES, _SCALE_WARPS, [], [64])
SCALE_LINE = gl.DistributedLinearLayout(  # the same as a row, [1, 64]
    [[0, 1]],
    [[0, *lane] for lane in _SCALE_LANES],
    [[0, *warp] for warp in _SCALE_WARPS],
    [],
    [1, 64],
)


@gluon.jit
def unpack_step(words, scales):
    """Return the BF16 values of a step of 64 along K, [w, g, t, q1, q0, h, p].

    Args:
        words: int32 [w, g, t, q1], code words.
        scales: int32 [w, g], scale words.
    """
    spread_words: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, gl.SliceLayout(6, VALUES)))
    spread_scales: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(5, gl.SliceLayout(6, VALUES)))
    a, b, c, d = gl.inline_asm_elementwise(
        UNPACK_SCALES, _SCALE_REGISTERS, [scales], dtype=_FOUR, is_pure=True, pack=1
    )
    pairs = gl.join(gl.join(a, b), gl.join(c, d))  # [w, g, q0, q1]
    pairs = gl.convert_layout(gl.permute(pairs, [0, 1, 3, 2]), spread_scales, assert_trivial=True)
    pairs = gl.expand_dims(gl.expand_dims(gl.expand_dims(pairs, 2), 5), 6)
    words = gl.convert_layout(words, spread_words, assert_trivial=True)
    words = gl.expand_dims(gl.expand_dims(gl.expand_dims(words, 4), 5), 6)
    return gl.inline_asm_elementwise(
        UNPACK_WORD,
        _WORD_REGISTERS,
        [words.broadcast_to([4, 8, 4, 2, 2, 2, 2]), pairs.broadcast_to([4, 8, 4, 2, 2, 2, 2])],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def step_words(words):
    """Return the code words of both steps of 64 along K, int32 [w, g, t, q1] each."""
    return gl.split(gl.permute(gl.reshape(words, [4, 8, 4, 2, 2]), [0, 1, 2, 4, 3]))


@gluon.jit
def step_scales(scales):
    """Return the scale words of both steps of 64 along K, int32 [w, g] each."""
    return gl.split(gl.reshape(scales, [4, 8, 2]))
