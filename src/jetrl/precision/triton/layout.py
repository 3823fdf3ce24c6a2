"""FP8 and INT8 operands in memory as the GEMMs read them: allocation only, no kernel.

A `QTensor` says what its numbers are; these functions give it the strides and the padding that
cuBLAS (`torch.nn.functional.scaled_mm`) and DeepGEMM read without another copy:

| operand | codes | scales |
| --- | --- | --- |
| rows, 1 x 128 | [M, K'], row-major, for `padded_rows(M)` | [M, K'/128], stride (1, padded) |
| tokens, 128 x 1 | [T', N], stored as [N, T'], T' = T up to 128s, then zeros | [T'/128, N] |
| X of WGrad, 128 x 128 | [T', K], stored as [K, T'] | [T'/128, K/128], stored as [K/128, T'/128] |
| weight, 128 x 128 | [N', K'], row-major | [N'/128, K'/128], stride (ceil4(K'/128), 1) |

A GEMM reads whole groups: N' and K' are N and K up to 128s. The codes past a short last group are
zeros, of which a `QTensor` shows nothing but the stride.
Padding rows are never read back: a row of a GEMM depends on that row of the left operand only.
Weights' scales are padded for cuBLAS; X's, whose T' is of any size, lie as DeepGEMM reads them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jetrl.precision.quantize import FP8_BLOCK, QTensor, empty_int8_rows

# cuBLAS cuts K into parts (another order of sums) for some shapes of fewer rows; 64 cost nothing,
# since the tensor core's tile has 64 rows anyway.
MIN_ROWS = 64
FEW_ROWS = 256  # of an INT8 product that is memory-bound


def padded_rows(rows: int) -> int:
    """Return the number of rows that a GEMM of `rows` rows is launched with.

    Few rows make whole tiles, since a bulk copy past the end of an array is slow; more are a
    multiple of 4, which cuBLAS demands.
    """
    if rows <= MIN_ROWS:
        return MIN_ROWS
    return 2 * MIN_ROWS if rows <= 2 * MIN_ROWS else round_up(rows, 4)


def cdiv(value: int, size: int) -> int:
    """Return the number of groups of `size` that hold `value`; faster than `triton.cdiv`."""
    return -(-value // size)


def round_up(value: int, multiple: int) -> int:
    return cdiv(value, multiple) * multiple


def is_ragged(columns: int) -> bool:
    """Return whether the last group along some columns has fewer than 128 values."""
    return columns % FP8_BLOCK != 0


def first_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return x[:rows] without a slice if x has no more rows."""
    return x if x.shape[0] == rows else x[:rows]


def placed(
    x: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int], zeros: bool = False
) -> torch.Tensor:
    """Return x [M, N] in a larger shape with some strides, copied if it does not lie so.

    The bytes that follow in x's own storage serve as padding: no row depends on another.
    """
    if x.shape == shape and x.stride() == strides:
        return x
    fits = all(
        a == b or (n == 1 and not zeros)
        for n, a, b in zip(x.shape, x.stride(), strides, strict=True)
    )
    left = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if fits and left >= shape[0] * shape[1]:
        return x.as_strided(shape, strides)
    out = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    if zeros:
        out.zero_()
    out[: x.shape[0], : x.shape[1]] = x
    return out


def whole_groups(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """Return codes [M, K] as some rows of K up to 128s, as they lie or copied in front of zeros."""
    width = round_up(codes.shape[1], FP8_BLOCK)
    return placed(codes, (rows, width), (width, 1), zeros=is_ragged(codes.shape[1]))


def empty_row_groups(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialised 1 x 128 groups: the left operand of FProp and DGrad."""
    padded = padded_rows(rows)
    blocks = cdiv(columns, FP8_BLOCK)
    codes = torch.empty(padded, blocks * FP8_BLOCK, dtype=dtype, device=device)
    codes = codes[:, :columns] if is_ragged(columns) else codes
    scales = torch.empty_strided((padded, blocks), (1, padded), dtype=torch.float32, device=device)
    return QTensor(first_rows(codes, rows), first_rows(scales, rows), (1, FP8_BLOCK))


def empty_token_groups(
    tokens: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialised 128 x 1 groups of [tokens up to a multiple of 128, columns].

    They are dY as WGrad reads it, whose `.mT` is [columns, tokens] with tokens contiguous.
    """
    padded = round_up(tokens, FP8_BLOCK)
    codes = torch.empty(columns, padded, dtype=dtype, device=device)
    scales = torch.empty(padded // FP8_BLOCK, columns, dtype=torch.float32, device=device)
    return QTensor(codes.mT, scales, (FP8_BLOCK, 1))


def empty_turned_squares(
    tokens: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialised 128 x 128 groups of [tokens up to a multiple of 128, columns].

    They are X as WGrad reads it, with tokens contiguous.
    """
    blocks = cdiv(tokens, FP8_BLOCK)
    codes = torch.empty(columns, blocks * FP8_BLOCK, dtype=dtype, device=device)
    scales = torch.empty(cdiv(columns, FP8_BLOCK), blocks, dtype=torch.float32, device=device)
    return QTensor(codes.mT, scales.mT, (FP8_BLOCK, FP8_BLOCK))


def empty_weight(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialised 128 x 128 groups of a weight, the padding of codes and scales zero."""
    lines, blocks = cdiv(rows, FP8_BLOCK), cdiv(columns, FP8_BLOCK)
    padded = round_up(blocks, 4)
    make = torch.zeros if padded > blocks else torch.empty
    scales = make(lines, padded, dtype=torch.float32, device=device)
    make = torch.zeros if is_ragged(rows) or is_ragged(columns) else torch.empty
    codes = make(lines * FP8_BLOCK, blocks * FP8_BLOCK, dtype=dtype, device=device)
    return QTensor(codes[:rows, :columns], scales[:, :blocks], (FP8_BLOCK, FP8_BLOCK))


def empty_int8_operand(rows: int, k: int, device: torch.device) -> QTensor:
    """Return uninitialized INT8 rows; few have storage for whole boxes, which copy faster."""
    boxes = round_up(rows, MIN_ROWS if rows <= MIN_ROWS else 2 * MIN_ROWS)
    q = empty_int8_rows(boxes if rows <= FEW_ROWS else rows, k, device)
    return replace(q, codes=first_rows(q.codes, rows), scales=first_rows(q.scales, rows))
