"""Counted randomness: every seed and every order is a function of the run's seed and a counter.

Nothing is carried from step to step, so a resumed run needs no state of a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

# The multiples of this number modulo 1 cover [0, 1) evenly, however many are taken.
GOLDEN = 0.6180339887498949


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that is a function of the parts, the same on every machine."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def draw_range(total: int, first: int, count: int, seed: int) -> list[int]:
    """Return consecutive entries of an endless sequence of shuffles of range(total)."""
    epochs = range(first // total, (first + count - 1) // total + 1)
    bits = {epoch: np.random.Philox(key=derive_seed(seed, epoch)) for epoch in epochs}
    order = {epoch: np.random.Generator(bits[epoch]).permutation(total) for epoch in epochs}
    return [int(order[i // total][i % total]) for i in range(first, first + count)]


def shares(weights: Sequence[float], count: int, last_step: int, seed: int) -> np.ndarray:
    """Divide each step's `count` items among weights: int64 [last_step, len(weights)].

    Systematic sampling: `count` marks at equal distances, moved a little every step, are laid over
    the weights. A step's numbers are off its exact shares by less than one, and these errors do not
    add up over the steps.
    """
    edges = np.concatenate([[0.0], np.cumsum(weights) / np.sum(weights)])
    edges[-1] = 1.0
    start = derive_seed(seed, "shares") / 2**63
    offset = (start + GOLDEN * np.arange(1, last_step + 1)) % 1.0
    before = np.ceil(count * edges[None, :] - offset[:, None])
    before[:, 0], before[:, -1] = 0, count
    return np.diff(np.clip(before, 0, count), axis=1).astype(np.int64)


def weighted_draw(weights: np.ndarray, count: int, seed: int) -> list[int]:
    """Draw different indices one after the other, with probabilities proportional to weights.

    The method of Efraimidis and Spirakis (2006), for positive weights float64 [N]. If `count` > N,
    each index is drawn once before any is drawn again.
    """
    chosen: list[int] = []
    while len(chosen) < count:
        key = derive_seed(seed, len(chosen))
        uniform = np.random.Generator(np.random.Philox(key=key)).random(len(weights))
        order = np.argsort(np.log1p(-uniform) / weights, kind="stable")[::-1]
        chosen += [int(index) for index in order[: count - len(chosen)]]
    return chosen
