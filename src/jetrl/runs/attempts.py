"""Attempts of a run: each start of the program on a run directory, its phase and its end.

An attempt without an end was killed if nobody holds the lock: an flock on `.lock`, which the system
releases when the process ends. `status.json` holds the current phase in one line of fixed length,
overwritten in place, so that it works on a full disk.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Literal

from jetrl.errors import RunStopped, StorageError, Terminated, UserError
from jetrl.files import checked, open_regular, read_bytes
from jetrl.runs.format import visible
from jetrl.runs.schemas import ATTEMPT_LINE, STATUS, EndState, Status
from jetrl.runs.storage import JsonlWriter, Record, read_jsonl, repair_jsonl, storing

State = Literal["new", "running", "finished", "interrupted", "stopped", "failed"]

PACKAGES = ("jetrl", "torch", "triton", "transformers", "safetensors", "numpy", "math-verify")
LOUD_LIBRARIES = ("transformers", "datasets", "huggingface_hub")
LOCK_RETRIES, LOCK_WAIT_S = 5, 0.05


@dataclass
class Attempt:
    """A start of the program on a run directory; `ended` and `state` are None until the end."""

    started: float
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    ended: float | None = None
    state: EndState | None = None
    reason: str = ""

    def end(self, state: EndState, reason: str = "") -> None:
        """Set how the attempt ends; by default finished, or according to the exception."""
        self.state, self.reason = state, reason


def read_attempts(path: Path) -> list[Attempt]:
    """Return the attempts of a run directory, oldest first."""
    attempts: list[Attempt] = []
    for record in read_jsonl(path / "attempts.jsonl", ATTEMPT_LINE)[0]:
        if record["event"] == "start":
            named = {key: record[key] for key in ("command", "versions", "notes") if key in record}
            attempts.append(Attempt(float(record["time"]), **named))
        elif attempts:
            attempts[-1].ended = float(record["time"])
            attempts[-1].end(record.get("state", "failed"), record.get("reason", ""))
    return attempts


def run_state(path: Path) -> State:
    """Return the state of a run directory.

    A `new` run has not started, an `interrupted` one received a signal or was killed, a `stopped`
    one ended itself early, a `failed` one ended with an error.
    """
    if is_locked(path):
        return "running"
    attempts = read_attempts(path)
    return attempts[-1].state or "interrupted" if attempts else "new"


def versions() -> dict[str, str]:
    """Return the versions of Python, the system, and packages that affect results."""
    versions = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


class RunLock:
    """Exclusive write lock of a run directory."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = open(path / ".lock", "ab")  # noqa: SIM115
        try:
            for _ in range(LOCK_RETRIES):  # a listing may hold it briefly
                if _try_lock(self._file, fcntl.LOCK_EX):
                    _held_locks.add(self)
                    return
                time.sleep(LOCK_WAIT_S)
        except OSError as error:
            self._file.close()
            raise UserError(
                f"run {path.name}: the file system of {path} does not support locks "
                f"({error.strerror}), which keep a second process from writing: set run.dir to a "
                "folder on another file system, or mount this one with locks (Lustre: -o flock)"
            ) from None
        self._file.close()
        raise UserError(
            f"run {path.name}: another process is writing {path}; wait for it or stop it, or "
            "choose another run.name"
        )

    @staticmethod
    def check(path: Path) -> None:
        """Raise UserError if the lock is held or permission is missing; writes nothing."""
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        try:
            if not os.access(there / ".", os.W_OK | os.X_OK):
                code = errno.EACCES if there.is_dir() else errno.ENOTDIR
                raise OSError(code, os.strerror(code))
            if (path / ".lock").exists():
                RunLock(path).release()
        except OSError as error:
            raise UserError(f"run directory {path}: {error.strerror}") from None

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


_held_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()
# Forked workers would share the lock and keep it after this process is killed.
os.register_at_fork(after_in_child=lambda: [*map(RunLock.release, _held_locks)])


def _try_lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return True if a process is writing this run directory; False without file locks."""
    try:
        file = open_regular(path / ".lock")
    except FileNotFoundError:
        return False
    with file:
        try:
            return not _try_lock(file, fcntl.LOCK_SH)
        except OSError:
            return False


class _Visible(logging.Formatter):
    """Log formatter that escapes control characters, which quoted model output may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), newlines=True)


class _LogFile(logging.FileHandler):
    """A log file that only loses lines when the disk is full."""

    _warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True
            with suppress(OSError):
                print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # lines still in the buffer; handleError has warned
            super().close()


