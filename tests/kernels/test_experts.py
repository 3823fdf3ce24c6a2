"""The kernels of experts: the bits of their references, and the sizes of grids and tiles."""

from __future__ import annotations

import itertools

import pytest
from tests.kernels.interpreted import interpreted


def test_kernels_have_the_bits_of_their_references() -> None:
    compared = interpreted("interpreted_experts.py")
    assert len(compared) > 40
    assert {case: n for case, n in compared.items() if n} == {}


def test_fp8_and_bf16_kernels_have_the_bits_of_their_references() -> None:
    compared = interpreted("interpreted_fp8_experts.py")
    assert len(compared) > 130
    assert {case: n for case, n in compared.items() if n} == {}


def test_grids_cover_all_sizes_of_groups() -> None:
    grouped = pytest.importorskip("jetrl.precision.triton.grouped_int8")
    for size in (2, 3, 4):
        for rows, experts in itertools.product(range(9), (1, 2, 3)):
            ways = itertools.product(range(rows + 1), repeat=experts)
            tiles = [sum(-(-n // size) for n in way) for way in ways if sum(way) == rows]
            assert max(tiles) == grouped.most_tiles(rows, experts, size)


def test_tables_have_every_class() -> None:
    grouped = pytest.importorskip("jetrl.precision.triton.grouped_int8")
    sizes = [(1, 128), (64, 128), (2048, 128), (4096, 128), (16384, 128), (20481, 128)]
    assert [grouped.tile_class(*each) for each in sizes] == [8, 8, 20, 40, 160, 0]
    assert [set(table) for table in grouped.TILES.values()] == [{0, 160, 40, 20, 8}] * 3
    assert set(grouped.TILES) == set(grouped.WGRAD) == {"large", "small", "pieces"}
    assert all(128 % tile.depth == 0 for tile in grouped.WGRAD.values())


def test_tiles_of_fp8_are_of_wgmma_and_have_one_scale_per_block() -> None:
    grouped = pytest.importorskip("jetrl.precision.triton.grouped_fp8")
    assert set(grouped.TILES) == set(grouped.WGRAD) == {"large", "small"}
    for tile in (*itertools.chain.from_iterable(grouped.TILES.values()), *grouped.WGRAD.values()):
        assert tile.rows % 64 == 0 == 128 % tile.columns
        assert (tile.depth, tile.rows) == (128, 16 * tile.warps)  # a warpgroup has 64 rows


def test_tiles_of_bf16_are_of_wgmma_and_have_the_depth_of_dense_layers() -> None:
    grouped = pytest.importorskip("jetrl.precision.triton.grouped_bf16")
    dense = pytest.importorskip("jetrl.precision.triton.float_tiles").MANY_ROWS
    assert set(grouped.TILES) == set(grouped.WGRAD) == {"large", "small"}
    for tile in (*itertools.chain.from_iterable(grouped.TILES.values()), *grouped.WGRAD.values()):
        assert (tile.depth, tile.rows) == (dense.depth, 16 * tile.warps)
