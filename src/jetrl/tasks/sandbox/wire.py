"""The messages between the scorer and its workers, over their socket.

The scorer sends pickles. A worker, which runs checkers on text that a model wrote, sends lines of
JSON of a limited length and a fixed form; anything else is a `WireError` and ends the worker.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from jetrl.files import problem_of
from jetrl.tasks.base import LARGEST

MAX_LINE = 2**16  # bytes of one line from a worker
MAX_OF_CALL = 2**12  # bytes more for each completion of a call of reward functions
MAX_NOTE = 200  # characters of a reward function's note on a completion
MAX_FAILURE = 2000  # characters
MAX_READABLE = 500  # characters of a prompt and its completion as a person would write them
MAX_STEP_REPLY = 5000  # characters of an environment's reply: a line holds them, escaped too

Verdict = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Text = InstanceOf[str]  # may hold half a character, which pydantic's own texts may not
PartName = Annotated[Text, Field(max_length=200)]
Note = Annotated[Text, AfterValidator(lambda text: text[:MAX_NOTE])]


class WireError(ValueError):
    """A worker sent what no worker sends."""


class WorkerReply(BaseModel):
    """A worker's answer to one item; its first says by `failure` why it could not start.

    Attributes:
        reward: 0 for a failure, a turn and a call; None if no reward function gave a number.
        failure: The reason for a missing score, else "".
        last: Whether the worker ends because memory, files, threads or processes ran out. A fresh
            worker tries the item again, unless this worker was fresh.
        chunk: The random text that came with the items, so that no chunk is answered in advance.
        rewards: Of a call, a list for each function; `parts` are its metrics, `extra` its notes.
        step_reply: The environment's reply to a turn; None ends the completion.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    reward: Verdict | None = 0.0
    parts: Annotated[dict[PartName, Verdict], Field(max_length=64)] = {}
    failure: Annotated[Text, AfterValidator(lambda text: text[:MAX_FAILURE])] = ""
    last: bool = False
    chunk: Text = ""
    rewards: dict[Text, list[Verdict | None]] = {}
    extra: dict[PartName, list[Verdict | Note | None]] = {}
    step_reply: Text | dict[Text, Text] | None = None
    readable: Annotated[Text, AfterValidator(lambda text: text[:MAX_READABLE])] = ""


def reply_line(reply: WorkerReply) -> bytes:
    """Return a reply as a line."""
    return json.dumps(vars(reply)).encode("ascii") + b"\n"


def parse_reply(line: bytes) -> WorkerReply:
    """Return a worker's line as a reply; raise `WireError` if it is none."""
    try:
        return WorkerReply.model_validate(json.loads(line))
    except ValidationError as error:
        raise WireError(problem_of(error)) from None
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON ({type(error).__name__})") from None
