"""Writing a run directory: rank 0 writes all files of a run, other ranks only logs.

    runs/NAME/ranks/
      rank_1.txt        Python logging of rank 1, and the output of its process and libraries
      rank_1_hang.txt   stacks of rank 1 if it hung, or waited for a rank that hung
      board.json        state of each rank when one was lost or failed (distributed/peers.py)
      collectives_rank_1.json, nccl_timeout_rank_1
                        its last collectives at that time (distributed/process_group.py)

Other ranks receive from rank 0 every value read from the directory (`World.from_first`), since
rank 0 may write more in the meantime.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from jetrl.distributed.console import keep_streams
from jetrl.distributed.world import World, world
from jetrl.errors import StorageError, UserError, is_of_disk
from jetrl.runs import schemas
from jetrl.runs.attempts import (
    Attempt,
    RunLock,
    attempt_logged,
    end_of_attempt,
    logging_to,
    versions,
    write_attempt,
)
from jetrl.runs.digest import Digest
from jetrl.runs.directory import (
    READING,
    RunDirectory,
    check_plan,
    check_readable,
    check_use,
    path_of_run,
    settings_that_differ,
)
from jetrl.runs.history import in_phase, phase_of
from jetrl.runs.metrics import check_metrics
from jetrl.runs.schemas import Phase, record_of
from jetrl.runs.storage import (
    JsonlWriter,
    Record,
    repair_jsonl,
    storing,
    write_atomically,
    write_jsonl,
)
from jetrl.settings.loading import Settings, to_toml
from jetrl.types import Sample, StepStats
from jetrl.types.images import preview

PHASE_ORDER: dict[str, int] = {"sft": 0, "rl": 1}
FOLDER = "ranks"


class RunWriter(RunDirectory):
    """A run directory that this process writes, locked until `close`.

    `notes` are messages for the user. A resume reports `changed_settings` and writes them in
    `truncate_after`, which is called once a checkpoint is known to fit them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.log_file = path / "log.txt"
        self.hang_file = path / "hang.txt"
        self.changed_settings: dict[str, tuple[Any, Any]] = {}
        self.notes: list[str] = []
        self._lock: RunLock | None = None
        self._metrics_writer: JsonlWriter | None = None
        self._last: tuple[int, int] = (-1, -1)
        self._new_config = ""  # settings of a resume, until written by `truncate_after`

    @classmethod
    def create(cls, settings: Settings, plan: Record, *, resume: bool = False) -> RunWriter:
        """Create the directory settings.run.dir / settings.run.name, or resume its run.

        Raises UserError if the name is unfit or in use, another process writes the run, there is
        nothing to resume, the precision plan has changed, or permission is missing; StorageError if
        the disk is full.
        """
        run = cls(path_of_run(settings))
        check_readable(settings, plan)
        try:
            check_use(run.path, resume)
            for folder in (run.path, run.rollouts_dir, run.checkpoints_dir):
                folder.mkdir(parents=True, exist_ok=True)
            run._lock = RunLock(run.path)
            try:
                _remove_temporary_files(run.path, run.rollouts_dir)
                run._write_settings(settings, plan, resume)
                run._open_metrics()
            except BaseException:
                run.close()
                raise
        except OSError as error:
            kind = StorageError if is_of_disk(error) else UserError
            raise kind(f"run directory {run.path}: {error.strerror or error}") from None
        return run

    def attempt(
        self, command: Sequence[str], notes: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Attempt]:
        """Return a context that records this attempt, with all Python logging in log.txt."""
        self._check_present()
        return attempt_logged(self.path, command, notes or {}, remarks=self.notes)

    def end_attempt_for_hang(self, reason: str) -> None:
        """Record from another thread that the attempt failed, when its own thread hangs."""
        end = {"event": "end", "time": time.time(), "state": "failed", "reason": reason}
        write_attempt(self.path, end)

    def write_step(
        self, stats: StepStats, phase: Phase = "rl", digest: Digest | None = None
    ) -> None:
        """Append a step's metrics and digest; a process killed after this call keeps them.

        Raises ValueError if a metric is not registered, or the step is not after the last one.
        """
        self._check_present()
        position = (PHASE_ORDER[phase], stats.step)
        if position <= self._last:
            raise ValueError(f"{phase} step {stats.step} is out of order in {self.metrics_file}")
        record = {
            "step": stats.step,
            "time": time.time(),
            **({"phase": phase} if phase != "rl" else {}),
            **check_metrics(stats.metrics),
            **({} if digest is None else {"digest": dict(digest)}),
        }
        assert self._metrics_writer is not None
        with storing(self.metrics_file):
            self._metrics_writer.write(record)
        self._last = position

    def write_rollouts(self, step: int, samples: Iterable[Sample]) -> Path:
        self._check_present()
        path, samples = self.rollouts_file(step), list(samples)
        images = {i.digest.hex(): i for sample in samples for i in sample.prompt.images}
        with storing(path):
            for digest, image in images.items():
                file = self.preview_file(digest)
                if not file.exists():
                    file.parent.mkdir(exist_ok=True)
                    write_atomically(file, preview(image))
            write_jsonl(path, (record_of(step, sample) for sample in samples))
        return path

    def truncate_after(self, step: int, phase: Phase = "rl") -> list[str]:
        """Drop the metrics and rollouts after a step, and write the settings of the resumed run.

        All RL steps come after the steps of the phase "sft". Returns notes about lost lines.
        """
        self._check_present()
        if self._new_config:
            with storing(self.path / "config.toml"):
                write_atomically(self.path / "config.toml", self._new_config)
        limit = (PHASE_ORDER[phase], step)
        records = self.metrics()
        kept = [r for r in records if _position(r) <= limit]
        if len(kept) < len(records):
            self._close_metrics()
            with storing(self.metrics_file):
                write_jsonl(self.metrics_file, kept)
            self._open_metrics()
        with storing(self.rollouts_dir):
            for written in self.rollout_steps():
                if (PHASE_ORDER["rl"], written) > limit:
                    self.rollouts_file(written).unlink()
        last = max((record["step"] for record in in_phase(kept, phase)), default=0)
        following = step + (phase == "sft")  # an RL step's line may be only in its checkpoint
        if last >= following - 1:
            return []
        note = (
            f"{self.metrics_file} has lost the lines of steps {last + 1} to {following - 1}; it "
            f"continues with step {following}"
        )
        logging.getLogger("jetrl").warning("%s", note)
        return [note]

    def write_reading(self, sentence: str) -> None:
        with storing(self.path / READING):
            write_atomically(self.path / READING, sentence + "\n")

    def close(self) -> None:
        """Close the files and release the lock; may be called twice."""
        self._close_metrics()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_settings(self, settings: Settings, plan: Record, resume: bool) -> None:
        config_text = to_toml(settings)
        if resume:
            check_plan(self.path, plan)
            self.changed_settings = settings_that_differ(self.config(), tomllib.loads(config_text))
            self.notes += [
                f"changed on resume: {key}: {old} -> {new}"
                for key, (old, new) in self.changed_settings.items()
            ]
            self._new_config = config_text
            return
        write_atomically(self.path / "plan.json", json.dumps(dict(plan), indent=2) + "\n")
        write_atomically(self.path / "config.toml", config_text)

    def _open_metrics(self) -> None:
        records, note = repair_jsonl(self.metrics_file, schemas.METRICS_LINE)
        if note:
            self.notes.append(note)
        self._last = max((_position(r) for r in records), default=(-1, -1))
        self._metrics_writer = JsonlWriter(self.metrics_file)

    def _close_metrics(self) -> None:
        if self._metrics_writer is not None:
            self._metrics_writer.close()
            self._metrics_writer = None

    def _check_present(self) -> None:
        if self._metrics_writer is not None and not self.metrics_file.is_file():
            raise StorageError(
                f"{self.metrics_file} was deleted during the run, so the run stops: restore "
                f"{self.path} from a copy and continue with --resume, or start a new run"
            )


