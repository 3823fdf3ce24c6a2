"""A run directory: everything that one run leaves behind.

    runs/NAME/
      config.toml                   the resolved settings
      plan.json                     the precision plan
      metrics.jsonl                 one line a step (docs/metrics.md)
      rollouts/step_NNNNNN.jsonl    the step's completions with their log-probs and rewards
      checkpoints/                  written by the trainer
      log.txt                       Python logging, a header for each attempt
      attempts.jsonl                when the program was started on it, and how that ended
      status.json                   what it is doing, or was when it was killed
      hang.txt                      where it hung, if it did (session/watchdog.py)
      report.html, plots/           written by `write_report`

`create` makes one or, with resume, goes on with one, and holds a lock until `close`; `open` reads
one, also while another process writes it.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from jetrl.errors import UserError
from jetrl.runs.attempts import Attempt, RunLock, attempt_logged, read_attempts, run_state
from jetrl.runs.history import RunHistory, history_of
from jetrl.runs.jsonl import (
    JsonlWriter,
    Record,
    check_fields,
    read_jsonl,
    repair_jsonl,
    write_atomically,
    write_jsonl,
)
from jetrl.runs.metrics import check_metrics
from jetrl.runs.rollout_records import FIELDS, is_whole, record_of
from jetrl.runs.storing import storing
from jetrl.settings.loading import Settings, to_toml
from jetrl.types import Sample, StepStats

Phase = Literal["sft", "rl"]
PHASE_ORDER: dict[str, int] = {"sft": 0, "rl": 1}
MAX_NAME = 120


class RunDirectory:
    """One run directory. `notes` says what `create` found and did, for the console to show.

    Attributes:
        path: runs/NAME. log_file, checkpoints_dir, rollouts_dir: inside it.
        changed_settings: on resume, {dotted key: (before, now)}.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_file = path / "log.txt"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints_dir = path / "checkpoints"
        self.rollouts_dir = path / "rollouts"
        self.changed_settings: dict[str, tuple[Any, Any]] = {}
        self.notes: list[str] = []
        self._lock: RunLock | None = None
        self._metrics_writer: JsonlWriter | None = None
        self._last: tuple[int, int] = (-1, -1)
        self._new_config = ""  # of a resume, before it goes on

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(
        cls, settings: Settings, plan: Mapping[str, Any], *, resume: bool = False
    ) -> RunDirectory:
        """Makes settings.run.dir / settings.run.name, or with `resume` opens it for going on.

        Resuming drops an incomplete last line of metrics.jsonl and reports the settings that
        changed; the caller then calls `truncate_after` with its checkpoint's step, which writes
        them. A checkpoint that does not fit them leaves those that it was made with.

        Args:
            settings: resolved settings; run.name must be set.
            plan: PrecisionPlan.to_dict().

        Raises:
            UserError: the name cannot be a folder's, is in use (an attempt that ended before its
                first step leaves it free), or is being written by another process; nothing to
                resume; a different precision plan on resume; no permission.
        """
        run = cls(Path(settings.run.dir) / _checked_name(settings.run.name))
        try:
            run._make_folder(resume)
            run._lock = RunLock(run.path)
            try:
                run._sweep()
                run._write_settings(settings, dict(plan), resume)
                run._open_metrics()
            except BaseException:
                run.close()
                raise
        except OSError as error:
            raise UserError(f"run directory {run.path}: {error.strerror or error}") from None
        return run

    @classmethod
    def check_name(cls, settings: Settings, *, resume: bool = False) -> None:
        """Raises what `create` would about the name, before anything slow is loaded.

        Raises:
            UserError: the name cannot be a folder's or is in use; nothing to resume.
        """
        cls(Path(settings.run.dir) / _checked_name(settings.run.name))._check_use(resume)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """A run directory for reading.

        Raises:
            UserError: no such folder, or it is not a run directory.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path}: no such run directory")
        if not (path / "config.toml").is_file():
            raise UserError(f"{path}: not a run directory (it has no config.toml)")
        return cls(path)

    def attempt(
        self, command: Sequence[str], notes: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Attempt]:
        """A context that records this start of the program: log.txt gets a header and all Python
        logging; the end is noted as finished, interrupted (KeyboardInterrupt), stopped (RunStopped)
        or failed. The context's value has `.end(state, reason)` for ends without an exception."""
        self._check_writable()
        return attempt_logged(self.path, self._write_attempt, command, notes or {}, self.notes)

    def end_attempt_for_hang(self, reason: str) -> None:
        """Notes that the attempt failed, from another thread, when its own will not come to it."""
        self._write_attempt(
            {"event": "end", "time": time.time(), "state": "failed", "reason": reason}
        )

    def write_step(self, stats: StepStats, phase: Phase = "rl") -> None:
        """Appends a step's metrics; once this returns, a killed process does not lose them.

        Raises:
            StorageError: the disk is full.
            ValueError: an unregistered metric name, or a step that does not come after the last
            one.
        """
        self._check_writable()
        place = (PHASE_ORDER[phase], stats.step)
        if place <= self._last:
            raise ValueError(
                f"{phase} step {stats.step} written out of order in {self.metrics_file}"
            )
        record: Record = {"step": stats.step, "time": time.time()}
        if phase != "rl":
            record["phase"] = phase
        record.update(check_metrics(stats.metrics))
        assert self._metrics_writer is not None
        with storing(self.metrics_file):
            self._metrics_writer.write(record)
        self._last = place

    def metrics(self, phase: Phase | None = None) -> list[Record]:
        """The lines of metrics.jsonl in order, of one phase or of all: dicts with `step`, `time`,
        for supervised steps `phase`, and metric names.

        Raises:
            UserError: a damaged line (an incomplete last one is dropped).
        """
        records, _ = read_jsonl(self.metrics_file)
        check_fields(self.metrics_file, records, {"step": (int,), "phase": (str,)}, (int, float))
        for number, record in enumerate(records, start=1):
            if "step" not in record:
                raise UserError(f"{self.metrics_file}, line {number}: no step number")
        return [r for r in records if phase is None or _phase(r) == phase]

    def write_rollouts(self, step: int, samples: Iterable[Sample]) -> Path:
        """Writes the samples of a step, atomically; returns the file.

        Raises:
            StorageError: the disk is full.
        """
        self._check_writable()
        path = self.rollouts_dir / f"step_{step:06d}.jsonl"
        with storing(path):
            write_jsonl(path, (record_of(step, sample) for sample in samples))
        return path

    def rollout_steps(self) -> list[int]:
        """The steps whose rollouts were written, ascending."""
        names = (path.name for path in self.rollouts_dir.glob("step_*.jsonl"))
        found = (re.fullmatch(r"step_(\d+)\.jsonl", name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def rollouts(self, step: int) -> list[Record]:
        """The samples of a step as dicts (`rollout_records.sample_of` makes a Sample of one).

        Raises:
            UserError: a damaged line (an incomplete last one is dropped).
        """
        path = self.rollouts_dir / f"step_{step:06d}.jsonl"
        records, _ = read_jsonl(path)
        check_fields(path, records, FIELDS)
        for number, record in enumerate(records, start=1):
            if not is_whole(record):
                raise UserError(f"{path}, line {number}: no sample of a run; the file is damaged")
        return records

    def truncate_after(self, step: int, phase: Phase = "rl") -> None:
        """Forgets what comes after a step, in metrics and rollouts: a resumed run writes it again.
        With phase "sft", everything of the RL phase is after it. Writes the settings of the resume.

        Raises:
            StorageError: the disk is full; no metrics are lost.
        """
        self._check_writable()
        if self._new_config:
            with storing(self.path / "config.toml"):
                write_atomically(self.path / "config.toml", self._new_config)
        limit = (PHASE_ORDER[phase], step)
        records = self.metrics()
        kept = [r for r in records if _place(r) <= limit]
        if len(kept) < len(records):
            self._close_metrics()
            with storing(self.metrics_file):
                write_jsonl(self.metrics_file, kept)
            self._open_metrics()
        with storing(self.rollouts_dir):
            for written in self.rollout_steps():
                if (PHASE_ORDER["rl"], written) > limit:
                    (self.rollouts_dir / f"step_{written:06d}.jsonl").unlink()

    def history(self) -> RunHistory:
        """Totals so far: what a resumed run's console and time limit go on from."""
        return history_of(self.metrics(), read_attempts(self.path))

    def had_checkpoint(self, every: int) -> bool:
        """Whether a checkpoint has been written, by the lines and the attempts: at the second that
        is due the first one is waited for, and a run that came to its end has one.

        Args:
            every: its checkpoint.every.
        """
        last = max((record["step"] for record in self.metrics()), default=0)
        finished = any(attempt.state == "finished" for attempt in self.attempts())
        return (every > 0 and last >= 2 * every) or (finished and bool(self.metrics("rl")))

    def attempts(self) -> list[Attempt]:
        return read_attempts(self.path)

    def state(self) -> str:
        """new, running, finished, interrupted, stopped or failed."""
        return run_state(self.path)

    def config(self) -> dict[str, Any]:
        """The settings as a nested dict, as config.toml has them.

        Raises:
            UserError: config.toml is missing or not TOML.
        """
        try:
            return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self.path / 'config.toml'}: {error}") from None

    def plan(self) -> dict[str, Any]:
        """The precision plan as a dict.

        Raises:
            UserError: plan.json is missing or not JSON.
        """
        try:
            return dict(json.loads((self.path / "plan.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{self.path / 'plan.json'}: {error}") from None

    def close(self) -> None:
        """Closes files and gives the lock back; more than once is fine."""
        self._close_metrics()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make_folder(self, resume: bool) -> None:
        self._check_use(resume)
        for folder in (self.path, self.rollouts_dir, self.checkpoints_dir):
            folder.mkdir(parents=True, exist_ok=True)

    def _sweep(self) -> None:
        """Removes what a killed attempt was writing: files and models that had no name yet."""
        for folder in (self.path, self.rollouts_dir):
            for pattern in (".*.tmp", ".*.tmp.before"):
                for left in folder.glob(pattern):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _check_use(self, resume: bool) -> None:
        if self.path.is_symlink():
            raise UserError(
                f"run directory {self.path} is a link to {self.path.resolve()}: a run writes into "
                "run.dir only; set run.dir to the other folder, or choose another run.name"
            )
        used = self.path.is_dir() and any(self.path.iterdir())
        if used and not resume and not self._is_void():
            raise UserError(
                f"run.name {self.name!r} is in use ({self.path}): choose another run.name, "
                "or go on with that run with --resume"
            )
        if resume and not (self.path / "config.toml").is_file():
            raise UserError(
                f"nothing to resume: {self.path} is not a run directory; start it without --resume"
            )

    def _is_void(self) -> bool:
        """Whether all that was done here are attempts that ended before their first step, as with
        a setting that turned out wrong: the name is free to be used again, and the log goes on."""
        left = (self.rollouts_dir, self.checkpoints_dir)
        # Killed between making the folder and its settings: nothing in it is anybody else's.
        killed_at_once = {path.name for path in self.path.iterdir()} <= {
            ".lock",
            ".plan.json.tmp",
            "plan.json",
            ".config.toml.tmp",
            *(folder.name for folder in left),
        }
        return (
            (killed_at_once or self.state() in ("failed", "stopped", "interrupted"))
            and not (self.metrics_file.is_file() and self.metrics_file.stat().st_size)
            and not any(folder.is_dir() and any(folder.iterdir()) for folder in left)
        )

    def _write_settings(self, settings: Settings, plan: dict[str, Any], resume: bool) -> None:
        config_text = to_toml(settings)
        if resume:
            before = self.plan()
            now = json.loads(json.dumps(plan))
            if before != now:
                differing = sorted(k for k in before | now if before.get(k) != now.get(k))
                raise UserError(
                    f"run {self.name!r} was started with another precision plan (different: "
                    f"{', '.join(differing)}); resume with the same one, or start a new run"
                )
            self.changed_settings = settings_that_differ(self.config(), tomllib.loads(config_text))
            self.notes += [
                f"changed on resume: {key}: {old} -> {new}"
                for key, (old, new) in self.changed_settings.items()
            ]
            self._new_config = config_text
            return
        write_atomically(self.path / "plan.json", json.dumps(plan, indent=2) + "\n")
        write_atomically(self.path / "config.toml", config_text)

    def _open_metrics(self) -> None:
        records, note = repair_jsonl(self.metrics_file)
        if note:
            self.notes.append(note)
        self._last = max((_place(r) for r in records), default=(-1, -1))
        self._metrics_writer = JsonlWriter(self.metrics_file)

    def _close_metrics(self) -> None:
        if self._metrics_writer is not None:
            self._metrics_writer.close()
            self._metrics_writer = None

    def _write_attempt(self, record: Record) -> None:
        path = self.path / "attempts.jsonl"
        with storing(path):
            repair_jsonl(path)
            writer = JsonlWriter(path)
            try:
                writer.write(record)
            finally:
                writer.close()

    def _check_writable(self) -> None:
        if self._lock is None:
            raise ValueError(f"{self.path} is open for reading only; use RunDirectory.create")


def _phase(record: Record) -> str:
    return str(record.get("phase", "rl"))


def _place(record: Record) -> tuple[int, int]:
    return PHASE_ORDER.get(_phase(record), 1), int(record["step"])


def _checked_name(name: str | None) -> str:
    if not name:
        raise UserError("run.name is not set: give the run a name, such as run.name=first-try")
    bad = next((c for c in name if c in "/\\" or not c.isprintable()), None)
    if bad is not None or ".." in name or name == "." or name != name.strip():
        raise UserError(
            f"run.name {name!r}: it becomes a folder, so no path separators, '..', control "
            "characters or blanks at its ends (run.dir says where runs are kept)"
        )
    if len(name.encode()) > MAX_NAME:
        raise UserError(
            f"run.name: {len(name.encode())} bytes long, at most {MAX_NAME} can be used"
        )
    return name


def settings_that_differ(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """By dotted key: (value before, value now), of what differs between two `RunDirectory.config`.
    None where there is none."""

    def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{s}.{k}": v for s, section in tree.items() for k, v in section.items()}

    old, new = flat(before), flat(now)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
    }
