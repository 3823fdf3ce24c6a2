"""Schemas of the files in a run directory, and samples as lines of `rollouts/`.

A line of metrics.jsonl may hold NaN and infinities, which a run can measure; its step, time and
totaled counts are finite. A line of rollouts/ has all that a replay of the training step needs, but
not a prompt's `metadata`, which may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from jetrl.errors import UserError
from jetrl.files import Count, Step, Stored, UnixTime
from jetrl.runs.storage import Record
from jetrl.settings.section import ReportSamples
from jetrl.types import Completion, FinishReason, Image, Prompt, PromptInputs, Sample, Score, Turn
from jetrl.types.conversation import shown_message

Phase = Literal["sft", "rl"]
EndState = Literal["finished", "interrupted", "stopped", "failed"]

Number = float  # strict: accepts int, but not bool
MOST_NAME = 1000  # characters
Name = Annotated[str, Field(max_length=MOST_NAME)]
Span = Annotated[list[Count], Field(min_length=2, max_length=2)]
Tokens = Annotated[float, Field(ge=0, lt=2**63, allow_inf_nan=False)]


class DigestRecord(Stored):
    """The digest of a run after a step ("run"), and the step's fields by name (runs/digest.py)."""

    __pydantic_extra__: dict[Name, Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]] = Field(
        init=False
    )

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MetricsLine(Stored):
    """A line of metrics.jsonl: step number, time, metrics by name, and the digest."""

    __pydantic_extra__: dict[str, Number] = Field(init=False)

    step: Step
    time: UnixTime = 0.0
    phase: Phase = "rl"
    digest: DigestRecord | None = None
    num_tokens: Tokens = Field(0, alias="mismatch/num_tokens")
    num_different: Tokens = Field(0, alias="mismatch/num_different")


class AttemptLine(Stored):
    """A line of attempts.jsonl: the start of an attempt, or its end."""

    event: Literal["start", "end"]
    time: UnixTime
    command: str = ""
    versions: dict[Name, str] = Field(default_factory=dict)
    notes: dict[Name, str] = Field(default_factory=dict)
    state: EndState = "failed"
    reason: str = ""


class Status(Stored):
    """The contents of status.json: the last phase ("": between phases) and its step (0: before)."""

    phase: Name
    step: Step
    time: UnixTime
    pid: Count


class RankLine(Stored):
    rank: Count
    node: Name
    pid: Count
    place: Annotated[str, Field(max_length=10 * MOST_NAME)]
    collectives: Count
    left: bool


class BoardRecord(Stored):
    """The contents of ranks/board.json: how a rank (-1: the key-value store) ended a run."""

    time: UnixTime
    rank: Annotated[int, Field(ge=-1, lt=2**31)]
    words: str
    ranks: list[RankLine]


class RolloutLine(Stored):
    """A line of rollouts/step_NNNNNN.jsonl: a sample (`record_of`).

    Attributes:
        prompt: None: the prompt has messages.
        reward: None: no reward function judged the completion.
        extra: Notes of reward functions (`log_extra`).
        failure: Why the completion could not be scored, or "".
        environment: Spans [start, end) of tokens from an environment.
        continues: Whether the sample is of the same episode as the one before.
        images: Hashes of the files of the prompt's images.
    """

    step: Step = 0
    group: Count = 0
    prompt_id: str = ""
    prompt: str | None = None
    messages: list[Record] | None = None
    answer: str | None = None
    completion: str = ""
    reward: Number | None = 0.0
    parts: dict[str, Number] = Field(default_factory=dict)
    extra: dict[str, Number | str | None] = Field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    failure: str = ""
    prompt_token_ids: list[Count] = Field(default_factory=list)
    token_ids: list[Count] = Field(default_factory=list)
    logprobs: list[Number] = Field(default_factory=list)
    environment: list[Span] = Field(default_factory=list)
    turns: list[Record] = Field(default_factory=list)
    versions: list[Step] = Field(default_factory=list)
    task: str = ""
    readable: str = ""
    continues: bool = False
    images: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(default_factory=list)


class RunConfig(Stored):
    """The contents of a run's config.toml that readers of a run directory use.

    Other versions of jetrl have other settings, so the rest only has to be sections of keys. A
    resume checks all settings with `load_config`.
    """

    class Named(Stored):
        name: str = ""

    class Model(Stored):
        path: str | None = None

    class Precision(Stored):
        preset: str = ""

    class Loop(Stored):
        steps: Step | None = None

    class Report(Stored):
        samples: ReportSamples = 0

    __pydantic_extra__: dict[str, Record] = Field(init=False)

    run: Named = Named()
    task: Named = Named()
    model: Model = Model()
    precision: Precision = Precision()
    loop: Loop = Loop()
    report: Report = Report()


