"""How the Hopper GEMMs want FP8 operands in memory. No kernel here: only allocation.

A `QTensor` says what its numbers are; these functions give it the strides and the padding that
cuBLAS (`torch.nn.functional.scaled_mm`) and DeepGEMM read without another copy:

| operand | codes | scales |
| --- | --- | --- |
| rows, 1 x 128 | [M, K] row-major, storage for `padded_rows(M)` | [M, K/128], stride (1, padded) |
| tokens, 128 x 1 | [T', N], stored as [N, T'], T' = T up to 128s, then zeros | [T'/128, N] |
| X of WGrad, 128 x 128 | [T', K], stored as [K, T'] | as a weight's, of [K, T'] |
| weight, 128 x 128 | [N, K] row-major | [N/128, K/128], stride (ceil4(K/128), 1) |

Padding rows are never read back: a row of a GEMM depends on that row of the left operand alone.
"""

from __future__ import annotations

import torch

from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import QTensor

# cuBLAS cuts K into parts (another order of sums) for some shapes of fewer rows; 64 cost nothing,
# since the tensor core's tile has 64 rows anyway.
MIN_ROWS = 64


def padded_rows(rows: int) -> int:
    """Rows that a GEMM is launched with: whole tiles where rows are few, since a bulk copy is slow
    past the end of an array; otherwise a multiple of 4."""
    if rows <= MIN_ROWS:
        return MIN_ROWS
    return 2 * MIN_ROWS if rows <= 2 * MIN_ROWS else round_up(rows, 4)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def empty_row_groups(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Uninitialised 1 x 128 groups of [rows, columns]: the left operand of FProp and DGrad."""
    padded = padded_rows(rows)
    codes = torch.empty(padded, columns, dtype=dtype, device=device)[:rows]
    blocks = -(-columns // FP8_BLOCK)
    scales = torch.empty(blocks, padded, dtype=torch.float32, device=device)
    return QTensor(codes, scales.mT[:rows], (1, FP8_BLOCK))


def empty_token_groups(
    tokens: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Uninitialised 128 x 1 groups of [tokens up to a multiple of 128, columns]: dY as WGrad reads
    it, whose `.mT` is [columns, tokens] with tokens contiguous."""
    padded = round_up(tokens, FP8_BLOCK)
    codes = torch.empty(columns, padded, dtype=dtype, device=device)
    scales = torch.empty(padded // FP8_BLOCK, columns, dtype=torch.float32, device=device)
    return QTensor(codes.mT, scales, (FP8_BLOCK, 1))


def empty_turned_squares(
    tokens: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Uninitialised 128 x 128 groups of [tokens up to a multiple of 128, columns] whose `.mT` lies
    in memory as a weight does: X as WGrad reads it.

    Raises:
        ValueError: columns that are not a multiple of 128.
    """
    return empty_weight(columns, round_up(tokens, FP8_BLOCK), dtype, device).mT


def empty_weight(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Uninitialised 128 x 128 groups of [rows, columns], the scales' own padding zero.

    Raises:
        ValueError: a dimension that is not a multiple of 128.
    """
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        raise ValueError(f"an FP8 weight needs multiples of {FP8_BLOCK}, not [{rows}, {columns}]")
    blocks = columns // FP8_BLOCK
    scales = torch.zeros(rows // FP8_BLOCK, round_up(blocks, 4), device=device)
    codes = torch.empty(rows, columns, dtype=dtype, device=device)
    return QTensor(codes, scales[:, :blocks], (FP8_BLOCK, FP8_BLOCK))
