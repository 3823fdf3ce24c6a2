"""The number of rows whose float32 logits a GPU holds at once, for kernels and memory plan."""

from __future__ import annotations

_CHUNK_LOGITS = 2**29  # float32 logits: 2 GiB


def rows_at_once(vocabulary: int) -> int:
    """Return the number of rows whose float32 logits a GPU holds at a time, a multiple of 64.

    The log-probs of the language-model head are made from hidden states in chunks of so many rows;
    a chunk's size changes none of their bits. 64 rows fill a tile of the GEMM.
    """
    return max(64, _CHUNK_LOGITS // vocabulary // 64 * 64)
