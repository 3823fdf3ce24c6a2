"""Operands as the Hopper GEMMs want them in memory: strides and padding, no kernel."""

from __future__ import annotations

import pytest
import torch

from jetrl.precision.hopper.layout import (
    cdiv,
    empty_row_groups,
    empty_token_groups,
    empty_turned_squares,
    empty_weight,
    padded_rows,
)

CODES = torch.float8_e4m3fn


def storage_elements(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()


@pytest.mark.parametrize("columns", [128, 896])
@pytest.mark.parametrize("rows", [0, 1, 65, 1000])
def test_row_groups_have_storage_for_the_padded_rows(rows: int, columns: int) -> None:
    q, padded = empty_row_groups(rows, columns, CODES, "cpu"), padded_rows(rows)
    assert q.shape == (rows, columns)
    assert q.codes.stride() == (columns, 1)
    assert q.scales.shape == (rows, columns // 128)
    assert q.scales.stride() == (1, padded)
    assert storage_elements(q.codes) >= padded * columns
    assert storage_elements(q.scales) >= padded * (columns // 128)


@pytest.mark.parametrize("tokens", [1, 129, 16128])
def test_operands_of_wgrad_are_contiguous_along_tokens(tokens: int) -> None:
    blocks = cdiv(tokens, 128)
    dy, x = (make(tokens, 384, CODES, "cpu") for make in (empty_token_groups, empty_turned_squares))
    for q in (dy, x):
        assert q.codes.shape == (128 * blocks, 384)
        assert q.codes.mT.is_contiguous()
    assert dy.scales.shape == (blocks, 384)
    assert dy.scales.is_contiguous()
    assert x.scales.shape == (blocks, 3)
    assert x.scales.mT.stride() == (blocks, 1)


@pytest.mark.parametrize("columns", [128, 512, 896])
def test_scales_of_a_weight_are_padded_with_zeros(columns: int) -> None:
    q, padded = empty_weight(256, columns, CODES, "cpu"), 4 * cdiv(columns, 512)
    assert q.scales.shape == (2, columns // 128)
    assert q.scales.stride() == (padded, 1)
    whole = q.scales.as_strided((2, padded), (padded, 1))
    assert not whole[:, columns // 128 :].any()
