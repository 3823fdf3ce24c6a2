r"""Prompts from your own data: JSONL, JSON, CSV, Parquet, or anything the `datasets` package loads.

Options name the prompt and answer fields, and the verifier of completions:

    math                math-verify on the completion's marked answer, or else its last number
                        (answers.py); `strict` accepts only marked answers
    exact               the whole completion, stripped
    regex               the first group of the last match of `pattern`, stripped; without an answer
                        field, any match is correct
    file.py:function    function(prompt, completion) in your file: a number or a Score; also with
                        TRL's signature (all completions of a step) or verl's
    zero                0 for all: for supervised training, or next to a reward model

The first three give 1 or 0. `math` and `regex` have a part `answered`: 1 if the completion has an
answer in the expected form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from jetrl.errors import UserError, nearest
from jetrl.tasks.answers import answer_key, check_math, gold_answer, is_nothing, load_math_verify
from jetrl.tasks.base import (
    Answer,
    CallResult,
    Format,
    HeldOutShare,
    RewardCall,
    Task,
    TrainerState,
    question_content,
    to_stops,
)
from jetrl.tasks.rewards import Checker, Rewards, UserFunction, reward_function
from jetrl.tasks.rows import Row, check_path, has_field, read_rows, splits_of, value_at
from jetrl.tasks.shapes import COLUMNS, row_images, with_places, without_places
from jetrl.tasks.splits import content_key, held_out_keys
from jetrl.tasks.thoughts import answer_part, names_thoughts, whole_turn
from jetrl.tasks.user_files import PREFIX
from jetrl.types import Image, Json, Message, Prompt, Score, Turn
from jetrl.types.conversation import (
    are_messages,
    as_message,
    as_messages,
    as_template_args,
    as_tools,
    as_turns,
    refuse_media,
)

ALL = "all"
"""Split with all examples of data without splits."""
# Field in a template. Dotted paths begin with a letter: {0.5} is LaTeX.
_FIELD = re.compile(r"\{(\w+|[^\W\d]\w*(?:\.\w+)+)\}")
# Default fields per role: the first one that a row has.
_USUAL = {
    "prompt": ("prompt", "question", "problem", "messages", "chosen"),
    "answer": ("answer", "reward_model.ground_truth", "solution", "ground_truth"),
    "demonstration": ("completion", "messages"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "id": (),
    "tools": ("tools",),
    "template_args": ("chat_template_kwargs",),
}
_OTHER_FORMS = {  # hints for rows in other formats, by a field name
    "conversations": "; of ShareGPT rows rename conversations to messages, from to role (human to "
    "user, gpt to assistant) and value to content",
    "instruction": '; Alpaca rows: task.options.template="{instruction} {input}", and '
    "task.options.answer=output, or task.options.demonstration=output for supervised training",
}


@dataclass(frozen=True)
class _RowFields:
    """The fields of a row by role, with errors that name the row.

    Attributes:
        names: The field of each role, as set; None: the first of `_USUAL` that a row has; "": none.
        template: The question, with `{field}` for fields of the row; None: the prompt field.
        needs_answer: True if the verifier compares completions with an answer.
    """

    names: Mapping[str, str | None]
    template: str | None
    needs_answer: bool

    def name(self, row: Row, role: str) -> str:
        """Return the field of a role, as set or by default; "" if there is none."""
        given = self.names[role]
        return next((n for n in _USUAL[role] if has_field(row, n)), "") if given is None else given

    def check_template(self, row: Row) -> None:
        for field in _FIELD.findall(self.template or ""):
            for role in ("answer", "demonstration", "chosen", "rejected"):
                if f"{self.name(row, role)}.".startswith(f"{field}."):
                    raise UserError(
                        f"task.options.template takes {{{field}}}, the field of "
                        f"task.options.{role}; take it out, or put spaces inside to write it as "
                        f"it is: {{ {field} }}"
                    )

    def question(self, row: Row, where: str) -> Any:
        """Return a row's question: text or messages."""
        if self.template is not None:
            return _FIELD.sub(lambda m: self._fill(row, m[1], where), self.template)
        name = self.name(row, "prompt") or "prompt"
        value = as_messages(
            field_value(row, name, where, "task.options.prompt names it"), name, where
        )
        if self.names["prompt"] is None and name in ("messages", "chosen"):
            if are_messages(value) and value[-1]["role"] == "assistant":
                return value[:-1]
            if name == "chosen":  # plain text does not contain the prompt
                field_value(row, "prompt", where, "task.options.prompt names it")
        return value

    def _fill(self, row: Row, field: str, where: str) -> str:
        value = field_value(row, field, where, "task.options.template takes it")
        if isinstance(value, Mapping) or are_messages(as_messages(value, field, where)):
            raise UserError(
                f"{where}: field {field!r} is {value!r:.60}, not a text that "
                f"task.options.template could take{parts_of(field, value)}"
            )
        return str(value)

    def text(self, row: Row, role: str, where: str) -> str | None:
        """Return a text field, or a number as text; None if the role has no field."""
        name = self.name(row, role)
        if not name:
            return None
        value = field_value(row, name, where, f"task.options.{role} names it")
        whole = isinstance(value, int) and not isinstance(value, bool)  # of any number of digits
        number = whole or (isinstance(value, float) and math.isfinite(value))
        if not isinstance(value, str) and not number:
            hint = parts_of(name, value)
            if role == "answer" and not self.needs_answer:
                hint += '; task.options.answer = "" leaves it to the function, in prompt.metadata'
            raise UserError(
                f"{where}: field {name!r} (the {role}) is {value!r:.60}, not a text or a "
                f"number{hint}"
            )
        if not isinstance(value, float):
            return str(value)
        # Parquet stores integer columns with nulls as floats; write other floats without exponent.
        return format(Decimal(repr(value)), "f").removesuffix(".0")

    def completion(self, prompt: Prompt, role: str, where: str) -> list[Turn] | None:
        """Return a completion: text, or the assistant messages after the prompt's."""
        name = self.name(prompt.metadata, role)
        value: Any = value_at(prompt.metadata, name) if name else None
        value = as_messages(value, name, where)
        if not are_messages(value):
            text = self.text(prompt.metadata, role, where)
            return None if text is None else [Turn(text)]
        field, images = f"{where}: field {name!r}", bool(prompt.images)
        messages = [as_message(item, field, images) for item in value]
        asked = without_places(prompt.messages or ())
        begins = without_places(messages[: len(asked)]) == asked
        said = messages[len(asked) :] if begins else messages
        turns = as_turns(said)
        if turns and (len(turns) == 1 or role == "demonstration"):
            return turns
        if self.names[role] is None:
            return None
        raise UserError(
            f"{where}: field {name!r} (the {role}): expected one message of the assistant, after "
            "those of the prompt or alone, with a text"
        )

    def template_fields(self, row: Row, where: str, is_chat: bool) -> Json:
        """Return a row's tools and chat-template arguments, which plain text does not support."""
        tools, args = self.name(row, "tools"), self.name(row, "template_args")
        found = {
            "tools": as_tools(value_at(row, tools), f"{where}: field {tools!r}"),
            "template_args": as_template_args(value_at(row, args), f"{where}: field {args!r}"),
        }
        for role, value in found.items():
            if value and not is_chat:
                what = f"{where}: field {self.name(row, role)!r} is for a chat template"
                raise UserError(f'{what}, and the prompt is a plain text; task.options.{role}=""')
        return found


