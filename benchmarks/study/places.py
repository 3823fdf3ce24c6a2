"""The places for child processes, given to the runs of one study or of several until all are done.

A free place goes to the first part of the queue that has a command which can be started. So the
places that the last runs of one study leave free go to the next study, and so do those that wait
for a supervised start. What is trained is evaluated before anything else begins, since nothing is
kept of a run until then. Where the time is limited, a run that would not end in it, by those that
are done, leaves its place to a shorter one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.study.processes import POLL_S, Job, Pool
from benchmarks.study.progress import Progress, Standing, together
from benchmarks.study.sitting import Sitting


@dataclass(frozen=True)
class Part:
    """A part of the queue: runs of one study.

    Attributes:
        sitting: The sitting at the study.
        names: The names of the runs.
    """

    sitting: Sitting
    names: frozenset[str]


@dataclass(frozen=True)
class TimeLimit:
    """Seconds after which the runs that are left are stopped.

    Attributes:
        seconds: The seconds.
        end: The time of `time.monotonic` at which they are over.
    """

    seconds: float
    end: float

    @property
    def is_over(self) -> bool:
        """True once the time is up."""
        return time.monotonic() > self.end

    def has_room_for(self, seconds: float) -> bool:
        """Return whether a run should begin now, by the seconds that it is expected to take.

        One that takes longer than the whole limit may: it is stopped, and resumed another time.
        """
        return seconds <= self.end - time.monotonic() or seconds > self.seconds


def work_off(
    parts: Sequence[Part], pool: Pool, progress: Progress, minutes: float | None = None
) -> None:
    """Work off the runs of studies; those that are running at the end are stopped at a checkpoint.

    Args:
        parts: The parts of the queue; those of one study have the same sitting.
        pool: The places for child processes.
        progress: The console.
        minutes: The minutes after which the runs that are left are stopped at a checkpoint; None:
            no limit.

    Raises:
        KeyboardInterrupt, Terminated: A signal; the runs were stopped before.
        StorageError: A file of a study could not be written; likewise.
    """
    sittings = {str(part.sitting.definition.source): part.sitting for part in parts}

    def standing() -> Standing:
        return together([sitting.standing() for sitting in sittings.values()])

    progress.begin(standing())
    seconds = math.inf if minutes is None else 60 * minutes
    limit = TimeLimit(seconds, time.monotonic() + seconds)
    try:
        pool.warm_up(sum(len(sitting.left) for sitting in sittings.values()))
        while True:
            for child in pool.ended():
                sittings[child.job.study].take_in(child)
            for child in pool.children:
                sittings[child.job.study].kill_if_due(child)
            _fill(pool, parts, limit)
            progress.show(standing)
            if not pool.children:
                if any(sitting.left for sitting in sittings.values()):
                    progress.event("no run that is left would end before the time is up")
                return
            if limit.is_over:
                running = len(pool.children)
                progress.event(f"the time is up: {running} runs stop at a checkpoint")
                return
            time.sleep(POLL_S)
    finally:
        pool.stop()
        progress.close()


def _fill(pool: Pool, parts: Sequence[Part], limit: TimeLimit) -> None:
    """Start commands at the free places, as long as there are both."""
    while pool.has_place:
        job = _next_job(parts, limit)
        if job is None:
            return
        pool.start(job)


def _next_job(parts: Sequence[Part], limit: TimeLimit) -> Job | None:
    """Return the next command: an evaluation, else a training, of the first part that has one."""
    for part in parts:
        if job := part.sitting.next_evaluation(part.names):
            return job
    for part in parts:
        if job := part.sitting.next_training(part.names, limit.has_room_for):
            return job
    return None
