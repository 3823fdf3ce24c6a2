"""The page allocator agrees with a plain model of the contents of each page table."""

from __future__ import annotations

import random

import pytest

from jetrl.rollout.pages import PageAllocator


def test_fork_shares_and_the_first_writer_copies():
    allocator = PageAllocator(num_pages=4, page_size=2)
    pages = allocator.allocate(allocator.pages_for(3))
    other = allocator.fork(pages, 3)
    assert other == pages
    assert allocator.num_used == 2

    source, destination = allocator.make_writable(other, 3)
    assert (source, other[1]) == (pages[1], destination)
    assert other[0] == pages[0]
    assert allocator.make_writable(pages, 3) is None, "its last user writes in place"
    allocator.check([pages, other])

    allocator.release(pages)
    allocator.release(other)
    assert pages == []
    assert allocator.num_used == 0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda a: a.allocate(3),
        lambda a: a.release([0, 0, 0]),
        lambda a: a.fork([1], 2),
        lambda a: a.fork([0], 3),
        lambda a: a.make_writable([0], 4),
    ],
    ids=["more than free", "released twice", "fork of a free page", "fork beyond", "write beyond"],
)
def test_misuse_is_an_assertion(misuse):
    allocator = PageAllocator(num_pages=2, page_size=2)
    assert allocator.allocate(1) == [0]
    with pytest.raises(AssertionError):
        misuse(allocator)


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("seed", range(5))
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
        allocator.check([pages for pages, _ in tables])
        for pages, wanted in tables:
            read = [memory[pages[p // page_size], p % page_size] for p in range(len(wanted))]
            assert read == wanted
    for pages, _ in tables:
        allocator.release(pages)
    assert allocator.num_used == 0
