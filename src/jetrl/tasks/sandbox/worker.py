"""Worker process: builds the task, then scores one completion after another.

It imports neither torch nor the main program. Over a socket (wire.py) it receives its setup and
reports if the task could be built; then it receives chunks of items and sends a line per item: a
completion, a turn, or a reward call with all completions of a step. It exits with its parent, along
with its subprocesses.

A score or call has a CPU-time limit, so that results do not depend on machine load, and a
wall-clock limit of CLOCK_FACTOR times that, for scores that wait. System and faulthandler timers
end the process; neither needs the GIL, so they also stop a hanging C function and print its
location. An address-space limit turns excessive memory use into a MemoryError. A process that ran
out of memory, files, threads or processes is not reused, since earlier scores may hold them.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from jetrl.errors import UserError
from jetrl.files import problem_of
from jetrl.tasks import user_files
from jetrl.tasks.base import (
    Answer,
    RewardCall,
    ScoreError,
    Task,
    TrainerState,
    describe_error,
    to_reply,
    to_score,
)
from jetrl.tasks.registry import get_task
from jetrl.tasks.sandbox.wire import MAX_LINE, MAX_OF_CALL, MAX_STEP_REPLY, WorkerReply, reply_line
from jetrl.types import Prompt, Turn
from jetrl.untrusted import USERS_ERRORS, limit_cpu, limit_memory

STDERR = 2
CLOCK_FACTOR = 10  # wall-clock seconds per second of CPU-time limit
_NO_MEMORY = ("failed to map segment", "Cannot allocate", "can't allocate memory", "bad_alloc")
_RAN_OUT = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


@dataclass(frozen=True)
class WorkerSetup:
    """The task that a worker builds, and the limits per score.

    A score may use `timeout_s` of CPU time, and `memory_mib` in addition to the memory of the idle
    worker (0: no limit). `sources` holds the contents of user files by path.
    """

    name: str
    options: Mapping[str, Any]
    timeout_s: float
    memory_mib: int = 0
    sources: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def clock_s(self) -> float:
        """Wall-clock limit per score in seconds."""
        return CLOCK_FACTOR * self.timeout_s


@dataclass(frozen=True)
class Item:
    """A completion to score or, with `step`, a turn to reply to.

    `completion` is the text to score or, in a task with turns, all turns, the last without a reply.
    """

    prompt: Prompt
    completion: str | tuple[Turn, ...]
    step: bool = False


@dataclass(frozen=True)
class CallItem:
    """Completions to pass to the reward functions of a call, all at once."""

    call: RewardCall
    answers: tuple[Answer, ...]
    state: TrainerState


def main(descriptor: int) -> None:
    """Serve the socket `descriptor` until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    faulthandler.enable(file=STDERR)
    # At the CPU-time limit, print the stack and die of the signal.
    faulthandler.register(signal.SIGPROF, file=STDERR, chain=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection, process = socket.socket(fileno=descriptor), os.getpid()
    incoming = connection.makefile("rb")
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    # Build the task, and report success or failure.
    setup: WorkerSetup = pickle.load(incoming)
    user_files.fixed.update(setup.sources)
    try:
        task = get_task(setup.name, **setup.options)
    except USERS_ERRORS as error:
        own = isinstance(error, UserError)
        why = str(error) if own else f"task {setup.name}: {describe_error(error)}"
        connection.sendall(reply_line(WorkerReply(failure=why)))
        return
    if setup.memory_mib:
        limit_memory(setup.memory_mib)
    connection.sendall(reply_line(WorkerReply()))
    # Score chunk after chunk; per item, timers end the process on timeout.
    while True:
        try:
            chunk, items = pickle.load(incoming)
        except EOFError:
            os.killpg(0, signal.SIGKILL)  # with the processes that the task may have started
            return
        for item in items:
            try:
                faulthandler.dump_traceback_later(setup.clock_s, exit=True, file=STDERR)
                limit_cpu(setup.timeout_s)
            except RuntimeError as error:  # its thread: scores before have left too many
                reply = WorkerReply(failure=f"no timer for the score: {error}", last=True)
            else:
                reply = _score_pickled(task, item, setup.memory_mib)
            if os.getpid() != process:
                os._exit(0)  # a forked child of the score: the parent answers
            limit_cpu(0.0)
            faulthandler.cancel_dump_traceback_later()
            reply.chunk = chunk
            connection.sendall(reply_line(reply))
            if reply.last:
                return


def _score_pickled(task: Task, pickled: bytes, memory_mib: int) -> WorkerReply:
    try:
        item: Item | CallItem = pickle.loads(pickled)
    except Exception as error:
        return WorkerReply(
            failure=f"the prompt does not unpickle in a worker: {describe_error(error)}",
            last=bool(_lacking(error)),
        )
    return score_safely(task, item, memory_mib)


def score_safely(task: Task, item: Item | CallItem, memory_mib: int = 0) -> WorkerReply:
    """Return the task's score or reply to a turn, or a failure (which mentions `memory_mib`)."""
    try:
        return _call(task, item) if isinstance(item, CallItem) else _answer(task, item)
    except ScoreError as error:
        lacking = error.__cause__ is not None and _lacking(error.__cause__)
        return WorkerReply(failure=str(error), last=bool(lacking))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # treat SystemExit and similar as task failures
        lacking = _lacking(error)
        limit = f"; task.memory_mib = {memory_mib}" if memory_mib else ""
        failure = f"score raised {describe_error(error)}"
        if lacking == "memory":
            failure = f"score ran out of memory: {describe_error(error)}{limit}"
        return WorkerReply(failure=failure, last=bool(lacking))


def _lacking(error: BaseException) -> str:
    """Return "memory" or "files" if an error or its causes show that those ran out, else ""."""
    cause: BaseException | None = error
    lacking = ""
    for _ in range(10):  # limit: the chain may be cyclic
        if cause is None:
            break
        text = str(cause) if isinstance(cause, ImportError | OSError | RuntimeError) else ""
        if isinstance(cause, MemoryError) or any(words in text for words in _NO_MEMORY):
            return "memory"
        if getattr(cause, "errno", None) in _RAN_OUT or "can't start new thread" in text:
            lacking = "files"  # or threads
        cause = cause.__cause__ or cause.__context__
    return lacking


def _answer(task: Task, item: Item) -> WorkerReply:
    prompt, completion = item.prompt, item.completion
    if item.step:
        assert not isinstance(completion, str)  # Scorer.ask
        *turns, last = completion
        reply = to_reply(task.step(prompt, tuple(turns), last.text), prompt, task.label)
        text = "".join(reply.values()) if isinstance(reply, Mapping) else reply or ""
        if len(text) > MAX_STEP_REPLY:
            problem = f"step returned {len(text)} characters; at most {MAX_STEP_REPLY}"
            raise ScoreError(f"task {task.label}, prompt {prompt.id!r}: {problem}")
        return WorkerReply(step_reply=dict(reply) if isinstance(reply, Mapping) else reply)
    score = to_score(task.score_alone(prompt, completion), task.label, prompt.id)
    text = completion if isinstance(completion, str) else completion[-1].text
    try:
        shown = task.readable(prompt, text)
        return WorkerReply(reward=score.reward, parts=dict(score.parts), readable=shown)
    except ValidationError as error:
        problem = problem_of(error)
        raise ScoreError(f"task {task.label}, prompt {prompt.id!r}: {problem}") from None


def _call(task: Task, item: CallItem) -> WorkerReply:
    result = task.call_rewards(item.call, item.answers, item.state)
    try:
        rewards, notes = dict(result.rewards), dict(result.extra)
        reply = WorkerReply(rewards=rewards, parts=dict(result.metrics), extra=notes)
    except ValidationError as error:
        raise ScoreError(f"{item.call}: {problem_of(error)}") from None
    most = MAX_LINE + MAX_OF_CALL * len(item.answers)
    if len(reply_line(reply)) > most:
        raise ScoreError(f"{item.call}: log_extra notes more than {most} bytes")
    return reply


def _end_with_parent(descriptor: int) -> None:
    """Wait until the parent closes its end of the socket, then kill this session."""
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP is always reported
    poll.poll()
    time.sleep(1.0)  # an idle worker exits by itself
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # with the processes that the task may have started
