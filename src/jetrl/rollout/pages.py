"""KV cache pages: reference counts, and the page tables of sequences; without torch.

A page is `page_size` slots for the keys and values of consecutive tokens, in every layer. The
samples of one prompt share its pages. Before a write to a shared page the writer gets its own, and
the cache copies (source, destination).

    pages = allocator.allocate(2)          # [4, 0], a prompt of 3 tokens at page_size 2
    other = allocator.fork(pages, 3)       # [4, 0], both pages now with two users
    allocator.make_writable(other, 3)      # (0, 7): slot 3 is in page 0, shared; other is [4, 7]
    allocator.make_writable(pages, 3)      # None: page 0 has one user again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jetrl.rollout.sequence import RunningSequence


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


class SequencePages:
    """The page tables of sequences; the samples of a prompt, a group, share its pages.

    Attributes:
        groups: Of each sequence, the samples of its prompt that share a prefill.
        parked: Waiting sequences that hold pages of their prompt, oldest first.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self.groups: list[list[RunningSequence]] = []
        self.parked: deque[RunningSequence] = deque()

    def leads(self, sequence: RunningSequence) -> bool:
        """Return whether a sequence prefills the prompt for its group."""
        return self.groups[sequence.index][0] is sequence

    def fits(self, plan: Sequence[tuple[RunningSequence, int]], width: int) -> bool:
        """Return whether a plan can be written without taking pages from any sequence."""
        cost = self._allocator.write_cost
        needed = 0
        for sequence, length in plan:
            written = length
            if width > 1 or sequence.num_extra:
                written = sequence.most_written(length, width)
            needed += cost(sequence.pages, sequence.num_computed, written)
        return needed <= self._allocator.num_free

    def share_prompt(self, donor: RunningSequence, sequence: RunningSequence) -> None:
        """Share the prompt's pages of `donor` with `sequence`, a sample of the same prompt."""
        sequence.pages = self._allocator.fork(donor.pages, len(donor.prompt))
        sequence.num_computed = len(donor.prompt)

    def may_grow(self, sequence: RunningSequence) -> bool:
        """Return whether a sequence may still need another page."""
        pages = sequence.pages
        if len(pages) < self._allocator.pages_for(sequence.max_cached_tokens):
            return True
        written = min(sequence.num_computed, sequence.max_cached_tokens - 1)
        return self._allocator.write_cost(pages, written) > 0

    def needed_to_admit(self, sequence: RunningSequence) -> int:
        """Return the free pages for a sequence's tokens so far, and one more to grow."""
        if sequence.started:
            shares_prompt = bool(sequence.pages) or self._donor(sequence) is not None
        else:
            shares_prompt = not self.leads(sequence)
        size = self._allocator.page_size
        tokens = min(sequence.num_tokens + size, sequence.max_cached_tokens)
        total = self._allocator.pages_for(tokens)
        return total - len(sequence.prompt) // size if shares_prompt else total

    def _donor(self, sequence: RunningSequence) -> RunningSequence | None:
        """Return another group member whose pages hold the whole prompt, or None."""
        prompt = len(sequence.prompt)
        for member in self.groups[sequence.index]:
            if member.pages and member.num_computed >= prompt and member is not sequence:
                return member
        return None

    def admit(self, sequence: RunningSequence) -> None:
        """Give an admitted sequence the pages that its prefill writes."""
        if sequence.pages:
            parked = self.parked.popleft()
            assert parked is sequence, f"parked {parked.index} is older than {sequence.index}"
        elif sequence.started:
            donor = self._donor(sequence)
            if donor is not None:
                self.share_prompt(donor, sequence)
            self._extend(sequence)
        elif self.leads(sequence):
            self._extend(sequence)

    def _extend(self, sequence: RunningSequence) -> None:
        """Give a sequence pages for all its tokens, so that its prefill needs no more."""
        missing = self._allocator.pages_for(sequence.num_tokens) - len(sequence.pages)
        # In a mixed group a younger sequence may be parked before an older one is admitted.
        while missing > self._allocator.num_free and self.drop_parked():
            pass
        sequence.pages += self._allocator.allocate(missing)

    def drop_parked(self) -> bool:
        """Take the pages of the youngest parked sequence; return False if none is parked."""
        if not self.parked:
            return False
        self.drop(self.parked.pop())
        return True

    def drop(self, sequence: RunningSequence) -> None:
        """Take all pages from a sequence, which has to be prefilled again."""
        self._allocator.release(sequence.pages)
        sequence.num_computed = 0

    def release(self, sequence: RunningSequence) -> None:
        """Free the pages of a sequence that ended."""
        if sequence in self.parked:
            self.parked.remove(sequence)
        self._allocator.release(sequence.pages)
