"""What the scorer and its workers say to each other over their socket.

Down to the worker go pickles, each behind its length: the worker believes who started it. Up come
lines of JSON and nothing else: a worker runs checkers on text that a model wrote, so what it sends
is judged like any other input. A line has a largest length and a fixed form; anything else is a
`WireError`, and the worker that sent it is ended.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from typing import Any, BinaryIO, NamedTuple

MAX_LINE = 2**16  # bytes of one line from a worker
MAX_FAILURE = 2000  # characters
MAX_PARTS = 64
MAX_PART_NAME = 200  # characters
MAX_SAID = 5000  # characters of what an environment says: a line holds them, however escaped
_LENGTH = struct.Struct("!Q")


class WireError(ValueError):
    """A worker sent what no worker sends."""


class Reply(NamedTuple):
    """A worker's answer to one item. failure: why there is no verdict, "" if there is one. last:
    memory, files, threads or processes ran out and the worker ends; a fresh one is to try again,
    unless this one was. chunk: the number that came with the items; nobody can answer a chunk
    before it was handed out. said: of a turn, what the environment says to it; None ends the
    completion."""

    reward: float
    parts: dict[str, float]
    failure: str
    last: bool = False
    chunk: str = ""
    said: str | dict[str, str] | None = None


def pack_down(value: object) -> bytes:
    """`value` as the worker's `read_down` takes it."""
    data = pickle.dumps(value)
    return _LENGTH.pack(len(data)) + data


def read_down(stream: BinaryIO) -> Any:
    """The next thing that the scorer sent; EOFError when it hung up."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    data = stream.read(_LENGTH.unpack(head)[0])
    return pickle.loads(data)


def started_line(error: str = "") -> bytes:
    """The worker's first line: its task is built, or why it cannot be."""
    return _line({"started": not error, "error": error[:MAX_FAILURE]})


def reply_line(reply: Reply) -> bytes:
    """A reply as a line. A score with more or longer named parts than a line takes is a failure."""
    if len(reply.parts) > MAX_PARTS or any(len(name) > MAX_PART_NAME for name in reply.parts):
        reply = Reply(
            0.0,
            {},
            f"score returned {len(reply.parts)} parts; at most {MAX_PARTS}, with names of at most "
            f"{MAX_PART_NAME} characters",
            chunk=reply.chunk,
        )
    return _line(reply._replace(failure=reply.failure[:MAX_FAILURE])._asdict())


def parse_started(line: bytes) -> str:
    """What keeps the worker's task from being built; "" if nothing does."""
    message = _object(line)
    started, error = message.get("started"), message.get("error")
    if set(message) != {"started", "error"} or not isinstance(started, bool):
        raise WireError("its first line is not one of a worker")
    if not isinstance(error, str) or started == bool(error):
        raise WireError("its first line is not one of a worker")
    return error


def parse_reply(line: bytes) -> Reply:
    """A worker's line as a reply of finite numbers.

    Raises:
        WireError: it is none.
    """
    message = _object(line)
    if set(message) != set(Reply._fields):
        raise WireError("it has other fields than a reply")
    reply = Reply(**message)
    if not isinstance(reply.parts, dict) or len(reply.parts) > MAX_PARTS:
        raise WireError("the parts of its score are none")
    texts = isinstance(reply.failure, str) and isinstance(reply.chunk, str)
    if not texts or not isinstance(reply.last, bool):
        raise WireError("a field of another type than a reply's")
    if not isinstance(reply.said, str | dict | None):
        raise WireError("a turn's answer that is neither text nor a message")
    if isinstance(reply.said, dict) and not all(isinstance(v, str) for v in reply.said.values()):
        raise WireError("a message with something else than text in it")
    return Reply(
        _finite(reply.reward),
        {name[:MAX_PART_NAME]: _finite(value) for name, value in reply.parts.items()},
        reply.failure[:MAX_FAILURE],
        reply.last,
        reply.chunk,
        reply.said,
    )


class LineBuffer:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends.

        Raises:
            WireError: a line longer than MAX_LINE.
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
    if not math.isfinite(number):
        raise WireError("a score that is not finite")
    return number
