"""Sizes that bound sampling on a GPU: room for KV pages, contexts of a forward, speculation."""

from __future__ import annotations

# Tokens of context that a forward over several prompts reads, for each prompt token of its own.
CONTEXT_TOKENS = 64
# GPU memory reserved for prefill and for CUDA graphs of decode: bytes, capped at this fraction of
# the free memory.
_GPU_LEFT, _GPU_LEFT_SHARE = 4 * 2**30, 0.2


def most_contexts(max_prefill_tokens: int, sequences: int, longest: int) -> int:
    """Return the maximum tokens whose keys a forward over prompts reads, earlier ones included."""
    return min(max(CONTEXT_TOKENS * max_prefill_tokens, longest), sequences * longest)


def gpu_pages_room(free: int, staged: int, again: bool = False) -> int:
    """Return the bytes that KV pages may take of a GPU's free memory.

    `staged` bytes stage contexts in attention over prompts. 4 GiB, or a fifth of the free memory if
    that is less, stay free for other work; only half of that if pages with captured graphs come
    back (`again`), so that small differences in free memory do not change the number of pages.
    """
    left = min(_GPU_LEFT, int(_GPU_LEFT_SHARE * free))
    return max(0, free - (left // 2 if again else left) - staged)


def gpu_pages(free: int, staged: int, page: int, needed: int, again: bool = False) -> int:
    """Return the pages of `page` bytes that fit on a GPU (see `gpu_pages_room`).

    The `needed` pages of one sequence go before contexts.
    """
    next_to_contexts = gpu_pages_room(free, staged, again) // page
    without_contexts = gpu_pages_room(free, 0, again) // page
    return max(next_to_contexts, min(needed, without_contexts))


# Tokens of ended completions, and entries of a table of n-grams: 48 MiB on a GPU, 3 MiB elsewhere.
GPU_ARCHIVE, CPU_ARCHIVE = 2**22, 2**18
MOST_ROWS = 1024  # Rows of a forward at most, if they are chosen.
ALWAYS_ROWS = 256  # Those if drafts are always verified, unless two per sequence are more.
_MOST_QUERIES = 8  # Tokens of a sequence in a forward.


def text_bytes(sequences: int, longest: int, mode: str) -> int:
    """Return the bytes of the text of drafts on a GPU."""
    if mode not in ("text", "auto"):
        return 0
    return 4 * ((sequences + 1) * (longest + 1) + 3 * GPU_ARCHIVE)


def most_rows(sequences: int, mode: str) -> int:
    """Return the maximum number of rows of a decode forward."""
    if mode == "off":
        return sequences
    bound = max(MOST_ROWS, sequences) if mode == "auto" else max(ALWAYS_ROWS, 2 * sequences)
    return min(_MOST_QUERIES * sequences, bound)
