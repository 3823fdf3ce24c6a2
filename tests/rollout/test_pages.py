"""The page allocator agrees with a plain model of the contents of each page table."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jetrl.rollout.pages import PageAllocator


def check_counts(allocator: PageAllocator, tables: list[list[int]]) -> None:
    """Assert that the counts are those of exactly these page tables."""
    assert all(len(set(table)) == len(table) for table in tables), "a page twice in one table"
    counts = Counter(page for table in tables for page in table)
    assert [counts[page] for page in range(allocator.num_pages)] == allocator._users
    assert sorted(allocator._free) == [p for p in range(allocator.num_pages) if not counts[p]]


class PageTables(RuleBasedStateMachine):
    """Page tables that write a new value at each position and must read all that they hold.

    The copies that the allocator asks for are made in `memory`.
    """

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.allocator = PageAllocator(num_pages=12, page_size=page_size)
        self.memory: dict[tuple[int, int], int] = {}
        self.tables: list[tuple[list[int], list[int]]] = [([], [])]
        self.written = 0

    @precondition(lambda self: len(self.tables) < 6)
    @rule()
    def new(self) -> None:
        self.tables.append(([], []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 7))
    def write(self, data: st.DataObject, count: int) -> None:
        pages, wanted = data.draw(st.sampled_from(self.tables))
        size, position = self.allocator.page_size, len(wanted)
        cost = self.allocator.write_cost(pages, position, count)
        free = self.allocator.num_free
        if cost > free:
            return
        copy = self.allocator.make_writable(pages, position, count)
        assert self.allocator.num_free == free - cost
        if copy is not None:
            for offset in range(size):
                self.memory[copy[1], offset] = self.memory.get((copy[0], offset), -1)
        for at in range(position, position + count):
            self.written += 1
            wanted.append(self.written)
            self.memory[pages[at // size], at % size] = self.written

    @precondition(lambda self: 0 < len(self.tables) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        pages, wanted = data.draw(st.sampled_from(self.tables))
        length = data.draw(st.integers(0, len(wanted)))
        self.tables.append((self.allocator.fork(pages, length), wanted[:length]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.release(pages)
        assert pages == []

    @invariant()
    def tables_read_what_they_wrote(self) -> None:
        check_counts(self.allocator, [pages for pages, _ in self.tables])
        size = self.allocator.page_size
        for pages, wanted in self.tables:
            read = [self.memory[pages[p // size], p % size] for p in range(len(wanted))]
            assert read == wanted

    def teardown(self) -> None:
        for pages, _ in getattr(self, "tables", []):
            self.allocator.release(pages)
        assert not hasattr(self, "tables") or self.allocator.num_used == 0


TestPageTables = PageTables.TestCase
TestPageTables.settings = settings(
    max_examples=60, stateful_step_count=50, derandomize=True, deadline=None, database=None
)
