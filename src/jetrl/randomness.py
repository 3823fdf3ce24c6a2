"""Counted randomness: every seed and every order is a function of the run's seed and a counter.

Nothing is carried from step to step, so a resumed run needs no state of a generator.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) made of several: the same for the same parts, on every machine."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def draw_range(total: int, first: int, count: int, seed: int) -> list[int]:
    """`count` indices below `total`, from place `first` on, of endless shuffles."""
    epochs = range(first // total, (first + count - 1) // total + 1)
    order = {
        epoch: np.random.Generator(np.random.Philox(key=derive_seed(seed, epoch))).permutation(
            total
        )
        for epoch in epochs
    }
    return [int(order[i // total][i % total]) for i in range(first, first + count)]
