"""Run directory: all files of one run.

    runs/NAME/
      config.toml                   the resolved settings
      plan.json                     the precision plan
      metrics.jsonl                 one line per step (docs/metrics.md)
      rollouts/step_NNNNNN.jsonl    the step's completions with their log-probs and rewards
      checkpoints/                  written by the trainer
      checkpointed.txt              exists once a checkpoint has been written
      log.txt                       Python logging, with a header per attempt
      attempts.jsonl                each start of the program, and how it ended
      status.json                   current phase, or the phase in which the run was killed
      hang.txt                      stacks of a hang (session/watchdog.py)
      reading.txt                   how to read the task's completions, if that is not obvious
      report.html, plots/           written by `write_report`

`create` makes or resumes a run directory and holds a lock until `close`; `open` reads one, even
while another process writes it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Self

from jetrl.errors import StorageError, UserError, is_of_disk
from jetrl.files import MOST_BYTES, checked, read_stored, read_text
from jetrl.runs import schemas
from jetrl.runs.attempts import Attempt, RunLock, attempt_logged, read_attempts, run_state
from jetrl.runs.history import RunHistory, history_of, in_phase, phase_of
from jetrl.runs.metrics import check_metrics
from jetrl.runs.schemas import Phase, record_of
from jetrl.runs.storage import (
    JsonlWriter,
    Record,
    read_jsonl,
    repair_jsonl,
    storing,
    write_atomically,
    write_jsonl,
)
from jetrl.settings.loading import Settings, to_toml
from jetrl.settings.presets import PRESETS
from jetrl.types import Sample, StepStats

PHASE_ORDER: dict[str, int] = {"sft": 0, "rl": 1}
MAX_NAME = 120
READING = "reading.txt"
_FOLDERS = ("rollouts", "checkpoints", "plots", "ranks")


class RunDirectory:
    """A run directory for reading or writing; `notes` are messages of `create` for the user."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_file = path / "log.txt"
        self.hang_file = path / "hang.txt"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints_dir = path / "checkpoints"
        self.checkpointed_file = path / "checkpointed.txt"
        self.rollouts_dir = path / "rollouts"
        self.changed_settings: dict[str, tuple[Any, Any]] = {}
        self.notes: list[str] = []
        self._lock: RunLock | None = None
        self._metrics_writer: JsonlWriter | None = None
        self._last: tuple[int, int] = (-1, -1)
        self._new_config = ""  # settings of a resume, until written by `truncate_after`

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(
        cls, settings: Settings, plan: Mapping[str, Any], *, resume: bool = False
    ) -> RunDirectory:
        """Create the directory settings.run.dir / settings.run.name, or resume its run.

        A resume reports changed settings. They are written later by `truncate_after`, which is
        called with the checkpoint's step once the checkpoint is known to fit them.

        Raises UserError if the name is unfit or in use, another process writes the run, there is
        nothing to resume, the precision plan has changed, or permission is missing; StorageError if
        the disk is full.
        """
        run = cls(Path(settings.run.dir) / _checked_name(settings.run.name))
        _check_readable(settings, plan)
        try:
            run._check_use(resume)
            for folder in (run.path, run.rollouts_dir, run.checkpoints_dir):
                folder.mkdir(parents=True, exist_ok=True)
            run._lock = RunLock(run.path)
            try:
                run._sweep()
                run._write_settings(settings, dict(plan), resume)
                run._open_metrics()
            except BaseException:
                run.close()
                raise
        except OSError as error:
            kind = StorageError if is_of_disk(error) else UserError
            raise kind(f"run directory {run.path}: {error.strerror or error}") from None
        return run

    @classmethod
    def settings_of_resume(cls, settings: Settings) -> Settings:
        """Return a resume's settings: the run's own formats for those that presets have changed."""
        # `unified` had FP8 keys before INT8 keys, `bf16` and `mixed` rounded to nearest.
        run = cls(Path(settings.run.dir) / _checked_name(settings.run.name))
        precision, preset = settings.precision, PRESETS[settings.precision.preset]
        plan = run.plan() if (run.path / "plan.json").is_file() else {}
        if plan.get("name") != precision.preset:
            return settings
        for key, absent in (("kv", None), ("bf16_rounding", "nearest")):
            own = plan.get(key, absent)
            if getattr(precision, key) is None and own not in (None, getattr(preset, key)):
                precision = precision.model_copy(update={key: own})
        return settings.model_copy(update={"precision": precision})

    @classmethod
    def check(cls, settings: Settings, plan: Mapping[str, Any], resume: bool) -> None:
        """Raise the errors of `create` before anything slow is loaded; leaves no files."""
        run = cls(Path(settings.run.dir) / _checked_name(settings.run.name))
        _check_readable(settings, plan)
        run._check_use(resume)
        if resume:
            run._check_plan(plan)
        RunLock.check(run.path)
        folders = (run.path, *run.path.absolute().parents)
        above = next(folder for folder in folders if folder.exists())
        try:  # os.access is always True for root
            os.rmdir(tempfile.mkdtemp(prefix=".jetrl-", dir=above))
        except OSError as error:
            why = f"cannot write into {above}: {error.strerror or error}; set run.dir"
            raise UserError(f"run directory {run.path}: {why}") from None

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path}: no such run directory")
        if not (path / "config.toml").is_file():
            raise UserError(f"{path}: not a run directory (it has no config.toml)")
        return cls(path)

    def attempt(
        self, command: Sequence[str], notes: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Attempt]:
        """Return a context that records this attempt, with all Python logging in log.txt."""
        self._check_writable()
        return attempt_logged(self.path, self._write_attempt, command, notes or {}, self.notes)

    def end_attempt_for_hang(self, reason: str) -> None:
        """Record from another thread that the attempt failed, when its own thread hangs."""
        end = {"event": "end", "time": time.time(), "state": "failed", "reason": reason}
        self._write_attempt(end)

    def write_step(self, stats: StepStats, phase: Phase = "rl") -> None:
        """Append a step's metrics; a process killed after this call does not lose them.

        Raises ValueError if a metric is not registered, or the step is not after the last one.
        """
        self._check_writable()
        position = (PHASE_ORDER[phase], stats.step)
        if position <= self._last:
            raise ValueError(f"{phase} step {stats.step} is out of order in {self.metrics_file}")
        record = {
            **{"step": stats.step, "time": time.time()},
            **({"phase": phase} if phase != "rl" else {}),
            **check_metrics(stats.metrics),
        }
        assert self._metrics_writer is not None
        with storing(self.metrics_file):
            self._metrics_writer.write(record)
        self._last = position

    def metrics(self, phase: Phase | None = None) -> list[Record]:
        """Return the lines of metrics.jsonl, of one phase or all; a damaged one is a UserError."""
        records, _ = read_jsonl(self.metrics_file, schemas.METRICS_LINE)
        return records if phase is None else in_phase(records, phase)

    def write_rollouts(self, step: int, samples: Iterable[Sample]) -> Path:
        self._check_writable()
        path = self._rollouts_file(step)
        with storing(path):
            write_jsonl(path, (record_of(step, sample) for sample in samples))
        return path

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts were written, ascending."""
        names = [path.stem.removeprefix("step_") for path in self.rollouts_dir.glob("step_*.jsonl")]
        return sorted(int(name) for name in names if name.isdecimal())

    def rollouts(self, step: int) -> list[Record]:
        return read_jsonl(self._rollouts_file(step), schemas.ROLLOUT_LINE)[0]

    def truncate_after(self, step: int, phase: Phase = "rl") -> list[str]:
        """Drop the metrics and rollouts after a step, and write the settings of the resumed run.

        All RL steps come after the steps of the phase "sft". Returns notes about lost lines.
        """
        self._check_writable()
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
                    self._rollouts_file(written).unlink()
        last = max((record["step"] for record in in_phase(kept, phase)), default=0)
        following = step + (phase == "sft")  # an RL step's line may be only in its checkpoint
        if last >= following - 1:
            return []
        lost = f"{self.metrics_file} has lost the lines of steps {last + 1} to {following - 1}"
        note = f"{lost}; it continues with step {following}"
        logging.getLogger("jetrl").warning("%s", note)
        return [note]

    def history(self) -> RunHistory:
        """Return the totals so far; console and time limit of a resumed run start from them."""
        return history_of(self.metrics(), read_attempts(self.path))

    def had_checkpoint(self) -> bool:
        """Return whether a checkpoint was written, even if it is gone."""
        # Older versions have left no such file; what has finished steps had a checkpoint.
        finished = any(attempt.state == "finished" for attempt in self.attempts())
        return self.checkpointed_file.exists() or (finished and bool(self.metrics("rl")))

    def attempts(self) -> list[Attempt]:
        return read_attempts(self.path)

    def state(self) -> str:
        """Return the state: new, running, finished, interrupted, stopped or failed."""
        return run_state(self.path)

    def config(self) -> dict[str, Any]:
        file = self.path / "config.toml"
        try:
            tree = tomllib.loads(read_text(file))
        except UserError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: {error}") from None
        checked(schemas.RUN_CONFIG, tree, str(file))
        return tree

    def write_reading(self, sentence: str) -> None:
        with storing(self.path / READING):
            write_atomically(self.path / READING, sentence + "\n")

    def reading(self) -> str:
        """Return how to read the task's completions; "" if that is obvious."""
        file = self.path / READING
        return read_text(file).strip() if file.is_file() else ""

    def plan(self) -> dict[str, Any]:
        try:
            return read_stored(self.path / "plan.json", schemas.PLAN)
        except FileNotFoundError as error:
            raise UserError(f"{self.path / 'plan.json'}: {error.strerror}") from None

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

    def _rollouts_file(self, step: int) -> Path:
        return self.rollouts_dir / f"step_{step:06d}.jsonl"

    def _sweep(self) -> None:
        for folder in (self.path, self.rollouts_dir):
            for pattern in (".*.tmp", ".*.tmp.before"):
                for left in folder.glob(pattern):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _check_files(self) -> None:
        """Reject pipes, sockets and devices: opening a pipe could block forever."""
        for folder in (self.path, *(self.path / name for name in _FOLDERS)):
            for entry in sorted(folder.glob("*")):
                if os.path.exists(entry) and not (os.path.isfile(entry) or os.path.isdir(entry)):
                    what = "a pipe, a socket or a device, which no run writes"
                    raise UserError(f"{entry}: {what}; delete it, or choose another run.name")

    def _check_use(self, resume: bool) -> None:
        self._check_files()
        if self.path.is_symlink():
            raise UserError(
                f"run directory {self.path} is a link to {self.path.resolve()}: set run.dir to the "
                "folder above that, or choose another run.name"
            )
        used = self.path.is_dir() and any(self.path.iterdir())
        if used and not resume and not self._is_void():
            what = f"run.name {self.name!r} is in use ({self.path}): choose another run.name, or"
            raise UserError(f"{what} continue that run with --resume (in Python: resume=True)")
        if resume and not (self.path / "config.toml").is_file():
            raise UserError(
                f"nothing to resume: {self.path} is not a run directory; start it without --resume"
            )

    def _is_void(self) -> bool:
        """Return True if all attempts ended before their first step: the name is free."""
        left = (self.rollouts_dir, self.checkpoints_dir)
        # Killed between creating the folder and writing settings: all files are ours.
        first = {".lock", ".plan.json.tmp", "plan.json", ".config.toml.tmp"}
        names = {path.name for path in self.path.iterdir()}
        killed_at_once = names <= {*first, *(folder.name for folder in left)}
        return (
            (killed_at_once or self.state() in ("failed", "stopped", "interrupted"))
            and not (self.metrics_file.is_file() and self.metrics_file.stat().st_size)
            and not any(folder.is_dir() and any(folder.iterdir()) for folder in left)
            and not self.checkpointed_file.exists()
        )

    def _write_settings(self, settings: Settings, plan: dict[str, Any], resume: bool) -> None:
        config_text = to_toml(settings)
        if resume:
            self._check_plan(plan)
            self.changed_settings = settings_that_differ(self.config(), tomllib.loads(config_text))
            self.notes += [
                f"changed on resume: {key}: {old} -> {new}"
                for key, (old, new) in self.changed_settings.items()
            ]
            self._new_config = config_text
            return
        write_atomically(self.path / "plan.json", json.dumps(plan, indent=2) + "\n")
        write_atomically(self.path / "config.toml", config_text)

    def _check_plan(self, plan: Mapping[str, Any]) -> None:
        changed = _differences(self.plan(), json.loads(json.dumps(plan)))
        if changed:
            words = ", ".join(f"{key}: {a} there, {b} here" for key, (a, b) in changed.items())
            raise UserError(
                f"run {self.name!r} was started with another precision plan ({words}): resume "
                f"with [precision] as in {self.path / 'config.toml'}, or start a new run"
            )

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

    def _write_attempt(self, record: Record) -> None:
        path = self.path / "attempts.jsonl"
        with storing(path):
            repair_jsonl(path, schemas.ATTEMPT_LINE)
            with closing(JsonlWriter(path)) as writer:
                writer.write(record)

    def _check_writable(self) -> None:
        if self._lock is None:
            raise ValueError(f"{self.path} is open for reading only; use RunDirectory.create")
        if self._metrics_writer is not None and not self.metrics_file.is_file():
            raise StorageError(
                f"{self.metrics_file} was deleted during the run, so the run stops: restore "
                f"{self.path} from a copy and continue with --resume, or start a new run"
            )


