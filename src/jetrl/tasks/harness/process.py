"""The harness process, seen from jetrl: starts it, sends it episodes, explains its end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jetrl.errors import UserError
from jetrl.types import Json
from jetrl.untrusted import check_trusted

logger = logging.getLogger(__name__)

START_LIMIT_S = 300.0  # importing a harness's packages from a cold disk
_HOST = Path(__file__).with_name("host.py")
_MOST_LINE = 2**26


@dataclass(frozen=True)
class HarnessSpec:
    """A harness, and how it is run.

    Attributes:
        target: `module:name` or `file.py:name` of a function or class; "" with a command.
        python: Interpreter that has the harness's packages.
        slots: How many episodes it plays at once.
    """

    target: str
    arguments: Json = field(default_factory=dict)
    command: Sequence[str] = ()
    python: str = sys.executable
    slots: int = 64

    @property
    def label(self) -> str:
        return self.target or " ".join(self.command)

    def check_trusted(self) -> None:
        """Raise UserError if a recipe from elsewhere names this harness."""
        place = self.command[0] if self.command else self.target.rpartition(":")[0]
        for name in {place, self.python} - {sys.executable}:
            check_trusted(Path(name))


class HarnessDied(Exception):  # noqa: N818  (what happened)
    """The process has ended; the message says how."""


class HarnessProcess:
    """A running harness process; `close` ends it with all that it started.

    Args:
        wake: Called, in another thread, when there is an answer.

    Raises:
        UserError: The harness does not start.
    """

    def __init__(self, spec: HarnessSpec, wake: Callable[[], None] = lambda: None) -> None:
        self._spec, self._wake = spec, wake
        self._answers: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._said: deque[str] = deque(maxlen=20)
        try:
            self._process = subprocess.Popen(
                [spec.python, "-u", str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"task.options.python = {spec.python}: {error.strerror}") from None
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._listen, self._log)
        ]
        for reader in self._readers:
            reader.start()
        setup = {"target": spec.target, "arguments": dict(spec.arguments), "slots": spec.slots}
        try:
            self._ask(setup | {"command": list(spec.command)})
        except BaseException:
            self.close()
            raise

    def rows(self, split: str) -> list[Any]:
        """Return the harness's own rows of a split."""
        rows = self._ask({"rows": split}).get("rows")
        if not isinstance(rows, list):
            raise UserError(f"harness {self._spec.label}: its rows are no list")
        return rows

    def play(self, number: int, episode: Json, timeout_s: float) -> None:
        """Begin an episode, whose answer has this number."""
        with contextlib.suppress(OSError):  # `answer` says how it ended
            self._send({"id": number, "timeout_s": timeout_s, "episode": episode})

    def answer(self) -> Json | None:
        """Return the next answer, None if there is none yet; raise HarnessDied at the end."""
        try:
            line = self._answers.get_nowait()
        except queue.Empty:
            return None
        if line is None:
            self._answers.put(None)
            raise HarnessDied(self._end())
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(2.0)  # a command's children may hold the pipes

    def _ask(self, line: Json) -> Json:
        """Send a line and return its answer, before any episode runs."""
        where = f"harness {self._spec.label}"
        with contextlib.suppress(OSError):
            self._send(line)
        try:
            answer = self._answers.get(timeout=START_LIMIT_S)
        except queue.Empty:
            raise UserError(f"{where}: no answer after {START_LIMIT_S:g} s") from None
        if answer is None:
            raise UserError(f"{where}: {self._end()}")
        if "error" in answer:
            raise UserError(f"{where}: {answer['error']}")
        return answer

    def _send(self, line: Json) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def _listen(self) -> None:
        """Read the answers, in a thread."""
        pipe = self._process.stdout
        assert pipe is not None
        while line := pipe.readline(_MOST_LINE):
            try:
                answer = json.loads(line)
            except ValueError:
                break
            self._answers.put(answer)
            self._wake()
        self._answers.put(None)
        self._wake()

    def _log(self) -> None:
        """Log what the harness prints, in a thread, and keep its end."""
        pipe: IO[bytes] | None = self._process.stderr
        assert pipe is not None
        for line in iter(lambda: pipe.readline(2**16), b""):
            text = line.decode(errors="replace").rstrip()
            if text:
                self._said.append(text)
                logger.info("harness: %s", text)

    def _end(self) -> str:
        """Return how the process ended, with the last that it printed."""
        code = self._process.wait()
        self._readers[1].join(1.0)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = f"; it printed last: {self._said[-1]}" if self._said else ""
        return f"the harness process ended with {how}{said}"
