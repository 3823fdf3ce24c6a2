"""`precision.int8.int8_matmul` in plain Triton, for GPUs of compute capability 8.0 and later.

A program multiplies a tile of rows by a tile of columns over all of K. With few rows the weight is
read at the bandwidth of memory; if there are too few tiles for all SMs, K is split. The parts write
int32 sums, which a second kernel adds. Integer sums have no order, so tiles and splits change no
bits.

Operands are rows of codes with K contiguous, a multiple of 64. Rows and columns are masked.

GPUs with few INT8 units (`sm_103`) multiply by BF16 tensor cores, with the same sums: codes are
exact in BF16, and so is the float32 sum of 1,024 products of at most 128**2, up to 2**24. Such
pieces are added as int32. `int8_dot` is such a product of two tiles, for other kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.quantize import QTensor
from jetrl.precision.triton.layout import FEW_ROWS, cdiv

OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Tile:
    """A program's rows, columns and values along K at a time, its warps and pipeline stages.

    `bf16`: multiply by BF16 tensor cores. `registers`: the limit per thread, 0 without.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    bf16: bool = False
    registers: int = 0

    @property
    def options(self) -> dict[str, int | bool]:
        """The options of a launch."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit, **OPTIONS}


# Tiles by the largest number of rows (0: more); the small ones fit in 99 KB of shared memory.
# Tiles of few rows, and parts of K, were chosen for the widths of 1.7B and 8B on an H200.
_LARGE = {
    0: Tile(128, 256, 128, 8, 4),
    256: Tile(64, 128, 128, 4, 4),
    128: Tile(64, 64, 128, 4, 4),
    64: Tile(64, 32, 128, 4, 6),
    32: Tile(32, 32, 256, 4, 4),
    16: Tile(16, 32, 256, 2, 4),
}
_SMALL = {
    0: Tile(128, 256, 64, 8, 4),
    256: Tile(128, 128, 64, 8, 4),
    128: Tile(128, 64, 128, 4, 3),
    64: Tile(64, 64, 128, 4, 4),
    32: Tile(32, 32, 256, 4, 4),
    16: Tile(16, 32, 256, 4, 4),
}
_BF16 = {
    0: Tile(128, 128, 64, 8, 3, bf16=True),
    256: Tile(128, 128, 64, 8, 3, bf16=True),
    128: Tile(128, 64, 64, 4, 3, bf16=True),
    64: Tile(64, 64, 128, 4, 4, bf16=True),
    32: Tile(32, 32, 128, 4, 4, bf16=True),
    16: Tile(16, 32, 128, 4, 4, bf16=True),
}
_FEW_INT8_UNITS = (10, 3)  # a compute capability
# Whether `int8_dot` is compiled for one; a process has GPUs of one kind.
BY_BF16 = tl.constexpr(
    torch.cuda.is_available() and torch.cuda.get_device_capability() == _FEW_INT8_UNITS
)
TILES = {"large": _LARGE, "small": _SMALL, "pieces": _BF16}
_EXACT_K = tl.constexpr(1024)  # values whose sums of products are exact in float32
_ROWS = (16, 32, 64, 128, FEW_ROWS)
_PROGRAMS = 2  # per SM; a split of K makes no more
_LEAST_K = 1536  # of a part, below which a second kernel takes longer than it saves
_STRIP = 1024  # columns of a program that adds parts


@functools.cache
def memory_class(device: torch.device) -> str:
    """Return the size of shared memory: large (227 KB) or small (99 KB and more)."""
    if device.type != "cuda":
        return "small"
    # Blackwell's INT8 products are those of Ampere in Triton, whose large tiles spill registers.
    return "large" if torch.cuda.get_device_capability(device) == (9, 0) else "small"


@functools.cache
def table_of(device: torch.device) -> str:
    """Return the tiles of INT8 products on a GPU: `pieces`, or those of its `memory_class`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == _FEW_INT8_UNITS:
        return "pieces"
    return memory_class(device)


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the number of SMs; 4 for Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_class(rows: int) -> int:
    """Return the key of a table of tiles: the smallest size with `rows` rows, or 0 for many."""
    return next((size for size in _ROWS if rows <= size), 0)


def parts_of(tile: Tile, rows: int, columns: int, k: int, processors: int) -> int:
    """Return the number of parts of K, so that few tiles keep all SMs busy."""
    programs = cdiv(rows, tile.rows) * cdiv(columns, tile.columns)
    return max(1, min(_PROGRAMS * processors // programs, k // _LEAST_K))


@triton.jit
def int8_dot(a, b, total=None):
    """Return total + a @ b, int32, of INT8 tiles with at most 1,024 values along the sum."""
    tl.static_assert(a.shape[1] <= _EXACT_K)
    if BY_BF16:
        products = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16)).to(tl.int32)
        if total is not None:
            products += total
        return products
    else:
        return tl.dot(a, b, total, out_dtype=tl.int32)


@triton.jit
def place(item, down, across, GROUP: tl.constexpr):
    """Return the tile row and tile column of a program; GROUP rows share columns in L2."""
    first = item // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = item % (GROUP * across)
    return first + inside % height, inside // height


