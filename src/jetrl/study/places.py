"""The places for child processes, given to the runs of one study or of several until all are done.

A free place goes to the first part of the queue that has a command which can be started. So the
places that the last runs of one study leave free go to the next study, and so do those that wait
for a supervised start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jetrl.study.processes import POLL_S, Job, Pool
from jetrl.study.progress import Progress, Standing, together
from jetrl.study.sitting import Sitting


@dataclass(frozen=True)
class Part:
    """A part of the queue: runs of one study.

    Attributes:
        sitting: The sitting at the study.
        names: The names of the runs.
    """

    sitting: Sitting
    names: frozenset[str]


def work_off(
    parts: Sequence[Part], pool: Pool, progress: Progress, minutes: float | None = None
) -> None:
    """Work off the runs of studies; those that are running at the end are stopped at a checkpoint.

    Args:
        parts: The parts of the queue; those of one study have the same sitting.
        pool: The places for child processes.
        progress: The console.
        minutes: The minutes after which no run is begun and those that run are stopped at a
            checkpoint; None: no limit.

    Raises:
        KeyboardInterrupt, Terminated: A signal; the runs were stopped before.
        StorageError: A file of a study could not be written; likewise.
    """
    sittings = {str(part.sitting.definition.source): part.sitting for part in parts}

    def standing() -> Standing:
        return together([sitting.standing() for sitting in sittings.values()])

    progress.begin(standing())
    began = time.monotonic()
    try:
        pool.warm_up(sum(len(sitting.left) for sitting in sittings.values()))
        while True:
            for child in pool.ended():
                sittings[child.job.study].take_in(child)
            for child in pool.children:
                sittings[child.job.study].kill_if_due(child)
            _fill(pool, parts)
            progress.show(standing)
            if not pool.children:
                return
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                running = len(pool.children)
                progress.event(f"the time is up: {running} runs stop at a checkpoint")
                return
            time.sleep(POLL_S)
    finally:
        pool.stop()
        progress.close()


def _fill(pool: Pool, parts: Sequence[Part]) -> None:
    """Start commands at the free places, as long as there are both."""
    while pool.has_place:
        job = _next_job(parts)
        if job is None:
            return
        pool.start(job)


def _next_job(parts: Sequence[Part]) -> Job | None:
    """Return the next command: an evaluation, else a training, of the first part that has one."""
    for part in parts:
        if job := part.sitting.next_evaluation(part.names):
            return job
    for part in parts:
        if job := part.sitting.next_training(part.names):
            return job
    return None
