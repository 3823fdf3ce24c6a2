"""How much of a GPU's memory KV pages may take, and what forwards over prompts read beside them."""

from __future__ import annotations

# Of the contexts that a forward over several prompts reads, for each of max_prefill_tokens.
CONTEXT_TOKENS = 64
# Of what is free on a GPU, left to prompts' forwards and decode's graphs.
_GPU_LEFT, _GPU_LEFT_SHARE = 4 * 2**30, 0.2


def most_contexts(max_prefill_tokens: int, sequences: int, longest: int) -> int:
    """Tokens whose keys a forward over prompts reads at most: replies to long conversations, or
    completions that go on. sequences: that run together. longest: tokens of one."""
    return min(max(CONTEXT_TOKENS * max_prefill_tokens, longest), sequences * longest)


def gpu_pages_room(free: int, staged: int, again: bool = False) -> int:
    """Bytes that KV pages may take of a GPU's free memory: all but 4 GiB, or but a fifth where
    that is less, and but what contexts take when they are staged. again: pages that were given
    back, whose graphs are there, and whose number had better stay the same though no two updates
    leave the same memory free: all but half of the 4 GiB."""
    left = min(_GPU_LEFT, int(_GPU_LEFT_SHARE * free))
    return max(0, free - (left // 2 if again else left) - staged)
