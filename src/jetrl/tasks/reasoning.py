"""Any data set of reasoning-gym as a task: `reasoning_gym:chain_sum`.

Question i of a data set with seed s is drawn by a generator seeded with s + i, so the test split
starts far away, at seed + TEST_OFFSET. (A data set with few possible questions may still draw the
same one in both.)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from jetrl.errors import UserError, nearest
from jetrl.settings.section import NonNegative, Positive
from jetrl.tasks.base import Format, Task, check_options, describe_error, question_content
from jetrl.tasks.rows import import_package
from jetrl.tasks.thoughts import answer_part, whole_turn
from jetrl.types import Prompt, Score

TEST_OFFSET = 1 << 30
INSTRUCTION = "Think step by step. Give only the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class ReasoningGym(Task):
    """A data set of reasoning-gym, whose own `score_answer` gives the reward.

    Args:
        format: "chat" (messages) or "text" (the bare question).
        instruction: Text after the question in a chat prompt. With an instruction the answer is the
            text between the last <answer> and </answer>; without one (`instruction = ""`, or format
            "text") it is the whole completion, stripped.
    """

    def __init__(
        self,
        dataset: str,
        size: Annotated[int, Field(ge=1, le=TEST_OFFSET)] = 10_000,
        test_size: Positive = 500,
        seed: NonNegative = 0,
        format: Format = "chat",
        instruction: str = INSTRUCTION,
        **options: Any,
    ) -> None:
        gym = import_package("reasoning_gym", f"task reasoning_gym:{dataset}", "reasoning-gym")
        known = gym.factory.DATASETS
        if dataset not in known:
            raise UserError(f"reasoning-gym has no data set {dataset!r}{nearest(dataset, known)}")
        fields = [field.name for field in dataclasses.fields(known[dataset][1])]
        own = ["test_size", "format", "instruction"]
        check_options([*own, *fields], options, f"reasoning_gym:{dataset}")
        self.name = dataset
        self.format = format
        self.instruction = instruction if format == "chat" else ""
        self._data: dict[str, Any] = {}
        try:
            for split, number, start in (("train", size, 0), ("test", test_size, TEST_OFFSET)):
                self._data[split] = gym.create_dataset(
                    dataset, size=number, seed=seed + start, **options
                )
        except Exception as error:
            problem = f"does not take these options: {describe_error(error)}"
            raise UserError(f"reasoning_gym:{dataset} {problem}") from error

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return prompts with ids `train-0`, ..., each made when the iterator reaches it."""
        self.check_split(split)
        data = self._data[split]
        return (self._prompt(f"{split}-{index}", data[index]) for index in range(len(data)))

    def _prompt(self, prompt_id: str, entry: dict[str, Any]) -> Prompt:
        text, gold = str(entry["question"]), entry["answer"]
        if self.format == "chat":
            text = f"{text}\n\n{self.instruction}".strip()
        answer = None if gold is None else str(gold)
        content = question_content(self.format, text)
        return Prompt(id=prompt_id, answer=answer, metadata={"entry": entry}, **content)

    def score(self, prompt: Prompt, completion: str) -> Score:
        """Return the data set's own score; the part `answered` is 1 if there are answer tags."""
        text = answer_part(whole_turn(prompt, completion))
        answer = None if text is None else text.strip()
        score_parts = {}
        if self.instruction:
            answers = _ANSWER.findall(text or "")
            answer = answers[-1].strip() if answers else None
            score_parts["answered"] = float(bool(answers))
        reward = float(self._data["train"].score_answer(answer, prompt.metadata["entry"]))
        return Score(reward, score_parts)

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return only the answer, in tags with an instruction."""
        if prompt.answer is None:
            return None
        return f"<answer>{prompt.answer}</answer>" if self.instruction else prompt.answer
