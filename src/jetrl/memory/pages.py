"""Sizes that bound sampling on a GPU: the room for KV pages, and the contexts of one forward."""

from __future__ import annotations

# Tokens of context that a forward over several prompts reads, for each prompt token of its own.
CONTEXT_TOKENS = 64
# Left free on a GPU for the forwards over prompts and the captured graphs of decode: bytes, and at
# most this share of the free memory.
_GPU_LEFT, _GPU_LEFT_SHARE = 4 * 2**30, 0.2


def most_contexts(max_prefill_tokens: int, sequences: int, longest: int) -> int:
    """Return the most tokens whose keys one forward over prompts reads.

    Replies to long conversations and completions that continue read the keys of earlier tokens.
    """
    return min(max(CONTEXT_TOKENS * max_prefill_tokens, longest), sequences * longest)


def gpu_pages_room(free: int, staged: int, again: bool = False) -> int:
    """Return the bytes that KV pages may take of a GPU's free memory.

    4 GiB, or a fifth of the free memory where that is less, stay free for other work.

    Args:
        staged: Bytes that contexts take while attention over prompts stages them.
        again: Whether the pages were given back and are taken again: their graphs exist already,
            and their number should stay the same though no two updates leave the same memory
            free, so that half of the 4 GiB is enough.
    """
    left = min(_GPU_LEFT, int(_GPU_LEFT_SHARE * free))
    return max(0, free - (left // 2 if again else left) - staged)
