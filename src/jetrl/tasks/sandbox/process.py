"""Parent side of a scoring process: sends items, reads replies, explains crashes.

The process is a fresh interpreter in its own session, so that Ctrl-C does not reach it and its
subprocesses end with it. The tail of its output is kept until the next chunk, for faulthandler's
last traceback. Nothing that it sends or prints can block the parent, fill its memory or run code
there (wire.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import time
from collections import deque
from multiprocessing.connection import wait

from jetrl.distributed.console import keep_streams
from jetrl.errors import RunStopped, UserError
from jetrl.tasks.sandbox.wire import MAX_LINE, WireError, WorkerReply, parse_reply
from jetrl.tasks.sandbox.worker import WorkerSetup
from jetrl.untrusted import start

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # importing a task's packages from a cold disk
KEPT_OUTPUT = 100_000  # bytes, enough for a traceback of many threads
_READ = 2**16
_PROGRAM = "from jetrl.tasks.sandbox.worker import main\nmain(int(sys.argv[2]))"


class _Channel:
    """The parent's end of a worker's socket: sends pickles, reads lines of limited length."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.max_line = MAX_LINE
        self._begun_line = b""

    def send(self, value: object, deadline: float) -> bool:
        """Send a value; return False if the process is gone or does not read by `deadline`."""
        self.connection.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            self.connection.sendall(pickle.dumps(value))
        except OSError:
            return False
        return True

    def has_spoken(self) -> bool:
        """Return True if bytes or end-of-file can be read without blocking."""
        return bool(wait([self.connection], timeout=0))

    def read_lines(self) -> list[bytes]:
        """Return complete lines received so far; raise EOFError if the process is gone."""
        self.connection.settimeout(0)
        try:
            data = self.connection.recv(_READ)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._begun_line = (self._begun_line + data).split(b"\n")
        if max(map(len, [*lines, self._begun_line])) > self.max_line:
            raise WireError(f"a line of more than {self.max_line} bytes")
        return lines


