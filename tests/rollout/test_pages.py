"""The page allocator agrees with a plain model of the contents of each page table."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from jetrl.rollout.pages import PageAllocator


def check_counts(allocator: PageAllocator, tables: list[list[int]]) -> None:
    """Assert that the counts are those of exactly these page tables."""
    assert all(len(set(table)) == len(table) for table in tables), "a page twice in one table"
    counts = Counter(page for table in tables for page in table)
    assert [counts[page] for page in range(allocator.num_pages)] == allocator._users
    assert sorted(allocator._free) == [p for p in range(allocator.num_pages) if not counts[p]]


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_keep_counts_and_contents(page_size, seed):
    """Each page table reads what it wrote and what it inherited at its fork, after any operations.

    Each writes its own name at each position; the copies that the allocator asked for are made.
    """
    rng = random.Random(seed)
    allocator = PageAllocator(num_pages=12, page_size=page_size)
    memory: dict[tuple[int, int], str] = {}
    tables: list[tuple[list[int], list[str]]] = []
    for number in range(400):
        action = rng.choice(["new", "write", "write", "write", "fork", "release"])
        if action == "new" and len(tables) < 6:
            tables.append(([], []))
        elif tables and action == "write":
            pages, wanted = rng.choice(tables)
            position = len(wanted)
            if allocator.write_cost(pages, position) > allocator.num_free:
                continue
            copy = allocator.make_writable(pages, position)
            if copy is not None:
                for offset in range(page_size):
                    memory[copy[1], offset] = memory.get((copy[0], offset), "")
            wanted.append(f"write {number}")
            memory[pages[position // page_size], position % page_size] = wanted[-1]
        elif tables and action == "fork" and len(tables) < 6:
            pages, wanted = rng.choice(tables)
            length = rng.randint(0, len(wanted))
            tables.append((allocator.fork(pages, length), wanted[:length]))
        elif tables and action == "release":
            pages, _ = tables.pop(rng.randrange(len(tables)))
            allocator.release(pages)
        check_counts(allocator, [pages for pages, _ in tables])
        for pages, wanted in tables:
            read = [memory[pages[p // page_size], p % page_size] for p in range(len(wanted))]
            assert read == wanted
    for pages, _ in tables:
        allocator.release(pages)
    assert allocator.num_used == 0
