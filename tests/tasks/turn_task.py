"""A task with turns whose step does what the completion says: the ways in which it can go wrong."""

import faulthandler
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jetrl.tasks import Task
from jetrl.types import Prompt, Turn


class Turns(Task):
    name = "turns"
    max_turns = 3

    def prompts(self, split: str) -> Iterable[Prompt]:
        return [Prompt(id="text", text="?"), Prompt(id="chat", messages=({"role": "user"},))]

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(len(completion))

    def step(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> object:  # type: ignore[override]
        word, _, rest = completion.partition(" ")
        if word == "hang":
            faulthandler.dump_traceback_later(0.1, exit=True, file=2)  # the time limit passes
            while True:
                time.sleep(0.01)
        if word == "exit":
            os._exit(3)
        if word == "raise":
            raise KeyError(rest)
        if word == "wait-for":
            while not Path(rest).exists():
                time.sleep(0.01)
        values = {"number": 5, "end": None, "long": "x" * 6000, "odd": {"role": 1}, "": None}
        values["message"] = {"role": "tool", "content": "42"}
        return values.get(word, f"{len(turns)}:{completion}")


class Broken(Turns):
    def step(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> str | None:
        raise RuntimeError("the tool's package is missing")
