"""Experiment trackers: wandb, trackio, tensorboard.

All are optional packages. A missing package or failed login is an error at startup. Later, a
tracker never stops a run: its first failure is logged, and metrics.jsonl has all metrics anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory
from jetrl.runs.storage import Record
from jetrl.settings.sections import DEFAULT_PROJECT, TrackerSettings
from jetrl.types import Json, Metrics

log = logging.getLogger("jetrl.runs.trackers")

Send = Callable[[int, Metrics], object]


class Tracker(NamedTuple):
    """Interface of a tracker: metrics per step, summary after the last step, and close."""

    log: Send
    summarize: Send
    close: Callable[[], object]


class Trackers:
    """A group of trackers that never raise."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._failed: set[str] = set()
        self._last_step = 0

    def log(self, step: int, metrics: Metrics) -> None:
        self._last_step = step
        for name, tracker in self._trackers.items():
            with self._reporting(name, f"could not log the metrics of step {step}"):
                tracker.log(step, _metrics_of(metrics))

    def close(self, summary: Callable[[], Metrics] | None = None) -> None:
        """Close every tracker, after sending the run's summary if given; idempotent."""
        for name, tracker in self._trackers.items():
            if summary is not None:
                with self._reporting(name, "could not log the summary"):
                    values = {f"summary/{name}": value for name, value in summary().items()}
                    tracker.summarize(self._last_step, values)
            with self._reporting(name, "could not be closed"):
                tracker.close()
        self._trackers = {}

    @contextlib.contextmanager
    def _reporting(self, name: str, failure: str) -> Iterator[None]:
        """Log a tracker's first error of any kind, and let the run continue."""
        try:
            yield
        except Exception as error:
            if name in self._failed:
                return
            self._failed.add(name)
            log.warning(
                "tracker %s %s (%s); no further failure is logged",
                name,
                failure,
                f"{type(error).__name__}: {error}",
            )


_OF_UPDATES = ("sft/", "text/", "dpo/", "reward_model/")


def _metrics_of(record: Record) -> Metrics:
    """Return a line's metrics; `sft/` goes before those that RL steps, also from 1, have too."""
    metrics = {name: record[name] for name in record if "/" in name}
    if "sft/loss" not in metrics:
        return metrics
    return {n if n.startswith(_OF_UPDATES) else f"sft/{n}": v for n, v in metrics.items()}


def open_trackers(settings: TrackerSettings, run_path: Path, config: Record) -> Trackers:
    """Start the trackers of the settings.

    Trackers keep their files in the run directory, whose name is the run's. A missing package or a
    failed start is a `UserError`.
    """
    opened: dict[str, Tracker] = {}
    try:
        for name in settings.names:
            opened[name] = _start(name, settings, run_path, dict(config))
    except UserError:
        Trackers(opened).close()
        raise
    return Trackers(opened)


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError` for a missing package, before anything slow is loaded."""
    for name in names:
        _module(name)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(_OPENERS[name][0])
    except ImportError as error:
        raise UserError(
            f"trackers.names: {name} is not installed ({error}): pip install {name}"
        ) from None


def _start(name: str, settings: TrackerSettings, path: Path, config: Json) -> Tracker:
    module = _module(name)
    own = {"project": settings.project or os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT)}
    if settings.group is not None:
        own["group"] = settings.group
    try:
        return _OPENERS[name][1](module, own, path, config)
    except Exception as error:
        help_ = "run `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else "log in"
        raise UserError(
            f"trackers.names: {name} could not start ({type(error).__name__}: {error}): {help_}"
        ) from error


def _wandb(wandb: ModuleType, own: dict[str, str], path: Path, config: Json) -> Tracker:
    # Keep the id with the run: a resumed run continues its curves, and another run of the same name
    # gets new ones.
    id_file = path / "wandb_id.txt"
    resumes = id_file.is_file()
    if not resumes:
        id_file.write_text(secrets.token_hex(8))
    own = {**own, "name": path.name, "id": id_file.read_text().strip()}
    run = wandb.init(resume="allow", config=config, dir=path, **own)
    run.define_metric("*", step_metric="step")
    # Offline, each attempt has its own folder, and `wandb sync` keeps the last one: so the last one
    # must contain all steps. Those that a resume repeats are dropped by its first line.
    to_send_again = resumes and getattr(run, "offline", False)

    # Do not use wandb's step, which must increase: warm-up and RL both count from 1, and a resumed
    # run repeats steps.
    def send_lines() -> None:
        nonlocal to_send_again
        to_send_again = False
        for record in RunDirectory(path).metrics():
            run.log({**_metrics_of(record), "step": record["step"]})

    def send(step: int, metrics: Metrics) -> None:
        if to_send_again:
            send_lines()  # this step's is the last of them
        else:
            run.log({**metrics, "step": step})

    def close() -> None:
        if to_send_again:  # no step was made
            send_lines()
        run.finish()

    return Tracker(send, lambda step, summary: run.summary.update(summary), close)


def _trackio(trackio: ModuleType, own: dict[str, str], path: Path, config: Json) -> Tracker:
    def send(step: int, metrics: Metrics) -> None:
        trackio.log(dict(metrics), step=step)

    # By its name alone, a new run would continue an older one of another folder.
    resume = "allow" if RunDirectory(path).metrics() else "never"
    trackio.init(name=path.name, resume=resume, config=config, **own)
    return Tracker(send, send, trackio.finish)


def _tensorboard(summary: ModuleType, own: dict[str, str], path: Path, config: Json) -> Tracker:
    writer = summary.Writer(str(path / "tensorboard"))

    def send(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(send, send, writer.close)


_OPENERS: dict[str, tuple[str, Callable[..., Tracker]]] = {
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", _trackio),
    "tensorboard": ("tensorboard.summary", _tensorboard),
}
