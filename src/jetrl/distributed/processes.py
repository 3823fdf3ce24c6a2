"""The processes of this machine, as the system knows them.

Whether a process is gone or stopped can be asked of the system at once, where it is on the same
machine; nothing has to be waited for. Only Linux tells (/proc): elsewhere nothing is known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat, counted after the name of the program


@dataclass(frozen=True)
class ProcessId:
    """A process of a machine, which no later process is mistaken for.

    Attributes:
        machine: The boot of the machine and the process namespace; empty where neither is known.
    """

    machine: str
    pid: int
    born: int


def this_process() -> ProcessId:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        born = int(_fields(os.getpid())[_STARTED])
    except (OSError, IndexError, ValueError):
        return ProcessId("", os.getpid(), 0)
    return ProcessId(machine, os.getpid(), born)


def is_gone(process: ProcessId) -> bool:
    """Return whether a process of this machine has ended, however it did."""
    state = _state(process)
    return state in ("", "Z", "X")


def is_stopped(process: ProcessId) -> bool:
    """Return whether a process of this machine is stopped, as by SIGSTOP."""
    return _state(process) == "T"


def started_before(process: int, moment: float) -> bool | None:
    """Return whether a process of this machine was started before a moment; None if unknown."""
    try:
        ticks = int(_fields(process)[_STARTED])
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    except (OSError, IndexError, StopIteration, ValueError):
        return None
    return boot + ticks / os.sysconf("SC_CLK_TCK") < moment


def _state(process: ProcessId) -> str:
    """Return the letter of a process's state: "" if it is gone, "?" if it cannot be asked now."""
    try:
        fields = _fields(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # such as no free descriptor
        return "?"
    return fields[_STATE] if int(fields[_STARTED]) == process.born else ""


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
