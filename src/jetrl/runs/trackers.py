"""Experiment trackers by name: wandb, trackio, tensorboard. All are optional packages.

What can go wrong goes wrong at the start, in words: a package that is missing, a login that fails.
Once a run is going a tracker never stops it: the first failure is logged, and the metrics are in
metrics.jsonl anyway.
"""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from jetrl.errors import UserError

log = logging.getLogger("jetrl.runs.trackers")


class Tracker(Protocol):
    """Where metrics go. `summarize` gets the run in a few numbers, after the last step it saw;
    `close` is called once."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def summarize(self, step: int, summary: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Several trackers as one that never raises."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._failed: set[str] = set()
        self._last_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a step's metrics to every tracker."""
        self._last_step = max(self._last_step, step)
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, metrics)
            except Exception as error:  # whatever a tracker raises, training goes on
                self._report(name, f"could not take the metrics of step {step}", error)

    def close(self, summary: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Finishes every tracker, with a summary of the run if given; more than once is fine."""
        for name, tracker in self._trackers.items():
            try:
                if summary is not None:
                    tracker.summarize(self._last_step, summary())
            except Exception as error:  # whatever a tracker raises, the run ends well
                self._report(name, "could not take the summary", error)
            try:
                tracker.close()
            except Exception as error:  # whatever a tracker raises, the run ends well
                self._report(name, "could not be finished", error)
        self._trackers = {}

    def _report(self, name: str, what: str, error: Exception) -> None:
        if name not in self._failed:
            self._failed.add(name)
            log.warning(
                "tracker %s %s (%s: %s); further failures of it are not logged, and the metrics "
                "are in metrics.jsonl",
                name,
                what,
                type(error).__name__,
                error,
            )


def open_trackers(
    names: Sequence[str], project: str, run_path: Path, config: Mapping[str, Any]
) -> Trackers:
    """Starts the trackers of settings.trackers.

    Args:
        names: wandb, trackio, tensorboard. project: groups runs. run_path: the run directory; its
            name is the run's, and the trackers' own files go under it. config: the settings.

    Raises:
        UserError: a package is missing (with the command that installs it), a tracker that cannot
            start (no login, no network), or an unknown name.
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
    """Raises what `open_trackers` would about a package, before anything slow is loaded."""
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
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})

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
        values = {f"summary/{name}": value for name, value in summary.items()}
        self._trackio.log(values, step=step)

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
        self.log(step, {f"summary/{name}": value for name, value in summary.items()})

    def close(self) -> None:
        self._writer.close()


_OPENERS: dict[str, tuple[str, Callable[..., Tracker]]] = {
    "wandb": ("wandb", _Wandb),
    "trackio": ("trackio", _Trackio),
    "tensorboard": ("tensorboard.summary", _TensorBoard),
}
