"""Portable INT8 products: the bits of their references, and the tables of tiles."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.interpreted import interpreted


def test_products_have_the_bits_of_their_references() -> None:
    compared = interpreted("interpreted_gemm.py")
    assert len(compared) > 50
    assert {case: n for case, n in compared.items() if n} == {}


def test_bf16_tensor_cores_have_the_bits_of_int8() -> None:
    compared = interpreted("interpreted_pieces.py")
    kinds = {case.split()[0] for case in compared}
    assert {"sums", "forward", "backward", "decode", "fprop", "dgrad", "wgrad", "one"} <= kinds
    assert {case: n for case, n in compared.items() if n} == {}


def test_tables_have_every_size() -> None:
    portable = pytest.importorskip("jetrl.precision.triton.portable_int8")
    planes = pytest.importorskip("jetrl.precision.triton.int8_planes")
    classes = [portable.rows_class(rows) for rows in (1, 16, 17, 64, 65, 256, 257, 10**6)]
    assert classes == [16, 16, 32, 64, 128, 256, 0, 0]
    for table in (portable.TILES, planes.FPROP):
        assert all(set(tiles) == set(classes) for tiles in table.values())
    assert set(portable.TILES) == {"large", "small", "pieces"}
    assert set(planes.FPROP) == set(planes.DGRAD) == set(planes.WGRAD) == {"large", "small"}
    assert all(planes.BLOCK % tile.depth == 0 for tile in planes.DGRAD.values())


@pytest.mark.parametrize(
    "capability, table",
    [((8, 0), "small"), ((9, 0), "large"), ((10, 0), "small"), ((10, 3), "pieces")],
)
def test_only_gpus_with_few_int8_units_multiply_in_bf16(
    capability: tuple[int, int], table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable = pytest.importorskip("jetrl.precision.triton.portable_int8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for cached in (portable.table_of, portable.memory_class):
        cached.cache_clear()
    found = portable.table_of(torch.device("cuda"))
    for cached in (portable.table_of, portable.memory_class):
        cached.cache_clear()
    assert found == table
    assert {tile.bf16 for tile in portable.TILES[table].values()} == {table == "pieces"}


@pytest.mark.parametrize(
    "rows, columns, k, parts",
    [(1, 1024, 4096, 2), (64, 2048, 12288, 4), (64, 24576, 4096, 1), (16, 64, 576, 1)],
)
def test_few_tiles_take_parts_of_k(rows: int, columns: int, k: int, parts: int) -> None:
    portable = pytest.importorskip("jetrl.precision.triton.portable_int8")
    tile = portable.TILES["large"][portable.rows_class(rows)]
    assert portable.parts_of(tile, rows, columns, k, 132) == parts
