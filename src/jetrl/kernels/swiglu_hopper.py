"""The quantized backward of SwiGLU on Hopper, with both groupings from one read of each tile.

`swiglu_backward_quantize` quantizes the gradient of gate_up in both groupings (1 x 128 for DGrad,
128 x 1 for WGrad) and recomputes y in 128 x 128 groups for WGrad of `down`, reading each 128 x 128
tile once. Groups span the whole tile, so it must stay in registers until the first code is written:
16 warps hold a tile; eight would spill. One persistent program per SM loops over tiles while TMA
loads the next two. Warps exchange maxima through shared memory: one thread per group computes scale
and multiplier, and all threads quantize. Alternatives: docs/kernels.md.

Legend: T tokens, F features of y.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.kernels.exponential_triton import gluon_sigmoid
from jetrl.kernels.swiglu_triton import check_gate_up
from jetrl.precision.quantize import FORMATS, FP8_BLOCK, FP8Format, QTensor
from jetrl.precision.triton import gluon_names, tile
from jetrl.precision.triton.launch import multiprocessors
from jetrl.precision.triton.layout import (
    cdiv,
    empty_row_groups,
    empty_token_groups,
    empty_transposed_blocks,
    is_ragged,
)
from jetrl.precision.triton.quantize import tile_rule
from jetrl.settings.presets import DEFAULT_SCALES

_NUM_WARPS = 16
_STAGED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# A thread holds 4 rows x 8 columns, a warp 32 x 32, and 4 x 4 warps a tile. _TILE and _TURNED place
# the same values in the same threads. Only the register order differs: along rows, for vectors of
# row codes, or along columns, for vectors of token codes (`precision.triton.tile`).
_LANES = [[0, 8], [0, 16], [4, 0], [8, 0], [16, 0]]
_WARPS = [[0, 32], [0, 64], [32, 0], [64, 0]]
_ALONG_ROW, _ALONG_COLUMN = [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]]
_TILE = gl.constexpr(
    gl.DistributedLinearLayout(_ALONG_ROW + _ALONG_COLUMN, _LANES, _WARPS, [], [128, 128])
)
_TURNED = gl.constexpr(
    gl.DistributedLinearLayout(_ALONG_COLUMN + _ALONG_ROW, _LANES, _WARPS, [], [128, 128])
)
# Layouts for the reduction of maxima: 2 x 128 x 2 lines (columns or rows; index; dgate or dup), one
# per thread. _PARTS is [8 = 2 kinds x 4 warps' maxima, 128, 2], with the four maxima of a line in
# one thread; _LINES has the same threads after the four are reduced.
_PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0, 0], [2, 0, 0]],
        [[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        [[0, 16, 0], [0, 32, 0], [0, 64, 0], [4, 0, 0]],
        [],
        [8, 128, 2],
    )
)
_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [],
        [[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        [[0, 16, 0], [0, 32, 0], [0, 64, 0], [1, 0, 0]],
        [],
        [2, 128, 2],
    )
)
# For the maximum of a whole tile, each thread reads the maxima of all 16 warps.
_TILE_PARTS = gl.constexpr(
    gl.DistributedLinearLayout([[1], [2], [4], [8]], [[0]] * 5, [[0]] * 4, [], [16])
)
_SHARED_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_SHARED_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_SHARED_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def _gradients(dy, gate, up):
    """Return bfloat16 y, dgate and dup, in the operation order of `_rows_kernel`."""
    dy, gate = tile.widen(dy), tile.widen(gate)
    share = gluon_sigmoid(gate)
    silu = gate * share
    y = tile.to_bfloat16(silu * tile.widen(up))
    dgate = tile.to_bfloat16(dy * tile.widen(up) * (share + silu * (1.0 - share)))
    return y, dgate, tile.to_bfloat16(dy * silu)


@gluon.jit
def _pack(a, b):
    """Pack two bfloat16 into each int32, for shuffles between lanes."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(pairs):
    """Return the magnitudes of the two bfloat16 in each int32, as float32."""
    first = ((pairs & 0x7FFF) << 16).to(gl.float32, bitcast=True)
    return first, (pairs & 0x7FFF0000).to(gl.float32, bitcast=True)


# The larger magnitude of two bfloat16, or NaN, for two elements per instruction. The sign of the
# result (that of the product) is meaningless, which saves clearing the signs of the inputs.
_LARGER = gl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")