@triton.jit
def pointers(ptr, rows, columns, stride):
    """Return pointers [R, C] to some rows and columns of a matrix."""
    return ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]


@triton.jit
def within(rows, num_rows, columns, num_columns):
    """Return the mask [R, C] of the rows and columns of a matrix."""
    return (rows < num_rows)[:, None] & (columns < num_columns)[None, :]


@triton.jit
def load_scales(ptr, indices, number):
    """Load scales, zeros past their number."""
    return tl.load(ptr + indices, mask=indices < number, other=0.0)


@triton.jit
def load_codes(places, inside, left, EVEN: tl.constexpr):
    """Load codes [L, DEPTH], zeros for lines that are not inside and past `left` columns."""
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (tl.arange(0, places.shape[1]) < left)[None, :]
    return tl.load(places, mask=mask, other=0)


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    out_ptr,
    M,
    N,
    K,
    part,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BF16: tl.constexpr,
):
    """Compute a tile of a @ b^T, a [M, K] and b [N, K]: scaled, or int32 sums of a part of K."""
    m, n = place(tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), GROUP)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * part
    along = first + tl.arange(0, DEPTH)
    a = pointers(a_ptr, rows, along, K)
    b = pointers(b_ptr, columns, along, K)
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    piece = tl.zeros((ROWS, COLUMNS), tl.float32)  # of `_EXACT_K` values at most, if BF16
    for k in range(first, tl.minimum(first + part, K), DEPTH):
        x = load_codes(a, rows < M, K - k, EVEN)
        w = load_codes(b, columns < N, K - k, EVEN)
        if BF16:
            piece = tl.dot(x.to(tl.bfloat16), w.to(tl.bfloat16).T, piece)
            if (k - first) % _EXACT_K == _EXACT_K - DEPTH:
                sums += piece.to(tl.int32)
                piece = tl.zeros((ROWS, COLUMNS), tl.float32)
        else:
            sums = tl.dot(x, w.T, sums, out_dtype=tl.int32)
        a += DEPTH
        b += DEPTH
    if BF16:
        sums += piece.to(tl.int32)
    mask = within(rows, M, columns, N)
    if SPLIT:
        out_ptr += tl.program_id(1) * (M.to(tl.int64) * N)
        tl.store(pointers(out_ptr, rows, columns, N), sums, mask=mask)
    else:
        s = load_scales(a_scales_ptr, rows, M)
        t = load_scales(b_scales_ptr, columns, N)
        y = sums.to(tl.float32) * s[:, None] * t[None, :]
        y = y.to(out_ptr.dtype.element_ty)
        tl.store(pointers(out_ptr, rows, columns, N), y, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _add_parts_kernel(
    parts_ptr, a_scales_ptr, b_scales_ptr, out_ptr, M, N, PARTS: tl.constexpr, STRIP: tl.constexpr
):
    """Add the int32 sums of all parts of a strip of one row, and scale."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    places = row.to(tl.int64) * N + columns
    inside = columns < N
    sums = tl.zeros((STRIP,), tl.int32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts_ptr + part * M.to(tl.int64) * N + places, mask=inside, other=0)
    t = tl.load(b_scales_ptr + columns, mask=inside, other=0.0)
    y = sums.to(tl.float32) * tl.load(a_scales_ptr + row) * t
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=inside)


def int8_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`precision.int8.int8_matmul`, for any number of rows; CUDA graphs can capture it."""
    rows = a.shape[0]
    device = a.codes.device
    tile = TILES[table_of(device)][rows_class(rows)]
    if rows > FEW_ROWS:
        return product(a, b, out_dtype, tile, parts=1)
    parts = parts_of(tile, max(rows, 1), b.shape[0], b.shape[1], _processors(device))
    return product(a, b, out_dtype, tile, parts)


def product(a: QTensor, b: QTensor, out_dtype: torch.dtype, tile: Tile, parts: int) -> Tensor:
    """Return a @ b^T by tiles of a given size, with K in at most `parts` parts."""
    (rows, k), columns, device = a.shape, b.shape[0], a.codes.device
    assert k == b.shape[1], f"products along {k} and {b.shape[1]} values"
    assert a.codes.stride() == b.codes.stride() == (k, 1), "codes with K contiguous"
    out = torch.empty(rows, columns, dtype=out_dtype, device=device)
    if not rows:
        return out
    part = cdiv(cdiv(k, parts), tile.depth) * tile.depth
    parts = cdiv(k, part)
    split = parts > 1
    sums = torch.empty(parts, rows, columns, dtype=torch.int32, device=device) if split else out
    down = cdiv(rows, tile.rows)
    across = cdiv(columns, tile.columns)
    _product_kernel[(down * across, parts)](
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        sums,
        rows,
        columns,
        k,
        part,
        tile.rows,
        tile.columns,
        tile.depth,
        8,
        k % tile.depth == 0,
        split,
        tile.bf16,
        **tile.options,
    )
    if split:
        _add_parts_kernel[(rows, cdiv(columns, _STRIP))](
            sums, a.scales, b.scales, out, rows, columns, parts, _STRIP, num_warps=4, **OPTIONS
        )
    return out
