"""Reference counts of KV cache pages; without torch.

A page is `page_size` slots for the keys and values of consecutive tokens, in every layer. The
samples of one prompt share its pages. Before a write to a shared page the writer gets its own, and
the cache copies (source, destination).

    pages = allocator.allocate(2)          # [4, 0], a prompt of 3 tokens at page_size 2
    other = allocator.fork(pages, 3)       # [4, 0], both pages now with two users
    allocator.make_writable(other, 3)      # (0, 7): slot 3 is in page 0, shared; other is [4, 7]
    allocator.make_writable(pages, 3)      # None: page 0 has one user again
"""

from __future__ import annotations


class PageAllocator:
    """Free pages and a user count per page; a call is linear in the pages that it touches."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take free pages; the caller has made sure that there are enough."""
        assert 0 <= count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def fork(self, pages: list[int], num_tokens: int) -> list[int]:
        """Return a second page table for the first `num_tokens` tokens, sharing their pages."""
        shared = pages[: self.pages_for(num_tokens)]
        for page in shared:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] += 1
        return shared

    def write_cost(self, pages: list[int], position: int, count: int = 1) -> int:
        """Return the number of pages that `make_writable` would take."""
        first = position // self.page_size
        assert first <= len(pages), f"position {position} leaves a gap after {len(pages)} pages"
        missing = (position + count - 1) // self.page_size + 1 - len(pages)
        shared = first < len(pages) and self._users[pages[first]] > 1
        return max(0, missing) + shared

    def make_writable(
        self, pages: list[int], position: int, count: int = 1
    ) -> tuple[int, int] | None:
        """Give a page table, in place, its own pages for the positions that are written next.

        Return (source, destination) pages to copy before the write: only the first can be shared.
        """
        cost = self.write_cost(pages, position, count)
        if not cost:
            return None
        # The first page is copied if others read it; later ones are new.
        fresh = self.allocate(cost)
        first = position // self.page_size
        copy = None
        if first < len(pages) and self._users[pages[first]] > 1:
            copy = pages[first], fresh.pop(0)
            self._users[copy[0]] -= 1
            pages[first] = copy[1]
        pages += fresh
        assert all(self._users[page] == 1 for page in pages[first + 1 :]), "a later page is shared"
        return copy

    def release(self, pages: list[int]) -> None:
        """Empty a page table; pages without another user become free."""
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is already free"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)
        pages.clear()
