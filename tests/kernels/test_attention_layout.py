"""The work lists of the GPU attention kernels: each query once, all key blocks of its context."""

from __future__ import annotations

import itertools

import pytest

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS, BACKWARD_QUERIES
from jetrl.kernels.attention.layout import TILE_ROWS, QueryTiles

# Runs' first rows, and the stem of each.
BATCHES = {
    "whole": ([0, 1, 130, 430, 494], [-1] * 4),
    "one": ([0, 64], [-1]),
    "two": ([0, 128, 228, 229], [-1, 0, 0]),
    "three": ([0, 50, 306, 306 + 64, 370 + 129, 800], [-1, -1, 1, 1, 1]),
    "mixed": ([0, 128, 256, 400, 784, 785, 1000, 1100], [-1, -1, 0, -1, 1, 3, 3]),
    # One stem of two blocks of keys and twelve branches of up to eight blocks of queries, and a
    # stem of one branch: at most 16 blocks of queries in a part.
    "divided": (
        [0, 256, *(256 + 400 * i + i**2 for i in range(1, 13)), 5400, 5500],
        [-1, *[0] * 12, -1, -1],
    ),
    # The longest sequence has 32 blocks of queries of its own, more than a part needs.
    "long branch": ([0, 128, 2176, 2900, 3600, 4300, 4301], [-1, 0, 0, 0, 0, 0]),
    "long stem": ([0, 2048, 2148, 2248, 2300], [-1, 0, 0, 0]),
}
batches = pytest.mark.parametrize("cu, stems", BATCHES.values(), ids=BATCHES)


def rows_of(tiles: QueryTiles) -> list[int]:
    return sorted(r for first, n, *_ in tiles.tiles.tolist() for r in range(first, first + n))


@batches
def test_forward_tiles_read_the_keys_of_their_queries(cu: list[int], stems: list[int]) -> None:
    """Each query once, longest first; a branch reads its stem's blocks first."""
    tiles = QueryTiles.packed(cu, "cpu", stems)
    assert rows_of(tiles) == list(range(cu[-1]))
    assert (tiles.num_queries, tiles.shared) == (cu[-1], any(s >= 0 for s in stems))
    ends = [position + n for _, n, position, *_ in tiles.tiles.tolist()]
    assert ends == sorted(ends, reverse=True)
    for row, count, position, own, stem_blocks, stem_block in tiles.tiles.tolist():
        assert count <= TILE_ROWS
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


@batches
def test_tiles_of_ds_are_written_once_and_found_again(cu: list[int], stems: list[int]) -> None:
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


@batches
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
