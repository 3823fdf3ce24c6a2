"""`precision.int8` in Triton: memory-bound quantization and transposition, and the GEMM.

Along rows, eight lanes hold the 64 values of a Hadamard rotation, so that loads are coalesced;
along tokens, one thread holds them. The GEMM accumulates in integers, so tiles and the K split
change no bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

from jetrl.precision.quantize import (
    AMAX_FLOOR,
    FORMATS,
    FP8_BLOCK,
    INT8_CODES,
    ROTATION,
    QTensor,
    empty_int8_rows,
)
from jetrl.precision.triton import gluon_names, tile
from jetrl.precision.triton.launch import (
    gluon_let_next_start,
    gluon_wait_for_previous,
    multiprocessors,
    overlapped,
)
from jetrl.precision.triton.layout import cdiv, empty_int8_operand, empty_weight, is_ragged

_TOP = gl.constexpr(FORMATS[INT8_CODES][1])
_PANEL, _PROGRAMS = 128, 4  # columns per tile of 64 tokens, and programs per SM
_OPTIONS = {"enable_fp_fusion": False}
_TURN_OPTIONS = {"num_warps": 8, "maxnreg": 80, **_OPTIONS}  # three programs per SM


@gluon.jit
def rotated(x):
    """Return float32 [R, 64] Hadamard-rotated along the last dimension, held by one thread."""
    for _ in gl.static_range(6):
        even, odd = gl.split(gl.reshape(x, [x.shape[0], 32, 2]))
        joined = gl.permute(gl.join(even + odd, even - odd), [0, 2, 1])
        x = gl.reshape(joined, [x.shape[0], 64])
    return x * 0.125


def row_warps(k: int, most: int = 8) -> int:
    """Return the number of warps that quantize a row, which process 256 columns each at a time."""
    return min(most, max(1, triton.next_power_of_2(k) // 256))


@gluon.constexpr_function
def part_layout(num_warps):
    """Return the layout of a part of a row: 8 values per lane, 16 bytes in BF16."""
    return gl.BlockedLayout([8], [32], [num_warps], [0])


@gluon.jit
def rotated_part(x):
    """Return float32 [W] in `part_layout`, rotated within threads, then across eight lanes."""
    LAYOUT: gl.constexpr = part_layout(gl.num_warps())
    for _ in gl.static_range(3):
        even, odd = gl.split(gl.reshape(x, [x.shape[0] // 8, 4, 2]))
        x = gl.reshape(gl.permute(gl.join(even + odd, even - odd), [0, 2, 1]), [x.shape[0]])
    x = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    columns = gl.arange(0, x.shape[0], LAYOUT)
    for stage in gl.static_range(3):
        # The lane with the second value of a pair computes the difference: the other minus its own.
        sign = ((columns >> (3 + stage)) & 1) << 31
        distance = gl.full([x.shape[0]], 1 << stage, gl.int32, LAYOUT)
        x = gl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shfl.sync.bfly.b32 a, $1, $3, 31, -1; xor.b32 b, $1, $2; "
            "add.rn.f32 $0, a, b; }",
            "=r,r,r,r",
            [x, sign, distance],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    return x * 0.125


@gluon.jit
def store_row(parts, row, codes_ptr, scales_ptr, K: gl.constexpr, FLOOR: gl.constexpr):
    """Quantize and store the rotated parts of a row, float32 in `part_layout`, zeros past K."""
    WIDTH: gl.constexpr = parts[0].shape[0]
    PARTS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    amax = gl.abs(parts[0])
    for i in gl.static_range(1, PARTS):
        amax = tile.larger(amax, gl.abs(parts[i]))
    amax = gl.reduce(amax, 0, tile.larger)
    scale, multiplier = tile.scale_and_multiplier(amax, _TOP, FLOOR, False)
    columns = gl.arange(0, WIDTH, part_layout(gl.num_warps()))
    places = codes_ptr + row.to(gl.int64) * K + columns
    for i in gl.static_range(PARTS):
        codes = tile.to_int8(parts[i] * multiplier)
        gl.store(places + i * WIDTH, codes, mask=i * WIDTH + columns < K)
    gl.store(scales_ptr + row, scale)


@gluon.jit
def _rows_kernel(x_ptr, codes_ptr, scales_ptr, row_stride, K: gl.constexpr, FLOOR: gl.constexpr):
    WIDTH: gl.constexpr = 256 * gl.num_warps()
    row = gl.program_id(0)
    columns = gl.arange(0, WIDTH, part_layout(gl.num_warps()))
    places = x_ptr + row.to(gl.int64) * row_stride + columns
    gluon_let_next_start()
    gluon_wait_for_previous()
    parts = ()
    for first in gl.static_range(0, K, WIDTH):
        x = gl.load(places + first, mask=first + columns < K, other=0.0)
        parts += (rotated_part(tile.widen(x)),)  # type: ignore[assignment]
    store_row(parts, row, codes_ptr, scales_ptr, K, FLOOR)


@gluon.jit
def _tile(x_ptr, block, first_column, num_rows, num_columns, row_stride, COLUMNS: gl.constexpr):
    """Load 64 tokens of COLUMNS columns, and rotate them along tokens; float32 [64, COLUMNS]."""
    LANES: gl.constexpr = COLUMNS // 8 if COLUMNS < 64 else 8
    LOADED: gl.constexpr = gl.BlockedLayout(
        [1, 8],
        [32 // LANES, LANES],
        [gl.num_warps() * LANES * 8 // COLUMNS, COLUMNS // (LANES * 8)],
        [1, 0],
    )
    ALONG: gl.constexpr = gl.BlockedLayout([64, 1], [1, 32], [1, gl.num_warps()], [0, 1])
    tokens = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, LOADED))
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LOADED))
    mask = (tokens < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = tokens.to(gl.int64)[:, None] * row_stride + columns[None, :]
    x = gl.convert_layout(gl.load(x_ptr + places, mask=mask, other=0.0), ALONG).to(gl.float32)
    return _along_tokens(x, ALONG)


@gluon.jit
def _along_tokens(x, ALONG: gl.constexpr):
    """Return float32 [64, C] rotated along the first dimension, held by one thread."""
    x = gl.permute(rotated(gl.permute(x, [1, 0])), [1, 0])
    return gl.convert_layout(x, ALONG, assert_trivial=True)


@gluon.jit
def _bits(x):
    """Return the int32 bits of |x|, which order like |x|, with NaN above Inf."""
    return x.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit(do_not_specialize=["num_rows", "blocks"])
def _tokens_kernel(
    x_ptr,
    maxima_ptr,
    arrived_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    row_stride,
    blocks,
    COLUMNS: gl.constexpr,
    PASS: gl.constexpr,
    FLOOR: gl.constexpr,
):
    """Quantize each column over all tokens, and store transposed: [num_columns, blocks * 64].

    A scale needs the maximum over all tokens. PASS 1 computes the maxima, and PASS 2 quantizes.
    PASS 0 does both: a program keeps its tile until the other tiles of its columns have added their
    maxima, so all programs of a panel must run concurrently (blocks <= programs).
    """
    ALONG: gl.constexpr = gl.BlockedLayout([64, 1], [1, 32], [1, gl.num_warps()], [0, 1])
    STORED: gl.constexpr = gl.BlockedLayout([16, 1], [4, 8], [1, gl.num_warps()], [0, 1])
    panels = (num_columns + COLUMNS - 1) // COLUMNS
    for item in range(gl.program_id(0), blocks * panels, gl.num_programs(0)):
        panel, block = item // blocks, item % blocks
        x = _tile(x_ptr, block, panel * COLUMNS, num_rows, num_columns, row_stride, COLUMNS)
        columns = panel * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, ALONG))
        inside = columns < num_columns
        if PASS < 2:
            gl.atomic_max(maxima_ptr + columns, gl.max(_bits(x), 0), mask=inside, sem="relaxed")
        if PASS == 0:
            gluon_names.barrier()
            gl.atomic_add(arrived_ptr + panel, 1, sem="acq_rel")
            while gl.atomic_add(arrived_ptr + panel, 0, sem="acquire") < blocks:
                pass
        if PASS != 1:
            bits = gl.load(maxima_ptr + columns, mask=inside, other=0, cache_modifier=".cg")
            scale, multiplier = tile.scale_and_multiplier(
                bits.to(gl.float32, bitcast=True), _TOP, FLOOR, False
            )
            codes = gl.convert_layout(tile.to_int8(x * multiplier[None, :]), STORED)
            tokens = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORED))
            stored = panel * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, STORED))
            places = stored.to(gl.int64)[None, :] * (blocks * 64) + tokens[:, None]
            mask = (stored < num_columns)[None, :] & (tokens < blocks * 64)[:, None]
            gl.store(codes_ptr + places, codes, mask=mask)
            gl.store(scales_ptr + columns, scale, mask=inside & (block == 0))


_ALONG_ROW = gl.constexpr(gl.BlockedLayout([1, 64], [8, 4], [8, 1], [1, 0]))
_ALONG_COLUMN = gl.constexpr(gl.BlockedLayout([64, 1], [1, 32], [1, 8], [0, 1]))


@gluon.jit
def _weight_tile(codes_ptr, scales_ptr, num_rows, num_columns):
    """Load a tile of a weight, dequantized, rotated back along rows and rotated along columns.

    The third axis of programs counts matrices that are stacked along rows.
    """
    scales_ptr += gl.program_id(2) * num_rows
    codes_ptr += gl.program_id(2).to(gl.int64) * num_rows * num_columns
    rows = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, _ALONG_ROW))
    columns = gl.program_id(1) * 256 + gl.arange(0, 256, gl.SliceLayout(0, _ALONG_ROW))
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows.to(gl.int64)[:, None] * num_columns + columns[None, :]
    codes = gl.load(codes_ptr + places, mask=mask, other=0).to(gl.float32)
    w = codes * gl.load(scales_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    w = gl.reshape(rotated(gl.reshape(w, [256, 64])), [64, 256])
    return _along_tokens(gl.convert_layout(w, _ALONG_COLUMN), _ALONG_COLUMN)


@gluon.jit
def _weight_maxima_kernel(codes_ptr, scales_ptr, maxima_ptr, num_rows, num_columns):
    w = _weight_tile(codes_ptr, scales_ptr, num_rows, num_columns)
    columns = gl.program_id(1) * 256 + gl.arange(0, 256, gl.SliceLayout(0, _ALONG_COLUMN))
    inside = columns < num_columns
    maxima_ptr += gl.program_id(2) * num_columns
    gl.atomic_max(maxima_ptr + columns, gl.max(_bits(w), 0), mask=inside, sem="relaxed")


@gluon.jit
def _turn_kernel(
    codes_ptr,
    scales_ptr,
    maxima_ptr,
    turned_ptr,
    turned_scales_ptr,
    num_rows,
    num_columns,
    FLOOR: gl.constexpr,
):
    w = _weight_tile(codes_ptr, scales_ptr, num_rows, num_columns)
    rows = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, _ALONG_COLUMN))
    columns = gl.program_id(1) * 256 + gl.arange(0, 256, gl.SliceLayout(0, _ALONG_COLUMN))
    inside = columns < num_columns
    line = gl.program_id(2) * num_columns
    turned_ptr += line.to(gl.int64) * num_rows
    bits = gl.load(maxima_ptr + line + columns, mask=inside, other=0)
    scale, multiplier = tile.scale_and_multiplier(
        bits.to(gl.float32, bitcast=True), _TOP, FLOOR, False
    )
    mask = (rows < num_rows)[:, None] & inside[None, :]
    places = columns.to(gl.int64)[None, :] * num_rows + rows[:, None]
    gl.store(turned_ptr + places, tile.to_int8(w * multiplier[None, :]), mask=mask)
    mask = inside & (gl.program_id(0) == 0)
    gl.store(turned_scales_ptr + line + columns, scale, mask=mask)


@gluon.jit
def _squares_kernel(
    codes_ptr,
    scales_ptr,
    turned_ptr,
    turned_scales_ptr,
    num_rows,
    num_columns,
    turned_scale_stride,
    row_blocks,
    column_blocks,
    RAGGED: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
):
    """Requantize a tile of an INT8 weight as one 128 x 128 E4M3 group, transposed for DGrad.

    Matrices of `num_rows` rows, in `row_blocks` groups, are stacked along rows.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 64], [16, 2], [8, 1], [1, 0])
    block, column = gl.program_id(0) // column_blocks, gl.program_id(0) % column_blocks
    inside = block % row_blocks * 128 + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    rows = block // row_blocks * num_rows + inside
    columns = column * 128 + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    places = codes_ptr + rows.to(gl.int64)[:, None] * num_columns + columns[None, :]
    if RAGGED:
        mask = (inside < num_rows)[:, None] & (columns < num_columns)[None, :]
        codes = gl.load(places, mask=mask, other=0)
        row_scales = gl.load(scales_ptr + rows, mask=inside < num_rows, other=0.0)
    else:
        codes, row_scales = gl.load(places), gl.load(scales_ptr + rows)
    w = codes.to(gl.float32) * row_scales[:, None]
    w = gl.reshape(rotated(gl.reshape(w, [256, 64])), [128, 128])
    w = gl.convert_layout(w, LAYOUT, assert_trivial=True)
    amax = gl.reduce(tile.largest(w, 1), 0, tile.larger)
    scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, False)
    gl.store(turned_scales_ptr + column * turned_scale_stride + block, scale)
    turned = gl.convert_layout((w * multiplier).to(turned_ptr.dtype.element_ty), tile.TURNED)
    stride = gl.num_programs(0) // column_blocks * 128
    tile.store_transposed(turned_ptr, turned, block, column, num_columns, stride)


