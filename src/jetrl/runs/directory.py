"""Run directory: all files of one run.

    runs/NAME/
      config.toml                   the resolved settings
      plan.json                     the precision plan
      metrics.jsonl                 one line per step (docs/metrics.md)
      rollouts/step_NNNNNN.jsonl    the step's completions with their log-probs and rewards
      rollouts/images/HASH.jpg      previews of images of prompts
      checkpoints/                  written by the trainer
      checkpointed.txt              exists once a checkpoint has been written
      log.txt                       Python logging, with a header per attempt
      attempts.jsonl                each start of the program, and how it ended
      status.json                   current phase, or the phase in which the run was killed
      hang.txt                      stacks of a hang (session/watchdog.py)
      reading.txt                   how to read the task's completions, if that is not obvious
      report.html, plots/           written by `write_report` (runs/report.py)

`RunDirectory` reads a run, even while another process writes it; runs/writer.py writes one.
`check_start` checks a run directory before anything slow is loaded.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.files import MOST_BYTES, checked, read_stored, read_text
from jetrl.runs import schemas
from jetrl.runs.attempts import Attempt, RunLock, read_attempts, run_state
from jetrl.runs.history import RunHistory, history_of, in_phase
from jetrl.runs.schemas import Phase
from jetrl.runs.storage import Record, read_jsonl
from jetrl.settings.loading import Settings, to_toml
from jetrl.settings.presets import PRESETS

MAX_NAME = 120
READING = "reading.txt"
_FOLDERS = ("rollouts", "checkpoints", "plots", "ranks")


class RunDirectory:
    """A run directory for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints_dir = path / "checkpoints"
        self.checkpointed_file = path / "checkpointed.txt"
        self.rollouts_dir = path / "rollouts"

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path}: no such run directory")
        if not (path / "config.toml").is_file():
            raise UserError(f"{path}: not a run directory (it has no config.toml)")
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.name

    def metrics(self, phase: Phase | None = None) -> list[Record]:
        """Return the lines of metrics.jsonl, of one phase or all; a damaged one is a UserError."""
        records, _ = read_jsonl(self.metrics_file, schemas.METRICS_LINE)
        return records if phase is None else in_phase(records, phase)

    def rollouts_file(self, step: int) -> Path:
        return self.rollouts_dir / f"step_{step:06d}.jsonl"

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts were written, ascending."""
        names = [path.stem.removeprefix("step_") for path in self.rollouts_dir.glob("step_*.jsonl")]
        return sorted(int(name) for name in names if name.isdecimal())

    def preview_file(self, digest: str) -> Path:
        """Return the file with the preview of an image, by its hash in a line of rollouts."""
        return self.rollouts_dir / "images" / f"{digest}.jpg"

    def rollouts(self, step: int) -> list[Record]:
        return read_jsonl(self.rollouts_file(step), schemas.ROLLOUT_LINE)[0]

    def history(self) -> RunHistory:
        """Return the totals so far; console and time limit of a resumed run start from them."""
        return history_of(self.metrics(), read_attempts(self.path))

    def had_checkpoint(self) -> bool:
        """Return whether a checkpoint was written, even if it is gone."""
        # Older versions wrote no such file, but a finished run had a checkpoint.
        finished = any(attempt.state == "finished" for attempt in self.attempts())
        return self.checkpointed_file.exists() or (finished and bool(self.metrics("rl")))

    def attempts(self) -> list[Attempt]:
        return read_attempts(self.path)

    def state(self) -> str:
        """Return the state: new, running, finished, interrupted, stopped or failed."""
        return run_state(self.path)

    def config(self) -> Record:
        file = self.path / "config.toml"
        try:
            tree = tomllib.loads(read_text(file))
        except UserError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: {error}") from None
        checked(schemas.RUN_CONFIG, tree, str(file))
        return tree

    def reading(self) -> str:
        """Return how to read the task's completions; "" if that is obvious."""
        file = self.path / READING
        return read_text(file).strip() if file.is_file() else ""

    def plan(self) -> Record:
        try:
            return read_stored(self.path / "plan.json", schemas.PLAN)
        except FileNotFoundError as error:
            raise UserError(f"{self.path / 'plan.json'}: {error.strerror}") from None


# Checks before a start or a resume


def path_of_run(settings: Settings) -> Path:
    """Return run.dir / run.name; UserError if the name cannot be a folder's name."""
    return Path(settings.run.dir) / _checked_name(settings.run.name)


def settings_of_resume(settings: Settings) -> Settings:
    """Return the settings of a resume, with the formats that its preset had at the start.

    A run that continues on a CPU leaves the kernels of its GPU behind.
    """
    run = RunDirectory(path_of_run(settings))
    config = run.config() if (run.path / "config.toml").is_file() else {}
    settings = _with_older_logprobs(settings, config.get("rollout", {}))
    stored = config.get("run", {})
    moved = settings.run.device == "cpu" and stored.get("device", "auto") != "cpu"
    kept = settings.run.backend == stored.get("backend")
    if moved and kept and settings.run.backend != "reference":
        here = settings.run.model_copy(update={"backend": "auto"})
        settings = settings.model_copy(update={"run": here})
    # `unified` had FP8 keys before INT8 keys; `bf16` and `mixed` rounded to nearest.
    precision, preset = settings.precision, PRESETS[settings.precision.preset]
    plan = run.plan() if (run.path / "plan.json").is_file() else {}
    if plan.get("name") != precision.preset:
        return settings
    for key, absent in (("kv", None), ("bf16_rounding", "nearest")):
        own = plan.get(key, absent)
        if getattr(precision, key) is None and own not in (None, getattr(preset, key)):
            precision = precision.model_copy(update={key: own})
    return settings.model_copy(update={"precision": precision})


