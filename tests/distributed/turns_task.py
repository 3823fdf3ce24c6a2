"""A task whose completions take turns with a counter, which now and then says what is no text."""

from collections.abc import Iterable, Sequence

from jetrl.tasks import Task
from jetrl.types import Prompt, Turn


class Counter(Task):
    """A task that answers each turn with the number of its characters."""

    alphabet = "0123456789+="
    stop = ("1", "3", "5", "7", "=")
    max_turns = 3

    def prompts(self, split: str) -> Iterable[Prompt]:
        first = 0 if split == "train" else 50
        return [Prompt(id=str(n), text=f"{n}+{n % 7}=") for n in range(first, first + 20)]

    def score(self, prompt: Prompt, completion: str) -> float:
        return completion.count("4") / (1 + len(completion))

    def step(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> str | None:
        if completion.endswith("9"):
            return "\ud83d"  # half of a character
        return None if completion.endswith("6") else f"+{len(completion)}={prompt.id}"
