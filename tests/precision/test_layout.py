"""Operands as the Hopper GEMMs want them in memory: strides and padding, no kernel."""

from __future__ import annotations

import pytest
import torch

from jetrl.precision.triton.layout import (
    cdiv,
    empty_row_groups,
    empty_token_groups,
    empty_transposed_blocks,
    empty_weight,
    padded_rows,
    whole_groups,
)

CODES = torch.float8_e4m3fn


def storage_elements(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()


@pytest.mark.parametrize("columns", [64, 128, 576, 896])
@pytest.mark.parametrize("rows", [0, 1, 65, 1000])
def test_row_groups_have_storage_for_the_padded_rows(rows: int, columns: int) -> None:
    q, padded = empty_row_groups(rows, columns, CODES, "cpu"), padded_rows(rows)
    blocks = cdiv(columns, 128)
    assert q.shape == (rows, columns)
    assert q.codes.stride() == (blocks * 128, 1)
    assert q.scales.shape == (rows, blocks)
    assert q.scales.stride() == (1, padded)
    assert storage_elements(q.codes) >= padded * blocks * 128
    assert storage_elements(q.scales) >= padded * blocks
    whole = whole_groups(q.codes, padded)
    assert whole.shape == (padded, blocks * 128)
    if rows:
        assert whole.data_ptr() == q.codes.data_ptr()
    if rows and columns % 128:  # codes without room are copied in front of zeros
        codes = torch.full((rows + 64, columns), 3, dtype=torch.uint8)[:rows]
        whole = whole_groups(codes, padded)
        assert torch.equal(whole[:rows, :columns], codes)
        assert not whole[:, columns:].any()


@pytest.mark.parametrize("columns", [320, 384])
@pytest.mark.parametrize("tokens", [1, 129, 16128])
def test_operands_of_wgrad_are_contiguous_along_tokens(tokens: int, columns: int) -> None:
    blocks, makers = cdiv(tokens, 128), (empty_token_groups, empty_transposed_blocks)
    dy, x = (make(tokens, columns, CODES, "cpu") for make in makers)
    for q in (dy, x):
        assert q.codes.shape == (128 * blocks, columns)
        assert q.codes.mT.is_contiguous()
    assert dy.scales.shape == (blocks, columns)
    assert dy.scales.is_contiguous()
    assert x.scales.shape == (blocks, 3)
    assert x.scales.mT.stride() == (blocks, 1)


@pytest.mark.parametrize("rows", [192, 256])
@pytest.mark.parametrize("columns", [128, 512, 576, 896])
def test_a_weight_is_padded_with_zeros(rows: int, columns: int) -> None:
    q, padded, blocks = empty_weight(rows, columns, CODES, "cpu"), 4 * cdiv(columns, 512), 2
    assert q.shape == (rows, columns)
    assert q.scales.shape == (blocks, cdiv(columns, 128))
    assert q.scales.stride() == (padded, 1)
    whole = q.scales.as_strided((blocks, padded), (padded, 1))
    assert not whole[:, cdiv(columns, 128) :].any()
    codes = whole_groups(q.codes, 256)
    assert codes.data_ptr() == q.codes.data_ptr()
    assert not codes.float()[rows:].any()
    assert not codes.float()[:, columns:].any()
