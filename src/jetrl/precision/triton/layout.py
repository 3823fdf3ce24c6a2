"""Memory layouts of FP8 and INT8 GEMM operands; allocation only, no kernels.

These functions allocate a `QTensor` with the strides and padding that cuBLAS
(`torch.nn.functional.scaled_mm`) and DeepGEMM require, so that no GEMM needs a copy:

| operand | codes | scales |
| --- | --- | --- |
| rows, 1 x 128 | [M, K'], row-major, for `padded_rows(M)` | [M, K'/128], stride (1, padded) |
| tokens, 128 x 1 | [T', N], stored as [N, T'], zeros past T | [T'/128, N] |
| X of WGrad, 128 x 128 | [T', K], stored as [K, T'] | [T'/128, K/128], stored as [K/128, T'/128] |
| weight, 128 x 128 | [N', K'], row-major | [N'/128, K'/128], stride (ceil4(K'/128), 1) |

A GEMM reads whole groups: T', N' and K' are rounded up to multiples of 128. The codes past a short
last group are zeros, visible in a `QTensor` only through its stride. The results of padding rows
are never read: a row of a GEMM depends only on that row of the left operand. Scales of weights are
padded for cuBLAS; those of X in WGrad have the layout of DeepGEMM.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jetrl.precision.quantize import FP8_BLOCK, QTensor, empty_int8_rows

# cuBLAS splits K (a different reduction order) for some shapes with fewer rows. Padding to 64 is
# free, since the tensor-core tile has 64 rows anyway.
MIN_ROWS = 64
FEW_ROWS = 256  # up to this many rows, an INT8 GEMM is memory-bound


def padded_rows(rows: int) -> int:
    """Return the number of rows that a GEMM with `rows` rows is launched with.

    Few rows are padded to whole tiles, since TMA loads past the end of an array are slow; more are
    padded to a multiple of 4, which cuBLAS requires.
    """
    if rows <= MIN_ROWS:
        return MIN_ROWS
    return 2 * MIN_ROWS if rows <= 2 * MIN_ROWS else round_up(rows, 4)


def cdiv(value: int, size: int) -> int:
    """Return ceil(value / size); faster than `triton.cdiv`."""
    return -(-value // size)


def round_up(value: int, multiple: int) -> int:
    return cdiv(value, multiple) * multiple


def is_ragged(columns: int) -> bool:
    """Return whether the last group of 128 columns is incomplete."""
    return columns % FP8_BLOCK != 0


def first_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return x[:rows], or x itself if it has exactly `rows` rows."""
    return x if x.shape[0] == rows else x[:rows]


def placed(
    x: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int], zeros: bool = False
) -> torch.Tensor:
    """Return x [M, N] with a larger shape and the given strides, copied only if necessary.

    Without a copy, the padding is whatever follows x in its storage: no row depends on another.
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
    """Return codes [M, K] padded to `rows` and whole groups of 128 columns, copied if necessary."""
    width = round_up(codes.shape[1], FP8_BLOCK)
    return placed(codes, (rows, width), (width, 1), zeros=is_ragged(codes.shape[1]))


def empty_row_groups(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialized 1 x 128 groups: the left operand of FProp and DGrad."""
    padded = padded_rows(rows)
    blocks = cdiv(columns, FP8_BLOCK)
    codes = torch.empty(padded, blocks * FP8_BLOCK, dtype=dtype, device=device)
    codes = codes[:, :columns] if is_ragged(columns) else codes
    scales = torch.empty_strided((padded, blocks), (1, padded), dtype=torch.float32, device=device)
    return QTensor(first_rows(codes, rows), first_rows(scales, rows), (1, FP8_BLOCK))


def empty_token_groups(
    tokens: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialized 128 x 1 groups of [tokens rounded up to a multiple of 128, columns].

    This is the layout of dY in WGrad: `.mT` is [columns, tokens] with tokens contiguous.
    """
    padded = round_up(tokens, FP8_BLOCK)
    codes = torch.empty(columns, padded, dtype=dtype, device=device)
    scales = torch.empty(padded // FP8_BLOCK, columns, dtype=torch.float32, device=device)
    return QTensor(codes.mT, scales, (FP8_BLOCK, 1))


def empty_transposed_blocks(
    tokens: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialized 128 x 128 groups of [tokens rounded up to a multiple of 128, columns].

    This is the layout of X in WGrad, with tokens contiguous.
    """
    blocks = cdiv(tokens, FP8_BLOCK)
    codes = torch.empty(columns, blocks * FP8_BLOCK, dtype=dtype, device=device)
    scales = torch.empty(cdiv(columns, FP8_BLOCK), blocks, dtype=torch.float32, device=device)
    return QTensor(codes.mT, scales.mT, (FP8_BLOCK, FP8_BLOCK))


def empty_weight(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QTensor:
    """Return uninitialized 128 x 128 groups of a weight; padding of codes and scales is zero."""
    lines, blocks = cdiv(rows, FP8_BLOCK), cdiv(columns, FP8_BLOCK)
    padded = round_up(blocks, 4)
    make = torch.zeros if padded > blocks else torch.empty
    scales = make(lines, padded, dtype=torch.float32, device=device)
    make = torch.zeros if is_ragged(rows) or is_ragged(columns) else torch.empty
    codes = make(lines * FP8_BLOCK, blocks * FP8_BLOCK, dtype=dtype, device=device)
    return QTensor(codes[:rows, :columns], scales[:, :blocks], (FP8_BLOCK, FP8_BLOCK))


def empty_int8_operand(rows: int, k: int, device: torch.device) -> QTensor:
    """Return uninitialized INT8 rows; few rows are padded to whole TMA boxes, which load faster."""
    boxes = round_up(rows, MIN_ROWS if rows <= MIN_ROWS else 2 * MIN_ROWS)
    q = empty_int8_rows(boxes if rows <= FEW_ROWS else rows, k, device)
    return replace(q, codes=first_rows(q.codes, rows), scales=first_rows(q.scales, rows))


def check_fp8_operands(a: QTensor, b: QTensor) -> None:
    """Check the operands of a product of E4M3 codes, a [M, K] and b [N, K], both along K."""
    assert a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn, "codes must be E4M3"
    assert (a.block, b.block) == ((1, FP8_BLOCK), (FP8_BLOCK, FP8_BLOCK)), f"{a.block} {b.block}"
    assert a.codes.stride(1) == b.codes.stride(1) == 1, "K must be contiguous"
    assert a.shape[1] == b.shape[1], f"{a.shape}, {b.shape}"