class Dataset(Task):
    """Examples of a file, folder or hub data set, one prompt each.

    Fields are named by key, or by a dotted path (reward_model.ground_truth). The default is the
    first of `_USUAL` that the row has, which covers the formats of verl and TRL; "": none.

    Args:
        path: A folder with `train.jsonl` and `test.jsonl` (or .json, .csv, .parquet); one such
            file; a folder that `datasets` saved; or a name that `datasets` loads.
        prompt: Field of the question: text, or a list of messages with role and content (or its
            JSON). Unnamed `messages` or `chosen` end before the assistant's last message.
        answer: Field of the correct answer, text or a number.
        demonstration: Field of a completion to imitate in supervised training.
        chosen: Field of the better of two completions, for a reward model.
        rejected: Field of the worse of two completions.
        id: Field that names a row; "": its split and number.
        tools: Field of the tools that the chat template offers, a list of JSON schemas or its JSON.
        template_args: Field of the row's own arguments of the chat template, an object or its JSON.
        template: The question, with `{field}` for any field except the answer and completions;
            default: only the prompt field.
        checker: One of the above verifiers, or several, whose rewards are summed.
        weights: Factors of several checkers' rewards; default: 1 each.
        strict: True if the verifier math accepts only marked answers.
        format: "chat" wraps a text in a user message, "text" keeps it plain.
        test_share: Fraction of distinct prompts in the `test` split, if the data has no splits;
            then `all` is a split too.
        seed: Seed of the train-test split.
    """

    name = "dataset"

    def __init__(
        self,
        path: str,
        prompt: str | None = None,
        answer: str | None = None,
        demonstration: str | None = None,
        chosen: str | None = None,
        rejected: str | None = None,
        id: str = "",
        tools: str | None = None,
        template_args: str | None = None,
        template: str | None = None,
        checker: str | list[str] = "math",
        weights: list[float] | None = None,
        pattern: str | None = None,
        strict: bool = False,
        format: Format = "chat",
        stop: Any = (),
        test_share: HeldOutShare = 0.1,
        seed: int = 0,
        config: str | None = None,
    ) -> None:
        names = [checker] if isinstance(checker, str) else checker
        if answer == "" and {"math", "exact"} & {*names}:
            raise UserError(f"task.options.answer is empty: checker {checker!r} needs an answer")
        check_path(path)
        self.path, self.config = path, config
        location = Path(path).expanduser()
        self._folder = location if location.is_dir() else location.parent
        self._places: dict[str, str] = {}  # of rows, by the ids of their prompts
        self._checked: dict[bytes | Path, Image] = {}  # so that splits decode each once
        self.format = format
        self.test_share, self.seed = test_share, seed
        fields = {
            "prompt": prompt,
            "answer": answer,
            "demonstration": demonstration,
            "chosen": chosen,
            "rejected": rejected,
            "id": id,
            "tools": tools,
            "template_args": template_args,
        }
        reads_answers = bool({"math", "exact", "regex"} & {*names})
        self._fields = _RowFields(fields, template, needs_answer=reads_answers and answer != "")
        self.stop = to_stops(stop, "task.options.stop")
        self._check = get_checker(checker, pattern, strict, weights, answer)
        self.reward_calls = self._check.calls
        if self.reward_calls and type(self).score is not Dataset.score:
            raise UserError(
                f"{type(self).__name__} has a score of its own, which gets one completion; "
                f"{self.reward_calls[0]} needs all of a step: give one of them"
            )
        self._checkers, self._strict = names, strict
        self._own_splits = splits_of(path)
        if self._own_splits:
            self.splits = tuple(self._own_splits)
        elif self._own_splits is None:
            self.splits = ("train", "test", ALL)

    @property
    def label(self) -> str:
        """Name of the data: of the file, folder or data set."""
        return Path(self.path).stem

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return the prompts of the split, in data order."""
        if self._own_splits != []:  # only `datasets` knows the splits of a hub name
            self.check_split(split)
        rows = list(read_rows(self.path, split, self.config))
        if self._own_splits is None:
            rows = self._drawn_split(rows, split)
        if not rows:
            raise UserError(f"task dataset: no rows in split {split!r} of {self.path}")
        prompts = [self._prompt(f"{split}-{n}", row, where) for n, (row, where) in enumerate(rows)]
        seen: dict[str, str] = {}
        for prompt, (_, where) in zip(prompts, rows, strict=True):
            if prompt.id in seen:
                raise UserError(f"{where}: id {prompt.id!r} is also that of {seen[prompt.id]}")
            seen[prompt.id] = where
        self._places |= seen
        return prompts

    def about_split(self, split: str) -> str:
        """Describe a generated split of data without splits; "" for other data."""
        if self._own_splits is not None or split == ALL:
            return ""
        total = sum(1 for _ in read_rows(self.path, split, self.config))
        return (
            f"{self.path} has no splits: {split} is {len([*self.prompts(split)])} of its {total} "
            f"examples (task.options.test_share = {self.test_share:g})"
        )

    def score(self, prompt: Prompt, completion: str) -> float | Score:
        self._require_answer(prompt)
        return self._check(prompt, completion)

    def score_alone(self, prompt: Prompt, completion: str | tuple[Turn, ...]) -> float | Score:
        if not self.reward_calls:
            return super().score_alone(prompt, completion)
        self._require_answer(prompt)
        text = completion if isinstance(completion, str) else completion[-1].text
        return self._check.alone(prompt, text)

    def call_rewards(
        self, call: RewardCall, answers: Sequence[Answer], state: TrainerState
    ) -> CallResult:
        return self._check.call(call, answers, state)

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        cases = [*super().self_test()]
        self._require_answer(cases[0][0])
        return cases

    def _require_answer(self, prompt: Prompt) -> None:
        if prompt.answer is None and self._fields.needs_answer:
            checker = self._checkers[0]
            raise UserError(
                f"{self.path}: checker {checker!r} needs an answer, and row {prompt.id} has none: "
                "name the answer's field in task.options.answer, or set task.options.checker "
                "(file.py:function, or zero if you only fine-tune)"
            )

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        """Return the answer read by the verifier `math`; None for other verifiers."""
        if self._checkers != ["math"]:
            return None
        return answer_key(whole_turn(prompt, completion), self._strict)

    def demonstration(self, prompt: Prompt) -> str | Message | Sequence[Turn] | None:
        turns = self._fields.completion(prompt, "demonstration", f"row {prompt.id}")
        return turns[0].completion if turns and len(turns) == 1 else turns

    def preference(self, prompt: Prompt) -> tuple[str | Message, str | Message] | None:
        fields, where = self._fields, self._places.get(prompt.id, f"row {prompt.id}")
        pair = [fields.completion(prompt, role, where) for role in ("chosen", "rejected")]
        better, worse = (turns[0].completion if turns else None for turns in pair)
        if better is not None and worse is not None:
            return better, worse
        if better is None and worse is None:
            return None
        role = "chosen" if better is None else "rejected"
        raise UserError(
            f"{where}: field {fields.name(prompt.metadata, role) or role!r} has no completion, "
            "and a pair needs two: fill it with a text, or with the prompt's messages and one of "
            "the assistant, or drop the row"
        )

    def _drawn_split(self, rows: list[tuple[Row, str]], split: str) -> list[tuple[Row, str]]:
        """Return a random split of data without splits, by seed, in data order.

        Rows with the same question are in the same split.
        """
        if split == ALL:
            return rows
        for row, _ in rows:
            self._fields.check_template(row)
        keys = [self._split_key(row, where) for row, where in rows]
        held_out = held_out_keys(keys, self.test_share, self.seed)
        if split == "test" and rows and not held_out:
            raise UserError(
                f"task.path = {self.path}: its {len(rows)} examples ask one and the same prompt; "
                "nothing can be held out: add others, or set eval.every = 0"
            )
        chosen = zip(rows, keys, strict=True)
        return [row for row, key in chosen if (key in held_out) == (split == "test")]

    def _split_key(self, row: Row, where: str) -> bytes:
        asked = self._fields.question(row, where)
        images = row_images(row, where, self._folder, self._checked)
        return content_key([asked, [each.digest.hex() for each in images]] if images else asked)

    def _prompt(self, number: str, row: Row, where: str) -> Prompt:
        fields = self._fields
        fields.check_template(row)
        question = fields.question(row, where)
        answer = fields.text(row, "answer", where)
        if answer is None and fields.needs_answer:
            if not any(fields.name(row, role) for role in ("demonstration", "chosen")):
                field_value(row, "answer", where, "task.options.answer names it")
        elif "math" in self._checkers and not gold_answer(answer or ""):
            what = f"{where}: field {fields.name(row, 'answer')!r} (the answer) is {answer!r:.60}"
            why = "the checker 'math' reads no answer in it"
            raise UserError(f"{what}: {why}; give a number or LaTeX, or drop the row")
        elif answer is not None and fields.needs_answer and is_nothing(answer):
            what = f"{where}: field {fields.name(row, 'answer')!r} (the answer) is {answer!r:.60}"
            why = "says that there is none, and a completion would be paid for it"
            raise UserError(
                f"{what}, which {why}; fill it, drop the row, or compare it in a function of your "
                "own (task.options.checker = file.py:function)"
            )
        prompt_id = fields.text(row, "id", where) or number
        field = f"{where}: field {fields.name(row, 'prompt')!r}"
        images = row_images(row, where, self._folder, self._checked)
        if isinstance(question, list | tuple) and question:
            messages = (as_message(each, field, bool(images)) for each in question)
            content: Json = {"messages": tuple(messages)}
            if self.format == "text":
                raise UserError(f"{field} is a list of messages, and task.options.format is 'text'")
        elif isinstance(question, str) and question:
            content = question_content(self.format, question)
        else:
            if question == "":
                raise UserError(f"{field} is empty; fill it, or drop the row")
            raise UserError(f"{field} is {question!r:.60}, not a text or a list of messages")
        refuse_media(row, where)
        if images:
            content = with_places(content, images, where)
            row = {key: value for key, value in row.items() if key not in COLUMNS}
        content |= fields.template_fields(row, where, "messages" in content)
        prompt = Prompt(id=prompt_id, answer=answer, metadata=dict(row), images=images, **content)
        for name in ("demonstration", "chosen", "rejected"):
            fields.completion(prompt, name, where)
        return prompt


def field_value(row: Row, field: str, where: str, why: str) -> Any:
    """Return a field by name or dotted path; raise UserError, with `why` it is read, without it."""
    value = value_at(row, field)
    if value is not None:
        return value
    known = list(_paths(row))
    if field in known:
        raise UserError(f"{where}: field {field!r} is empty (null); fill it, or drop the row")
    form = next((hint for name, hint in _OTHER_FORMS.items() if name in row), "")
    raise UserError(f"{where}: no field {field!r}{nearest(field, known)} ({why}){form}")


def _paths(row: Row, above: str = "") -> Iterator[str]:
    """Yield the dotted paths of all nested fields of a row."""
    for key, value in row.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping) and above.count(".") < 5:  # limit the depth
            yield from _paths(value, f"{above}{key}.")


def parts_of(field: str, value: Any) -> str:
    """Return a hint about dotted paths into an object, or ""."""
    parts = list(_paths(value, f"{field}."))[:4] if isinstance(value, Mapping) else []
    return f"; a part of it is named {' or '.join(parts)}" if parts else ""


def get_checker(
    name: str | Sequence[str],
    pattern: str | None = None,
    strict: bool = False,
    weights: Sequence[float] | None = None,
    answer: str | None = None,
) -> Rewards:
    """Return the verifier `name`, or the weighted sum of several.

    `answer` is the field of the correct answer, for functions with verl's signature.
    """
    names = [name] if isinstance(name, str) else [*name]
    if pattern is not None and "regex" not in names:
        raise UserError("task.options.pattern: only the checker 'regex' has one")
    if strict and "math" not in names:
        raise UserError("task.options.strict: only the checker 'math' takes it")
    if not names:
        raise UserError("task.options.checker = []: name one or more")
    words = [one.rpartition(":")[2] for one in names]
    labels = [w if words.count(w) == 1 else f"{w}-{n}" for n, w in enumerate(words, start=1)]
    checkers = (_one_checker(one, pattern, strict) for one in names)
    as_parts = not isinstance(name, str) or weights is not None
    return Rewards(dict(zip(labels, checkers, strict=True)), weights, as_parts, answer)


def _one_checker(name: str, pattern: str | None, strict: bool) -> Checker | UserFunction:
    file, colon, _ = name.rpartition(":")
    if colon and (file.endswith(".py") or name.startswith(PREFIX)):
        return reward_function(name)
    if name == "math":
        load_math_verify()
        return lambda prompt, text: check_math(
            prompt.answer or "", whole_turn(prompt, text), strict
        )
    if name == "zero":
        return lambda prompt, text: 0.0
    if name == "exact":
        return _exact
    if name == "regex":
        return _regex(pattern)
    near = nearest(name, ("math", "exact", "regex", "zero"))
    raise UserError(f"task.options.checker = {name!r}{near} (also possible: file.py:function)")


def _exact(prompt: Prompt, completion: str) -> float:
    said = answer_part(whole_turn(prompt, completion))
    return float(said is not None and said.strip() == (prompt.answer or "").strip())


def _regex(pattern: str | None) -> Checker:
    key = "task.options.pattern"
    if pattern is None:
        raise UserError(f"{key}: the checker 'regex' needs one, such as '<answer>(.*?)</answer>'")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{key} = {pattern!r}: not a regular expression: {error}") from None

    reads_thoughts = names_thoughts(pattern)  # matches on the reasoning format

    def check(prompt: Prompt, completion: str) -> Score:
        turn = whole_turn(prompt, completion)
        text = turn if reads_thoughts else answer_part(turn)
        matches = [] if text is None else list(compiled.finditer(text))
        if not matches:
            return Score(0.0, {"answered": 0.0})
        answer = matches[-1].group(1 if compiled.groups else 0) or ""
        right = prompt.answer is None or answer.strip() == prompt.answer.strip()
        return Score(float(right), {"answered": 1.0})

    return check