@contextmanager
def logging_to(path: Path, attempt: Attempt, notes: Sequence[str] = ()) -> Iterator[None]:
    """Send Python logging (INFO and above) and warnings to a file, below a header."""
    date = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(attempt.started))
    header = [f"==== {date}  {attempt.command}"]
    header += [", ".join(f"{name} {version}" for name, version in attempt.versions.items())]
    header += [f"{name}: {value}" for name, value in attempt.notes.items()]
    with storing(path):
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join([*header, *notes]) + "\n")
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Visible("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    previous_level = root.level
    root.addHandler(handler)
    root.setLevel(min(previous_level or logging.INFO, logging.INFO))
    logging.captureWarnings(True)
    loud = [logging.getLogger(name) for name in LOUD_LIBRARIES]
    quieted = [(logger, logger.propagate, logger.handlers) for logger in loud]
    for logger in loud:
        logger.propagate, logger.handlers = True, []
    try:
        yield
    finally:
        for logger, propagate, handlers in quieted:
            logger.propagate, logger.handlers = propagate, handlers
        logging.captureWarnings(False)
        root.setLevel(previous_level)
        root.removeHandler(handler)
        handler.close()


def write_attempt(path: Path, record: Record) -> None:
    """Append the start or the end of an attempt to attempts.jsonl."""
    file = path / "attempts.jsonl"
    with storing(file):
        repair_jsonl(file, ATTEMPT_LINE)
        with closing(JsonlWriter(file)) as writer:
            writer.write(record)


@contextmanager
def attempt_logged(
    path: Path, command: Sequence[str], notes: Mapping[str, str], remarks: Sequence[str]
) -> Iterator[Attempt]:
    """Record an attempt: its start, its end, and its log in path/log.txt."""
    attempt = Attempt(time.time(), " ".join(command), versions(), dict(notes))
    named = {"command": attempt.command, "versions": attempt.versions, "notes": attempt.notes}
    process = {"pid": os.getpid(), "host": platform.node()}
    write_attempt(path, {"event": "start", "time": attempt.started, **named, **process})
    with logging_to(path / "log.txt", attempt, remarks):
        try:
            with end_of_attempt(attempt):
                yield attempt
        finally:
            # On a full disk, raise only the error that ended the run.
            end = {"time": attempt.ended, "state": attempt.state, "reason": attempt.reason}
            try:
                write_attempt(path, {"event": "end", **end})
            except StorageError as error:
                if attempt.state == "finished":
                    raise
                logging.getLogger("jetrl").error("%s", error)


@contextmanager
def end_of_attempt(attempt: Attempt) -> Iterator[None]:
    log = logging.getLogger("jetrl")
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        signal = "SIGTERM" if isinstance(error, Terminated) else "Ctrl-C"
        attempt.end("interrupted", attempt.reason or signal)
        raise
    except RunStopped as error:
        attempt.end("stopped", str(error))
        log.error("stopped: %s", error)
        raise
    except BaseException as error:
        attempt.end("failed", f"{type(error).__name__}: {error}")
        log.exception("failed")
        raise
    finally:
        attempt.ended = time.time()
        attempt.state = attempt.state or "finished"
        log.info("%s after %.1f s", attempt.state, attempt.ended - attempt.started)


_LENGTH = 256
NAME = "status.json"


class StatusFile:
    """Phase observer that writes `status.json`."""

    def __init__(self, run_path: Path) -> None:
        self._path = run_path / NAME
        with storing(self._path):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)

    def begin(self, phase: str, step: int) -> None:
        status = {"phase": phase, "step": step, "time": time.time(), "pid": os.getpid()}
        with storing(self._path):
            os.pwrite(self._handle, json.dumps(status).ljust(_LENGTH - 1).encode() + b"\n", 0)
        self._step = step

    def beat(self) -> None:
        """Do nothing: the file has the start time of the phase."""

    def end(self, phase: str, seconds: float) -> None:
        """Record that no phase is running."""
        self.begin("", self._step)

    def close(self) -> None:
        os.close(self._handle)


def read_status(run_path: Path) -> Status | None:
    """Return the last status of a run; None if the file is missing or incomplete."""
    path = run_path / NAME
    try:
        status = json.loads(read_bytes(path))
    except UserError:
        raise
    except (FileNotFoundError, RecursionError, ValueError):
        return None
    return checked(STATUS, status, str(path))
