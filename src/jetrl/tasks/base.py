"""Base class of tasks: prompts, and a score for each completion.

A task of your own is one class in one Python file: see docs/tasks.md and its example,
examples/reverse_words.py. Scoring runs in worker processes without torch, so keep torch out of a
task file unless its score needs it.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import traceback
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from jetrl.errors import UserError, nearest
from jetrl.files import problem_of
from jetrl.tasks.splits import content_key
from jetrl.types import Json, Message, Prompt, Reply, Score, Turn
from jetrl.untrusted import USERS_ERRORS

Format = Literal["chat", "text"]
HeldOutShare = Annotated[float, Field(gt=0, lt=1)]
LARGEST = 1e15
"""Maximum absolute value of a reward or part: sums of squares must fit in float32."""


@dataclass(frozen=True)
class Answer:
    """A completion, as passed to reward functions that get all completions of a step."""

    prompt: Prompt
    completion: str | tuple[Turn, ...]
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RewardCall:
    """Reward functions that are called with all completions of a step at once.

    Attributes:
        names: One function, or all async functions, which run concurrently.
        factors: Weight of each function's reward in the sum.
        as_parts: True if each function's reward is also a part of the score.
        task: The mixed task whose completions they get (`Prompt.task`).
    """

    names: tuple[str, ...]
    factors: tuple[float, ...]
    as_parts: bool
    task: str = ""

    def __str__(self) -> str:
        return f"reward function{'s' * (len(self.names) > 1)} {', '.join(self.names)}"


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run, as in TRL: completed steps and total steps."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True)
class CallResult:
    """The results of a `RewardCall`, in the order of the completions.

    Attributes:
        rewards: A list for each function; None leaves the completion to the other functions.
        metrics: Numbers of the whole call (TRL's `log_metric`).
        extra: Lists of notes (TRL's `log_extra`).
    """

    rewards: Mapping[str, list[float | None]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, list[Any]] = field(default_factory=dict)


class ScoreError(UserError):
    """A score is not a finite number: the completion counts as a failure, with reward 0."""


class Task:
    """A source of prompts, with a score for each completion; subclass it for your own task.

    A task must define `prompts` and `score`. `[task.options]`, and `task.path` as `path` if set,
    become keyword arguments of `__init__`. The constructor runs in the main process and in every
    scoring worker: keep it cheap, and read data in `prompts`.

    Attributes:
        name: Task name in logs and metrics (`eval/<name>/mean`).
        splits: Names accepted by `prompts`; the first is the default training split.
        stop: Stop strings; the text passed to `score` ends before them.
        alphabet: All characters of prompts and answers, for a character tokenizer; None for free
            text.
        max_turns: Maximum turns per completion; above 1 if `step` replies.
        weights: Fraction of the prompts by `Prompt.task`, for a task built from several, else {}.
        partial_credit: True if rewards between 0 and 1 are common, so that the mean reward is not
            the accuracy; evaluations then also report `eval/<name>/accuracy`.
        reward_calls: Reward functions that get all completions of a step; see tasks/rewards.py.
        reading: A sentence that explains an unusual notation; shown at the start of a run and in
            its report.
    """

    name: str = ""
    splits: tuple[str, ...] = ("train", "test")
    stop: tuple[str, ...] = ()
    alphabet: str | None = None
    max_turns: int = 1
    weights: Mapping[str, float] = MappingProxyType({})
    partial_credit: bool = False
    reward_calls: tuple[RewardCall, ...] = ()
    reading: str = ""

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return the prompts of a split, in a deterministic order.

        Prompt ids are unique within a split. Raise `UserError` for data that cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prompts(split)")

    def score(self, prompt: Prompt, completion: str) -> float | Score:
        """Return the reward of one completion, a finite number.

        Returns a number from -1e15 to 1e15, or a `Score(reward, parts)` with named parts for the
        logs. The completion may be any text, including an empty one. The score must depend only on
        these arguments, so that all workers agree.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score(prompt, completion)")

    def step(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> Reply | None:
        """Return the environment's reply to a turn, or None to end the completion.

        Called for tasks with `max_turns` above 1; `completion` is the model's text in this turn,
        without the stop string, after the earlier `turns`. The reply must depend only on the
        arguments. The model sees it but is not trained on it.

        For a text prompt, the reply is text appended to the turn; for a chat prompt, a message such
        as `{"role": "tool", "content": "72"}`.
        """
        return None

    def score_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float | Score:
        """Return the reward of a multi-turn completion; by default the score of its last turn."""
        return self.score(prompt, turns[-1].text)

    def score_alone(self, prompt: Prompt, completion: str | tuple[Turn, ...]) -> float | Score:
        """Return the score without the functions of `reward_calls`."""
        if isinstance(completion, str):
            return self.score(prompt, completion)
        return self.score_turns(prompt, completion)

    def call_rewards(
        self, call: RewardCall, answers: Sequence[Answer], state: TrainerState
    ) -> CallResult:
        """Call the functions of one of `reward_calls` with all completions of a step."""
        raise NotImplementedError(f"{type(self).__name__} has no call_rewards")

    def stops(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the stop strings of a prompt: `stop`, unless overridden."""
        return self.stop

    def demonstration(self, prompt: Prompt) -> str | Message | Sequence[Turn] | None:
        """Return a completion to imitate in supervised training, if any.

        It has no end-of-sequence token. For a chat prompt, it may be an assistant message with
        tool_calls or reasoning_content, rendered by the chat template. A multi-turn completion is a
        sequence of turns, each with its stop string and the environment's reply.
        """
        return None

    def preference(self, prompt: Prompt) -> tuple[str | Message, str | Message] | None:
        """Return two completions of the prompt, the better one first, if available.

        Used by `jetrl sft --task reward`. They have no end-of-sequence token; messages are as for
        `demonstration`.
        """
        return None

    def readable(self, prompt: Prompt, completion: str) -> str:
        """Return a prompt and its completion (or last turn) in human-readable notation.

        Shown next to samples; the default, "", shows nothing.
        """
        return ""

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        """Return a completion's answer in canonical form, for majority voting; None if it has none.

        The most frequent answer of several completions is their majority (maj@k of `jetrl eval`).
        """
        return None

    def content_key(self, prompt: Prompt) -> bytes:
        """Return a hash of the prompt's content.

        Used to find eval prompts that are also training prompts.
        """
        asked = prompt.text if prompt.messages is None else prompt.messages
        images = [image.digest.hex() for image in prompt.images]
        return content_key([asked, images] if images else asked)

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        """Return cases to score at startup, as (prompt, completion, expected reward).

        If the expected reward is None, scoring only has to work. By default, the first prompt of
        the first split is scored with its demonstration, if any, and with an empty completion.
        """
        prompt = next(iter(self.prompts(self.splits[0])), None)
        if prompt is None:
            raise UserError(f"task {self.label}: split {self.splits[0]!r} has no prompts")
        demonstration = self.demonstration(prompt)
        cases: list[tuple[Prompt, str, float | None]] = [(prompt, "", None)]
        if demonstration is not None:
            if isinstance(demonstration, str | Mapping):
                demonstration = [Turn(demonstration)]
            cases.insert(0, (prompt, demonstration[-1].text, None))
        return cases

    @property
    def label(self) -> str:
        """Task name in messages: `name`, or the class name."""
        return self.name or type(self).__name__

    def about_split(self, split: str) -> str:
        """Return a note for `jetrl eval` about a split that the user did not choose, or ""."""
        return ""

    def check_split(self, split: str) -> None:
        """Raise UserError unless `split` is one of `splits`."""
        if split not in self.splits:
            known = ", ".join(map(repr, self.splits))
            raise UserError(
                f"task {self.label}: no split {split!r}; it has {known}; task.split and "
                "task.eval_split name one each (with eval.every = 0, and without sft.until, no "
                "eval_split is needed)"
            )


def to_stops(value: object, where: str) -> tuple[str, ...]:
    """Return stop strings as a tuple; raise UserError unless all are non-empty strings."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        stops = tuple(value)
        if all(isinstance(stop, str) and stop for stop in stops):
            return stops
    raise UserError(f"{where} = {value!r}: give a list of texts, none empty")


def to_reply(value: object, prompt: Prompt, task: str) -> Reply | None:
    """Return the result of a task's `step` as a reply, or raise ScoreError."""
    where = f"task {task}, prompt {prompt.id!r}: step returned {_show(value)}"
    if value is None:
        return None
    if isinstance(value, str) and prompt.text is not None:
        return str(value)
    if isinstance(value, Mapping) and prompt.messages is not None:
        message = {str(key): item for key, item in value.items()}
        message = {key: item for key, item in message.items() if item is not None}
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ScoreError(f"{where}, which needs a role and a content, both text")
        if wrong := [key for key, item in message.items() if not isinstance(item, str)]:
            raise ScoreError(f"{where}, of which {wrong[0]!r} is not a text")
        return {key: str(item) for key, item in message.items()}
    usable = "a text, since the prompt is one" if prompt.text is not None else "a message"
    raise ScoreError(f"{where}; give {usable}, or None to end")


def to_score(value: object, task: str, prompt_id: str) -> Score:
    """Return the result of a task's `score` as a `Score` of finite Python floats.

    Accepts booleans and NumPy or torch scalars; anything else, NaN and numbers above LARGEST raise
    ScoreError.
    """
    where = f"task {task}, prompt {prompt_id!r}"
    if isinstance(value, Score):
        if not isinstance(value.parts, Mapping):
            raise ScoreError(f"{where}: Score.parts is a mapping, not {_show(value.parts)}")
        what = f"{where}: part {{!r}} of the score"
        parts = {str(k): to_number(part, what.format(k)) for k, part in value.parts.items()}
        if value.reward is None:
            return Score(None, parts)
        return Score(to_number(value.reward, f"{where}: score"), parts)
    return Score(to_number(value, f"{where}: score"))


def to_number(value: object, what: str) -> float:
    """Return a finite Python float, or raise ScoreError with a message starting with `what`."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # NumPy or torch scalar
    if not isinstance(value, numbers.Real):
        raise ScoreError(f"{what} returned {_show(value)}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:  # also true for NaN
        raise ScoreError(f"{what} returned {number}; give a finite number up to {LARGEST:g}")
    return number


def _show(value: object) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"


def option_key(option: str) -> str:
    """Return the settings key of a task option."""
    return "task.path" if option == "path" else f"task.options.{option}"


def check_options(known: list[str], options: Json, task: str) -> None:
    """Raise UserError for an unknown option, with the closest known one."""
    for option in options:
        if option not in known:
            near = nearest(option, known)
            raise UserError(f"{option_key(option)}: task {task} has no such option{near}")


def check_values(task_class: type[Task], options: Json) -> None:
    """Raise UserError for an option of the wrong type or range."""
    hints = typing.get_type_hints(task_class.__init__, include_extras=True)
    for option, value in options.items():
        try:
            TypeAdapter(hints.get(option, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(problem_of(error, option_key(option))) from None


def question_content(format: Format, text: str) -> Json:
    """Return the `Prompt` fields for a question: plain text, or a user chat message."""
    message = {"role": "user", "content": text}
    return {"text": text} if format == "text" else {"messages": (message,)}


@contextlib.contextmanager
def naming_errors(what: str) -> Iterator[None]:
    """Convert errors of user code to UserError, with a message starting with `what`."""
    try:
        yield
    except UserError:
        raise
    except USERS_ERRORS as error:
        raise UserError(f"{what} {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return an exception with its origin: `ValueError: text (a.py, line 3, in score)`."""
    text = f"{type(error).__name__}: {error}"[:500]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text} ({last.filename}, line {last.lineno}, in {last.name})"
