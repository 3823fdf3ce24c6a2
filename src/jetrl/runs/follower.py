"""Run directory on ranks other than 0, which only write logs.

    runs/NAME/ranks/
      rank_1.txt        Python logging of rank 1, and what it and its libraries print
      rank_1_hang.txt   where it hung, if it did, or waited for a rank that hung
      board.json        where each rank was when one was lost or failed (distributed/peers.py)
      collectives_rank_1.json, nccl_timeout_rank_1
                        its last collectives at that time (distributed/process_group.py)

Only rank 0 creates and writes the directory. Other ranks get what they decide by from rank 0
(`World.from_first`), since rank 0 may write more in the meantime.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl.distributed.console import keep_streams
from jetrl.distributed.world import World, world
from jetrl.runs.attempts import Attempt, end_of_attempt, logging_to, versions
from jetrl.runs.directory import Phase, RunDirectory
from jetrl.runs.storage import storing
from jetrl.settings.loading import Settings
from jetrl.types import Sample, StepStats

FOLDER = "ranks"


def open_run_directory(settings: Settings, plan: Mapping[str, Any], resume: bool) -> RunDirectory:
    """Return the run directory, created or resumed by rank 0; all ranks raise its UserError."""
    made: list[RunDirectory] = []
    keep_streams()  # otherwise console output would go to a run file

    def create() -> tuple[Path, dict[str, tuple[Any, Any]]]:
        made.append(RunDirectory.create(settings, plan, resume=resume))
        if world().size > 1:
            with storing(made[0].path):
                (made[0].path / FOLDER).mkdir(exist_ok=True)
        return made[0].path, made[0].changed_settings

    path, changed_settings = world().from_first("the run directory", create)
    return made[0] if made else FollowedDirectory(path, changed_settings, world())


class FollowedDirectory(RunDirectory):
    """Run directory of a rank other than 0: only its log is written."""

    def __init__(self, path: Path, changed: dict[str, tuple[Any, Any]], own: World) -> None:
        super().__init__(path)
        self.changed_settings = changed
        self.log_file = path / FOLDER / f"rank_{own.rank}.txt"
        self.hang_file = path / FOLDER / f"rank_{own.rank}_hang.txt"
        self._own = own

    @contextlib.contextmanager
    def attempt(
        self, command: Sequence[str], notes: Mapping[str, str] | None = None
    ) -> Iterator[Attempt]:
        """Return a context that sends logging and the process's output to this rank's log."""
        where = {"rank": f"{self._own.rank} of {self._own.size}, on {self._own.node}"}
        attempt = Attempt(time.time(), " ".join(command), versions(), {**where, **(notes or {})})
        log = self.log_file
        with logging_to(log, attempt), _printing_to(log), end_of_attempt(attempt):
            yield attempt

    def end_attempt_for_hang(self, reason: str) -> None:
        """Do nothing: the attempt is rank 0's."""

    def write_step(self, stats: StepStats, phase: Phase = "rl") -> None:
        """Do nothing: rank 0 writes the metrics."""

    def write_rollouts(self, step: int, samples: Iterable[Sample]) -> Path:
        """Return the file that rank 0 writes the samples of a step to."""
        return self._rollouts_file(step)

    def truncate_after(self, step: int, phase: Phase = "rl") -> list[str]:
        """Return no notes: rank 0 drops the lines after a step."""
        return []


@contextlib.contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Append the output of this process and its libraries to a file, within the block."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
    with storing(file), open(file, "ab", buffering=0) as log:
        for descriptor, _ in before:
            os.dup2(log.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, kept in before:
            os.dup2(kept, descriptor)
            os.close(kept)
