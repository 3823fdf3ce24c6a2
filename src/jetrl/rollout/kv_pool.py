"""The paged KV cache from one call of `generate` to the next.

The pool decides how many pages the cache has, when their memory is freed, and when a new cache is
made. The decode batch, with the graphs captured over the cache, lives as long as the cache.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

import torch

from jetrl.errors import UserError
from jetrl.memory.cpu import available_bytes
from jetrl.memory.pages import gpu_pages_room, most_contexts
from jetrl.models.attention import staged_bytes_per_token
from jetrl.models.policy import Policy
from jetrl.rollout.decode import DecodeBatch
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import RolloutSizes
from jetrl.rollout.speculation import Speculation

logger = logging.getLogger(__name__)

_CPU_MEMORY_SHARE = 0.25  # Of free memory, for the cache: a laptop runs other programs too.


class KVPool:
    """The owner of an engine's KV cache, and of the decode graphs captured over it.

    Args:
        num_pages: None for as many as the largest batch of a call can use and memory has room for.

    Attributes:
        pages: Pages of the last requested cache; None before the first request.
        needed: Pages of the longest sequence of that request.
        speculation: The drafts that decode verifies; None without.

    Raises:
        UserError: There is no memory for so many pages.
    """

    def __init__(
        self,
        policy: Policy,
        sizes: RolloutSizes,
        num_pages: int | None,
        page_size: int,
        max_model_len: int,
    ) -> None:
        self._policy, self._sizes = policy, sizes
        self.speculation: Speculation | None = None
        self._num_pages, self._page_size, self._max_model_len = num_pages, page_size, max_model_len
        self._page_bytes = PagedCache.page_bytes(policy.config, policy.plan, page_size)
        self.pages: int | None = None
        self.needed = 1
        self._cache: PagedCache | None = None
        self._decode: DecodeBatch | None = None
        # Whether memory, and not the batch, decided the number of pages.
        self._all_memory = False
        if num_pages is not None:
            self._check_room(num_pages, self._free_bytes())

    def cache_for(self, groups: Sequence[Sequence[RunningSequence]]) -> PagedCache:
        """Return the cache for a call: the current one if it is large enough, otherwise a new one.

        Raises:
            UserError: The cache cannot hold the longest sequence, or its pages do not fit.
            torch.OutOfMemoryError: The device has no memory for the pages.
        """
        now = self._sizes.now
        longest = max((s for group in groups for s in group), key=lambda s: s.max_cached_tokens)
        needed = -(-longest.max_cached_tokens // self._page_size)
        num_sequences = sum(len(group) for group in groups)
        together = min(num_sequences, now.max_batch_size)
        # Parked samples share one page that no running sequence has: the prompt's last, partly
        # filled page.
        num_pages = needed * together + int(num_sequences > together)
        contexts = most_contexts(now.max_prefill_tokens, together, longest.max_cached_tokens)
        plan = self._policy.plan.on("rollout")
        staged = contexts * staged_bytes_per_token(self._policy.config, plan)
        # A requested number stands; else the current cache if it is enough; else what fits.
        limit = self._sizes.max_pages(needed)
        if self._num_pages is not None and limit is not None:
            num_pages = limit
        elif self._cache is not None and self._is_enough(self._cache, num_pages, staged, needed):
            num_pages = self._cache.num_pages
        else:
            self.drop()  # The old cache's memory is free for the new one.
            affordable = min(self._affordable_pages(staged, needed), limit or sys.maxsize)
            self._all_memory = affordable < num_pages
            num_pages = min(num_pages, affordable)
        self.pages, self.needed = num_pages, needed
        if num_pages < needed:
            prompt, most = len(longest.prompt), longest.rules.max_tokens
            setting = self._num_pages is not None
            raise UserError(too_small(num_pages, self._page_size, prompt, most, setting))
        if self._cache is not None and self._cache.num_pages != num_pages:
            self.drop()
        # Make the cache, or map the memory of the current one again.
        if self._cache is None:
            self._cache = self._make(num_pages)
            logger.info(
                "one sequence of this call uses up to %d pages, and up to %d sequences run "
                "together%s",
                *(needed, together),
                "; more than the pages hold at their longest: the youngest wait"
                if self._all_memory
                else "",
            )
        elif not self._cache.ready:
            self._take_again(self._cache)
        return self._cache

    def decode_batch(self) -> DecodeBatch:
        """Return the decode batch over the current cache, whose graphs serve all later calls."""
        assert self._cache is not None, "no cache to decode over"
        if self._decode is None:
            batch = self._sizes.now.max_batch_size
            self._decode = DecodeBatch(
                self._policy, self._cache, batch, self._max_model_len, self.speculation
            )
        return self._decode

    def use_drafts(self, speculation: Speculation) -> None:
        """Let decode verify drafts from the next call on."""
        assert self._decode is None, "the graphs of decode are captured without these drafts"
        self.speculation = speculation

    def give_back(self) -> None:
        """Free the pages' memory, keeping addresses and graphs if the device can."""
        if self._cache is not None and self._cache.keeps_addresses:
            self._cache.give_back()
        else:
            self.drop()

    def drop(self) -> None:
        """Free cache and graphs; the next call makes new ones."""
        cache, decode = self._cache, self._decode
        self._cache = self._decode = None
        # A traceback may keep the objects alive, and Python may collect them in any order.
        if decode is not None:
            decode.close()
        if cache is not None and cache.keeps_addresses:
            cache.give_back()

    def _is_enough(self, cache: PagedCache, useful: int, staged: int, needed: int) -> bool:
        """Return whether a call can use the current cache."""
        if cache.num_pages < (needed if self._all_memory else useful):
            return False
        return cache.ready or cache.num_pages <= _gpu_pages(
            self._free_bytes(), staged, needed, self._page_bytes, again=True
        )

    def _take_again(self, cache: PagedCache) -> None:
        began, free = time.perf_counter(), self._free_bytes()
        self._check_room(cache.num_pages, free)
        try:
            cache.take_again()
        except BaseException:
            self.drop()  # The next attempt may have other sizes.
            raise
        logger.info(
            "KV cache: its %d pages again, %.1f MiB of the %.1f GiB that were free, in %.3f s",
            *(cache.num_pages, cache.num_bytes / 2**20, free / 2**30),
            time.perf_counter() - began,
        )

    def _make(self, pages: int) -> PagedCache:
        policy, free = self._policy, self._free_bytes()
        self._check_room(pages, free)
        cache = PagedCache(policy.config, policy.plan, pages, self._page_size, policy.device)
        kv = policy.plan.on("rollout").kv
        logger.info(
            "KV cache: %d pages of %d tokens, %s, %.1f MiB of the %.1f GiB that were free",
            *(pages, self._page_size, kv, cache.num_bytes / 2**20, free / 2**30),
        )
        return cache

    def _check_room(self, pages: int, free: int) -> None:
        check_room(pages, self._page_size, self._page_bytes, free)

    def _affordable_pages(self, staged: int, needed: int) -> int:
        """Return the pages that fit in the cache's share of memory, next to the staged contexts."""
        on_gpu, free = self._policy.device.type == "cuda", self._free_bytes()
        if on_gpu:
            return _gpu_pages(free, staged, needed, self._page_bytes)
        return int(_CPU_MEMORY_SHARE * free) // self._page_bytes

    def _free_bytes(self) -> int:
        """Return the device's free bytes; all of the machine's if the system does not say."""
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()  # Memory that torch keeps for later is free for the cache.
            free, _ = torch.cuda.mem_get_info(self._policy.device)
            return int(free)
        available = available_bytes()
        if available is None:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return available


