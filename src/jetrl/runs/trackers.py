"""Experiment trackers by name: wandb, trackio, tensorboard.

All are optional packages. A missing package or a failing login is an error at the start. Later a
tracker never stops a run: the first failure is logged, and the metrics are in metrics.jsonl anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from jetrl.errors import UserError

log = logging.getLogger("jetrl.runs.trackers")


class Tracker(Protocol):
    """A service or file that metrics are sent to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a step's metrics."""

    def summarize(self, step: int, summary: Mapping[str, float]) -> None:
        """Take the run in a few numbers, named `summary/...`, after its last step."""

    def close(self) -> None:
        """Finish; called once."""


class Trackers:
    """A group of trackers that never raises."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._failed: set[str] = set()
        self._last_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics to every tracker."""
        self._last_step = max(self._last_step, step)
        for name, tracker in self._trackers.items():
            with self._reporting(name, f"could not take the metrics of step {step}"):
                tracker.log(step, metrics)

    def close(self, summary: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Finish every tracker, with a summary of the run if given; more than one call is fine."""
        for name, tracker in self._trackers.items():
            if summary is not None:
                with self._reporting(name, "could not take the summary"):
                    values = {f"summary/{name}": value for name, value in summary().items()}
                    tracker.summarize(self._last_step, values)
            with self._reporting(name, "could not be finished"):
                tracker.close()
        self._trackers = {}

    @contextlib.contextmanager
    def _reporting(self, name: str, failure: str) -> Iterator[None]:
        """Log a tracker's first error, whatever it is, and let the run continue."""
        try:
            yield
        except Exception as error:
            if name in self._failed:
                return
            self._failed.add(name)
            log.warning(
                "tracker %s %s (%s: %s); further failures of it are not logged, and the metrics "
                "are in metrics.jsonl",
                name,
                failure,
                type(error).__name__,
                error,
            )


def open_trackers(
    names: Sequence[str], project: str, run_path: Path, config: Mapping[str, Any]
) -> Trackers:
    """Start the trackers of settings.trackers.

    Args:
        run_path: The run directory; its name is the run's, and the trackers' own files go under it.

    Raises:
        UserError: A package is missing (with the command that installs it), a tracker cannot start
            (no login, no network), or a name is unknown.
    """
    opened: dict[str, Tracker] = {}
    try:
        for name in names:
            if name not in _OPENERS:
                raise UserError(f"trackers.names: {name!r} is none of {', '.join(_OPENERS)}")
            opened[name] = _start(name, (project, run_path, dict(config)))
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
            f"trackers.names: {name} is not installed ({error}); pip install {name}, or leave it "
            "out"
        ) from None


def _start(name: str, arguments: tuple[Any, ...]) -> Tracker:
    module = _module(name)
    try:
        return _OPENERS[name][1](module, *arguments)
    except Exception as error:
        raise UserError(
            f"trackers.names: {name} could not start ({type(error).__name__}: {error}); "
            "see its documentation for login and offline use, or leave it out"
        ) from error


class _Wandb:
    def __init__(self, wandb: ModuleType, project: str, path: Path, config: dict[str, Any]) -> None:
        # An id of its own, kept with the run: a resumed run goes on with its curves, and a name
        # used again elsewhere gets new ones.
        id_file = path / "wandb_id.txt"
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=project,
            name=path.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=path,
            config=config,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Not wandb's own step, which may only grow: warm-up and RL each count from one, and a
        # resumed run repeats the steps after its checkpoint.
        self._run.log({**metrics, "step": step})

    def summarize(self, step: int, summary: Mapping[str, float]) -> None:
        self._run.summary.update(summary)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(
        self, trackio: ModuleType, project: str, path: Path, config: dict[str, Any]
    ) -> None:
        self._trackio = trackio
        trackio.init(project=project, name=path.name, resume="allow", config=config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def summarize(self, step: int, summary: Mapping[str, float]) -> None:
        self.log(step, summary)

    def close(self) -> None:
        self._trackio.finish()


class _TensorBoard:
    def __init__(
        self, summary: ModuleType, project: str, path: Path, config: dict[str, Any]
    ) -> None:
        self._writer = summary.Writer(str(path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def summarize(self, step: int, summary: Mapping[str, float]) -> None:
        self.log(step, summary)

    def close(self) -> None:
        self._writer.close()


_OPENERS: dict[str, tuple[str, Callable[..., Tracker]]] = {
    "wandb": ("wandb", _Wandb),
    "trackio": ("trackio", _Trackio),
    "tensorboard": ("tensorboard.summary", _TensorBoard),
}
