"""The pieces of work of a study, and the state that earlier sittings left each in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.study.definition import Definition
from benchmarks.study.final_evaluation import has_weights
from benchmarks.study.outcome import Outcome, kept_outcome
from benchmarks.study.plan import PlannedRun, PlannedStart, recipe_of
from benchmarks.study.results import End, Results

from jetrl.errors import UserError
from jetrl.runs.attempts import is_locked, read_status, run_state
from jetrl.runs.directory import settings_that_differ
from jetrl.runs.format import clip
from jetrl.settings.loading import Settings, load_config

Stage = Literal["train", "evaluate", "collect", "done", "failed"]


@dataclass
class Item:
    """A piece of work: a run of the study, or a start that runs wait for.

    Attributes:
        work: The run or the start.
        stage: What is to be done next, or how it ended.
        running: Whether a child process is at it.
        failures: How often a child process failed.
        end: How the run ended.
        reason: The message that the run ended or failed with.
        outcome: The outcome that an earlier sitting left, where it has only to be collected.
    """

    work: PlannedRun | PlannedStart
    stage: Stage = "train"
    running: bool = False
    failures: int = 0
    end: End = "finished"
    reason: str = ""
    outcome: Outcome | None = None

    @property
    def is_over(self) -> bool:
        """True if nothing is left to do."""
        return self.stage in ("done", "failed")


def look(item: Item, definition: Definition, results: Results) -> None:
    """Set the stage of a piece of work to what its files say.

    Args:
        item: The piece of work.
        definition: The definition of the study.
        results: Its results so far.

    Raises:
        UserError: Its result, or its run directory, is of other settings.
    """
    work = item.work
    result = results.runs.get(work.name)
    if result is not None:
        assert isinstance(work, PlannedRun)  # a start has no result
        if result.digest != work.digest and result.said != work.said:
            raise UserError(
                f"{results.path}: the run {work.name} was made with other settings than "
                f"{definition.source} now gives it; delete it there, or call the study "
                "or the arm otherwise"
            )
        item.stage = "done"
    elif is_locked(work.path):
        item.stage, item.reason = "failed", f"another process is writing {work.path}"
    elif has_begun(work, definition):
        if isinstance(work, PlannedRun):
            _look_at_ended(item, work, definition, results)
        elif run_state(work.path) == "finished":
            item.stage = "done"
    elif isinstance(work, PlannedStart) and (work.path / "model" / "config.json").is_file():
        item.stage = "done"  # its model was put there from a copy; its name has the digest


def _look_at_ended(item: Item, run: PlannedRun, definition: Definition, results: Results) -> None:
    """Set the stage of a run that is not in the results and has a directory, if its training ended.

    Args:
        item: The run as a piece of work.
        run: The run.
        definition: The definition of the study.
        results: Its results so far.
    """
    outcome = kept_outcome(definition, run)
    if isinstance(outcome, Outcome):
        item.stage, item.outcome = "collect", outcome
    elif run_state(run.path) == "finished":
        item.stage = "evaluate"
        if not has_weights(run.path):
            item.stage = "failed"
            item.reason = (
                f"its training is finished, but {run.path} has no weights left to evaluate "
                "(study.keep_weights = false removes them once a run is in the results), "
                f"{results.path} has no result of it, and {outcome}. Put the results file or the "
                "outcome back from a copy, or remove that run directory: the run is then trained "
                "again"
            )


def has_begun(work: PlannedRun | PlannedStart, definition: Definition) -> bool:
    """Return whether a run directory holds steps that were made with the present settings.

    A setting that only its default gives a value keeps the one that the run began with: what counts
    is that the study says of the run what it said when the run began.

    Raises:
        UserError: It holds steps of other settings.
    """
    config = work.path / "config.toml"
    if not config.is_file():
        return False
    before = load_config(config)
    if before == work.settings:
        return True
    metrics = work.path / "metrics.jsonl"
    if not (metrics.is_file() and metrics.stat().st_size):
        return False  # it ended before its first step, and may begin with other settings
    differing = settings_that_differ(_dumped(before), _dumped(work.settings))
    recipe = recipe_file(work, definition)
    if recipe.is_file() and recipe.read_text(encoding="utf-8") == recipe_of(work.settings):
        said = work.settings.model_dump(mode="json", exclude_unset=True)
        if not any(f"{section}.{key}" in differing for section in said for key in said[section]):
            return True
    changes = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in differing.items())
    raise UserError(
        f"{work.path}: begun with other settings than {definition.source} now gives it "
        f"({clip(changes, 300)}); remove that folder, or call the study or the arm otherwise"
    )


def recipe_file(work: PlannedRun | PlannedStart, definition: Definition) -> Path:
    """Return the file of a run's recipe, with which its command is started."""
    return definition.out / "recipes" / f"{work.name}.toml"


def steps_done(path: Path) -> int:
    """Return how many steps a run has made, by its status file."""
    status = read_status(path) if path.is_dir() else None
    if status is None:
        return 0
    return max(status.step - 1, 0) if status.phase else status.step


def _dumped(settings: Settings) -> dict[str, dict[str, object]]:
    return settings.model_dump(mode="json")
