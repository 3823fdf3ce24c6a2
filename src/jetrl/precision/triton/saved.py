"""`precision.saved` in Triton: activations to INT8 codes and back, at memory bandwidth."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.quantize import FORMATS, FP8_BLOCK, INT8_CODES, QTensor
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.quantize import FLOOR_BITS, abs_bits, load_tile, scale_and_multiplier

_ROWS = 32  # rows per program; changes no bits
_MAXIMUM = FORMATS[INT8_CODES][1]
_MAGIC = tl.constexpr(1.5 * 2**23)  # adding it rounds to an integer, in the low bits of the sum


@triton.jit(do_not_specialize=["num_rows"])
def _save_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, num_columns, x_stride, code_stride, scale_stride,
    column_blocks, ROWS: tl.constexpr, MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows of a group of 128 columns; strides are those of rows."""
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    x = load_tile(x_ptr, rows, column, num_rows, num_columns, x_stride)
    scale, multiplier = scale_and_multiplier(tl.max(abs_bits(x), 1), MAXIMUM, FLOOR_BITS, False)
    # A product is at most 127 and a rounding error, so it rounds to at most 127; NaN to 0.
    scaled = x * multiplier[:, None]
    codes = (tl.where(scaled == scaled, scaled, 0.0) + _MAGIC).to(tl.int32, bitcast=True)
    columns = column * 128 + tl.arange(0, 128)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    rows = rows.to(tl.int64)
    tl.store(codes_ptr + rows[:, None] * code_stride + columns[None, :], codes.to(tl.int8), mask)
    tl.store(scales_ptr + rows * scale_stride + column, scale, rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _load_kernel(
    codes_ptr, scales_ptr, out_ptr, num_rows, num_columns, code_stride, scale_stride, out_stride,
    column_blocks, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the values of ROWS rows of a group of 128 columns; strides are those of rows."""
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    codes = load_tile(codes_ptr, rows, column, num_rows, num_columns, code_stride)
    inside = rows < num_rows
    scale = tl.load(scales_ptr + rows.to(tl.int64) * scale_stride + column, inside, 0.0)
    columns = column * 128 + tl.arange(0, 128)
    places = rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    mask = inside[:, None] & (columns < num_columns)[None, :]
    tl.store(out_ptr + places, (codes * scale[:, None]).to(tl.bfloat16), mask)


def save_codes(x: Tensor, q: QTensor) -> None:
    """Write bfloat16 x [T, K], each row contiguous, as `quantize(x, (1, 128), "int8")` to q."""
    assert x.stride(1) == 1, f"strides {list(x.stride())}"
    tokens, width = x.shape
    blocks = cdiv(width, FP8_BLOCK)
    if tokens:
        _save_kernel[(cdiv(tokens, _ROWS) * blocks,)](
            x, q.codes, q.scales, tokens, width, x.stride(0), q.codes.stride(0),
            q.scales.stride(0), blocks, _ROWS, _MAXIMUM, FLOOR_BITS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def load_values(q: QTensor, out: Tensor) -> None:
    """Write the values of codes in groups of 1 x 128 to `out`, bfloat16 [T, K], rows contiguous."""
    assert out.stride(1) == 1, f"strides {list(out.stride())}"
    tokens, width = q.shape
    blocks = cdiv(width, FP8_BLOCK)
    if tokens:
        _load_kernel[(cdiv(tokens, _ROWS) * blocks,)](
            q.codes, q.scales, out, tokens, width, q.codes.stride(0), q.scales.stride(0),
            out.stride(0), blocks, _ROWS, num_warps=4,
        )  # fmt: skip