def _with_older_logprobs(settings: Settings, stored: Record) -> Settings:
    """Return settings with log-probs of all tokens for a run from before truncated_logprobs."""
    rollout, key = settings.rollout, "truncated_logprobs"
    filters = stored.get("top_p", 1.0) != 1.0 or stored.get("top_k", 0) != 0
    if key in stored or key in rollout.model_fields_set or not filters:
        return settings
    return settings.model_copy(update={"rollout": rollout.model_copy(update={key: False})})


def check_start(settings: Settings, plan: Record, resume: bool) -> None:
    """Raise the errors of `RunWriter.create` before anything slow is loaded; leave no files."""
    path = path_of_run(settings)
    check_readable(settings, plan)
    check_use(path, resume)
    if resume:
        check_plan(path, plan)
    RunLock.check(path)
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:  # os.access is always True for root
        os.rmdir(tempfile.mkdtemp(prefix=".jetrl-", dir=above))
    except OSError as error:
        raise UserError(
            f"run directory {path}: cannot write into {above}: {error.strerror or error}; set "
            "run.dir"
        ) from None


def check_readable(settings: Settings, plan: Record) -> None:
    """Raise if config.toml or plan.json could not be read back by a resume."""
    text = to_toml(settings)
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise UserError(
            f"the settings are larger than the {MOST_BYTES / 2**20:g} MiB of config.toml that are "
            "read back: name files in place of tables"
        )
    checked(schemas.RUN_CONFIG, tomllib.loads(text), "config.toml")
    checked(schemas.PLAN, json.loads(json.dumps(plan)), "plan.json")


def check_use(path: Path, resume: bool) -> None:
    """Check that a run directory is free, or holds a run if it is resumed."""
    _check_files(path)
    if path.is_symlink():
        raise UserError(
            f"run directory {path} is a link to {path.resolve()}: set run.dir to the "
            "folder above that, or choose another run.name"
        )
    used = path.is_dir() and any(path.iterdir())
    if used and not resume and not _is_void(RunDirectory(path)):
        raise UserError(
            f"run.name {path.name!r} is in use ({path}): choose another run.name, or continue "
            "that run with --resume (in Python: resume=True)"
        )
    if resume and not (path / "config.toml").is_file():
        raise UserError(
            f"nothing to resume: {path} is not a run directory; start it without --resume"
        )


def check_plan(path: Path, plan: Record) -> None:
    """Check that a resumed run has the precision plan of its start."""
    changed = _differences(RunDirectory(path).plan(), json.loads(json.dumps(plan)))
    if changed:
        words = ", ".join(f"{key}: {a} there, {b} here" for key, (a, b) in changed.items())
        raise UserError(
            f"run {path.name!r} was started with another precision plan ({words}): resume "
            f"with [precision] as in {path / 'config.toml'}, or start a new run"
        )


def _check_files(path: Path) -> None:
    """Reject pipes, sockets and devices: opening a pipe could block forever."""
    for folder in (path, *(path / name for name in _FOLDERS)):
        for entry in sorted(folder.glob("*")):
            if os.path.exists(entry) and not (os.path.isfile(entry) or os.path.isdir(entry)):
                raise UserError(
                    f"{entry}: a pipe, a socket or a device, which no run writes; delete it, or "
                    "choose another run.name"
                )


def _is_void(run: RunDirectory) -> bool:
    """Return True if all attempts ended before their first step: the name is free."""
    left = (run.rollouts_dir, run.checkpoints_dir)
    # If killed between creating the folder and writing settings, it has only these files.
    first = {".lock", ".plan.json.tmp", "plan.json", ".config.toml.tmp"}
    names = {path.name for path in run.path.iterdir()}
    killed_at_once = names <= {*first, *(folder.name for folder in left)}
    return (
        (killed_at_once or run.state() in ("failed", "stopped", "interrupted"))
        and not (run.metrics_file.is_file() and run.metrics_file.stat().st_size)
        and not any(folder.is_dir() and any(folder.iterdir()) for folder in left)
        and not run.checkpointed_file.exists()
    )


def _checked_name(name: str | None) -> str:
    if not name:
        raise UserError("run.name is not set: give the run a name, such as run.name=first-try")
    bad = next((c for c in name if c in "/\\" or not c.isprintable()), None)
    if bad is not None or ".." in name or name == "." or name != name.strip():
        raise UserError(
            f"run.name {name!r} becomes a folder's name, so it may not contain path separators, "
            "'..' or control characters, or begin or end with spaces (run.dir: its parent)"
        )
    if len(name.encode()) > MAX_NAME:
        raise UserError(f"run.name: {len(name.encode())} bytes long; the maximum is {MAX_NAME}")
    return name


def settings_that_differ(before: Record, now: Record) -> dict[str, tuple[Any, Any]]:
    """Return the differing settings of two configs: {key: (before, now)}; missing is None."""

    def flat(tree: Record) -> Record:
        return {f"{s}.{k}": v for s, section in tree.items() for k, v in section.items()}

    return _differences(flat(before), flat(now))


def _differences(old: Record, new: Record) -> dict[str, tuple[Any, Any]]:
    return {
        key: (old.get(key), new.get(key))
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    }
