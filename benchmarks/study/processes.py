"""Child processes of a study, several per GPU, each of which runs a sequence of commands.

Children have their own sessions, so that Ctrl-C in the terminal reaches only the study. The study
then ends its children: with SIGTERM, on which a run writes a checkpoint, and with SIGKILL if they
do not end.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.study.worker import order_of

from jetrl.runs.storage import storing

POLL_S = 0.1
GRACE_S = 180.0  # for a checkpoint, after SIGTERM
SERVER = (sys.executable, "-m", "benchmarks.study.worker")
CHECKOUT = Path(__file__).resolve().parents[2]  # where a child finds the package `benchmarks`
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A command to run.

    Attributes:
        name: The name of its run.
        words: The words of the command, without the program's name.
        log: The file to which its output is appended.
    """

    name: str
    words: Sequence[str]
    log: Path


class Worker:
    """A process that runs a sequence of commands (`benchmarks.study.worker`).

    Args:
        card: Its GPU; None: all that the study sees.

    Attributes:
        returncode: The exit code of its last command; None while that runs.
    """

    def __init__(
        self, program: Sequence[str], card: str | None, environment: Mapping[str, str]
    ) -> None:
        self.card = card
        self.returncode: int | None = None
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the process has not ended."""
        return self._process.poll() is None

    def order(self, job: Job) -> None:
        """Start a command; the last one must have ended."""
        assert self._process.stdin is not None
        self.returncode = None
        with suppress(BrokenPipeError):  # it has died meanwhile: `poll` returns its exit code
            self._process.stdin.write(order_of(job.words, str(job.log.absolute())))

    def poll(self) -> int | None:
        """Return the exit code of the command; None while it runs."""
        if self.returncode is None:
            ended = self._process.poll()  # before the look at the answer, which may precede it
            self.returncode = 0 if self._has_answered() else ended
        return self.returncode

    def _has_answered(self) -> bool:
        """Return whether the command's answer has arrived, and consume it."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], 0)
        return bool(readable and self._process.stdout.read(64))

    def ask_to_end(self) -> None:
        """Send SIGTERM, on which a run writes a checkpoint."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the idle process and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self.poll()
        self._process.stdout.close()


@dataclass
class Child:
    """A running command.

    Attributes:
        card: Its GPU; None: all that the study sees.
    """

    job: Job
    card: str | None
    process: Worker


class Pool:
    """Slots for child processes, the same number on each GPU.

    Args:
        cards: The GPUs, as CUDA_VISIBLE_DEVICES names them; none: the children run on the CPU.
    """

    def __init__(
        self, cards: Sequence[str], jobs: int, threads: int, program: Sequence[str] = SERVER
    ) -> None:
        self.children: list[Child] = []
        cards_or_cpu: Sequence[str | None] = cards or [None]
        self._places = [card for _ in range(jobs) for card in cards_or_cpu]
        self._program, self._threads = program, threads
        self._idle: list[Worker] = []

    @property
    def size(self) -> int:
        """The number of places, used or free."""
        return len(self._places) + len(self.children)

    @property
    def has_place(self) -> bool:
        """True if another child can start."""
        return bool(self._places)

    def warm_up(self, most: int) -> None:
        """Start processes ahead of their commands."""
        for card in self._places[:most]:
            self._idle.append(self._worker(card))

    def start(self, job: Job) -> Child:
        """Start a command in a free slot, on the GPU with the fewest children."""
        card = self._places.pop(0)
        with storing(job.log):
            job.log.parent.mkdir(parents=True, exist_ok=True)
            with open(job.log, "ab") as log:
                log.write(f"$ jetrl {' '.join(job.words)}\n".encode())
        worker = self._idle_worker(card) or self._worker(card)
        worker.order(job)
        child = Child(job, card, worker)
        self.children.append(child)
        return child

    def _worker(self, card: str | None) -> Worker:
        """Return a new process on a card."""
        environment = dict(os.environ)
        environment |= dict.fromkeys(THREAD_VARIABLES, str(self._threads))
        paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = card
        return Worker(self._program, card, environment)

    def _idle_worker(self, card: str | None) -> Worker | None:
        """Return an idle process on a GPU, if any."""
        for worker in [one for one in self._idle if one.card == card]:
            self._idle.remove(worker)
            if worker.is_alive:
                return worker
            worker.close()
        return None

    def ended(self) -> list[Child]:
        """Return the children that have ended since the last call, and free their slots."""
        gone = [child for child in self.children if child.process.poll() is not None]
        for child in gone:
            self.children.remove(child)
            self._places.append(child.card)
            self._idle.append(child.process)
        return gone

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End all children with SIGTERM, and after the grace period with SIGKILL."""
        for child in self.children:
            child.process.ask_to_end()
        try:
            deadline = time.monotonic() + grace_s
            while self._is_running() and time.monotonic() < deadline:
                time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))
        finally:
            for child in self.children:
                if child.process.poll() is None:
                    child.process.kill()
            for worker in [*(child.process for child in self.children), *self._idle]:
                worker.close()
            self._idle.clear()

    def _is_running(self) -> bool:
        """Return whether a command of a child has not ended yet."""
        return any(child.process.poll() is None for child in self.children)


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log, usually the error message; or ""."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def cards_for(device: str) -> list[str]:
    """Return the GPUs for runs of a device setting, as CUDA_VISIBLE_DEVICES names them."""
    if device == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [card.strip() for card in visible.split(",") if card.strip()]
    return [str(card) for card in range(torch.cuda.device_count())]
