"""Sums whose reward an untrained model gets some of, so that every update has a gradient.

There is also one with a checker that crashes or hangs on a few completions, the same ones in every
run.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import time

from jetrl.tasks.toys import Arithmetic
from jetrl.types import Prompt

CRASHES, HANGS = 1 / 600, 1 / 3000  # share of completions


class Digits(Arithmetic):
    name = "digits"

    def score(self, prompt: Prompt, completion: str) -> float:
        """The share of digits that are right, and something for an even length."""
        answer = prompt.answer or ""
        right = sum(a == b for a, b in zip(answer, completion, strict=False))
        return right / len(answer) + 0.25 * (len(completion) % 2 == 0)

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        return [(prompt, text, None) for prompt, text, _ in super().self_test()]


class Soak(Digits):
    name = "soak"

    def score(self, prompt: Prompt, completion: str) -> float:
        text = f"{prompt.id}\0{completion}".encode("utf-8", "surrogatepass")
        draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64
        if draw < CRASHES:
            os._exit(3)
        if draw < CRASHES + HANGS:
            faulthandler.dump_traceback_later(0.5, exit=True, file=2)  # the time limit passes
            time.sleep(3600)
        return super().score(prompt, completion)
