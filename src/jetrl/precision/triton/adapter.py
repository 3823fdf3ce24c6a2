"""Both LoRA GEMMs on GPUs of compute capability 8.0 and later (`precision.adapter`).

The GEMM with A sums over K in chunks of 512, each a chain of tensor-core products from zero; chunks
are added in float32 in order. For many rows, one program computes all chunks. For few rows, each
chunk has its own program, and a second kernel adds the sums in that order. The GEMM with B sums
over the rank in one chain from zero; y and u B^T are rounded to bfloat16 separately, and their sum
is rounded again.

Tiles have 64 rows, whatever the batch, so a row always has the same instructions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.quantize import QTensor
from jetrl.precision.triton.float_tiles import fp8_matmul
from jetrl.precision.triton.launch import let_next_start, overlapped, wait_for_previous
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.quantize import quantize_rows

if TYPE_CHECKING:
    from jetrl.precision.adapter_weight import AdapterWeight

CHUNK = 512  # along K; pinned, since the bits depend on it
MANY_ROWS = 4096  # from this many rows on, a program computes all chunks

# Pinned: the bits of the GEMMs depend on these.
_ROWS, _DEPTH, _OUTPUTS = 64, 64, 64
_VALUES = 256  # outputs of a program that adds chunks


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    x_ptr,
    a_ptr,
    out_ptr,
    num_rows,
    num_columns,
    rank,
    x_stride,
    chunks,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute x A^T for ROWS rows of x and BLOCK_R rows of A, over some chunks of K.

    Args:
        x_ptr: bfloat16 [num_rows, num_columns], with row stride x_stride.
        a_ptr: bfloat16 [rank, num_columns].
        out_ptr: [programs along K, num_rows, rank], written.
        chunks: The number of chunks that a program adds.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(2)
    wait_for_previous()
    let_next_start()
    total = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for chunk in range(part * chunks, (part + 1) * chunks):
        first = chunk * CHUNK
        # Each chunk is a chain of its own from zero.
        product = tl.zeros([ROWS, BLOCK_R], tl.float32)
        for start in tl.range(first, tl.minimum(first + CHUNK, num_columns), DEPTH):
            depth = start + tl.arange(0, DEPTH)
            inside = depth < num_columns
            x = tl.load(
                x_ptr + rows.to(tl.int64)[:, None] * x_stride + depth[None, :],
                mask=(rows < num_rows)[:, None] & inside[None, :],
                other=0.0,
            )
            a = tl.load(
                a_ptr + outputs.to(tl.int64)[:, None] * num_columns + depth[None, :],
                mask=(outputs < rank)[:, None] & inside[None, :],
                other=0.0,
            )
            product = tl.dot(x, a.T, product)
        total += product
    mask = (rows < num_rows)[:, None] & (outputs < rank)[None, :]
    places = (part.to(tl.int64) * num_rows + rows)[:, None] * rank + outputs[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def _add_chunks_kernel(sums_ptr, out_ptr, size, chunks, VALUES: tl.constexpr):
    """Add the sums of chunks in order, float32 [chunks, size], and round them once."""
    at = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    wait_for_previous()
    let_next_start()
    total = tl.zeros([VALUES], tl.float32)
    for _chunk in range(chunks):
        total += tl.load(sums_ptr + at, mask=at < size, other=0.0)
        sums_ptr += size
    tl.store(out_ptr + at, total.to(tl.bfloat16), mask=at < size)


@triton.jit(do_not_specialize=["num_rows"])
def _up_kernel(
    y_ptr,
    u_ptr,
    b_ptr,
    columns_ptr,
    num_rows,
    num_outputs,
    u_stride,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add u B^T to ROWS rows and OUTPUTS columns of y, after rounding it to bfloat16."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.load(columns_ptr + tl.program_id(1))
    places = rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    wait_for_previous()
    let_next_start()
    if first >= 0:
        # Load y first, since it has the longest latency.
        y = tl.load(y_ptr + places, mask=inside, other=0.0)
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in tl.static_range(0, RANK, BLOCK_R):
            ranks = start + tl.arange(0, BLOCK_R)
            u = tl.load(
                u_ptr + rows.to(tl.int64)[:, None] * u_stride + (first + ranks)[None, :],
                mask=(rows < num_rows)[:, None] & (ranks < RANK)[None, :],
                other=0.0,
            )
            b = tl.load(
                b_ptr + outputs.to(tl.int64)[:, None] * RANK + ranks[None, :],
                mask=(outputs < num_outputs)[:, None] & (ranks < RANK)[None, :],
                other=0.0,
            )
            total = tl.dot(u, b.T, total)
        added = total.to(tl.bfloat16).to(tl.float32)
        tl.store(y_ptr + places, (y.to(tl.float32) + added).to(tl.bfloat16), mask=inside)


def project_down(x: Tensor, down: Tensor, arrived: Tensor) -> Tensor:
    """`precision.adapter.project_down`; `arrived` is for Hopper's kernels."""
    return project_down_whole(x, down) if len(x) >= MANY_ROWS else project_down_chunks(x, down)


