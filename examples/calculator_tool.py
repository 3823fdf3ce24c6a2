"""A task with turns: word problems whose sums a calculator does.

    jetrl train examples/calculator.toml

The model writes `<<48*24>>`, the stop string `>>` ends its turn, the calculator's `1152.` goes on
right there, and the model writes the answer: `#### 1152`. What the calculator said is part of the
sequence and is not trained on. docs/tasks.md goes through this file.
"""

import random
import re
from collections.abc import Iterable, Sequence

from jetrl.tasks import Task
from jetrl.types import Prompt, Score, Turn

STORIES = (  # what is asked, and which sum it is
    ("Ann has {a} pens and gets {b}.", "+"),
    ("Ann has {a} pens and loses {b}.", "-"),
    ("Ann has {a} bags of {b} pens.", "*"),
)
CALL = re.compile(r"<<(\d{1,6})([-+*])(\d{1,6})$")  # the end of a turn that the stop string cut


def calculate(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


class CalculatorTool(Task):
    """Word problems with two numbers below `limit`, and a calculator.

    seed: which tenth of all problems is held out, and the order of the rest.
    """

    name = "calculator"
    stop = (">>", "\n")  # a call of the calculator, or the end of the answer
    max_turns = 3
    alphabet = "".join(sorted({*"".join(story for story, _ in STORIES), *"0123456789+-*<>#\n"}))

    def __init__(self, limit: int = 100, seed: int = 0) -> None:
        self.limit, self.seed = limit, seed

    def prompts(self, split: str) -> Iterable[Prompt]:
        self.check_split(split)
        problems = [
            self._problem(story, left, sign, right)
            for story, sign in STORIES
            for left in range(1, self.limit)
            for right in range(1, left + 1)
        ]
        random.Random(self.seed).shuffle(problems)
        num_test = len(problems) // 10
        return problems[:num_test] if split == "test" else problems[num_test:]

    def _problem(self, story: str, left: int, sign: str, right: int) -> Prompt:
        call = f"{left}{sign}{right}"
        return Prompt(
            id=call,
            text=story.format(a=left, b=right) + "\n",
            answer=str(calculate(left, sign, right)),
            metadata={"call": f"<<{call}>>"},
        )

    def step(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> str | None:
        """The calculator: what a call comes to, and nothing where there is no call."""
        call = CALL.search(completion)
        return None if call is None else f"{calculate(int(call[1]), call[2], int(call[3]))}."

    def score_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> Score:
        called = float(len(turns) > 1)
        return Score(self.score(prompt, turns[-1].completion), {"called": called})

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip() == f"#### {prompt.answer}")

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        call = prompt.metadata["call"]
        return (Turn(call, f"{prompt.answer}."), Turn(f"#### {prompt.answer}"))
