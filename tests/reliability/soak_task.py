"""Sums whose checker crashes or hangs on a few completions: the same ones in every run."""

from __future__ import annotations

import hashlib
import os
import time

from jetrl.tasks.arithmetic import Arithmetic
from jetrl.types import Prompt

CRASHES, HANGS = 1 / 600, 1 / 3000  # share of completions


class Soak(Arithmetic):
    name = "soak"

    def score(self, prompt: Prompt, completion: str) -> float:
        text = f"{prompt.id}\0{completion}".encode("utf-8", "surrogatepass")
        draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64
        if draw < CRASHES:
            os._exit(3)
        if draw < CRASHES + HANGS:
            time.sleep(3600)
        return super().score(prompt, completion)
