"""Processes that get ready side by side and work in turn, for benchmarks of other engines.

An engine may compile for minutes on one core while the GPU idles. Several get ready together, and
none works while another is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_LINES = 15  # of the log of a process that failed


def in_turn(
    work: Callable[[Any], Iterator[Any]], jobs: Mapping[str, Any], logs: Path, limit: float
) -> Iterator[tuple[str, Any]]:
    """Yield (name, result) of jobs in their order, each as soon as it is there.

    Each job has a process. It fails alone: the end of its log is printed, and the others go on.
    """
    context = multiprocessing.get_context("spawn")
    logs.mkdir(parents=True, exist_ok=True)
    processes, connections = {}, {}
    try:
        for name, job in jobs.items():
            connections[name], theirs = context.Pipe()
            arguments = (work, job, logs / f"{name}.log", theirs)
            processes[name] = context.Process(target=_process, args=arguments)
            processes[name].start()
            theirs.close()
        ready = _ready(connections, limit)
        for name in jobs:
            if name not in ready:
                processes[name].kill()
                _report(name, f"was not ready after {limit:g} s or failed", logs)
        for name in ready:
            connections[name].send(None)
            while (result := _received(connections[name])) is not None:
                yield name, result[0]
            processes[name].join()
            if processes[name].exitcode:
                _report(name, f"ended with {processes[name].exitcode}", logs)
    finally:
        for process in processes.values():
            process.kill()


def _ready(connections: Mapping[str, Connection], limit: float) -> list[str]:
    """Return the names of processes that got ready, in their order."""
    names = {connection: name for name, connection in connections.items()}
    waiting, ready, end = dict(names), set(), time.monotonic() + limit
    while waiting and (left := end - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            name = waiting.pop(connection)
            if _received(connection) is not None:
                ready.add(name)
    return [name for name in connections if name in ready]


def _received(connection: Connection) -> tuple[Any] | None:
    """Return what a process sent, in a tuple; None if it has ended."""
    try:
        return (connection.recv(),)
    except (EOFError, ConnectionResetError):
        return None


def _report(name: str, what: str, logs: Path) -> None:
    """Print what became of a process, and the end of its log."""
    path = logs / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    print(f"{name} {what}; its log ends:", *lines[-_LINES:], sep="\n    ", flush=True)


def _process(
    work: Callable[[Any], Iterator[Any]], job: Any, log: Path, connection: Connection
) -> None:
    """Do a job: say that it is ready, wait for its turn, and send its results."""
    with log.open("wb") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    for index, result in enumerate(work(job)):
        connection.send(result)
        if index == 0:
            connection.recv()
