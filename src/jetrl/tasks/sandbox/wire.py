"""Messages between the scorer and its workers, over a socket.

The scorer sends pickles. Workers, which run verifiers on model output, send JSON lines of limited
length and a fixed schema; anything else is a `WireError` and ends the worker.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from jetrl.files import problem_of
from jetrl.tasks.base import LARGEST

MAX_LINE = 2**16  # maximum bytes per line from a worker
MAX_OF_CALL = 2**12  # extra bytes per completion of a reward call
MAX_NOTE = 200  # maximum characters of a reward function's note
MAX_FAILURE = 2000  # characters
MAX_READABLE = 500  # maximum characters of the human-readable notation
MAX_STEP_REPLY = 5000  # maximum characters of a reply, so that it fits a line when escaped

Verdict = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Text = InstanceOf[str]  # may hold half a character, which pydantic's own texts may not
PartName = Annotated[Text, Field(max_length=200)]
Note = Annotated[Text, AfterValidator(lambda text: text[:MAX_NOTE])]


class WireError(ValueError):
    """A worker sent an invalid message."""


class WorkerReply(BaseModel):
    """A worker's answer to one item; its first says by `failure` why it could not start.

    Attributes:
        reward: 0 for a failure, a turn and a call; None if no reward function gave a number.
        failure: The reason for a missing score, else "".
        last: True if the worker exits because memory, files, threads or processes ran out. A fresh
            worker retries the item, unless this worker was fresh.
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
    """Return a reply as a JSON line."""
    return json.dumps(vars(reply)).encode("ascii") + b"\n"


def parse_reply(line: bytes) -> WorkerReply:
    """Parse a worker's line; raise WireError if it is not a valid reply."""
    try:
        return WorkerReply.model_validate(json.loads(line))
    except ValidationError as error:
        raise WireError(problem_of(error)) from None
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON ({type(error).__name__})") from None
