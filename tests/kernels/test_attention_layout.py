"""The work lists of the GPU attention kernels: each query once, all key blocks of its context."""

from __future__ import annotations

import itertools

import pytest
import torch

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS, BACKWARD_QUERIES
from jetrl.kernels.attention.layout import TILE_ROWS, KeyValueCodes, QueryTiles


def rows_of(tiles: QueryTiles) -> list[int]:
    return sorted(r for first, n, *_ in tiles.tiles.tolist() for r in range(first, first + n))


def test_packed_tiles_cover_each_query_once_longest_first() -> None:
    cu = [0, 1, 130, 430, 494]
    tiles = QueryTiles.packed(cu, "cpu")
    assert rows_of(tiles) == list(range(494))
    assert tiles.num_queries == 494
    assert tiles.longest == 300
    ends = [position + n for _, n, position, *_ in tiles.tiles.tolist()]
    assert ends == sorted(ends, reverse=True)
    assert all(n <= TILE_ROWS for _, n, *_ in tiles.tiles.tolist())
    # a sequence's blocks: 64 keys each from its own first row, the last one cut
    assert tiles.key_blocks[:4].tolist() == [[0, 1], [1, 64], [65, 64], [129, 1]]
    for first, _, position, block, *stem in tiles.tiles.tolist():
        assert stem == [0, 0]
        assert tiles.key_blocks[block, 0] == first - position


def test_backward_tiles_cover_keys_and_queries_once() -> None:
    tiles = QueryTiles.packed([0, 300, 301], "cpu")
    keys = sorted(
        r for r, end, *_ in tiles.key_tiles.tolist() for r in range(r, min(r + BACKWARD_KEYS, end))
    )
    queries = sorted(
        r
        for _, q, end, *_ in tiles.query_tiles.tolist()
        for r in range(q, min(q + BACKWARD_QUERIES, end))
    )
    assert keys == queries == list(range(301))


