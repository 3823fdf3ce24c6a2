"""A scoring process, from the side that starts it: hands out items, takes in replies, and finds out
what it died of.

The process is a fresh interpreter with a session of its own, so that Ctrl-C does not reach it and
whatever its task started ends with it. What it prints goes to a temporary file, emptied with every
chunk: when it dies, faulthandler's last traceback is in there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from multiprocessing import Pipe
from typing import IO

from jetrl.errors import UserError
from jetrl.tasks.worker import Reply, Setup

START_LIMIT_S = 120.0  # importing a task's packages from a cold disk
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from jetrl.tasks.worker import main
main(int(sys.argv[1]))
"""


class WorkerProcess:
    """One worker process, from the parent's side. `jobs` are the items it has not answered yet."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.jobs: deque[int] = deque()
        self.ready = False
        self.deadline = 0.0
        self._returned: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the process and hand it the task's name; it answers when the task is built."""
        self.connection, theirs = Pipe()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _end)
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"cannot start a scoring worker: {error}") from error
        finally:
            theirs.close()
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        self.connection.send_bytes(pickle.dumps(self.setup))

    def assign(self, indices: list[int], payloads: list[bytes]) -> None:
        """Give an idle worker its next chunk."""
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # the position is shared with the worker
        os.ftruncate(self._output.fileno(), 0)
        self.jobs.extend(indices)
        self._set_deadline()
        try:
            self.connection.send(payloads)
        except OSError:  # it died while idle; no item of the chunk was begun
            self._end()
            self._give_back()

    def receive(self) -> list[tuple[int, Reply]]:
        """The answers that have come in, as (item, reply): the last may be of an item that the
        process died of, or that it was killed for."""
        replies: list[tuple[int, Reply]] = []
        if not self.running:
            return replies
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if self.ready:
                    replies.append((self.jobs.popleft(), message))
                else:
                    self._started(*message)
                self._set_deadline()
        except (EOFError, ConnectionError):
            failure = self._cause_of_death()
        else:
            if time.monotonic() < self.deadline:
                return replies
            failure = f"score took longer than {self.setup.timeout_s:g} s"
            if not self.ready:
                failure = f"not ready after {START_LIMIT_S:g} s"
        self._end()
        if not self.ready:
            raise UserError(f"task {self.setup.name}: its scoring worker did not start: {failure}")
        if self.jobs:
            replies.append((self.jobs.popleft(), (0.0, {}, failure)))
        self._give_back()
        return replies

    def take_back(self) -> list[int]:
        """Items that a worker left unanswered through no fault of theirs."""
        returned, self._returned = self._returned, []
        return returned

    def hang_up(self) -> None:
        """Tell the process to end; it does so at once when idle."""
        if self.running:
            self.connection.close()

    def stop(self, deadline: float = 0.0) -> None:
        """End the process, by force from `deadline` (of time.monotonic) on."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then _end kills it
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self._end()
        self.jobs.clear()

    def _started(self, kind: str, text: str) -> None:
        if kind == "error":
            self._end()
            raise UserError(text)
        self.ready = True

    def _set_deadline(self) -> None:
        """The worker's own timer comes first; this one is for a worker that is not even running."""
        self.deadline = time.monotonic() + 2 * self.setup.timeout_s + 2.0

    def _give_back(self) -> None:
        self._returned.extend(self.jobs)
        self.jobs.clear()

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()  # its session has not begun yet
            process.wait()
        self._process = None
        self.connection.close()
        self._output.close()

    def _cause_of_death(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "score closed the worker's connection"
        size = os.fstat(self._output.fileno()).st_size
        output = os.pread(self._output.fileno(), 100_000, max(0, size - 100_000))
        text = output.decode("utf-8", "replace")
        if not self.ready:
            return f"it ended with code {code}: {text.strip()[-500:] or 'no output'}"
        where = _where(text)
        if code == 1 and "Timeout (" in text:
            return f"score took longer than {self.setup.timeout_s:g} s{where}"
        if code < 0:
            return f"score crashed its worker with {signal.Signals(-code).name}{where}"
        return f"score ended its worker with exit code {code}"


def _where(output: str) -> str:
    """The innermost frame of the score in the last traceback that faulthandler printed."""
    for block in reversed(re.split(r"(?m)^(?:Current t|T)hread 0x", output)):
        frames = re.findall(r'(?m)^  File "(.+)", line (\d+) in (.+)$', block)
        if any(name == "score_safely" for _, _, name in frames):
            file, line, name = frames[0]
            return f" ({file}, line {line}, in {name})"
    return ""