def _remove_temporary_files(*folders: Path) -> None:
    """Remove the files that a killed process was writing."""
    for folder in folders:
        for pattern in (".*.tmp", ".*.tmp.before"):
            for left in folder.glob(pattern):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _position(record: Record) -> tuple[int, int]:
    return PHASE_ORDER[phase_of(record)], record["step"]


class FollowingWriter(RunWriter):
    """Run directory on a rank other than 0: only its log is written."""

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

    def write_step(
        self, stats: StepStats, phase: Phase = "rl", digest: Digest | None = None
    ) -> None:
        """Do nothing: rank 0 writes the metrics."""

    def write_rollouts(self, step: int, samples: Iterable[Sample]) -> Path:
        """Return the file that rank 0 writes the samples of a step to."""
        return self.rollouts_file(step)

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


def open_run_directory(settings: Settings, plan: Record, resume: bool) -> RunWriter:
    """Return the run directory, created or resumed by rank 0; all ranks raise its UserError."""
    made: list[RunWriter] = []
    keep_streams()  # otherwise console output would go to a run file

    def create() -> tuple[Path, dict[str, tuple[Any, Any]]]:
        made.append(RunWriter.create(settings, plan, resume=resume))
        if world().size > 1:
            with storing(made[0].path):
                (made[0].path / FOLDER).mkdir(exist_ok=True)
        return made[0].path, made[0].changed_settings

    path, changed_settings = world().from_first("the run directory", create)
    return made[0] if made else FollowingWriter(path, changed_settings, world())