def int8_squares_turned(w: QTensor, experts: int = 1) -> QTensor:
    """`precision.int8.int8_squares_turned` of each of the matrices that are stacked along rows."""
    rows, columns = w.shape[0] // experts, w.shape[1]
    row_blocks, blocks = cdiv(rows, FP8_BLOCK), cdiv(columns, FP8_BLOCK)
    length = rows if experts == 1 else experts * row_blocks * FP8_BLOCK
    q = empty_weight(columns, length, FORMATS["e4m3"][0], w.codes.device)
    _squares_kernel[(experts * row_blocks * blocks,)](
        w.codes,
        w.scales,
        q.codes,
        q.scales,
        rows,
        columns,
        q.scales.stride(0),
        row_blocks,
        blocks,
        is_ragged(rows) or is_ragged(columns),
        FORMATS["e4m3"][1],
        AMAX_FLOOR,
        **_TURN_OPTIONS,
    )
    return q


def int8_rows(x: Tensor, out: QTensor | None = None) -> QTensor:
    """`precision.int8.int8_rows` of bfloat16 or float32 [M, K], rows contiguous."""
    rows, k = x.shape
    assert (x.stride(1), k % ROTATION) == (1, 0), f"{x.shape}, strides {x.stride()}"
    q = empty_int8_operand(rows, k, x.device) if out is None else out
    if rows:
        _rows_kernel[(rows,)](
            x,
            q.codes,
            q.scales,
            x.stride(0),
            k,
            AMAX_FLOOR,
            num_warps=row_warps(k),
            **_OPTIONS,
            **overlapped(),
        )
    return q


