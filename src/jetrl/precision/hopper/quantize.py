"""The one quantizer on Hopper: the bits of `precision.quantize`, at the speed of memory.

Five kernels, all with one program for a tile of 128 columns:

* rows:    X -> 1 x 128 groups (FProp)
* tile:    dY -> 1 x 128 and 128 x 1 groups from one read (2 bytes read, 2 written)
* square:  X -> 128 x 128 groups, transposed (WGrad)
* weight:  W -> 128 x 128 groups
* turn:    a weight's groups -> those of W^T: the same codes and scales, in the order DGrad reads

and the device functions of the first, which the fused norm and SwiGLU kernels share; those of a
whole tile are in tile. `/` is not IEEE
division in Triton, so `div_rn` it is; the multiplication and the cast are single instructions. The
maximum is taken on the bits of |x| as integers, which orders NaN above Inf above every number: a
non-finite value makes its group's scale non-finite and its own code NaN. Layouts: precision/layout.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.precision.hopper import tile
from jetrl.precision.hopper.launch import OVERLAPPED, let_next_start, wait_for_previous
from jetrl.precision.layout import (
    cdiv,
    empty_row_groups,
    empty_token_groups,
    empty_turned_squares,
    empty_weight,
)
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, FP8Format, QTensor

_FLOOR_BITS = struct.unpack("<i", struct.pack("<f", AMAX_FLOOR))[0]
# Two programs of a tile share a multiprocessor with at most 128 registers a thread.
TILE_OPTIONS = {"num_warps": tile.NUM_WARPS, "maxnreg": 128, "enable_fp_fusion": False}
_FEW_ROWS = 256


@triton.jit
def abs_bits(x):
    """int32 bits of |x|: ordered like |x|, with NaN above Inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_to_bfloat16(x):
    """float32 x rounded to the nearest bfloat16, as float32; two elements for three instructions
    where the compiler's own conversion there and back goes through a slow pipe."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, -65536; }",
        "=r,=r,r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def scale_and_multiplier(
    amax_bits, MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr, POW2: tl.constexpr
):
    """(stored scale, multiplier), float32, for the bits of a group's maximum."""
    amax = tl.maximum(amax_bits, FLOOR_BITS).to(tl.float32, bitcast=True)
    limit = tl.full(amax.shape, MAXIMUM, tl.float32)
    scale = tl.math.div_rn(amax, limit)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, rounded, bits).to(tl.float32, bitcast=True)
        multiplier = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    else:
        multiplier = tl.math.div_rn(limit, amax)
    return scale, multiplier


@triton.jit
def store_row_groups(
    y,
    rows,
    column,
    num_rows,
    num_columns,
    codes_ptr,
    scales_ptr,
    scale_stride,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """Quantize y [R, 128] float32, columns column*128 on, as 1 x 128 groups."""
    scale, multiplier = scale_and_multiplier(tl.max(abs_bits(y), 1), MAXIMUM, FLOOR_BITS, POW2)
    codes = (y * multiplier[:, None]).to(codes_ptr.dtype.element_ty)
    columns = column * 128 + tl.arange(0, 128)
    wide_rows = rows.to(tl.int64)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(codes_ptr + wide_rows[:, None] * num_columns + columns[None, :], codes, mask=mask)
    tl.store(scales_ptr + column.to(tl.int64) * scale_stride + rows, scale, mask=rows < num_rows)


@triton.jit
def load_tile(x_ptr, rows, column, num_rows, num_columns, row_stride):
    """x [R, 128] as float32, zeros outside."""
    columns = column * 128 + tl.arange(0, 128)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    row_stride,
    scale_stride,
    column_blocks,
    ROWS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    wait_for_previous()
    let_next_start()
    y = load_tile(x_ptr, rows, column, num_rows, num_columns, row_stride)
    store_row_groups(
        y, rows, column, num_rows, num_columns, codes_ptr, scales_ptr, scale_stride,
        MAXIMUM, FLOOR_BITS, POW2,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "scale_stride"])
def _tile_kernel(
    x_ptr,
    row_codes_ptr,
    row_scales_ptr,
    token_codes_ptr,
    token_scales_ptr,
    num_rows,
    num_columns,
    row_stride,
    scale_stride,
    padded_tokens,
    column_blocks,
    ROW_GROUPS: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    block, column = tile.place(column_blocks)
    y = tile.load_tile(x_ptr, block, column, num_rows, num_columns, row_stride)
    tile.store_groups(
        y, block, column, num_rows, num_columns, row_codes_ptr, row_scales_ptr, scale_stride,
        token_codes_ptr, token_scales_ptr, padded_tokens, ROW_GROUPS, MAXIMUM, FLOOR, POW2,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "scale_stride"])
