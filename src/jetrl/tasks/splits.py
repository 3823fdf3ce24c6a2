"""Train-test split of prompts by content.

Prompts are identified by content (the text or messages sent to the model), never by id or row: a
question that occurs twice in a file must not be in both splits. White space is normalized.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any


def content_key(asked: Any) -> bytes:
    """Return a hash of a text or of messages; equal contents have equal hashes."""
    return hashlib.blake2b(repr(_plain(asked)).encode(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """Return a value in canonical form, including nested mappings and lists."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(item)) for key, item in value.items())
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def num_held_out(count: int, share: float) -> int:
    """Return how many of `count` distinct prompts are for testing: at least one, never all."""
    return min(max(1, round(count * share)), count - 1)


def held_out_keys(keys: Sequence[bytes], share: float, seed: int) -> set[bytes]:
    """Choose a fraction of the distinct keys; the choice depends on their order and the seed."""
    different = list(dict.fromkeys(keys))
    order = list(range(len(different)))
    random.Random(seed).shuffle(order)
    return {different[i] for i in order[: num_held_out(len(different), share)]}
