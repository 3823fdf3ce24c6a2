r"""GSM8K, or any questions with numbers for answers, in its format.

One JSON object a line with `question` and `answer`; the answer is the worked text and, after the
last `####`, the number: `... 48+24 = <<48+24=72>>72 clips\n#### 72`. What a completion gives for
its answer is decided in answers.py; whether it is the right one, by math-verify.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.answers import final_answer, find_number, same_value
from jetrl.tasks.base import Task
from jetrl.types import Prompt, Score

INSTRUCTION = (
    "Think step by step. End with the answer on a line of its own, written as #### NUMBER."
)
FORMATS = ("chat", "text")
FIELDS = ("question", "answer")
_ANNOTATION = re.compile(r"<<[^<>]*>>")


class Gsm8k(Task):
    r"""Grade-school questions, answered with a number.

    path: a folder with train.jsonl and test.jsonl; one JSONL file, whose lines are the prompts of
        both splits; or the name of a data set for the `datasets` package (`openai/gsm8k`).
    format: "chat" gives messages for the chat template, "text" the plain prompt
        "Question: ...\\nAnswer:\n", for base models and models without a template.
    instruction: what follows the question in a chat prompt.
    strict: take only `#### 18` and `\boxed{18}` for answers, not the last number of the text.
    config: the data set's configuration, for `datasets` names.

    The reward is 1 for the right value and 0 otherwise; the part `answered` is 1 where the
    completion names a final answer by `####` or `\boxed`.
    """

    name = "gsm8k"

    def __init__(
        self,
        path: str,
        format: str = "chat",
        instruction: str = INSTRUCTION,
        strict: bool = False,
        config: str = "main",
    ) -> None:
        if format not in FORMATS:
            raise UserError(f"task.options.format = {format!r}: give 'chat' or 'text'")
        local = Path(path).suffix in (".jsonl", ".json") or path.startswith((".", "/", "~"))
        local = local or ("/" in path and Path(path).parent.is_dir())  # a mistyped data/NAME
        if not Path(path).expanduser().exists() and (local or path.count("/") > 1):
            raise UserError(
                f"task.path = {path}: no such file or folder; give a folder with train.jsonl and "
                "test.jsonl, a JSONL file, or the name of a data set such as openai/gsm8k"
            )
        self.path = path
        self.format = format
        self.instruction = instruction
        self.strict = strict
        self.config = config
        self.stop = ("\nQuestion:",) if format == "text" else ()

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Prompts with ids `train-0`, `train-1`, ... and the gold number as answer."""
        self.check_split(split)
        prompts = [
            self._prompt(f"{split}-{index}", row, where)
            for index, (row, where) in enumerate(self._rows(split))
        ]
        if not prompts:
            raise UserError(f"task gsm8k: no questions in split {split!r} of {self.path}")
        return prompts

    def score(self, prompt: Prompt, completion: str) -> Score:
        answer = final_answer(completion, strict=self.strict)
        if answer is None:
            return Score(0.0, {"answered": 0.0})
        right = same_value(prompt.answer or "", answer.text)
        return Score(float(right), {"answered": float(answer.marked)})

    def demonstration(self, prompt: Prompt) -> str | None:
        """The worked answer without its calculator annotations `<<48+24=72>>`."""
        return str(prompt.metadata["demonstration"])

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        prompt = Prompt(id="self-test", text="6 * 3 = ?", answer="18")
        return [
            (prompt, "6 * 3 = 18\n#### 18", 1.0),
            (prompt, "so \\boxed{\\frac{36}{2}}", 1.0),
            (prompt, "#### 19", 0.0),
            (prompt, "", 0.0),
        ]

    def _prompt(self, prompt_id: str, row: Mapping[str, Any], where: str) -> Prompt:
        for field in FIELDS:
            if not isinstance(row.get(field), str):
                raise UserError(
                    f"{where}: no text field {field!r}; a line is "
                    '{"question": "...", "answer": "... #### 18"}'
                )
        question = row["question"].strip()
        worked, marker, last = row["answer"].rpartition("####")
        gold = find_number(last) if marker else None
        if gold is None:
            raise UserError(f"{where}: field 'answer' does not end with '#### NUMBER'")
        steps = _ANNOTATION.sub("", worked).strip()
        metadata = {"demonstration": f"{steps}\n#### {gold}".lstrip()}
        if self.format == "text":
            text = f"Question: {question}\nAnswer:\n"
            return Prompt(id=prompt_id, text=text, answer=gold, metadata=metadata)
        content = f"{question}\n{self.instruction}".strip()
        messages = ({"role": "user", "content": content},)
        return Prompt(id=prompt_id, messages=messages, answer=gold, metadata=metadata)

    def _rows(self, split: str) -> Iterator[tuple[Mapping[str, Any], str]]:
        place = Path(self.path).expanduser()
        if place.is_dir():
            place = place / f"{split}.jsonl"
            if not place.is_file():
                raise UserError(f"task.path = {self.path}: the folder has no {place.name}")
        if place.is_file():
            return _read_jsonl(place)
        return self._download(split)

    def _download(self, split: str) -> Iterator[tuple[Mapping[str, Any], str]]:
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise UserError(
                f"task.path = {self.path}: not a file or folder here, and to load a data set of "
                "this name the package `datasets` is needed: pip install 'jetrl[data]'"
            ) from error
        try:
            rows = datasets.load_dataset(self.path, self.config, split=split)
        except Exception as error:  # its errors come from five packages and have no common base
            raise UserError(
                f"task.path = {self.path}: not a file or folder here, and `datasets` cannot load "
                f"it (config {self.config!r}, split {split!r}): {type(error).__name__}: {error}"
            ) from error
        return ((row, f"{self.path}, {split} row {i}") for i, row in enumerate(rows))


def _read_jsonl(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The objects of a file with where they stand; blank lines are skipped."""
    try:
        contents = file.read_bytes()
        text = contents.decode("utf-8")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        bad = contents.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {bad}: not UTF-8 text ({error.reason})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
            raise UserError(f"{where}: not JSON that can be read: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON object is expected, not {line[:40]!r}")
        yield row, where
