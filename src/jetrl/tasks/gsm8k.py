r"""GSM8K, or any questions with numbers for answers, in its format.

One JSON object a line with `question` and `answer`; the answer is the worked text and, after the
last `####`, the number: `... 48+24 = <<48+24=72>>72 clips\n#### 72`. What a completion gives for
its answer is decided in answers.py; whether it is the right one, by math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jetrl.errors import UserError
from jetrl.tasks.answers import answer_key, gold_answer
from jetrl.tasks.base import Task
from jetrl.tasks.checkers import check_math
from jetrl.tasks.equality import load_math_verify
from jetrl.tasks.messages import check_format, question_content
from jetrl.tasks.rows import Row, check_path, read_rows
from jetrl.types import Prompt, Score

INSTRUCTION = (
    "Think step by step. End with the answer on a line of its own, written as #### NUMBER."
)
FIELDS = ("question", "answer")
OWN_DATA = str(Path(__file__).parents[1] / "data" / "gsm8k")  # OpenAI's GSM8K, MIT licence
_ANNOTATION = re.compile(r"<<[^<>]*>>")


class Gsm8k(Task):
    r"""Grade-school questions, answered with a number.

    The reward is 1 for the right value and 0 otherwise; the part `answered` is 1 where the
    completion names a final answer by `####` or `\boxed`.

    Args:
        path: A folder with train.jsonl and test.jsonl (or .parquet); one such file, whose rows are
            the prompts of both splits; or the name of a data set for `datasets` (`openai/gsm8k`).
            Default: GSM8K itself, which is part of jetrl.
        format: "chat" gives messages for the chat template, "text" the plain prompt
            "Question: ...\nAnswer:\n", for base models and models without a template.
        instruction: Text after the question in a chat prompt.
        strict: Whether only `#### 18` and `\boxed{18}` are answers, and not the last number.
        config: The data set's configuration, for `datasets` names.
    """

    name = "gsm8k"

    def __init__(
        self,
        path: str = OWN_DATA,
        format: str = "chat",
        instruction: str = INSTRUCTION,
        strict: bool = False,
        config: str = "main",
    ) -> None:
        check_format(format)
        check_path(path)
        load_math_verify()
        self.path = path
        self.format = format
        self.instruction = instruction
        self.strict = strict
        self.config = config
        self.stop = ("\nQuestion:",) if format == "text" else ()

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return prompts with ids `train-0`, `train-1`, ... and the right number as answer."""
        self.check_split(split)
        prompts = [
            self._prompt(f"{split}-{index}", row, where)
            for index, (row, where) in enumerate(read_rows(self.path, split, self.config))
        ]
        if not prompts:
            raise UserError(f"task gsm8k: no questions in split {split!r} of {self.path}")
        return prompts

    def score(self, prompt: Prompt, completion: str) -> Score:
        return check_math(prompt.answer or "", completion, self.strict)

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        return answer_key(completion, self.strict)

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the worked answer without its calculator annotations `<<48+24=72>>`."""
        return str(prompt.metadata["demonstration"])

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        prompt = Prompt(id="self-test", text="6 * 3 = ?", answer="18")
        return [
            (prompt, "6 * 3 = 18\n#### 18", 1.0),
            (prompt, "so \\boxed{\\frac{36}{2}}", 1.0),
            (prompt, "#### 19", 0.0),
            (prompt, "", 0.0),
        ]

    def _prompt(self, prompt_id: str, row: Row, where: str) -> Prompt:
        for field in FIELDS:
            if not isinstance(row.get(field), str):
                raise UserError(
                    f"{where}: no text field {field!r}; a line is "
                    '{"question": "...", "answer": "... #### 18"}'
                )
        question = row["question"].strip()
        worked, marker, last = row["answer"].rpartition("####")
        gold = gold_answer(f"####{last}") if marker else ""
        if not re.search("[0-9]", gold):
            raise UserError(f"{where}: field 'answer' does not end with '#### NUMBER'")
        steps = _ANNOTATION.sub("", worked).strip()
        metadata = {"demonstration": f"{steps}\n#### {gold}".lstrip()}
        text = f"Question: {question}\nAnswer:\n"
        if self.format == "chat":
            text = f"{question}\n{self.instruction}".strip()
        content = question_content(self.format, text)
        return Prompt(id=prompt_id, answer=gold, metadata=metadata, **content)
