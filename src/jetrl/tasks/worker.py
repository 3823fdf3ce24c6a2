"""The process that scores: builds the task, then scores one completion after the other.

Started by scorer.py with `python -c`, so it inherits nothing and imports neither torch nor the
program that started it. It speaks over one socket: the set-up comes in, ("ready", "") or
("error", text) goes out; then lists of pickled (prompt, completion) come in and one reply goes out
for each item, in order. What the task prints goes to a file that the parent reads when the process
dies.

It ends when the parent does: a thread waits for the other end of the socket to close. A score that
takes too long is ended by faulthandler's timer, which needs no interpreter lock, so that it stops a
hanging C function as well, and leaves behind where the score was.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.base import ScoreError, Task, to_score
from jetrl.tasks.messages import describe_error
from jetrl.tasks.registry import get_task
from jetrl.types import Prompt

STDERR = 2


@dataclass(frozen=True)
class Setup:
    """What a worker needs to build its task, and the seconds a score may take."""

    name: str
    path: str | None
    options: Mapping[str, Any]
    timeout_s: float


Reply = tuple[float, dict[str, float], str]  # reward, parts, failure


def main(descriptor: int) -> None:
    """Serve the socket `descriptor` until its other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.enable(file=STDERR)
    connection = Connection(descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    setup: Setup = pickle.loads(connection.recv_bytes())
    try:
        task = get_task(setup.name, path=setup.path, **setup.options)
    except UserError as error:
        connection.send(("error", str(error)))
        return
    except Exception as error:
        connection.send(("error", f"task {setup.name}: {describe_error(error)}"))
        return
    connection.send(("ready", ""))
    while True:
        try:
            items: list[bytes] = connection.recv()
        except EOFError:
            return
        for item in items:
            faulthandler.dump_traceback_later(setup.timeout_s, exit=True, file=STDERR)
            reply = _score_pickled(task, item)
            faulthandler.cancel_dump_traceback_later()
            connection.send(reply)


def _score_pickled(task: Task, item: bytes) -> Reply:
    try:
        prompt, completion = pickle.loads(item)
    except Exception as error:
        return 0.0, {}, f"the prompt does not unpickle in a worker: {describe_error(error)}"
    return score_safely(task, prompt, completion)


def score_safely(task: Task, prompt: Prompt, completion: str) -> Reply:
    """The task's verdict; whatever it raises or wrongly returns becomes reward 0 and a text."""
    try:
        score = to_score(task.score(prompt, completion), task.label, prompt.id)
    except ScoreError as error:
        return 0.0, {}, str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and the like are the task's failures too
        return 0.0, {}, f"score raised {describe_error(error)}"
    return score.reward, dict(score.parts), ""


def _end_with_parent(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-up is reported without being asked for
    poll.poll()
    time.sleep(1.0)  # an idle worker has ended on its own by now
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # with the processes that the task may have started
