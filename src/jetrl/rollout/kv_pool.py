"""KV cache and decode graphs of an engine, kept and resized across calls of `generate`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from jetrl.errors import UserError
from jetrl.memory.cpu import available_bytes
from jetrl.memory.pages import gpu_pages, most_contexts
from jetrl.models.attention import staged_bytes_per_token
from jetrl.models.policy import Policy
from jetrl.rollout.decode import DecodeBatch
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import RolloutSizes
from jetrl.rollout.speculation import Speculation

logger = logging.getLogger(__name__)

_CPU_MEMORY_SHARE = 0.25  # fraction of free memory for the cache: other programs run too


@dataclass(eq=False)
class KVPool:
    """Owns the KV cache of an engine, and the decode graphs captured over it.

    Attributes:
        num_pages: None for enough pages for the largest batch of a call, within free memory.
        speculation: Drafts to verify from the next call on, or None.
        pages: Pages of the last requested cache; None before the first request.
        needed: Pages of the longest sequence of that request.
    """

    policy: Policy
    sizes: RolloutSizes
    num_pages: int | None
    page_size: int
    max_model_len: int
    speculation: Speculation | None = None
    pages: int | None = field(default=None, init=False)
    needed: int = field(default=1, init=False)
    _cache: PagedCache | None = field(default=None, init=False)
    _decode: DecodeBatch | None = field(default=None, init=False)
    _all_memory: bool = field(default=False, init=False)  # memory, not the batch, limits the pages

    def __post_init__(self) -> None:
        policy = self.policy
        self._page_bytes = PagedCache.page_bytes(policy.config, policy.plan, self.page_size)
        if self.num_pages is not None:
            check_room(self.num_pages, self.page_size, self._page_bytes, self._free_bytes())

    def cache_for(self, groups: Sequence[Sequence[RunningSequence]]) -> PagedCache:
        """Return the cache for a call, reusing the current one if it is large enough.

        Raises UserError if the longest sequence or the requested pages do not fit.
        """
        # Upper bound: every running sequence is as long as the longest one.
        now = self.sizes.now
        longest = max((s for group in groups for s in group), key=lambda s: s.max_cached_tokens)
        needed = -(-longest.max_cached_tokens // self.page_size)
        num_sequences = sum(len(group) for group in groups)
        together = min(num_sequences, now.max_batch_size)
        # Parked samples share one more page: the last, partly filled one of their prompt.
        num_pages = needed * together + int(num_sequences > together)
        contexts = most_contexts(now.max_prefill_tokens, together, longest.max_cached_tokens)
        plan = self.policy.plan.on("rollout")
        staged = contexts * staged_bytes_per_token(self.policy.config, plan)
        # Use the requested number, else the current cache if large enough, else what fits.
        limit = self.sizes.max_pages(needed)
        if self.num_pages is not None and limit is not None:
            num_pages = limit
        elif self._cache is not None and self._is_enough(self._cache, num_pages, staged, needed):
            num_pages = self._cache.num_pages
        else:
            self.drop()  # frees memory for the new cache
            free = self._free_bytes()
            if self.policy.device.type == "cuda":
                affordable = gpu_pages(free, staged, self._page_bytes, needed)
            else:
                affordable = int(_CPU_MEMORY_SHARE * free) // self._page_bytes
            affordable = min(affordable, limit or sys.maxsize)
            self._all_memory = affordable < num_pages
            num_pages = min(num_pages, affordable)
        self.pages = num_pages
        self.needed = needed
        if num_pages < needed:
            raise UserError(
                too_small(
                    pages=num_pages,
                    page_size=self.page_size,
                    prompt=len(longest.prompt),
                    most=longest.rules.max_tokens,
                    setting=self.num_pages is not None,
                )
            )
        if self._cache is not None and self._cache.num_pages != num_pages:
            self.drop()
        if self._cache is None or not self._cache.ready:
            self._cache = self._ready_cache(num_pages)
        return self._cache

    def decode_batch(self) -> DecodeBatch:
        """Return the decode batch over the current cache, with its graphs."""
        assert self._cache is not None, "no cache to decode over"
        if self._decode is None:
            self._decode = DecodeBatch(
                self.policy,
                self._cache,
                max_batch_size=self.sizes.now.max_batch_size,
                max_model_len=self.max_model_len,
                speculation=self.speculation,
            )
        return self._decode

    def free_memory(self) -> None:
        """Free the memory of the pages, keeping addresses and graphs if the device can."""
        if self._cache is None or not self._cache.unmap():
            self.drop()

    def drop(self) -> None:
        """Free cache and graphs; the next call makes new ones."""
        cache, self._cache = self._cache, None
        decode, self._decode = self._decode, None
        # Free explicitly: a traceback may keep the objects alive.
        if decode is not None:
            decode.forwards.close()
        if cache is not None:
            cache.unmap()

    def _is_enough(self, cache: PagedCache, useful: int, staged: int, needed: int) -> bool:
        """Return True if a call can use the current cache."""
        if cache.num_pages < (needed if self._all_memory else useful):
            return False
        if cache.ready:
            return True
        free = self._free_bytes()
        return cache.num_pages <= gpu_pages(free, staged, self._page_bytes, needed, again=True)

    def _ready_cache(self, pages: int) -> PagedCache:
        """Return a new cache, or the current one with its memory mapped again."""
        policy = self.policy
        free = self._free_bytes()
        cache = self._cache
        check_room(pages, self.page_size, self._page_bytes, free)
        if cache is None:
            cache = PagedCache(
                policy.config,
                policy.plan,
                num_pages=pages,
                page_size=self.page_size,
                device=policy.device,
            )
        else:
            try:
                cache.remap()
            except BaseException:
                self.drop()  # the next attempt may have other sizes
                raise
        logger.info(
            "KV cache: %d pages of %d tokens, %s, %.1f MiB of the %.1f GiB that were free",
            pages,
            self.page_size,
            policy.plan.on("rollout").kv,
            cache.num_bytes / 2**20,
            free / 2**30,
        )
        return cache

    def _free_bytes(self) -> int:
        """Return the free bytes of the device, or all bytes of the machine if unknown."""
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()  # reserved memory of torch is free for the cache
            free, _ = torch.cuda.mem_get_info(self.policy.device)
            return int(free)
        return available_bytes() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def too_small(pages: int, page_size: int, prompt: int, most: int, setting: bool = True) -> str:
    """Return the error for a cache that cannot hold one sequence, or "" if it can."""
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
    """Raise UserError if this many pages do not fit in the free bytes."""
    if pages * page_bytes > free:
        raise UserError(
            f"rollout.num_pages = {pages}: pages of {page_size} tokens take "
            f"{page_bytes / 2**20:.1f} MiB each, {pages * page_bytes / 2**30:.1f} GiB in all, and "
            f"{free / 2**30:.1f} GiB are free; at most {free // page_bytes}, or leave it unset"
        )
