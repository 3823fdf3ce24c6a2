"""Seeded random damage: the same inputs in every run, so a failure is found again by its number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from jetrl.errors import UserError

NASTY = [
    *(
        b"",
        b"\0",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\\",
        b'"',
        b"\r\n",
        b"=" * 40,
        b"../../",
        b"#### ",
    ),
    *(b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"-1e999", b"NaN", b"\x1b]0;title\x07\x1b[2J"),
    *("\u202e\u2066\u200b".encode(), b"<script>alert(1)</script>", b"' onload='x", b"${jndi:x}"),
    *(b"\\frac{" * 200, b"\\boxed{" * 50, b"../../"),
]


def mutated(data: bytes, seed: int) -> bytes:
    """`data` with one to four random edits: bits flipped, parts cut, doubled, moved or replaced."""
    rng = random.Random(seed)
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(out))
        end = min(len(out), start + rng.choice([0, 1, 1, 2, 8, 64, 1000]))
        kind = rng.randrange(5)
        if kind == 0 and start < len(out):
            out[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[start:end]
        elif kind == 2:
            out[start:start] = out[start:end] * rng.choice([1, 2, 50])
        elif kind == 3:
            out[start:end] = rng.choice(NASTY)
        else:
            out[start:end] = bytes(rng.randrange(256) for _ in range(end - start))
    return bytes(out)


@pytest.fixture(scope="session")
def attempt() -> Callable[..., tuple[Any, str]]:
    """Return a call's result and "", or None and the UserError's message; raise any other error."""

    def attempted(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
        try:
            return function(*arguments), ""
        except UserError as error:
            return None, str(error) or "an empty message"

    return attempted


@pytest.fixture(scope="session")
def mutate() -> Callable[[bytes, int], bytes]:
    return mutated