@pytest.mark.parametrize("cu", [[0, 300, 301], [0, 64], [0, 65, 193, 1000], [0, 128]], ids=str)
def test_tiles_of_ds_are_written_once_and_found_again(cu: list[int]) -> None:
    """The tiles of dS are written from a block of keys on, i tiles after the block's first.

    They are read by formula from the sequence's first.
    """
    tiles = QueryTiles.packed(cu, "cpu")
    written = {}
    for row, end, first_tile, *_ in tiles.key_tiles.tolist():
        for i in range(-(-(end - row) // BACKWARD_QUERIES)):
            tile = first_tile + i
            assert tile not in written
            written[tile] = (row, row + i * BACKWARD_QUERIES)
    assert sorted(written) == list(range(tiles.stored_tiles))
    read = set()
    for first, row, end, base, *_ in tiles.stored_query_tiles.tolist():
        blocks = -(-(end - first) // BACKWARD_QUERIES)
        for m in range((row - first) // BACKWARD_QUERIES, blocks)[:2]:
            for j in range((row - first) // BACKWARD_KEYS + 1):
                tile = base + j * (blocks - j - 1) + m
                place = (first + j * BACKWARD_KEYS, first + m * BACKWARD_QUERIES)
                assert written[tile] == place
                read.add(tile)
    assert read == set(written)


SHARED = [
    # Runs' first rows, and the stem of each.
    ([0, 128, 228, 229], [-1, 0, 0]),
    ([0, 50, 306, 306 + 64, 370 + 129, 800], [-1, -1, 1, 1, 1]),
    ([0, 128, 256, 400, 784, 785, 1000, 1100], [-1, -1, 0, -1, 1, 3, 3]),
    # One stem of two blocks of keys and twelve branches of up to eight blocks of queries, beside a
    # stem of one branch: at most 16 blocks of queries in a part.
    (
        [0, 256, *(256 + 400 * i + i**2 for i in range(1, 13)), 5400, 5500],
        [-1, *[0] * 12, -1, -1],
    ),
    # The longest sequence has 32 blocks of queries of its own, more than a part needs.
    ([0, 128, 2176, 2900, 3600, 4300, 4301], [-1, 0, 0, 0, 0, 0]),
    # All of the stem's own blocks of queries make its first part.
    ([0, 2048, 2148, 2248, 2300], [-1, 0, 0, 0]),
]
SHARED_IDS = ["two", "three", "mixed", "divided", "long branch", "long stem"]


@pytest.mark.parametrize("cu, stems", SHARED, ids=SHARED_IDS)
def test_forward_tiles_of_branches_read_their_stems_blocks_first(
    cu: list[int], stems: list[int]
) -> None:
    tiles = QueryTiles.packed(cu, "cpu", stems)
    assert tiles.shared
    assert rows_of(tiles) == list(range(cu[-1]))
    for row, count, position, own, stem_blocks, stem_block in tiles.tiles.tolist():
        keys: list[int] = []
        for b in range(-(-(position + count) // 64)):
            first, valid = tiles.key_blocks[(stem_block if b < stem_blocks else own) + b].tolist()
            assert b >= stem_blocks or valid == 64
            keys += range(first, first + valid)
        run = next(i for i, end in enumerate(cu[1:]) if row < end)
        stem = stems[run]
        visible = [] if stem < 0 else list(range(cu[stem], cu[stem + 1]))
        visible += range(cu[run], row + count)
        assert keys[: position + count] == visible
    assert tiles.longest == max(
        cu[i + 1] - cu[i] + (cu[s + 1] - cu[s] if s >= 0 else 0) for i, s in enumerate(stems)
    )


@pytest.mark.parametrize("cu, stems", SHARED, ids=SHARED_IDS)
def test_tiles_of_ds_with_stems_are_written_once_and_found_again(
    cu: list[int], stems: list[int]
) -> None:
    """A tile of dS is named by its first key row and first query row; the kernels' own formulas."""
    tiles = QueryTiles.packed(cu, "cpu", stems)
    written = {}
    for row, end, first_tile, entry, entries, with_branches, _ in tiles.key_tiles.tolist():
        for i in range(-(-(end - row) // BACKWARD_QUERIES) if first_tile >= 0 else 0):
            assert first_tile + i not in written
            written[first_tile + i] = (row, row + i * BACKWARD_QUERIES)
        for first, run_end, number in tiles.branches[entry : entry + entries].tolist():
            for i, query in enumerate(range(first, run_end, BACKWARD_QUERIES)):
                assert with_branches + number + i not in written
                written[with_branches + number + i] = (row, query)
    assert sorted(written) == list(range(tiles.stored_tiles))
    read = set()
    for record in tiles.stored_query_tiles.tolist():
        first, row, end, base, stem_row, stem_blocks, with_stem, step = record
        blocks = -(-(end - first) // BACKWARD_QUERIES)
        for i, m in enumerate(range((row - first) // BACKWARD_QUERIES, blocks)[:2]):
            query = first + m * BACKWARD_QUERIES
            for j in range(stem_blocks):
                tile = with_stem + j * step + i
                assert written[tile] == (stem_row + j * BACKWARD_KEYS, query)
                read.add(tile)
            for j in range((row - first) // BACKWARD_KEYS + 1):
                tile = base + j * (blocks - j - 1) + m
                assert written[tile] == (first + j * BACKWARD_KEYS, query)
                read.add(tile)
    assert read == set(written)
    for first, row, end, stem_row, stem_end in tiles.query_tiles.tolist():
        run = next(i for i, run_end in enumerate(cu[1:]) if row < run_end)
        assert (first, end) == (cu[run], cu[run + 1])
        stem = stems[run]
        assert (stem_row, stem_end) == ((first, first) if stem < 0 else (cu[stem], cu[stem + 1]))


@pytest.mark.parametrize("cu, stems", SHARED, ids=SHARED_IDS)
def test_no_program_of_a_stems_keys_lasts_longer_than_the_longest_sequence(
    cu: list[int], stems: list[int]
) -> None:
    """Parts have consecutive places, in the order in which their sums are added."""
    tiles = QueryTiles.packed(cu, "cpu", stems)
    blocks, parts, rows = [], {}, []
    for row, end, first_tile, first, entries, _, place in tiles.key_tiles.tolist():
        queries = [end - row] * (first_tile >= 0)
        queries += [b - a for a, b, _ in tiles.branches[first : first + entries].tolist()]
        blocks.append(sum(-(-n // BACKWARD_QUERIES) for n in queries))
        assert 0 < blocks[-1] <= max(-(-tiles.longest // BACKWARD_QUERIES), 16)
        if place < 0:
            assert first_tile >= 0
            rows.append(row)
        else:
            parts[place] = (row, first_tile >= 0, first, entries)
    assert blocks == sorted(blocks, reverse=True)
    assert sorted(parts) == list(range(tiles.num_parts))
    for row, place, count in tiles.divided_key_tiles.tolist():
        rows.append(row)
        of_row = [parts.pop(place + i) for i in range(count)]
        assert count > 1
        assert [part[:2] for part in of_row] == [(row, i == 0) for i in range(count)]
        assert all(a[2] + a[3] == b[2] for a, b in itertools.pairwise(of_row))
    assert not parts
    assert sorted(rows) == [r for a, b in itertools.pairwise(cu) for r in range(a, b, 128)]


def test_parts_have_as_many_branches_as_make_no_more_blocks_than_the_longest_sequence() -> None:
    """Two blocks of keys, 4 and 2 own blocks of queries, 5 x 32 of branches: 36 at most a part."""
    ends = [0, 256, *(256 + 2048 * i for i in range(1, 6))]
    tiles = QueryTiles.packed(ends, "cpu", [-1, *[0] * 5])
    assert tiles.divided_key_tiles.tolist() == [[0, 0, 5], [128, 5, 5]]
    of_stem = [t for t in tiles.key_tiles.tolist() if t[0] < 256]
    assert of_stem == [  # longest first: 36 blocks, 34, and eight times 32
        [0, 256, 0, 0, 1, 6, 0],
        [128, 256, 4, 0, 1, 166, 5],
        *([0, 256, -1, i, 1, 6, i] for i in range(1, 5)),
        *([128, 256, -1, i, 1, 166, 5 + i] for i in range(1, 5)),
    ]
    few = [0, 128, *(228 + 100 * i for i in range(20))]
    tiles = QueryTiles.packed(few, "cpu", [-1, *[0] * 20])
    counts = [t[4] for t in sorted(tiles.key_tiles.tolist(), key=lambda t: t[6]) if t[0] == 0]
    assert counts == [7, 8, 5]  # of 2 blocks each, and 2 of the stem: 16 at most


@pytest.mark.parametrize("stems", [[-1, 1], [-1, 0, 1], [0, -1]], ids=str)
def test_impossible_stems_are_refused(stems: list[int]) -> None:
    with pytest.raises(ValueError, match="stem must be an earlier run"):
        QueryTiles.packed([0, 128, 256, 300][: len(stems) + 1], "cpu", stems)


def test_a_stem_has_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole blocks of 128 rows; got run 0"):
        QueryTiles.packed([0, 100, 200], "cpu", [-1, 0])


def test_paged_tiles_name_pages_and_positions() -> None:
    tiles = QueryTiles.paged([3, 200], [70, 200], [[5, 9], [2, 0, 7, 1]], "cpu")
    assert rows_of(tiles) == list(range(203))
    assert tiles.key_blocks.tolist() == [
        [320, 64], [576, 6], [128, 64], [0, 64], [448, 64], [64, 8],
    ]  # fmt: skip
    assert sorted(tiles.tiles.tolist()) == [
        [0, 3, 67, 0, 0, 0], [3, 192, 0, 2, 0, 0], [195, 8, 192, 2, 0, 0],
    ]  # fmt: skip
    assert not len(tiles.key_tiles)


@pytest.mark.parametrize(
    "queries, context, table",
    [(0, 5, [1]), (6, 5, [1]), (1, 65, [1])],
    ids=["none", "more", "pages"],
)
def test_impossible_chunks_are_refused(queries: int, context: int, table: list[int]) -> None:
    with pytest.raises(ValueError, match="sequence 0"):
        QueryTiles.paged([queries], [context], [table], "cpu")


@pytest.mark.parametrize("cu", [[1, 5], [0, 5, 5], [0, 5, 3]], ids=str)
def test_bad_boundaries_are_refused(cu: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        QueryTiles.packed(cu, "cpu")


def test_codes_must_agree_in_kind_and_shape() -> None:
    codes = torch.zeros(4, 2, 128, dtype=torch.float8_e4m3fn)
    scales = torch.ones(4, 2)
    assert KeyValueCodes(codes, scales, codes, scales).scaled
    with pytest.raises(ValueError, match="bfloat16"):
        KeyValueCodes(codes, None, codes, None)
    with pytest.raises(ValueError, match="both have scales"):
        KeyValueCodes(codes, scales, codes, None)
    with pytest.raises(ValueError, match=r"scales: .*\[4, 2\]"):
        KeyValueCodes(codes, scales, codes, scales[:3])
    wide = torch.zeros(4, 2, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="head_dim"):
        KeyValueCodes(wide, None, wide, None)