def _plain(value: Any) -> Any:
    if isinstance(value, str) and len(value) <= MOST_NAME:
        return value
    if value is None or (isinstance(value, int | float) and abs(value) < 2**53):
        return value
    raise ValueError("should be a short text, a number, true, false or null")


def _field(value: Any) -> Any:
    """Check a field of a precision plan: a plain value, or a table of plain values and lists."""
    if not isinstance(value, dict):
        return _plain(value)
    return {
        _plain(key): [_plain(item) for item in entry] if isinstance(entry, list) else _plain(entry)
        for key, entry in value.items()
    }


METRICS_LINE = TypeAdapter(MetricsLine)
ATTEMPT_LINE = TypeAdapter(AttemptLine)
ROLLOUT_LINE = TypeAdapter(RolloutLine)
STATUS = TypeAdapter(Status)
BOARD = TypeAdapter(BoardRecord)
RUN_CONFIG = TypeAdapter(RunConfig)
PLAN: TypeAdapter[Record] = TypeAdapter(dict[Name, Annotated[Any, AfterValidator(_field)]])
"""The contents of plan.json, by `PrecisionPlan.to_dict`."""


def record_of(step: int, sample: Sample) -> Record:
    """Return the JSON object of a sample; log-probs read back with the same bits."""
    prompt, completion = sample.prompt, sample.completion
    messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
    return {
        "step": step,
        "group": sample.group,
        "prompt_id": prompt.id,
        **({"task": prompt.task} if prompt.task else {}),
        "prompt": prompt.text,
        "messages": messages,
        "answer": prompt.answer,
        "completion": completion.text,
        "reward": sample.score.reward,
        "parts": {str(name): float(value) for name, value in sample.score.parts.items()},
        "finish_reason": completion.finish_reason,
        "failure": sample.failure,
        **({"readable": sample.readable} if sample.readable else {}),
        **({"extra": dict(sample.extra)} if sample.extra else {}),
        "prompt_token_ids": [int(token) for token in sample.prompt_token_ids],
        "token_ids": [int(token) for token in completion.token_ids],
        "logprobs": [float(value) for value in completion.logprobs],
        **({"versions": list(completion.versions)} if completion.versions else {}),
        **({"continues": True} if sample.continues else {}),
        **({"images": [each.digest.hex() for each in prompt.images]} if prompt.images else {}),
        **_turns_of(completion),
    }


def sample_of(record: Record) -> Sample:
    """Return the sample of a line (`record_of`), without its prompt's metadata.

    Of its images it has only the hashes. Raises ValueError if the line has log-probs of other
    tokens or no prompt.
    """
    line = RolloutLine.model_validate(record)
    if len(line.token_ids) != len(line.logprobs) or not line.prompt_token_ids:
        raise ValueError(
            f"it has {len(line.prompt_token_ids)}, {len(line.token_ids)} and {len(line.logprobs)} "
            "prompt tokens, tokens and log-probs"
        )
    return Sample(
        prompt=Prompt(
            id=line.prompt_id,
            text=line.prompt,
            messages=None if line.messages is None else tuple(line.messages),
            answer=line.answer,
            task=line.task,
            images=tuple(Image(_unread, 0, 0, bytes.fromhex(each)) for each in line.images),
        ),
        group=line.group,
        inputs=PromptInputs(tuple(line.prompt_token_ids)),
        completion=Completion(
            token_ids=tuple(line.token_ids),
            logprobs=tuple(line.logprobs),
            finish_reason=line.finish_reason,
            text=line.completion,
            environment=tuple((start, end) for start, end in line.environment),
            turns=tuple(Turn(turn["completion"], turn["reply"]) for turn in line.turns),
            versions=tuple(line.versions),
        ),
        score=Score(line.reward, line.parts),
        failure=line.failure,
        readable=line.readable,
        extra=line.extra,
        continues=line.continues,
    )


def _unread() -> bytes:
    raise UserError("image: a run records only the hashes of its files")


def _turns_of(completion: Completion) -> Record:
    if not completion.turns:
        return {}

    def plain(reply: Any) -> Any:
        return dict(reply) if isinstance(reply, Mapping) else reply

    turns = [{"completion": t.completion, "reply": plain(t.reply)} for t in completion.turns]
    return {"turns": turns, "environment": [list(span) for span in completion.environment]}


def prompt_text(record: Record) -> str:
    if record.get("messages"):
        return "\n".join(map(shown_message, record["messages"]))
    return str(record.get("prompt") or "")
