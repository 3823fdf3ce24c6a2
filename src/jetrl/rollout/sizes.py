"""How much runs together in a rollout, halved when memory runs out.

Draws depend on none of it, so the call that ran out begins anew with half of everything and gives
the tokens that it would have given. The sizes stay small for the rest of the run, also across a
resume: there they only save the time of finding out again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from jetrl.errors import OutOfMemoryStop

logger = logging.getLogger(__name__)

_LEAST_PREFILL = 16  # tokens a forward: less saves no memory worth having


@dataclass(frozen=True)
class Sizes:
    """max_batch_size: sequences. max_prefill_tokens: prompt tokens a forward. max_pages: of the
    cache; None: as many as there is memory for."""

    max_batch_size: int
    max_prefill_tokens: int
    max_pages: int | None


class RolloutSizes:
    """now: what holds.

    Args:
        asked: what the settings ask for.
    """

    def __init__(self, asked: Sizes) -> None:
        self._asked = asked
        self.now = asked
        self._retries = 0

    def halve(self, pages: int | None, needed: int, problem: str) -> None:
        """After memory ran out. pages: of the cache that there was, None if there was none yet.
        needed: pages of the longest sequence.

        Raises:
            OutOfMemoryStop: one sequence is all that runs.
        """
        before = self.now
        limit = before.max_pages if pages is None else pages
        after = Sizes(
            max_batch_size=max(1, before.max_batch_size // 2),
            max_prefill_tokens=max(
                min(_LEAST_PREFILL, before.max_prefill_tokens), before.max_prefill_tokens // 2
            ),
            max_pages=None if limit is None else max(needed, limit // 2),
        )
        if replace(after, max_pages=None) == replace(before, max_pages=None):
            raise OutOfMemoryStop(
                f"out of memory in rollout ({problem}) with one sequence at a time; lower "
                "rollout.max_tokens, take precision.kv=fp8 if it is not, or use a device with "
                "more memory. The last checkpoint is good"
            )
        self.now = after
        self._retries += 1
        logger.warning(
            "out of memory in rollout (%s): the step's sampling begins anew with at most %d "
            "sequences together, %d prompt tokens a forward and %s KV pages; the tokens are the "
            "same",
            *(problem, after.max_batch_size, after.max_prefill_tokens, after.max_pages or "free"),
        )

    def max_pages(self, needed: int) -> int | None:
        """Of a cache whose longest sequence takes `needed`: those that hold now, but enough for it
        where as many were asked for. They may have been halved when sequences were shorter."""
        most, asked = self.now.max_pages, self._asked.max_pages
        return None if most is None else max(most, min(needed, asked or needed))

    def take_retries(self) -> int:
        """How often they were halved since the last call."""
        retries, self._retries = self._retries, 0
        return retries

    def state(self) -> Any:
        return {"asked": _as_list(self._asked), "now": _as_list(self.now)}

    def load_state(self, state: Any) -> None:
        """Takes over the sizes of a run that goes on, unless its settings were changed."""
        if state["asked"] == _as_list(self._asked):
            self.now = Sizes(*state["now"])


def _as_list(sizes: Sizes) -> list[int | None]:
    return [sizes.max_batch_size, sizes.max_prefill_tokens, sizes.max_pages]