@gluon.jit
def _larger(a, b):
    """Return the larger magnitudes of bfloat16 a and b, with a meaningless sign."""
    return gl.inline_asm_elementwise(
        _LARGER, "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _larger_packed(a, b):
    """`_larger` for pairs of bfloat16 packed in int32."""
    return gl.inline_asm_elementwise(
        _LARGER, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _columns_of_threads(x):
    """Return per-thread column maxima of |x|: int32 pairs [32 = 4 warps x 8 lanes, 64]."""
    # x is bfloat16 [128, 128] in _TILE. Reduce the four rows of each thread in registers.
    a, b = tile.split_rows(x, 128)
    a, b = tile.split_rows(_larger(a, b), 64)
    a, b = gl.split(gl.reshape(_larger(a, b), [32, 64, 2]))
    return _pack(a, b)


@gluon.jit
def _column_parts(x):
    """Return column maxima of |x| within each of four warps, float32 [4, 128]."""
    # Reduce over the eight lanes of a warp that share columns, two columns per shuffle.
    lanes = gl.reshape(_columns_of_threads(x), [4, 8, 64])
    a, b = _unpack(gl.reduce(lanes, 1, _larger_packed))
    return gl.reshape(gl.join(a, b), [4, 128])


@gluon.jit
def _row_parts(x):
    """Return row maxima of |x| within each of four warps, float32 [4, 128]."""
    # Reduce the eight columns of a thread by halves, in registers. The first two splits keep
    # neighboring columns together, so that `_larger` handles both in one register.
    eights = gl.reshape(x, [128, 16, 2, 2, 2])
    a, b = gl.split(gl.permute(eights, [0, 1, 3, 4, 2]))
    a, b = gl.split(gl.permute(_larger(a, b), [0, 1, 3, 2]))
    a, b = gl.split(_larger(a, b))
    # Pack two rows into an int32, then reduce over the four lanes that share rows by shuffles.
    threads = gl.reshape(_larger(a, b), [64, 2, 16])
    a, b = gl.split(gl.permute(threads, [0, 2, 1]))
    lanes = gl.permute(gl.reshape(_pack(a, b), [64, 4, 4]), [2, 1, 0])
    a, b = _unpack(gl.reduce(lanes, 0, _larger_packed))
    return gl.reshape(gl.join(a, b), [4, 128])


@gluon.jit
def _tile_parts(x):
    """Return the maximum of |x| within each of the 4 x 4 warps, float32 [4, 4]."""
    threads = gl.reshape(_columns_of_threads(x), [4, 8, 4, 16])
    pairs = gl.reduce(gl.reduce(threads, 3, _larger_packed), 1, _larger_packed)
    a, b = _unpack(pairs)
    return tile.larger(a, b)


@gluon.jit
def _store_transposed(codes_ptr, codes, block, column, padded_tokens):
    """Store codes [128, 128] in _TURNED, transposed, to an array [columns, padded_tokens]."""
    corner = codes_ptr + (column.to(gl.int64) * 128 * padded_tokens + block * 128)
    rows = gl.arange(0, 128, gl.SliceLayout(1, _TURNED))
    columns = gl.arange(0, 128, gl.SliceLayout(0, _TURNED)).to(gl.int64)
    gl.store((corner + rows)[:, None] + columns[None, :] * padded_tokens, codes)


@gluon.jit
def _store_both(
    x,
    which: gl.constexpr,
    block,
    column,
    num_rows,
    stride: gl.constexpr,
    multipliers,
    row_codes_ptr,
    token_codes_ptr,
    padded_tokens,
):
    """Quantize a tile of dgate or dup in 1 x 128 and in 128 x 1 groups, and store the codes."""
    wide = tile.widen(x)
    # Along rows, a thread stores eight codes at a time.
    multiplier = multipliers.slice(256 + which * 128, 128).load(gl.SliceLayout(1, _TILE))
    codes = (wide * multiplier[:, None]).to(row_codes_ptr.dtype.element_ty)
    rows = gl.arange(0, 128, gl.SliceLayout(1, _TILE))
    columns = gl.arange(0, 128, gl.SliceLayout(0, _TILE))
    corner = row_codes_ptr + (block.to(gl.int64) * 128 * stride + column * 128)
    mask = (rows < num_rows - block * 128)[:, None]
    gl.store(corner + (rows.to(gl.int64)[:, None] * stride + columns[None, :]), codes, mask=mask)
    # Along tokens, the same registers reordered: a thread stores four codes at a time.
    multiplier = multipliers.slice(which * 128, 128).load(gl.SliceLayout(0, _TURNED))
    turned = gl.convert_layout(wide, _TURNED, assert_trivial=True)
    codes = (turned * multiplier[None, :]).to(token_codes_ptr.dtype.element_ty)
    _store_transposed(token_codes_ptr, codes, block, column, padded_tokens)


@gluon.jit
def _store_scales(
    parts,
    multipliers,
    block,
    column,
    num_rows,
    scale_stride,
    row_scales_ptr,
    token_scales_ptr,
    num_columns: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Compute the scales for columns and rows of dgate and dup, one thread per line (512)."""
    kind = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, _LINES)))[:, None, None]
    line = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, _LINES)))[None, :, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, _LINES)))[None, None, :]
    amax = gl.reduce(gl.reshape(parts.load(_PARTS), [2, 4, 128, 2]), 1, tile.larger)
    amax = gl.convert_layout(amax, _LINES, assert_trivial=True)
    scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
    multipliers.store(gl.reshape(gl.permute(multiplier, [0, 2, 1]), [512]))
    # Two stores, each by half of the threads: kind 0 has columns, kind 1 rows. Adding `kind * 0`
    # broadcasts the pointers to three dimensions.
    columns = column + half * (num_columns // 128)
    places = token_scales_ptr + block.to(gl.int64) * (2 * num_columns) + (columns * 128 + line)
    gl.store(places + kind * 0, scale, mask=kind == 0)
    places = row_scales_ptr + columns.to(gl.int64) * scale_stride + (block * 128 + line)
    gl.store(places + kind * 0, scale, mask=(kind == 1) & (line < num_rows - block * 128))


@gluon.jit
def _start_loads(dy_desc, x_desc, staged, arrived, stage, index, num_columns: gl.constexpr):
    """Start TMA loads of dy, gate and up of tile `index`, unless it is negative."""
    more = index >= 0
    column_blocks: gl.constexpr = num_columns // 128
    row, column = index // column_blocks * 128, index % column_blocks * 128
    bar, first = arrived.index(stage), 3 * stage
    mbarrier.expect(bar, 3 * dy_desc.block_type.nbytes, pred=more)
    gluon_names.tma_load(dy_desc, [row, column], bar, staged.index(first), pred=more)
    gluon_names.tma_load(x_desc, [row, column], bar, staged.index(first + 1), pred=more)
    up_column = num_columns + column
    gluon_names.tma_load(x_desc, [row, up_column], bar, staged.index(first + 2), pred=more)


# Do not specialize on the number of tokens: each new batch size would recompile.
@gluon.jit(do_not_specialize=["num_rows", "scale_stride", "y_scale_stride", "tiles"])
def _backward_tiles_kernel(
    dy_desc,
    x_desc,
    row_codes_ptr,
    row_scales_ptr,
    token_codes_ptr,
    token_scales_ptr,
    y_codes_ptr,
    y_scales_ptr,
    num_rows,
    scale_stride,
    y_scale_stride,
    padded_tokens,
    tiles,
    num_columns: gl.constexpr,
    MAXIMUM: gl.constexpr,
    Y_MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Write quantized gradients and y for the 128 x 128 tiles of a program.

    Args:
        dy_desc: bfloat16 [num_rows, num_columns]; TMA reads zeros past the end.
        x_desc: bfloat16 [num_rows, 2 * num_columns], gate columns first.
        row_codes_ptr: gradient in 1 x 128 groups, written; token_codes_ptr: in 128 x 1 groups.
        y_codes_ptr: y in 128 x 128 groups, tokens contiguous, written.
        scale_stride: stride between groups of row scales; y_scale_stride: between rows of y scales.
    """
    # Shared memory: 192 KiB of stages, the warps' maxima, and the multipliers of all groups.
    staged = gl.allocate_shared_memory(gl.bfloat16, [6, 128, 128], dy_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived.index(0), count=1)
    mbarrier.init(arrived.index(1), count=1)
    parts = gl.allocate_shared_memory(gl.float32, [8, 128, 2], _SHARED_3D)
    y_parts = gl.allocate_shared_memory(gl.float32, [4, 4], _SHARED_2D)
    multipliers = gl.allocate_shared_memory(gl.float32, [512], _SHARED_1D)
    stride: gl.constexpr = 2 * num_columns
    column_blocks: gl.constexpr = num_columns // 128
    step = gl.num_programs(0)
    # Start from the last rows: the previous kernel wrote them last, so they are still in L2.
    index = tiles - 1 - gl.program_id(0)
    _start_loads(dy_desc, x_desc, staged, arrived, 0, index, num_columns)
    _start_loads(dy_desc, x_desc, staged, arrived, 1, index - step, num_columns)
    turn = 0  # tiles done; bit 0 is the stage, bit 1 the phase of its barrier
    while index >= 0:
        stage = turn & 1
        mbarrier.wait(arrived.index(stage), (turn >> 1) & 1)
        dy = staged.index(3 * stage).load(_TILE)
        gate = staged.index(3 * stage + 1).load(_TILE)
        up = staged.index(3 * stage + 2).load(_TILE)

        # The three results stay in registers; their maxima go to shared memory.
        y, dgate, dup = _gradients(dy, gate, up)
        parts.slice(0, 4).store(gl.join(_column_parts(dgate), _column_parts(dup)))
        parts.slice(4, 4).store(gl.join(_row_parts(dgate), _row_parts(dup)))
        y_parts.store(_tile_parts(y))
        gluon_names.barrier()  # all warps have read the stage and written their maxima
        _start_loads(dy_desc, x_desc, staged, arrived, stage, index - 2 * step, num_columns)

        # Scales: one thread per group; every thread computes the single scale of y itself.
        block, column = index // column_blocks, index % column_blocks
        _store_scales(
            parts,
            multipliers,
            block,
            column,
            num_rows,
            scale_stride,
            row_scales_ptr,
            token_scales_ptr,
            num_columns,
            MAXIMUM,
            FLOOR,
            POW2,
        )
        amax = gl.reduce(y_parts.reshape([16]).load(_TILE_PARTS), 0, tile.larger)
        scale, multiplier = tile.scale_and_multiplier(amax, Y_MAXIMUM, FLOOR, POW2)
        gl.store(y_scales_ptr + (column.to(gl.int64) * y_scale_stride + block), scale)

        # Codes: y first, since it does not wait for multipliers from other threads.
        turned = gl.convert_layout(tile.widen(y), _TURNED, assert_trivial=True)
        codes = (turned * multiplier).to(y_codes_ptr.dtype.element_ty)
        _store_transposed(y_codes_ptr, codes, block, column, padded_tokens)
        _store_both(
            dgate,
            0,
            block,
            column,
            num_rows,
            stride,
            multipliers,
            row_codes_ptr,
            token_codes_ptr,
            padded_tokens,
        )
        _store_both(
            dup,
            1,
            block,
            column + column_blocks,
            num_rows,
            stride,
            multipliers,
            row_codes_ptr,
            token_codes_ptr,
            padded_tokens,
        )
        index -= step
        turn += 1


def swiglu_backward_quantize(
    dy: Tensor, gate_up: Tensor, format: FP8Format = "e4m3", scales: str = DEFAULT_SCALES
) -> tuple[QTensor, QTensor, QTensor]:
    """Return the quantized gradient of gate_up, and y recomputed, as operands of DGrad and WGrad.

    Args:
        dy: bfloat16 [T, F] contiguous, gradient of the output.
        gate_up: bfloat16 [T, 2F] contiguous, gate columns first, F a multiple of 128.
        scales: "fp32" or "pow2" scales.

    Returns:
        The gradient of gate_up [T, 2F] in 1 x 128 groups; the same in 128 x 1 groups, zero-padded
        to a multiple of 128 rows; y [T, F] in 128 x 128 groups, padded to the same rows.
    """
    check_gate_up(gate_up, dy)
    assert not is_ragged(dy.shape[1]), f"{dy.shape[1]} columns: groups would mix gate and up"
    num_rows, columns = gate_up.shape
    dtype = FORMATS[format][0]
    rows = empty_row_groups(num_rows, columns, dtype, dy.device)
    tokens = empty_token_groups(num_rows, columns, dtype, dy.device)
    y_dtype, y_maximum = FORMATS["e4m3"]
    y = empty_transposed_blocks(num_rows, dy.shape[1], y_dtype, dy.device)
    column_blocks = dy.shape[1] // FP8_BLOCK
    tiles = cdiv(num_rows, FP8_BLOCK) * column_blocks
    if not tiles:
        return rows, tokens, y
    tile_shape = [FP8_BLOCK, FP8_BLOCK]
    # One program per SM: 16 warps with 128 registers per thread fill it.
    _backward_tiles_kernel[(min(tiles, multiprocessors(dy.device)),)](
        TensorDescriptor.from_tensor(dy, tile_shape, _STAGED),
        TensorDescriptor.from_tensor(gate_up, tile_shape, _STAGED),
        rows.codes,
        rows.scales,
        tokens.codes,
        tokens.scales,
        y.codes,
        y.scales,
        num_rows,
        rows.scales.stride(1),
        y.scales.stride(1),
        tokens.shape[0],
        tiles,
        dy.shape[1],
        Y_MAXIMUM=y_maximum,
        **{**tile_rule(format, scales), "num_warps": _NUM_WARPS},
    )
    return rows, tokens, y
