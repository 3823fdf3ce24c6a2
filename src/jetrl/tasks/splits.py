"""Split prompts into training and held-out prompts by content.

Prompts are told apart by their content, the text or messages that the model is asked, never by id
or row: a question that occurs twice in a file must not be in both splits. Differences in white
space do not count.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any


def content_key(asked: Any) -> bytes:
    """Return a digest of a text or of messages; equal contents have equal digests."""
    return hashlib.blake2b(repr(_plain(asked)).encode(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """Return a value in one form for equal contents, of nested mappings and lists too."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(item)) for key, item in value.items())
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def num_held_out(count: int, share: float) -> int:
    """Return how many of `count` different prompts to hold out: at least one, never all."""
    return min(max(1, round(count * share)), count - 1)


def held_out_keys(keys: Sequence[bytes], share: float, seed: int) -> set[bytes]:
    """Draw a share of the different keys; the draw depends on their order and the seed."""
    different = list(dict.fromkeys(keys))
    order = list(range(len(different)))
    random.Random(seed).shuffle(order)
    return {different[i] for i in order[: num_held_out(len(different), share)]}