def project_down_whole(x: Tensor, down: Tensor) -> Tensor:
    """Return u = x A^T, bfloat16 [T, R], with one program per tile for all chunks of K."""
    return _project_down(x, down, programs=1)[0]


def project_down_chunks(x: Tensor, down: Tensor) -> Tensor:
    """Return u = x A^T, bfloat16 [T, R], with one program per tile and chunk of K."""
    sums = _project_down(x, down, programs=cdiv(x.shape[1], CHUNK))
    if len(sums) == 1:
        return sums[0]
    out = torch.empty(len(x), len(down), dtype=torch.bfloat16, device=x.device)
    if out.numel():
        _add_chunks_kernel[(cdiv(out.numel(), _VALUES),)](
            sums, out, out.numel(), len(sums), _VALUES, num_warps=4, **overlapped()
        )
    return out


def _project_down(x: Tensor, down: Tensor, programs: int) -> Tensor:
    """Return the sums over parts of K [programs, T, R], in float32 if they are several."""
    (num_rows, num_columns), rank = x.shape, len(down)
    dtype = torch.bfloat16 if programs == 1 else torch.float32
    out = torch.empty(programs, num_rows, rank, dtype=dtype, device=x.device)
    block = min(128, 1 << (rank - 1).bit_length())
    if num_rows:
        _down_kernel[(cdiv(num_rows, _ROWS), cdiv(rank, block), programs)](
            x,
            down,
            out,
            num_rows,
            num_columns,
            rank,
            x.stride(0),
            cdiv(num_columns, CHUNK) // programs,
            CHUNK,
            _ROWS,
            block,
            _DEPTH,
            num_warps=4,
            num_stages=4,
            enable_fp_fusion=False,
            **overlapped(),
        )
    return out


def project_up(y: Tensor, u: Tensor, up: Tensor, columns: Tensor) -> Tensor:
    """`precision.adapter.project_up`."""
    num_rows, num_outputs = y.shape
    assert (y.dtype, y.is_contiguous(), len(up)) == (torch.bfloat16, True, num_outputs)
    rank = up.shape[1]
    if num_rows:
        _up_kernel[(cdiv(num_rows, _ROWS), cdiv(num_outputs, _OUTPUTS))](
            y,
            u,
            up,
            columns,
            num_rows,
            num_outputs,
            u.stride(0),
            rank,
            _ROWS,
            _OUTPUTS,
            min(64, 1 << (rank - 1).bit_length()),
            num_warps=4,
            enable_fp_fusion=False,
            **overlapped(),
        )
    return y


def adapted_matmul(
    a: QTensor, values: Tensor, b: QTensor, adapter: AdapterWeight
) -> tuple[Tensor, Tensor]:
    """Return a @ b^T plus the adapter product, bfloat16 [T, N], and u, bfloat16 [T, P * R].

    `values` is a before quantization, bfloat16 [T, K].
    """
    u = project_down(values, adapter.down, adapter.arrived)
    return project_up(fp8_matmul(a, b), u, adapter.up, adapter.columns), u


def quantized_adapted_matmul(
    x: Tensor, b: QTensor, adapter: AdapterWeight, scales: str
) -> tuple[Tensor, Tensor]:
    """Return quantize(x) @ b^T plus the adapter product, and u = x A^T, for x bfloat16 [T, K]."""
    return adapted_matmul(quantize_rows(x, "e4m3", scales), x, b, adapter)
