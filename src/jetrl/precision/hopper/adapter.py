"""The adapter's two products on Hopper (`precision.adapter`), with the same bits in any batch.

The sum of a product's row over K has one order: chunks of 512 along K, each a chain of tensor-core
products from zero, are added in float32 from the first to the last. A program of many rows makes
all chunks, one after the other. Few rows would leave most multiprocessors idle that way: there
each chunk has a program of its own (`precision.hopper.adapter_rows`), and the sums are added in the
same order. So the number of rows changes no bit.

The product with B, whose sum is over the rank, adds its result to the layer's product in place: the
rounded product d and y are added and rounded as bfloat16 tensors would be. A GEMM of few rows does
so before it writes y (`precision.hopper.adapter_epilogue`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.hopper.adapter_rows import CHUNK, MOST_ROWS, project_down_rows
from jetrl.precision.hopper.checks import check_matrix, check_tensor
from jetrl.precision.hopper.launch import OVERLAPPED, let_next_start, wait_for_previous
from jetrl.precision.layout import cdiv

_BF16 = (torch.bfloat16,)
# Pinned: the bits of every product depend on these.
_ROWS, _DEPTH, _OUTPUTS = 64, 64, 64


@triton.jit
def _chunk_sum(
    x_ptr, a_ptr, rows, ranks, chunk, num_rows, num_columns, rank, x_stride,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the sum of one chunk of K of x A^T, float32 [ROWS, BLOCK_R], from zero."""
    total = tl.zeros([ROWS, BLOCK_R], tl.float32)
    first = chunk * CHUNK
    for start in tl.range(first, tl.minimum(first + CHUNK, num_columns), DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth < num_columns
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * x_stride + depth[None, :],
            mask=(rows < num_rows)[:, None] & inside[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + ranks.to(tl.int64)[:, None] * num_columns + depth[None, :],
            mask=(ranks < rank)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(x, a.T, total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    x_ptr, a_ptr, out_ptr, num_rows, num_columns, rank, x_stride, chunks,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of x by BLOCK_R rows of A, over all chunks of K.

    Args:
        x_ptr: bfloat16 [num_rows, num_columns], rows x_stride apart.
        a_ptr: bfloat16 [rank, num_columns].
        out_ptr: bfloat16 [num_rows, rank], written.
        BLOCK_R: rows of A that a program has, a power of two.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    wait_for_previous()
    let_next_start()
    total = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for chunk in range(chunks):
        total += _chunk_sum(
            x_ptr, a_ptr, rows, ranks, chunk, num_rows, num_columns, rank, x_stride,
            CHUNK, ROWS, BLOCK_R, DEPTH,
        )  # fmt: skip
    mask = (rows < num_rows)[:, None] & (ranks < rank)[None, :]
    places = rows.to(tl.int64)[:, None] * rank + ranks[None, :]
    tl.store(out_ptr + places, total.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _up_kernel(
    y_ptr, u_ptr, b_ptr, columns_ptr, num_rows, num_outputs, u_stride,
    RANK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add u B^T to ROWS rows and OUTPUTS columns of y, each product rounded before it is added.

    Args:
        y_ptr: bfloat16 [num_rows, num_outputs], changed in place.
        u_ptr: bfloat16 [num_rows, u_stride].
        b_ptr: bfloat16 [num_outputs, RANK].
        columns_ptr: int32 [num_outputs / OUTPUTS], the first column of u for these outputs, or -1.
        OUTPUTS: columns of y that a program has.
        BLOCK_R: columns of u of a step, a power of two.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.load(columns_ptr + tl.program_id(1))
    places = rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    wait_for_previous()
    let_next_start()
    if first >= 0:
        # Asked for first, since it comes from furthest away.
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


def project_down_hopper(x: Tensor, down: Tensor, arrived: Tensor) -> Tensor:
    """Return u = x A^T, bfloat16 [T, R], as `precision.adapter.project_down`.

    Args:
        x: bfloat16 [T, K], its rows contiguous.
        down: bfloat16 [R, K], A.
        arrived: int32, as of `adapter_rows.project_down_rows`, which takes fewer rows.
    """
    return (
        project_down_rows(x, down, arrived) if len(x) < MOST_ROWS else project_down_whole(x, down)
    )


def project_down_whole(x: Tensor, down: Tensor) -> Tensor:
    """Return u = x A^T, bfloat16 [T, R], each row by a program that makes all chunks.

    Args:
        x: bfloat16 [T, K], its rows contiguous.
        down: bfloat16 [R, K], A.
    """
    check_matrix("project_down", x, _BF16)
    (num_rows, num_columns), rank = x.shape, len(down)
    check_tensor("project_down", "A", down, torch.bfloat16, (rank, num_columns))
    out = torch.empty(num_rows, rank, dtype=torch.bfloat16, device=x.device)
    block = min(128, _power_of_two(rank))
    if num_rows:
        _down_kernel[(cdiv(num_rows, _ROWS), cdiv(rank, block))](
            x, down, out, num_rows, num_columns, rank, x.stride(0), cdiv(num_columns, CHUNK),
            CHUNK, _ROWS, block, _DEPTH,
            num_warps=4, num_stages=4, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
    return out


def project_up_hopper(y: Tensor, u: Tensor, up: Tensor, columns: Tensor) -> Tensor:
    """Return y after u B^T was added in place, as `precision.adapter.project_up`.

    Args:
        y: bfloat16 [T, N] contiguous.
        u: bfloat16 [T, P * R] contiguous.
        up: bfloat16 [N, R], s B.
        columns: int32 [N / 64], the first column of u for each 64 columns of y, or -1.
    """
    num_rows, num_outputs = y.shape
    check_tensor("project_up", "y", y, torch.bfloat16, y.shape)
    check_tensor("project_up", "B", up, torch.bfloat16, (num_outputs, up.shape[1]))
    rank = up.shape[1]
    if num_rows:
        _up_kernel[(cdiv(num_rows, _ROWS), cdiv(num_outputs, _OUTPUTS))](
            y, u, up, columns, num_rows, num_outputs, u.stride(0), rank, _ROWS, _OUTPUTS,
            min(64, _power_of_two(rank)), num_warps=4, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
    return y


def _power_of_two(value: int) -> int:
    """Return the smallest power of two that is not below a value."""
    return 1 << (value - 1).bit_length()