class _Output:
    """The tail of a worker's output, which a pipe carries; `pipe` is None at its end."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self.pipe: int | None = pipe
        self.tail = b""

    def read(self) -> bool:
        """Read a bounded piece of the process's output; return True if there was any."""
        if self.pipe is None:
            return False
        try:
            data = os.read(self.pipe, _READ)
        except BlockingIOError:
            return False
        self.tail = (self.tail + data)[-KEPT_OUTPUT:]
        if not data:
            self.close()
        return bool(data)

    def close(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None


class WorkerProcess:
    """A worker process, seen from the parent.

    Attributes:
        jobs: Tickets of unanswered items; items left unanswered through no fault of their own go
            back to the front of `pending`.
        lost_s: Seconds lost to fatal scores and restarts.
        deadline: Time (time.monotonic) by which the next answer must arrive.
    """

    def __init__(self, setup: WorkerSetup, pending: deque[int]) -> None:
        self.setup = setup
        self.pending = pending
        self.jobs: deque[int] = deque()
        self.ready = False
        self.deadline = 0.0
        self.lost_s = 0.0
        self._starts = 0
        self._deaths_at_start = 0  # in a row
        self._has_worked = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the process, which replies once its task is built."""
        keep_streams()  # otherwise output could go to a worker
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        self.channel, self.output = _Channel(ours), _Output(read_end)
        self._chunk = ""
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
        try:
            self._process = start(
                _PROGRAM,
                str(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        except OSError as error:
            self._close_channels()
            raise self._no_start(f"cannot start a scoring worker: {error}") from error
        finally:
            theirs.close()
            os.close(write_end)
        self.ready = self._was_busy = False
        self._answered = 0
        self._starts += 1
        self._began = time.monotonic()
        self.deadline = self._began + START_LIMIT_S
        self.channel.send(self.setup, self.deadline)

    def assign(self, tickets: list[int], payloads: list[bytes], max_line: int = MAX_LINE) -> None:
        """Send an idle worker its next chunk of tickets and pickled items; limit its answers."""
        self.channel.max_line = max_line
        self.output.read()
        self.output.tail = b""
        self.jobs.extend(tickets)
        self._set_deadline()
        self._chunk = secrets.token_hex(8)
        # It died or wrote while idle: no item of the chunk has started.
        sent = not self.channel.has_spoken() and self.channel.send(
            (self._chunk, payloads), self.deadline
        )
        if not sent:
            self._end()
            self.give_back()

    @property
    def channels(self) -> list[socket.socket | int]:
        """The channels of answers and of output."""
        connection, pipe = self.channel.connection, self.output.pipe
        return [connection] if pipe is None else [connection, pipe]

    def receive(self) -> list[tuple[int, WorkerReply]]:
        """Return the answers so far as (ticket, reply); the last may be for a fatal item."""
        replies: list[tuple[int, WorkerReply]] = []
        died = False
        if not self.running:
            return replies
        self.output.read()
        try:
            for line in self.channel.read_lines():
                took_s = time.monotonic() - self._began
                self._set_deadline()
                reply = parse_reply(line)
                if not self.ready:
                    if reply.failure:
                        self._end()
                        raise self._no_start(reply.failure)
                    self.ready = self._has_worked = True
                    self._deaths_at_start = 0
                    self.lost_s += took_s if self._starts > 1 else 0.0
                    continue
                if not self.jobs or reply.chunk != self._chunk:
                    raise WireError("an answer to what it was not given")
                if reply.last:
                    # Memory or files may have been exhausted by earlier items: retry in a fresh
                    # process.
                    if self._answered == 0:
                        replies.append((self.jobs.popleft(), reply))
                    self.lost_s += took_s
                    self._end()
                    self.give_back()
                    return replies
                replies.append((self.jobs.popleft(), reply))
                self._answered += 1
        except EOFError:
            failure, died = self._cause_of_death(), True
        except WireError as error:
            failure = f"score made its worker send what is no answer: {error}"
        else:
            if time.monotonic() < self.deadline:
                return replies
            failure = f"score took longer than {self.setup.clock_s:g} s by the clock"
            if not self.ready:
                failure = f"not ready after {START_LIMIT_S:g} s"
        # The process died, sent garbage or timed out: its current item fails.
        self._end()
        if not self.ready:
            self._failed_start(failure, died)
            return replies
        if self.jobs:
            # The reader may be late, but the process's own timers are exact.
            lost_s = min(time.monotonic(), self.deadline) - self._began
            self.lost_s += min(lost_s, self.setup.timeout_s) if self._was_busy else lost_s
            replies.append((self.jobs.popleft(), WorkerReply(failure=failure)))
        self.give_back()
        return replies

    def give_back(self) -> None:
        """Return unanswered items to the front of the pending ones."""
        self.pending.extendleft(reversed(self.jobs))
        self.jobs.clear()

    def hang_up(self) -> None:
        """Ask the process to exit; an idle one exits immediately."""
        if self.running:
            self.channel.connection.close()

    def stop(self, deadline: float = 0.0) -> None:
        """End the process, and kill it after `deadline` (time.monotonic)."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then _end kills it
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self._end()
        self.jobs.clear()

    def _failed_start(self, failure: str, died: bool) -> None:
        self._deaths_at_start += died
        if not died or self._deaths_at_start > 1:
            raise self._no_start(
                f"task {self.setup.name}: its scoring worker did not start: {failure}"
            )
        logger.warning("a scoring worker died while it started, and is started again: %s", failure)

    def _no_start(self, why: str) -> UserError | RunStopped:
        """Return the error to raise: UserError at the first start, later RunStopped."""
        if not self._has_worked:
            return UserError(why)
        return RunStopped(f"{why}. It had started before; go on with --resume once it does again")

    def _set_deadline(self) -> None:
        """Set a deadline later than the worker's own timer, in case the worker is stopped."""
        self._began = time.monotonic()
        self.deadline = self._began + 2 * self.setup.clock_s + 2.0

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        try:  # also if it has ended by itself: what its task started has not
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()  # its session has not begun yet, or nobody is left in it
        process.wait()
        self._process = None
        self._close_channels()

    def _close_channels(self) -> None:
        self.channel.connection.close()
        self.output.close()

    def _cause_of_death(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "score closed the worker's connection"
        for _ in range(4):  # a pipe's whole content; what escaped the process may continue writing
            if not self.output.read():
                break
        text = self.output.tail.decode("utf-8", "replace")
        if not self.ready:
            return f"it ended with code {code}: {text.strip()[-500:] or 'no output'}"
        where = _where(text)
        # A score that prints without end may have pushed the timer's own words out.
        late = time.monotonic() - self._began >= self.setup.clock_s
        if code == 1 and (late or "Timeout (" in text):
            return f"score took longer than {self.setup.clock_s:g} s by the clock{where}"
        if code == -signal.SIGPROF:
            self._was_busy = True
            return f"score took longer than {self.setup.timeout_s:g} s of processor time{where}"
        if code < 0:
            return f"score crashed its worker with {signal.Signals(-code).name}{where}"
        return f"score ended its worker with exit code {code}"


def _where(output: str) -> str:
    """Return the innermost frame of the score in the last traceback of faulthandler."""
    for block in reversed(re.split(r"(?m)^(?:Current t|T)hread 0x", output)):
        frames = re.findall(r'(?m)^  File "(.+)", line (\d+) in (.+)$', block)
        if any(name == "score_safely" for _, _, name in frames):
            file, line, name = frames[0]
            return f" ({file}, line {line}, in {name})"
    return ""
