"""The sizes of CUDA graphs of decode, to which batches and contexts are rounded up."""

from __future__ import annotations

import bisect

_ROWS = [8, 16, 32, 64, 96, 128, 192, 256, *range(384, 4097, 128)]  # Batch sizes of graphs.
_SPLIT_TOKENS = 1024  # Contexts are rounded up to this times a power of two.


def padded_batch(count: int) -> int:
    """Return the batch size of the graph that runs `count` rows."""
    at = bisect.bisect_left(_ROWS, count)
    return _ROWS[at] if at < len(_ROWS) else count


def padded_context(tokens: int) -> int:
    """Return the context size of the graph that runs contexts of up to so many tokens."""
    size = _SPLIT_TOKENS
    while size < tokens:
        size *= 2
    return size
