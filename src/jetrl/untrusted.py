"""Code that jetrl did not write: which files may be imported, and limited child processes.

A recipe may name Python files: a task, a checker, an algorithm. `jetrl train` and `jetrl sft` run
them. Other commands may read a run from elsewhere: they import only files typed on the command line
or trusted with --trust-task. Each import of a user's file calls `check_trusted` first. A program
that uses jetrl as a library trusts every file.

A score, a chat template, a regular expression or a decoder of images can run for years, fill the
memory or crash, and Python cannot interrupt it. Such code runs in a fresh interpreter with its own
session, which Ctrl-C does not reach. The system's timer of CPU time ends the process, so a busy
machine changes no verdict; the limit on address space hurts no other process. Scoring workers
(tasks/sandbox) use these limits with their own protocol; `LimitedProcess` answers one request after
the other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jetrl.errors import UserError

_MOST_ERROR = 1000  # characters
_START = "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
_SERVE = """\
sys.modules["torch"] = None  # nothing here needs it, and transformers starts faster without
from jetrl.untrusted import serve
from {module} import {function}
serve({function}, {limit_s}, {memory_mib})
"""


class LimitError(Exception):
    """A limited process gave no answer; the message says why."""


def start(program: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a fresh interpreter; its arguments begin at `sys.argv[2]`."""
    command = [sys.executable, "-P", "-c", _START + program, json.dumps(sys.path), *arguments]
    return subprocess.Popen(command, start_new_session=True, **options)


def limit_memory(mib: int) -> None:
    """Limit this process to its current address space and `mib` MiB more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + mib * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_cpu(seconds: float) -> None:
    """End this process by SIGPROF after this CPU time from now; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class LimitedProcess:
    """A process that answers requests in `limit_s` s of CPU time each, restarted after its end.

    `function` is the `module:name` of a function from a JSON value to another, or to bytes. If a
    request comes with bytes, they are its argument `attached`.
    """

    def __init__(self, function: str, limit_s: float, memory_mib: int) -> None:
        module, _, name = function.partition(":")
        self._limit_s, words = limit_s, {"module": module, "function": name}
        self._program = _SERVE.format(**words, limit_s=limit_s, memory_mib=memory_mib)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def answer(self, request: bytes, attached: bytes | None = None, most_bytes: int = 0) -> Any:
        """Return the function's value for a request, which is one line of JSON.

        Raise `LimitError` for an error, too much time or memory, a far larger value, or more than
        `most_bytes` bytes.
        """
        most = 2**16 + 8 * len(request)
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(b"%d\n" % (-1 if attached is None else len(attached)))
                process.stdin.write(request + b"\n")
                process.stdin.write(attached or b"")
                process.stdin.flush()
                reply = _read_reply(process.stdout, most, most_bytes)
            except (BrokenPipeError, ValueError):
                raise LimitError(self._why_ended(process)) from None
            except BaseException:  # too long, or Ctrl-C between a request and its reply
                self.close()
                raise
        if "error" in reply:
            raise LimitError(str(reply["error"]))
        return reply["value"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            pipe = subprocess.PIPE
            self._process = start(self._program, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        return self._process

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        self.close()
        if process.returncode == -signal.SIGPROF:
            return f"it takes more than {self._limit_s:g} s of CPU time"
        return f"its process ended ({process.returncode}), for lack of memory or by a crash"


def _read_reply(stream: IO[bytes], most: int, most_bytes: int) -> dict[str, Any]:
    line = stream.readline(most + 1)
    if len(line) > most:
        raise LimitError(f"it gives a text of more than {most:,} bytes")
    reply = json.loads(line)  # an error if the process ended
    if not isinstance(reply, dict) or not ({"value", "error", "bytes"} & reply.keys()):
        raise ValueError("not a reply")
    if "bytes" in reply:
        size = reply["bytes"]
        if not isinstance(size, int) or not 0 <= size <= most_bytes:
            raise LimitError(f"it gives more than {most_bytes:,} bytes")
        reply["value"] = stream.read(size)
        if len(reply["value"]) < size:
            raise ValueError("the process ended")
    return reply


def serve(function: Callable[..., Any], limit_s: float, memory_mib: int) -> None:
    """Answer requests on standard input: the child's side of `LimitedProcess`."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    limit_memory(memory_mib)
    for header in sys.stdin.buffer:
        line, size, call = sys.stdin.buffer.readline(), int(header), function
        if size >= 0:
            call = functools.partial(function, attached=sys.stdin.buffer.read(size))
        limit_cpu(limit_s)
        reply = _reply(call, line)
        limit_cpu(0)
        replies.write(reply)
        replies.flush()


def _reply(function: Callable[[Any], Any], line: bytes) -> bytes:
    try:
        value = function(json.loads(line))
        if isinstance(value, bytes):
            return b'{"bytes": %d}\n%b' % (len(value), value)
        return json.dumps({"value": value}).encode() + b"\n"
    except MemoryError:
        return b'{"error": "it takes too much memory"}\n'
    except Exception as error:  # code from elsewhere may raise anything
        text = str(error)[:_MOST_ERROR] or type(error).__name__
        return json.dumps({"error": text}).encode() + b"\n"


@contextlib.contextmanager
def exits_raised() -> Iterator[None]:
    """Make an error of `os._exit` in a score of this process: a run must not end with its code."""
    leave, own = os._exit, (os.getpid(), threading.get_ident())

    def refused(code: int) -> None:
        if (os.getpid(), threading.get_ident()) == own:
            raise SystemExit(f"os._exit({code}) with task.workers = 0 would end the run")
        leave(code)  # a fork, or another thread: the watchdog ends a run whose score hangs

    os._exit = refused  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


USERS_ERRORS = (Exception, SystemExit)
"""Errors of a user's code; its `sys.exit()` would end a run without a word."""

_trusted: frozenset[Path] | None = None  # None: every file


@contextlib.contextmanager
def trust_only(files: Iterable[str | Path] = ()) -> Iterator[None]:
    """Let the commands inside the context import only these users' files."""
    global _trusted
    before = _trusted
    _trusted = (before or frozenset()) | {Path(file).resolve() for file in files}
    try:
        yield
    finally:
        _trusted = before


def check_trusted(file: Path) -> None:
    """Raise `UserError` for a file that the command was not told to trust."""
    if _trusted is not None and file.resolve() not in _trusted:
        raise UserError(
            f"{file} is a Python file that the run's settings name, and this command runs no file "
            "that you did not name yourself: if the run is yours, add --trust-task to the "
            "command; else read the file first"
        )


def files_named(words: object) -> set[str]:
    """Return the Python files named as `file.py:Name` in a text, or in the texts of a container."""
    if isinstance(words, str):
        file, colon, _ = words.rpartition(":")
        return {file} if colon and file.endswith(".py") else set()
    if isinstance(words, dict):
        words = list(words.values())
    if isinstance(words, list | tuple):
        return set().union(*(files_named(word) for word in words))
    return set()
