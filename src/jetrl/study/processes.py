"""Child processes of a study, several to a card, each with a log file.

A child has a session of its own, so that Ctrl-C in the terminal reaches the study alone, which then
ends the children one by one: SIGTERM, on which a run leaves a checkpoint, and SIGKILL for those
that do not end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from jetrl.runs.storing import storing

POLL_S = 0.1
GRACE_S = 180.0  # for a checkpoint, after SIGTERM
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A command to run.

    Attributes:
        name: The name of the run that it is for.
        words: The command.
        log: The file that gets what it prints, behind what is in it.
    """

    name: str
    words: Sequence[str]
    log: Path


@dataclass
class Child:
    """A child process that is running.

    Attributes:
        job: Its command.
        card: The GPU that it has; None: it sees those that the study sees.
        process: The process.
    """

    job: Job
    card: str | None
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it with the processes that it started, as a power cut would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Pool:
    """Places for child processes, as many on each card.

    Args:
        cards: The GPUs, as CUDA_VISIBLE_DEVICES names them; none: the children run on the CPU.
        jobs: The number of children on a card, or on the CPU.
        threads: The CPU threads of a child.

    Attributes:
        children: The children that are running.
    """

    def __init__(self, cards: Sequence[str], jobs: int, threads: int) -> None:
        self.children: list[Child] = []
        cards_or_cpu: Sequence[str | None] = cards or [None]
        self._places = [card for _ in range(jobs) for card in cards_or_cpu]
        self._threads = threads

    @property
    def size(self) -> int:
        """The number of places, used or free."""
        return len(self._places) + len(self.children)

    @property
    def has_place(self) -> bool:
        """True if another child may be started."""
        return bool(self._places)

    def start(self, job: Job) -> Child:
        """Start a command at a free place, on the card with the fewest children.

        Raises:
            StorageError: Its log cannot be written.
        """
        card = self._places.pop(0)
        with storing(job.log):
            job.log.parent.mkdir(parents=True, exist_ok=True)
            with open(job.log, "ab") as log:
                log.write(f"$ {' '.join(job.words)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    job.words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(card),
                    start_new_session=True,
                )
        child = Child(job, card, process)
        self.children.append(child)
        return child

    def _environment(self, card: str | None) -> Mapping[str, str]:
        """Return the environment of a child on a card."""
        environment = dict(os.environ)
        environment |= dict.fromkeys(THREAD_VARIABLES, str(self._threads))
        if card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = card
        return environment

    def ended(self) -> list[Child]:
        """Return the children that have ended since the last call; their places are free."""
        gone = [child for child in self.children if child.process.poll() is not None]
        for child in gone:
            self.children.remove(child)
            self._places.append(child.card)
        return gone

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM to all children and wait for their end.

        Args:
            grace_s: Seconds after which those that are left are killed; so they are if the wait is
                interrupted.
        """
        for child in self.children:
            with suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        try:
            deadline = time.monotonic() + grace_s
            for child in self.children:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(deadline - time.monotonic(), POLL_S))
        finally:
            for child in self.children:
                if child.process.poll() is None:
                    child.kill()
                    child.process.wait()


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, where an error message stands; or ""."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def cards_for(device: str) -> list[str]:
    """Return the GPUs for runs of a device setting, as CUDA_VISIBLE_DEVICES names them.

    Args:
        device: The setting run.device: auto, cpu or cuda.
    """
    if device == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [card.strip() for card in visible.split(",") if card.strip()]
    return [str(card) for card in range(torch.cuda.device_count())]
