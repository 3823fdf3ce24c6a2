"""A task that does what its completion says: the ways in which a score can go wrong."""

import ctypes
import os
import re
import sys
import time
from collections.abc import Iterable

from jetrl.tasks import Task
from jetrl.types import Prompt, Score


class Awkward(Task):
    name = "awkward"

    def prompts(self, split: str) -> Iterable[Prompt]:
        return [Prompt(id=f"{split}-0", text="?")]

    def score(self, prompt: Prompt, completion: str) -> object:  # type: ignore[override]
        word, _, rest = completion.partition(" ")
        if word == "hang":
            while True:
                time.sleep(0.01)
        if word == "hang-in-c":
            return re.fullmatch(r"(a+)+b", "a" * 40) is None
        if word == "slow":
            time.sleep(float(rest))
            return 1.0
        if word == "exit":
            os._exit(int(rest))
        if word == "segfault":
            ctypes.string_at(0)
        if word == "raise":
            raise KeyError(rest)
        if word == "leave":
            sys.exit(3)
        if word == "modules":
            return float("torch" in sys.modules)
        if word == "flood":
            print("x" * 1_000_000)
            return 1.0
        if word == "pid":
            return float(os.getpid())
        values = {"none": None, "text": "1.0", "nan": float("nan"), "inf": float("inf"), "": 0.0}
        values |= {"true": True, "part": Score(1.0, {"speed": "fast"})}  # type: ignore[dict-item]
        return values[word] if word in values else float(word)


class Refuses(Awkward):
    def score(self, prompt: Prompt, completion: str) -> object:
        raise RuntimeError("the checker's package is broken")


class AlwaysZero(Awkward):
    """What math-verify looks like in a thread: no error, and every score 0."""

    def score(self, prompt: Prompt, completion: str) -> float:
        return 0.0

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        return [(Prompt(id="known", text="1+1="), "2", 1.0)]


class Empty(Awkward):
    def prompts(self, split: str) -> Iterable[Prompt]:
        return []


class NotATask:
    pass
