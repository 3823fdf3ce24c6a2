"""Speculation holds the text of drafts on the device, and forwards of more rows; no torch here."""

from __future__ import annotations

# Tokens of ended completions, and entries of a table of n-grams: 48 MiB on a GPU, 3 MiB elsewhere.
GPU_ARCHIVE, CPU_ARCHIVE = 2**22, 2**18
MOST_ROWS = 1024  # Rows of a forward at most, where they are chosen.
ALWAYS_ROWS = 256  # Rows of a forward where drafts are always verified, if not two a sequence.
_MOST_QUERIES = 8  # Tokens of a sequence in a forward.


def text_bytes(sequences: int, longest: int, mode: str) -> int:
    """Return the bytes of the text that drafts are taken from on a GPU.

    Args:
        longest: The most tokens of a sequence.
    """
    if mode not in ("text", "auto"):
        return 0
    return 4 * ((sequences + 1) * (longest + 1) + 3 * GPU_ARCHIVE)


def most_rows(sequences: int, mode: str) -> int:
    """Return the most rows of a forward of decode."""
    if mode == "off":
        return sequences
    bound = max(MOST_ROWS, sequences) if mode == "auto" else max(ALWAYS_ROWS, 2 * sequences)
    return min(_MOST_QUERIES * sequences, bound)
