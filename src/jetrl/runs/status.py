"""What a run is doing, in a file for others to read: `jetrl doctor RUN` tells from it where a
killed run was. One line of fixed length, overwritten in place, so that it costs no room on a full
disk; nothing waits for it to reach the disk, which a killed process does not need."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from jetrl.runs.storing import storing

_LENGTH = 256
NAME = "status.json"


@dataclass(frozen=True)
class Status:
    """phase: what began last, "" if nothing runs. step: of RL, 0 before the first. time: when it
    began, Unix seconds."""

    phase: str
    step: int
    time: float
    pid: int


class StatusFile:
    """Keeps `status.json` of a run directory, as an observer of its phases."""

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
        """The time is that of the phase's beginning."""

    def end(self, phase: str, seconds: float) -> None:
        self.begin("", self._step)

    def close(self) -> None:
        os.close(self._handle)


def read_status(run_path: Path) -> Status | None:
    """The last status of a run; None if there is none that can be read."""
    try:
        found = json.loads((run_path / NAME).read_text(encoding="utf-8"))
        return Status(
            str(found["phase"]), int(found["step"]), float(found["time"]), int(found["pid"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