def _position(record: Record) -> tuple[int, int]:
    return PHASE_ORDER[phase_of(record)], record["step"]


def _checked_name(name: str | None) -> str:
    if not name:
        raise UserError("run.name is not set: give the run a name, such as run.name=first-try")
    bad = next((c for c in name if c in "/\\" or not c.isprintable()), None)
    if bad is not None or ".." in name or name == "." or name != name.strip():
        raise UserError(
            f"run.name {name!r} becomes a folder's name, so it may not contain path separators, "
            "'..' or control characters, or begin or end with blanks (run.dir: its parent)"
        )
    if len(name.encode()) > MAX_NAME:
        raise UserError(f"run.name: {len(name.encode())} bytes long, at most {MAX_NAME} may be")
    return name


def _check_readable(settings: Settings, plan: Mapping[str, Any]) -> None:
    """Raise if the run's config.toml or plan.json would be unreadable: now, not after training."""
    text = to_toml(settings)
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        most = f"{MOST_BYTES / 2**20:g} MiB of config.toml that are read back"
        raise UserError(f"the settings are larger than the {most}: name files in place of tables")
    checked(schemas.RUN_CONFIG, tomllib.loads(text), "config.toml")
    checked(schemas.PLAN, json.loads(json.dumps(plan)), "plan.json")


def settings_that_differ(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the differing settings of two configs: {key: (before, now)}; missing is None."""

    def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{s}.{k}": v for s, section in tree.items() for k, v in section.items()}

    return _differences(flat(before), flat(now))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        key: (old.get(key), new.get(key))
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    }
