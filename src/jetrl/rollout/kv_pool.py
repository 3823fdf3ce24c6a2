"""The cache of keys and values from one call to the next: how many pages it has, when its memory is
given back, and when it is made anew. Decode's batch, with its graphs, lives and goes with it.
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

logger = logging.getLogger(__name__)

_CPU_MEMORY_SHARE = 0.25  # of what is free, for the cache: a laptop runs other things too


class KVPool:
    """What an engine has of it.

    Args:
        num_pages: of the cache; None: what the largest batch of a call can use and memory has room
            for. page_size, max_model_len: in tokens. sizes: of the engine, as they are at a call.

    Attributes:
        pages: of the cache that was last asked for. needed: of these for the longest sequence.

    Raises:
        UserError: there is no memory for so many pages.
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
        self._num_pages, self._page_size, self._max_model_len = num_pages, page_size, max_model_len
        self._page_bytes = PagedCache.page_bytes(policy.config, policy.plan, page_size)
        self.pages: int | None = None
        self.needed = 1
        self._cache: PagedCache | None = None
        self._decode: DecodeBatch | None = None
        self._all_memory = False  # whether the cache is smaller than the largest batch could use
        if num_pages is not None:
            self._check_room(num_pages, self._free_bytes())

    def cache_for(self, groups: Sequence[Sequence[RunningSequence]]) -> PagedCache:
        """The cache for a call: the one there is if it is large enough, else a new one.

        Raises:
            UserError: it cannot hold the longest sequence, or its pages do not fit.
            torch.OutOfMemoryError: likewise, as the device says it.
        """
        now = self._sizes.now
        longest = max((s for group in groups for s in group), key=lambda s: s.max_cached_tokens)
        needed = -(-longest.max_cached_tokens // self._page_size)
        num_sequences = sum(len(group) for group in groups)
        together = min(num_sequences, now.max_batch_size)
        # Samples that wait for a place in the batch share one page that none of the running ones
        # has: the prompt's last, partly filled one.
        wanted = needed * together + int(num_sequences > together)
        contexts = most_contexts(now.max_prefill_tokens, together, longest.max_cached_tokens)
        staged = contexts * staged_bytes_per_token(self._policy.config, self._policy.plan)
        limit = self._sizes.max_pages(needed)
        if self._num_pages is not None and limit is not None:
            wanted = limit
        elif self._cache is not None and self._is_enough(self._cache, wanted, staged, needed):
            wanted = self._cache.num_pages
        else:
            self.drop()  # before its memory is measured as used
            affordable = min(self._affordable_pages(staged, needed), limit or sys.maxsize)
            self._all_memory = affordable < wanted
            wanted = min(wanted, affordable)
        self.pages, self.needed = wanted, needed
        if wanted < needed:
            raise UserError(self._too_small(longest, needed, wanted))
        if self._cache is not None and self._cache.num_pages != wanted:
            self.drop()
        if self._cache is None:
            self._cache = self._make(wanted)
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
        """Decode over the cache that `cache_for` gave; graphs are captured once and used in later
        calls."""
        assert self._cache is not None, "no cache to decode over"
        if self._decode is None:
            batch = self._sizes.now.max_batch_size
            self._decode = DecodeBatch(self._policy, self._cache, batch, self._max_model_len)
        return self._decode

    def give_back(self) -> None:
        """Gives the pages' memory back: alone, where their addresses and what uses these stay."""
        if self._cache is not None and self._cache.keeps_addresses:
            self._cache.give_back()
        else:
            self._cache = self._decode = None

    def drop(self) -> None:
        """Gives everything up; the next call makes it anew."""
        cache, self._cache, self._decode = self._cache, None, None
        if cache is not None and cache.keeps_addresses:
            cache.give_back()  # a traceback may keep it

    def _is_enough(self, cache: PagedCache, wanted: int, staged: int, needed: int) -> bool:
        """Whether a call that can use `wanted` pages, and must have `needed`, goes on with this
        cache. staged: bytes of the contexts that it stages at most."""
        if cache.num_pages < (needed if self._all_memory else wanted):
            return False
        return cache.ready or cache.num_pages <= _gpu_pages(
            self._free_bytes(), staged, needed, self._page_bytes, again=True
        )

    def _take_again(self, cache: PagedCache) -> None:
        """Memory for the pages that were given back."""
        began, free = time.perf_counter(), self._free_bytes()
        self._check_room(cache.num_pages, free)
        try:
            cache.take_again()
        except BaseException:
            self.drop()  # what is tried next may be of other sizes
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
        logger.info(
            "KV cache: %d pages of %d tokens, %s, %.1f MiB of the %.1f GiB that were free",
            *(pages, self._page_size, policy.plan.kv, cache.num_bytes / 2**20, free / 2**30),
        )
        return cache

    def _check_room(self, pages: int, free: int) -> None:
        """UserError where so many do not fit in the bytes that are free."""
        page = self._page_bytes
        if pages * page > free:
            raise UserError(
                f"rollout.num_pages = {pages}: pages of {self._page_size} tokens take "
                f"{page / 2**20:.1f} MiB each, {pages * page / 2**30:.1f} GiB in all, and "
                f"{free / 2**30:.1f} GiB are free; at most {free // page}, or leave it unset"
            )

    def _affordable_pages(self, staged: int, needed: int) -> int:
        """Pages that the memory share of a cache holds, beside staged contexts of so many bytes."""
        on_gpu, free = self._policy.device.type == "cuda", self._free_bytes()
        if on_gpu:
            return _gpu_pages(free, staged, needed, self._page_bytes)
        return int(_CPU_MEMORY_SHARE * free) // self._page_bytes

    def _free_bytes(self) -> int:
        """Free memory of the device; all of the machine's where the system does not say."""
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later is free for the cache
            free, _ = torch.cuda.mem_get_info(self._policy.device)
            return int(free)
        available = available_bytes()
        if available is None:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return available

    def _too_small(self, longest: RunningSequence, needed: int, pages: int) -> str:
        setting = (
            f"raise rollout.num_pages to at least {needed}"
            if self._num_pages is not None
            else "use a machine with more memory"
        )
        return (
            f"KV cache too small for one sequence: {pages} pages of {self._page_size} tokens hold "
            f"{pages * self._page_size}, but a prompt of {len(longest.prompt)} tokens with "
            f"max_tokens {longest.rules.max_tokens} uses {longest.max_cached_tokens} "
            f"({needed} pages); {setting}, or lower rollout.max_tokens"
        )


def _gpu_pages(free: int, staged: int, needed: int, page: int, again: bool = False) -> int:
    """Pages of so many bytes that a GPU has room for, `again` as in `gpu_pages_room`. Those of one
    sequence go before staged contexts: of these a call that runs out of memory makes fewer."""
    beside, alone = (gpu_pages_room(free, size, again) // page for size in (staged, 0))
    return max(beside, min(needed, alone))
