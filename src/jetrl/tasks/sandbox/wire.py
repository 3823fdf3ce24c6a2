"""The messages between the scorer and its workers, over their socket.

Down to the worker go pickles, each behind its length: the worker believes who started it. Up come
lines of JSON and nothing else: a worker runs checkers on text that a model wrote, so what it sends
is checked like any other input. A line has a largest length and a fixed form; anything else is a
`WireError`, and the worker that sent it is ended.
"""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any, BinaryIO, NamedTuple

from jetrl.tasks.base import LARGEST

MAX_LINE = 2**16  # bytes of one line from a worker
MAX_FAILURE = 2000  # characters
MAX_PARTS = 64
MAX_PART_NAME = 200  # characters
MAX_READABLE = 500  # characters of a prompt and its completion as a person would write them
MAX_STEP_REPLY = 5000  # characters of an environment's reply: a line holds them, escaped too
_LENGTH = struct.Struct("!Q")


class WireError(ValueError):
    """A worker sent what no worker sends."""


class WorkerReply(NamedTuple):
    """A worker's answer to one item.

    Attributes:
        reward: The completion's reward; 0 for a failure, and for a turn.
        failure: The reason why there is no score; "" if there is one.
        last: Whether the worker ends because memory, files, threads or processes ran out. A fresh
            worker tries the item again, unless this worker was fresh.
        chunk: The random number that came with the items: a chunk cannot be answered before it was
            handed out.
        step_reply: The environment's reply to a turn; None ends the completion.
        readable: The prompt and the completion as a person would write them; "" for nothing.
    """

    reward: float
    parts: dict[str, float]
    failure: str
    last: bool = False
    chunk: str = ""
    step_reply: str | dict[str, str] | None = None
    readable: str = ""


def pack_down(value: object) -> bytes:
    """Return a value as bytes that the worker's `read_down` reads."""
    data = pickle.dumps(value)
    return _LENGTH.pack(len(data)) + data


def read_down(stream: BinaryIO) -> Any:
    """Return the next value that the scorer sent; raise EOFError when it hung up."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    data = stream.read(_LENGTH.unpack(head)[0])
    return pickle.loads(data)


def started_line(error: str = "") -> bytes:
    """Return the worker's first line: its task is built, or the error that prevents it."""
    return _line({"started": not error, "error": error[:MAX_FAILURE]})


def reply_line(reply: WorkerReply) -> bytes:
    """Return a reply as a line.

    A score with more or longer named parts than a line takes becomes a failure.
    """
    if len(reply.parts) > MAX_PARTS or any(len(name) > MAX_PART_NAME for name in reply.parts):
        reply = WorkerReply(
            0.0,
            {},
            f"score returned {len(reply.parts)} parts; at most {MAX_PARTS}, with names of at most "
            f"{MAX_PART_NAME} characters",
            chunk=reply.chunk,
        )
    return _line(reply._replace(failure=reply.failure[:MAX_FAILURE])._asdict())


def parse_started(line: bytes) -> str:
    """Return the error that keeps the worker's task from being built; "" if there is none."""
    message = _object(line)
    started, error = message.get("started"), message.get("error")
    typed = isinstance(started, bool) and isinstance(error, str)
    if set(message) != {"started", "error"} or not typed or started == bool(error):
        raise WireError("its first line is not one of a worker")
    return str(error)


def parse_reply(line: bytes) -> WorkerReply:
    """Return a worker's line as a reply with finite numbers.

    Raises:
        WireError: The line is no such reply.
    """
    message = _object(line)
    if set(message) != set(WorkerReply._fields):
        raise WireError("it has other fields than a reply")
    reply = WorkerReply(**message)
    if not isinstance(reply.parts, dict) or len(reply.parts) > MAX_PARTS:
        raise WireError("the parts of its score are none")
    texts = all(isinstance(item, str) for item in (reply.failure, reply.chunk, reply.readable))
    if not texts or not isinstance(reply.last, bool):
        raise WireError("a field of another type than a reply's")
    step_reply = reply.step_reply
    if not isinstance(step_reply, str | dict | None):
        raise WireError("a turn's answer that is neither text nor a message")
    if isinstance(step_reply, dict) and not all(isinstance(v, str) for v in step_reply.values()):
        raise WireError("a message with something else than text in it")
    return WorkerReply(
        _finite(reply.reward),
        {name[:MAX_PART_NAME]: _finite(value) for name, value in reply.parts.items()},
        reply.failure[:MAX_FAILURE],
        reply.last,
        reply.chunk,
        step_reply,
        reply.readable[:MAX_READABLE],
    )


class LineBuffer:
    """A buffer that takes bytes and gives whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their ends.

        Raises:
            WireError: A line is longer than MAX_LINE.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, [*lines, self._rest])) > MAX_LINE:
            raise WireError(f"a line of more than {MAX_LINE} bytes")
        return lines


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise WireError("not a JSON object")
    return message


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WireError("a score that is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise WireError("a score too large for a float") from None
    if not abs(number) <= LARGEST:
        raise WireError("a score that is not finite, or too large")
    return number