def too_small(pages: int, page_size: int, prompt: int, most: int, setting: bool = True) -> str:
    """Return the message for a cache that cannot hold one sequence; "" if it can."""
    cached = prompt + most - 1
    needed = -(-cached // page_size)
    if needed <= pages:
        return ""
    step = "use a machine with more memory"
    if setting:
        step = f"raise rollout.num_pages to at least {needed}"
    return (
        f"KV cache too small for one sequence: {pages} pages of {page_size} tokens hold "
        f"{pages * page_size}, but a prompt of {prompt} tokens with max_tokens {most} uses "
        f"{cached} ({needed} pages); {step}, or lower rollout.max_tokens"
    )


def check_room(pages: int, page_size: int, page_bytes: int, free: int) -> None:
    """Raise UserError if so many pages do not fit in the free bytes."""
    if pages * page_bytes > free:
        raise UserError(
            f"rollout.num_pages = {pages}: pages of {page_size} tokens take "
            f"{page_bytes / 2**20:.1f} MiB each, {pages * page_bytes / 2**30:.1f} GiB in all, and "
            f"{free / 2**30:.1f} GiB are free; at most {free // page_bytes}, or leave it unset"
        )


def _gpu_pages(free: int, staged: int, needed: int, page: int, again: bool = False) -> int:
    """Return the number of pages of `page` bytes that a GPU has room for."""
    beside, alone = (gpu_pages_room(free, size, again) // page for size in (staged, 0))
    return max(beside, min(needed, alone))
