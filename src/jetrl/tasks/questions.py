r"""GSM8K and common benchmarks: MATH-500, AIME, AMC, GPQA-diamond, MMLU-Pro."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.errors import UserError, nearest
from jetrl.tasks.answers import answer_key, check_math, gold_answer, load_math_verify
from jetrl.tasks.base import Format, Task, question_content
from jetrl.tasks.letters import LETTERS, chosen_letter
from jetrl.tasks.rows import Row, check_path, read_rows, split_files
from jetrl.tasks.thoughts import whole_turn
from jetrl.types import Json, Prompt, Score

INSTRUCTION = (
    "Think step by step. End with the answer on a line of its own, written as #### NUMBER."
)
OWN_DATA = str(Path(__file__).parent / "gsm8k")  # OpenAI's GSM8K, MIT licence
_ANNOTATION = re.compile(r"<<[^<>]*>>")


@dataclass(kw_only=True, eq=False)
class Gsm8k(Task):
    r"""Grade-school math questions with numeric answers.

    The reward is 1 for the right value, else 0; the part `answered` is 1 if the completion marks an
    answer by `####` or `\boxed`.

    Args:
        path: A folder with train.jsonl and test.jsonl (or .parquet); one such file, for both
            splits; or a name for `datasets`. Default: GSM8K itself, which is part of jetrl.
        format: "chat" gives messages for the chat template, "text" the plain prompt
            "Question: ...\nAnswer:\n", for base models and models without a template.
        instruction: Text after the question in a chat prompt.
        strict: True to accept only `#### 18` and `\boxed{18}`, not the last number.
        config: Configuration of a `datasets` name.
    """

    name = "gsm8k"

    path: str = OWN_DATA
    format: Format = "chat"
    instruction: str = INSTRUCTION
    strict: bool = False
    config: str = "main"

    def __post_init__(self) -> None:
        check_path(self.path)
        load_math_verify()
        self.stop = ("\nQuestion:",) if self.format == "text" else ()

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return prompts with ids `train-0`, ... and the correct number as answer."""
        self.check_split(split)
        rows = read_rows(self.path, split, self.config)
        prompts = [self._prompt(f"{split}-{n}", row, where) for n, (row, where) in enumerate(rows)]
        if not prompts:
            raise UserError(f"task gsm8k: no questions in split {split!r} of {self.path}")
        return prompts

    def score(self, prompt: Prompt, completion: str) -> Score:
        return check_math(prompt.answer or "", whole_turn(prompt, completion), self.strict)

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        return answer_key(whole_turn(prompt, completion), self.strict)

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the worked solution without its calculator annotations `<<48+24=72>>`."""
        return str(prompt.metadata["demonstration"])

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        prompt = Prompt(id="self-test", text="6 * 3 = ?", answer="18")
        right = ("6 * 3 = 18\n#### 18", "so \\boxed{\\frac{36}{2}}")
        return [(prompt, text, float(text in right)) for text in (*right, "#### 19", "")]

    def _prompt(self, prompt_id: str, row: Row, where: str) -> Prompt:
        for field in ("question", "answer"):
            if not isinstance(row.get(field), str):
                line = '{"question": "...", "answer": "... #### 18"}'
                raise UserError(f"{where}: no text field {field!r}; a line is {line}")
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


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
LETTER = (
    "Think step by step. End with the letter of the right choice on a line of its own, written as "
    "\\boxed{LETTER}."
)


@dataclass(frozen=True)
class Source:
    """A benchmark on the hub.

    Attributes:
        answer: The column of the right value, or of the right choice's letter or text.
        choices: The column of a list of choices, or the columns of the wrong ones; () for a value.
        config: The data set's configuration; None for its only one.
        max_tokens: Maximum tokens per completion of an evaluation, by default.
    """

    path: str
    split: str
    question: str
    answer: str
    choices: tuple[str, ...] = ()
    config: str | None = None
    max_tokens: int = 4096


SOURCES: dict[str, Source] = {
    "math500": Source("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
    "aime24": Source("HuggingFaceH4/aime_2024", "train", "problem", "answer", max_tokens=16384),
    "aime25": Source("math-ai/aime25", "test", "problem", "answer", max_tokens=16384),
    "amc": Source("AI-MO/aimo-validation-amc", "train", "problem", "answer", max_tokens=8192),
    "gpqa_diamond": Source(
        path="Idavidrein/gpqa",
        split="train",
        question="Question",
        answer="Correct Answer",
        choices=tuple(f"Incorrect Answer {number}" for number in (1, 2, 3)),
        config="gpqa_diamond",
        max_tokens=8192,
    ),
    "mmlu_pro": Source("TIGER-Lab/MMLU-Pro", "test", "question", "answer", ("options",)),
}
_OTHER_NAMES = {"math-500": "math500", "aime2024": "aime24", "aime_2024": "aime24"}
_OTHER_NAMES |= {"aime2025": "aime25", "aime_2025": "aime25", "amc23": "amc"}
_OTHER_NAMES |= {"gpqa": "gpqa_diamond", "mmlu-pro": "mmlu_pro"}


def benchmark_name(name: str) -> str | None:
    """Return the key of `SOURCES` for a name or hub id; None for other names."""
    lower = name.lower()
    by_path = {source.path.lower(): key for key, source in SOURCES.items()}
    key = _OTHER_NAMES.get(lower, by_path.get(lower, lower))
    return key if key in SOURCES else None


@dataclass(kw_only=True, eq=False)
class Benchmark(Task):
    """A common benchmark, for evaluation only.

    The reward is 1 for the correct value or letter, else 0; the part `answered` is 1 if the
    completion marks an answer.

    Args:
        set: A key of `SOURCES`.
        path: A local copy: a folder with a file of the split, or `test.jsonl`; or one such file.
            Default: the set's id on the hub.
        format: "chat" gives messages for the chat template, "text" the plain question.
        seed: Seed of the order of choices, if the data has the right one first.
    """

    splits = ("test",)

    set: str
    path: str | None = None
    format: Format = "chat"
    instruction: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        load_math_verify()
        self.name, self.source = self.set, SOURCES[self.set]
        if self.path is not None:
            check_path(self.path)
        self._path = self.path or self.source.path

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return the questions, with the correct value or letter as answer."""
        self.check_split(split)
        rows = read_rows(self._path, self._stored_split(), self.source.config)
        prompts = [self._prompt(number, row, where) for number, (row, where) in enumerate(rows)]
        if not prompts:
            raise UserError(f"task {self.name}: no questions in {self._path}")
        return prompts

    def score(self, prompt: Prompt, completion: str) -> Score:
        completion = whole_turn(prompt, completion)
        if not self.source.choices:
            return check_math(prompt.answer or "", completion)
        letter = chosen_letter(completion, prompt.metadata.get("choices", ()))
        return Score(float(letter == prompt.answer), {"answered": float(letter is not None)})

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        completion = whole_turn(prompt, completion)
        if not self.source.choices:
            return answer_key(completion)
        return chosen_letter(completion, prompt.metadata.get("choices", ()))

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        answer, wrong = ("B", "\\boxed{A}") if self.source.choices else ("18", "\\boxed{19}")
        prompt = Prompt(id="self-test", text="?", answer=answer)
        return [(prompt, f"so \\boxed{{{answer}}}", 1.0), (prompt, wrong, 0.0), (prompt, "", 0.0)]

    def _stored_split(self) -> str:
        """Return the data set's own split, or `test` for a folder that lacks it."""
        folder = Path(self._path).expanduser()
        stored = self.source.split
        return "test" if folder.is_dir() and stored not in split_files(folder) else stored

    def _prompt(self, number: int, row: Row, where: str) -> Prompt:
        question = str(_column(row, self.source.question, where)).strip()
        right = _column(row, self.source.answer, where)
        answer = gold_answer(str(right))
        metadata: Json = {}
        if self.source.choices:
            choices, answer = self._choices(number, row, str(right), where)
            metadata["choices"] = choices
            lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False)]
            question = "\n".join([question, "", *lines])
        if not answer:
            raise UserError(f"{where}: no answer can be read in {right!r:.60}; correct the row")
        usual = LETTER if self.source.choices else BOXED
        instruction = usual if self.instruction is None else self.instruction
        content = question_content(self.format, f"{question}\n\n{instruction}".strip())
        return Prompt(id=f"{self.name}-{number}", answer=answer, metadata=metadata, **content)

    def _choices(self, number: int, row: Row, right: str, where: str) -> tuple[list[str], str]:
        """Return the choices in order, and the letter of the correct one."""
        columns = [_column(row, name, where) for name in self.source.choices]
        if len(columns) == 1:  # a list, with the letter of the correct choice
            choices = [str(choice) for choice in columns[0]]
            letter = right.strip()
        else:  # the correct text and wrong ones, shuffled per question
            choices = [right.strip(), *(str(choice).strip() for choice in columns)]
            order = list(range(len(choices)))
            random.Random(f"{self.seed}:{number}").shuffle(order)
            choices, letter = [choices[i] for i in order], LETTERS[order.index(0)]
        if not 2 <= len(choices) <= len(LETTERS) or letter not in LETTERS[: len(choices)]:
            raise UserError(
                f"{where}: {len(choices)} choices, and {letter!r:.40} as the right one; give 2 to "
                f"{len(LETTERS)}, and the letter of one"
            )
        return choices, letter


def _column(row: Row, name: str, where: str) -> Any:
    if row.get(name) is None:
        raise UserError(f"{where}: no column {name!r}{nearest(name, list(row))}")
    return row[name]