def _square_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, num_columns, row_stride, scale_stride, padded_rows,
    column_blocks, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    block, column = tile.place(column_blocks)
    y = tile.load_tile(x_ptr, block, column, num_rows, num_columns, row_stride)
    tile.store_square_turned(
        y, block, column, num_columns, codes_ptr, scales_ptr, scale_stride, padded_rows,
        MAXIMUM, FLOOR, POW2,
    )  # fmt: skip


@gluon.jit
def _weight_kernel(
    w_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    scale_stride,
    column_blocks,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    block, column = gl.program_id(0) // column_blocks, gl.program_id(0) % column_blocks
    w = tile.load_tile(w_ptr, block, column, num_rows, num_columns, num_columns).to(gl.float32)
    amax = tile.largest(gl.convert_layout(tile.largest(w, 0), tile.LINE), 0)
    line = gl.full([128], 0.0, gl.float32, tile.LINE) + amax
    scale, multipliers = tile.scale_and_multiplier(line, MAXIMUM, FLOOR, POW2)
    one = gl.arange(0, 128, tile.LINE)
    gl.store(scales_ptr + block * scale_stride + column + one, scale, mask=one == 0)
    codes = (w * tile.largest(multipliers, 0)).to(codes_ptr.dtype.element_ty)
    gl.store(tile.tile_places(codes_ptr, block, column, num_columns), codes)


@gluon.jit
def _turn_kernel(
    codes_ptr,
    scales_ptr,
    turned_codes_ptr,
    turned_scales_ptr,
    num_rows,
    num_columns,
    scale_stride,
    turned_scale_stride,
    column_blocks,
):
    block, column = gl.program_id(0) // column_blocks, gl.program_id(0) % column_blocks
    codes = gl.load(tile.tile_places(codes_ptr, block, column, num_columns))
    turned = gl.convert_layout(codes, tile.TURNED, assert_trivial=True)
    tile.store_turned(turned_codes_ptr, turned, block, column, num_columns, num_rows)
    one = gl.arange(0, 128, tile.LINE)
    scale = gl.load(scales_ptr + block * scale_stride + column + 0 * one)
    places = column * turned_scale_stride + block + one
    gl.store(turned_scales_ptr + places, scale, mask=one == 0)


def rule(format: FP8Format, scales: str) -> dict[str, Any]:
    """The quantizer's constants as the kernels take them."""
    if scales not in ("fp32", "pow2"):
        raise ValueError(f"scales are fp32 or pow2, not {scales!r}")
    return {"MAXIMUM": FORMATS[format][1], "FLOOR_BITS": _FLOOR_BITS, "POW2": scales == "pow2"}


def tile_rule(format: FP8Format, scales: str) -> dict[str, Any]:
    """The same as the tile kernels take them, with the options of their launch."""
    constants = rule(format, scales)
    del constants["FLOOR_BITS"]
    return {**constants, "FLOOR": AMAX_FLOOR, **TILE_OPTIONS}


def tile_rows(num_rows: int) -> int:
    """Rows of a tile of 128 columns with 1 x 128 groups only: few for a decode step, where latency
    is all there is. Groups are exact, so no bit depends on it."""
    return 8 if num_rows <= _FEW_ROWS else 32


def check_matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """ValueError unless x is a CUDA matrix of one of `dtypes` whose rows are contiguous."""
    if not x.is_cuda or x.dim() != 2 or x.dtype not in dtypes or x.stride(1) != 1:
        raise ValueError(
            f"{name}: a CUDA matrix of {', '.join(map(str, dtypes))} with contiguous rows, "
            f"not {x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
        )


def quantize_rows(x: Tensor, format: FP8Format = "e4m3", scales: str = "fp32") -> QTensor:
    """x bfloat16, float16 or float32 [T, K] -> 1 x 128 groups, as `precision.quantize(x)`."""
    rows, _ = _quantize(x, True, False, format, scales)
    assert rows is not None
    return rows


def quantize_tokens(x: Tensor, format: FP8Format = "e4m3", scales: str = "fp32") -> QTensor:
    """x [T, K] -> 128 x 1 groups, as `quantize(x, (128, 1))`, but with rows of zeros after the
    last token up to a multiple of 128, and stored with tokens contiguous for WGrad."""
    _, tokens = _quantize(x, False, True, format, scales)
    assert tokens is not None
    return tokens


def quantize_rows_and_tokens(
    x: Tensor, format: FP8Format = "e4m3", scales: str = "fp32"
) -> tuple[QTensor, QTensor]:
    """(`quantize_rows(x)`, `quantize_tokens(x)`) from one read of x."""
    rows, tokens = _quantize(x, True, True, format, scales)
    assert rows is not None
    assert tokens is not None
    return rows, tokens


def quantize_squares(x: Tensor, scales: str = "fp32") -> QTensor:
    """X [T, K] as WGrad reads it: `quantize(x, (128, 128))`, but with rows of zeros after the last
    token up to a multiple of 128, and stored with tokens contiguous. K a multiple of 128."""
    check_matrix("quantize_squares", x, (torch.bfloat16,))
    num_rows, num_columns = x.shape
    out = empty_turned_squares(num_rows, num_columns, FORMATS["e4m3"][0], x.device)
    column_blocks = num_columns // FP8_BLOCK
    if num_rows:
        _square_kernel[(cdiv(num_rows, FP8_BLOCK) * column_blocks,)](
            x,
            out.codes,
            out.scales,
            num_rows,
            num_columns,
            x.stride(0),
            out.scales.stride(1),
            out.shape[0],
            column_blocks,
            **tile_rule("e4m3", scales),
        )
    return out


def _quantize(
    x: Tensor, row_groups: bool, token_groups: bool, format: FP8Format, scales: str
) -> tuple[QTensor | None, QTensor | None]:
    check_matrix("quantize", x, (torch.bfloat16, torch.float16, torch.float32))
    num_rows, num_columns = x.shape
    dtype = FORMATS[format][0]
    rows = empty_row_groups(num_rows, num_columns, dtype, x.device) if row_groups else None
    tokens = empty_token_groups(num_rows, num_columns, dtype, x.device) if token_groups else None
    column_blocks = cdiv(num_columns, FP8_BLOCK)
    if not x.numel():
        return rows, tokens
    if tokens is None:
        assert rows is not None
        _rows_kernel[(cdiv(num_rows, tile_rows(num_rows)) * column_blocks,)](
            x,
            rows.codes,
            rows.scales,
            num_rows,
            num_columns,
            x.stride(0),
            rows.scales.stride(1),
            column_blocks,
            tile_rows(num_rows),
            **rule(format, scales),
            num_warps=4,
            enable_fp_fusion=False,
            **OVERLAPPED,
        )
        return rows, None
    _tile_kernel[(cdiv(num_rows, FP8_BLOCK) * column_blocks,)](
        x,
        rows.codes if rows else tokens.codes,
        rows.scales if rows else tokens.scales,
        tokens.codes,
        tokens.scales,
        num_rows,
        num_columns,
        x.stride(0),
        rows.scales.stride(1) if rows else 0,
        tokens.shape[0],
        column_blocks,
        row_groups,
        **tile_rule(format, scales),
    )
    return rows, tokens


def quantize_weight(
    w: Tensor,
    format: FP8Format = "e4m3",
    scales: str = "fp32",
    out: QTensor | None = None,
) -> QTensor:
    """W float32 or bfloat16 [N, K] -> its 128 x 128 groups, as `precision.quantize(w, (128, 128))`.
    out: what an earlier call returned, written in place.

    Raises:
        ValueError: a layout that the kernel does not take, or dimensions not multiples of 128.
    """
    check_matrix("quantize_weight", w, (torch.float32, torch.bfloat16))
    if not w.is_contiguous():
        raise ValueError(f"quantize_weight: contiguous, not strides {list(w.stride())}")
    num_rows, num_columns = w.shape
    q = empty_weight(num_rows, num_columns, FORMATS[format][0], w.device) if out is None else out
    if q.shape != w.shape:
        raise ValueError(f"quantize_weight: out has shape {list(q.shape)} for {list(w.shape)}")
    column_blocks = num_columns // FP8_BLOCK
    _weight_kernel[(num_rows // FP8_BLOCK * column_blocks,)](
        w,
        q.codes,
        q.scales,
        num_rows,
        num_columns,
        q.scales.stride(0),
        column_blocks,
        **tile_rule(format, scales),
    )
    return q


def turned_weight(q: QTensor) -> QTensor:
    """`q.mT` of a weight's 128 x 128 groups [N, K], with its own bytes [K, N] in the order that
    DGrad reads: 2 bytes of traffic an element."""
    num_rows, num_columns = q.shape
    if q.block != (FP8_BLOCK, FP8_BLOCK) or not q.codes.is_contiguous():
        raise ValueError(f"turned_weight: contiguous codes of 128 x 128 groups, not {q.block}")
    turned = empty_weight(num_columns, num_rows, q.codes.dtype, q.codes.device)
    column_blocks = num_columns // FP8_BLOCK
    _turn_kernel[(num_rows // FP8_BLOCK * column_blocks,)](
        q.codes.view(torch.uint8),
        q.scales,
        turned.codes.view(torch.uint8),
        turned.scales,
        num_rows,
        num_columns,
        q.scales.stride(0),
        turned.scales.stride(0),
        column_blocks,
        **TILE_OPTIONS,
    )
    return turned
