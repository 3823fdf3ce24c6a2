"""A task that does what its completion says: the ways in which a score can go wrong."""

import ctypes
import faulthandler
import os
import pickle
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from jetrl.tasks import Task
from jetrl.types import Prompt, Score

LEAKED: list[bytearray] = []


LIMITS: list[float] = []  # seconds of each time limit that this worker has set


def let_the_limit_pass() -> None:
    """Let the time limit of the present score end in a moment, however long the limit is.

    Limits are long in these tests, so that no worker exceeds one because it does not get to run.
    """
    faulthandler.dump_traceback_later(0.1, exit=True, file=2)


def let_the_processor_time_pass() -> None:
    """Let the processor time of the present score end in a moment, however long it is."""
    signal.setitimer(signal.ITIMER_PROF, 0.1)


def note_limits() -> None:
    """Keep the seconds of every time limit that is set from now on in `LIMITS`."""
    set_limit, set_timer = faulthandler.dump_traceback_later, signal.setitimer

    def noted(seconds: float, **options: object) -> None:
        LIMITS.append(seconds)
        set_limit(seconds, **options)  # type: ignore[arg-type]

    def noted_timer(which: int, seconds: float) -> None:
        LIMITS.append(seconds)
        set_timer(which, seconds)

    faulthandler.dump_traceback_later = noted  # type: ignore[assignment]
    signal.setitimer = noted_timer  # type: ignore[assignment]


class Touch:
    """A pickle that does harm: whoever unpickles one has a new file."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, (os.environ.get("JETRL_TEST_TOUCH", "touched"), "w")  # type: ignore[return-value]


def socket_to_parent() -> socket.socket:
    """The worker's own connection, as code that got control of the worker would find it."""
    found = [n for n in os.listdir("/proc/self/fd") if "socket" in readlink(n)]
    return socket.socket(fileno=os.dup(int(found[0])))


def readlink(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def send_once_there_is(file: Path) -> None:
    """Send many replies to the parent once it has made `file`."""
    connection = socket_to_parent()
    while not file.exists():
        time.sleep(0.01)
    connection.sendall(SENT["many replies"])


SENT = {
    "pickle": pickle.dumps(Touch()) + b"\n",
    "length and pickle": struct.pack("!i", 60) + pickle.dumps(Touch()) + b"\n",
    "long line": b"x" * 2**20,
    "other fields": b'{"reward": 1.0, "command": "stop"}\n',
    "nan": b'{"reward": NaN, "parts": {}, "failure": "", "last": false, "chunk": ""}\n',
    "bool": b'{"reward": true, "parts": {}, "failure": "", "last": false, "chunk": ""}\n',
    "too large": b'{"reward": 1%s, "parts": {}, "failure": "", "last": false, "chunk": ""}\n'
    % (b"0" * 400),
    "too large for a mean": b'{"reward": 1e308, "parts": {}, "failure": "", "last": false, '
    b'"chunk": ""}\n',
    "list": b"[" * 5000 + b"]" * 5000 + b"\n",
    "parts": b'{"reward": 1, "parts": {"a": "b"}, "failure": "", "last": false, "chunk": ""}\n',
    "not text": b"\xff\xfe\n",
    "many replies": b'{"reward": 1, "parts": {}, "failure": "", "last": false, "chunk": ""}\n'
    * 500,
}


class Awkward(Task):
    name = "awkward"

    def prompts(self, split: str) -> Iterable[Prompt]:
        return [Prompt(id=f"{split}-0", text="?")]

    def score(self, prompt: Prompt, completion: str) -> object:  # type: ignore[override]
        word, _, rest = completion.partition(" ")
        if word in ("hang", "hang-in-c", "hang-in-sleep"):
            if rest != "to the limit":
                (let_the_processor_time_pass if word == "hang-in-c" else let_the_limit_pass)()
            if word == "hang-in-c":
                return re.fullmatch(r"(a+)+b", "a" * 40) is None
            while True:
                time.sleep(600 if word == "hang-in-sleep" else 0.01)
        if word == "touch-and-hang":
            Path(rest).touch()
            while True:
                time.sleep(0.01)
        if word == "slow":
            time.sleep(float(rest))
            return 1.0
        if word == "limits":  # the first of a worker: 0
            if not LIMITS:
                note_limits()
            return float(sum(LIMITS))
        if word == "exit":
            os._exit(int(rest))
        if word == "segfault":
            ctypes.string_at(0)
        if word == "raise":
            raise KeyError(rest)
        if word == "leave":
            sys.exit(3)
        if word == "modules":
            return float("torch" in sys.modules)
        if word == "flood":
            print("x" * 1_000_000)
            return 1.0
        if word == "pid":
            return float(os.getpid())
        if word == "memory":
            self.held = bytearray(int(rest) << 20)
            return 1.0
        if word == "leak":
            LEAKED.append(bytearray(int(rest) << 20))
            return 1.0
        if word == "print-forever":
            while True:
                print("x" * 1_000_000)
        if word == "send":
            socket_to_parent().sendall(SENT[rest])
            return 1.0
        if word == "send-once-there-is":
            threading.Thread(target=send_once_there_is, args=(Path(rest),), daemon=True).start()
            return 1.0
        if word == "parts":
            return Score(1.0, {f"{k}": 1.0 for k in range(int(rest))})
        values: dict[str, object] = {"none": None, "nan": float("nan"), "": 0.0}
        values["part"] = Score(1.0, {"speed": "fast"})  # type: ignore[dict-item]
        return values[word] if word in values else float(word)


class Untested(Awkward):
    """A task without a self-test, so that no score is made when a scorer starts."""

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        return []


class Refuses(Awkward):
    def score(self, prompt: Prompt, completion: str) -> object:
        raise RuntimeError("the checker's package is broken")


class AlwaysZero(Awkward):
    """A task that scores as math-verify does in a thread: no error, and every score 0."""

    def score(self, prompt: Prompt, completion: str) -> float:
        return 0.0

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        return [(Prompt(id="known", text="1+1="), "2", 1.0)]


class Empty(Awkward):
    def prompts(self, split: str) -> Iterable[Prompt]:
        return []


class NotATask:
    pass