def int8_tokens(x: Tensor) -> QTensor:
    """`precision.int8.int8_tokens` of bfloat16 [T, N]."""
    num_rows, num_columns = x.shape
    blocks = cdiv(num_rows, ROTATION)
    turned = empty_int8_rows(num_columns, blocks * ROTATION, x.device)
    panels = cdiv(num_columns, _PANEL)
    most = _PROGRAMS * multiprocessors(x.device)
    zeros = torch.zeros(num_columns + panels, dtype=torch.int32, device=x.device)
    grid = (min(blocks * panels, most),)
    for which in (0,) if blocks <= most // 4 else (1, 2):
        _tokens_kernel[grid](
            x,
            zeros,
            zeros[num_columns:],
            turned.codes,
            turned.scales,
            num_rows,
            num_columns,
            x.stride(0),
            blocks,
            _PANEL,
            which,
            AMAX_FLOOR,
            num_warps=_PANEL // 32,
            maxnreg=128,
            launch_cooperative_grid=which == 0,
            **_OPTIONS,
        )
    return turned.mT


def int8_turned(w: QTensor, experts: int = 1) -> QTensor:
    """`precision.int8.int8_turned` of each of the matrices that are stacked along rows."""
    rows, columns = w.shape[0] // experts, w.shape[1]
    assert rows % ROTATION == 0, f"{rows} rows per matrix"
    q = empty_int8_rows(experts * columns, rows, w.codes.device)
    amax = torch.zeros(experts * columns, dtype=torch.int32, device=w.codes.device)
    grid = (rows // ROTATION, cdiv(columns, 256), experts)
    _weight_maxima_kernel[grid](w.codes, w.scales, amax, rows, columns, **_TURN_OPTIONS)
    _turn_kernel[grid](
        w.codes, w.scales, amax, q.codes, q.scales, rows, columns, AMAX_FLOOR, **_TURN_OPTIONS
    )
    return q


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    a,
    b,
    a_scales,
    b_scales,
    out,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Compute a @ b^T for a [M, K] and b [N, K], exactly in int32, then scale."""
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    for item in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        first = item // (8 * across) * 8
        height = min(down - first, 8)
        m = (first + item % (8 * across) % height) * ROWS
        n = item % (8 * across) // height * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.int32)
        for k in range(0, K, 128):
            sums = tl.dot(a.load([m, k]), b.load([n, k]).T, sums, out_dtype=tl.int32)
        rows = m + tl.arange(0, ROWS)
        s = tl.load(a_scales + rows, mask=rows < M)[:, None]
        # Write the tile in halves, which leaves shared memory for a fourth stage.
        HALF: tl.constexpr = COLUMNS // 2
        halves = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, HALF)), (0, 2, 1)))
        for half in tl.static_range(2):
            columns = n + half * HALF + tl.arange(0, HALF)
            t = tl.load(b_scales + columns, mask=columns < N)[None, :]
            y = halves[half].to(tl.float32) * s * t
            out.store([m, n + half * HALF], y.to(out.dtype))


def tiles_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`precision.int8.int8_matmul` with tiles of 128 rows."""
    (rows, k), columns = a.shape, b.shape[0]
    # A float32 output tile leaves room for only half of the columns.
    height, width = 128, 256 if out_dtype == torch.bfloat16 else 128
    programs = multiprocessors(a.codes.device)
    out = torch.empty(rows, columns, dtype=out_dtype, device=a.codes.device)
    _product_kernel[(programs,)](
        TensorDescriptor.from_tensor(a.codes, [height, 128]),
        TensorDescriptor.from_tensor(b.codes, [width, 128]),
        a.scales,
        b.scales,
        TensorDescriptor.from_tensor(out, [height, width // 2]),
        rows,
        columns,
        k,
        height,
        width,
        programs,
        num_warps=8,
        num_stages=4,
    )
    return out
