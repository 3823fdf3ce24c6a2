"""Any reasoning-gym data set as a task: `reasoning_gym:chain_sum`.

Question i of a data set with seed s is generated with seed s + i, so the test split starts far
away, at seed + TEST_OFFSET. Data sets with few possible questions generate the same ones in both
splits; these are excluded from training.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import Field

from jetrl.errors import UserError, nearest
from jetrl.settings.section import NonNegative, Positive
from jetrl.tasks.base import Format, Task, check_options, describe_error, question_content
from jetrl.tasks.rows import import_package
from jetrl.tasks.splits import num_held_out
from jetrl.tasks.thoughts import answer_part, whole_turn
from jetrl.types import Json, Prompt, Score

TEST_OFFSET = 1 << 30
INSTRUCTION = (
    "Think step by step. Give only the bare final answer, with no words, \\boxed{} or $ around it, "
    "between <answer> and </answer>."
)
TEST_SHARE = 0.1  # fraction of the training questions, if there are few
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class ReasoningGym(Task):
    """A reasoning-gym data set, whose own `score_answer` gives the reward.

    Args:
        format: "chat" (messages) or "text" (the bare question).
        instruction: Text after the question in a chat prompt. With an instruction the answer is the
            text between the last <answer> and </answer>; without one (`instruction = ""`, or format
            "text") it is the whole completion, stripped.
    """

    partial_credit = True

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
        self._data: Json = {}
        try:
            for split, number, start in (("train", size, 0), ("test", test_size, TEST_OFFSET)):
                self._data[split] = gym.create_dataset(
                    dataset, size=number, seed=seed + start, **options
                )
        except Exception as error:
            raise UserError(
                f"reasoning_gym:{dataset} does not take these options: {describe_error(error)}"
            ) from error

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return prompts with ids `train-0`, ..., generated lazily.

        Ids count generated questions; questions that occur in the test split are skipped.
        """
        self.check_split(split)
        if split == "train":
            return self._train_prompts()
        if not self._test_prompts:
            raise UserError(
                f"reasoning_gym:{self.name}: every draw asks the same, nothing can be held out; "
                "set options that make more questions, or eval.every = 0"
            )
        return list(self._test_prompts)

    def _train_prompts(self) -> Iterator[Prompt]:
        held_out = {self.content_key(prompt) for prompt in self._test_prompts}
        left = False
        for prompt in self._draws("train"):
            if self.content_key(prompt) not in held_out:
                left = True
                yield prompt
        if not left:
            raise UserError(
                f"reasoning_gym:{self.name}: every draw for training is a test question; raise "
                "task.options.size or lower task.options.test_size"
            )

    def _draws(self, split: str) -> Iterator[Prompt]:
        data = self._data[split]
        return (self._prompt(f"{split}-{index}", data[index]) for index in range(len(data)))

    @functools.cached_property
    def _test_prompts(self) -> list[Prompt]:
        """Return the prompts of the test split; fewer if there are few distinct questions."""
        draws = list(self._draws("test"))
        keys = [self.content_key(prompt) for prompt in draws]
        if len(set(keys)) == len(keys):
            return draws
        # Questions repeat, so a large test split would take most of them from training. Of those
        # shared with training, keep a tenth in the test split, once each.
        trained = {self.content_key(prompt) for prompt in self._draws("train")}
        shared = [key for key in dict.fromkeys(keys) if key in trained]
        most = num_held_out(len(trained), TEST_SHARE)
        if len(shared) <= most:
            return draws
        given_back = set(shared[most:])
        once = dict(zip(reversed(keys), reversed(draws), strict=True))  # the first draw of each key
        kept = [key for key in dict.fromkeys(keys) if key not in given_back]
        return [once[key] for key in kept]

    def _prompt(self, prompt_id: str, entry: Json) -> Prompt:
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
        return Score(self._reward(answer, prompt.metadata["entry"]), score_parts)

    def _reward(self, answer: str | None, entry: Json) -> float:
        """Return the data set's own score, or 0 for a wrong answer that crashes its scorer."""
        score_answer = self._data["train"].score_answer
        try:
            return float(score_answer(answer, entry))
        except Exception:
            # Some scorers parse answers without validation. If a scorer also fails on its own
            # correct answer, it is broken or lacks a dependency: raise.
            if answer == entry["answer"]:
                raise
            score_answer(entry["answer"], entry)
            return 0.0

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        """Return the first draw with its demonstration and an empty completion."""
        prompt = next(self._draws("train"))  # test question or not: this avoids generating others
        worked = self.demonstration(prompt)
        return [(prompt, text, None) for text in (worked, "") if text is not None]

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return only the answer, in tags with an instruction."""
        if prompt.answer is None:
            return None
        return f"<answer>{prompt.answer}</answer>" if self.instruction else prompt.answer
