"""The present phase of a run, in a file for others to read.

`jetrl doctor RUN` reads there where a killed run was. The file is one line of fixed length,
overwritten in place, so that it costs no room on a full disk; nothing waits for it to reach the
disk, which a killed process does not need.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jetrl.errors import UserError
from jetrl.files import checked, read_bytes
from jetrl.runs.schemas import STATUS
from jetrl.runs.storing import storing

_LENGTH = 256
NAME = "status.json"


@dataclass(frozen=True)
class Status:
    """The phase that a run is or was in.

    Attributes:
        phase: The phase that began last; "" if none is running.
        step: The training step; 0 before the first.
    """

    phase: str
    step: int
    time: float
    pid: int


class StatusFile:
    """The writer of a run directory's `status.json`, an observer of the run's phases."""

    def __init__(self, run_path: Path) -> None:
        self._path = run_path / NAME
        with storing(self._path):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)

    def begin(self, phase: str, step: int) -> None:
        """Write that a phase of a training step begins now."""
        status = Status(phase, step, time.time(), os.getpid())
        with storing(self._path):
            os.pwrite(
                self._handle, json.dumps(asdict(status)).ljust(_LENGTH - 1).encode() + b"\n", 0
            )
        self._step = step

    def beat(self) -> None:
        """Do nothing: the file has the time at which the phase began."""

    def end(self, phase: str, seconds: float) -> None:
        """Write that no phase is running."""
        self.begin("", self._step)

    def close(self) -> None:
        os.close(self._handle)


def read_status(run_path: Path) -> Status | None:
    """Return the last status of a run; None if the file is missing, or was cut while written.

    Raises:
        UserError: The file is JSON, and not a status.
    """
    path = run_path / NAME
    try:
        text = read_bytes(path)
        status = json.loads(text)
    except (FileNotFoundError, RecursionError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        return None
    record = checked(STATUS, status, str(path))
    return Status(record.phase, record.step, record.time, record.pid)
