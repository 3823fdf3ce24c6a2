"""The sizes of a rollout's work: those of decode graphs, and those halved when memory runs out.

Draws do not depend on sizes, so a call that ran out of memory starts over with half of everything
and gives the same tokens. The sizes stay small for the rest of the run, also after a resume.
"""

from __future__ import annotations

import bisect
import logging
from dataclasses import astuple, dataclass, replace
from typing import Any

from jetrl.errors import OutOfMemoryStop

logger = logging.getLogger(__name__)

_ROWS = [8, 16, 32, 64, 96, 128, 192, 256, *range(384, 4097, 128)]  # Batch sizes of graphs.
_SPLIT_TOKENS = 1024  # Contexts are rounded up to this times a power of two.


def padded_batch(count: int) -> int:
    """Return the batch size of the graph that runs `count` rows."""
    at = bisect.bisect_left(_ROWS, count)
    return _ROWS[at] if at < len(_ROWS) else count


def padded_context(tokens: int) -> int:
    """Return the context size of the graph that runs contexts of up to `tokens` tokens."""
    size = _SPLIT_TOKENS
    while size < tokens:
        size *= 2
    return size


_LEAST_PREFILL = 16  # Prompt tokens of a forward: fewer save no memory worth having.


@dataclass(frozen=True)
class Sizes:
    """The sizes that bound the memory of a rollout; max_pages None: what memory has room for."""

    max_batch_size: int
    max_prefill_tokens: int
    max_pages: int | None


class RolloutSizes:
    """The requested sizes, and the current ones since memory ran out."""

    def __init__(self, requested: Sizes) -> None:
        self._requested = requested
        self.now = requested
        self._retries = 0

    def halve(self, pages: int | None, needed: int, problem: str) -> None:
        """Halve the sizes after memory ran out with a cache of `pages`, None without a cache."""
        before = self.now
        limit = before.max_pages if pages is None else pages
        # Half of everything, but never fewer pages than one sequence needs.
        least = min(_LEAST_PREFILL, before.max_prefill_tokens)
        after = Sizes(
            max(1, before.max_batch_size // 2),
            max(least, before.max_prefill_tokens // 2),
            None if limit is None else max(needed, limit // 2),
        )
        if replace(after, max_pages=None) == replace(before, max_pages=None):
            raise OutOfMemoryStop(
                f"out of memory in rollout ({problem}) with one sequence at a time; lower "
                "rollout.max_tokens, or set precision.kv=int8 if the plan keeps keys and values "
                "in BF16. The last checkpoint is good"
            )
        self.now = after
        self._retries += 1
        logger.warning(
            "out of memory in rollout (%s): sampling starts over, with the same tokens, at most %d "
            "sequences at once, %d prompt tokens per forward and %s KV pages",
            *(problem, after.max_batch_size, after.max_prefill_tokens, after.max_pages or "free"),
        )

    def max_pages(self, needed: int) -> int | None:
        """Return the maximum pages of a cache whose longest sequence takes `needed`.

        A number that was halved for shorter sequences grows to `needed` if that was requested.
        """
        most, requested = self.now.max_pages, self._requested.max_pages
        return None if most is None else max(most, min(needed, requested or needed))

    def take_retries(self) -> int:
        """Return how often the sizes were halved since the last call."""
        retries, self._retries = self._retries, 0
        return retries

    def state(self) -> Any:
        return {"asked": list(astuple(self._requested)), "now": list(astuple(self.now))}

    def load_state(self, state: Any) -> None:
        """Restore the sizes of a resumed run, unless its settings were changed."""
        # Other settings start with their own sizes.
        if state["asked"] == list(astuple(self._requested)):
            batch_size, prefill_tokens, pages = state["now"]
            self.now = Sizes(
                max_batch_size=batch_size, max_prefill_tokens=prefill_tokens, max_pages=pages
            )
