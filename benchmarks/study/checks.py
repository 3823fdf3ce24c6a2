"""Checks of a study's runs before the first begins: tasks, model shapes and precision plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.study.plan import PlannedRun

from jetrl.errors import UserError
from jetrl.precision import PrecisionPlan
from jetrl.session.building import model_config
from jetrl.tasks import build_task


def check_runs(runs: Sequence[PlannedRun]) -> None:
    """Check what the settings name, once for each different task, model and precision.

    Raises:
        UserError: There is no such task, it refuses its options, or a model cannot be used; the
            message names a run.
    """
    seen: set[str] = set()
    for run in runs:
        settings = run.settings
        first = run.start.settings if run.start is not None else settings

        def task(run: PlannedRun = run) -> object:
            return build_task(run.settings.task)

        def plan(run: PlannedRun = run) -> object:
            settings = run.settings
            return PrecisionPlan.from_settings(settings.precision, settings.sampler_deviation)

        def model(run: PlannedRun = run) -> object:
            return model_config(run.start.settings if run.start else run.settings)

        _check_once(seen, run, settings.task, task)
        _check_once(seen, run, (settings.precision, settings.sampler_deviation), plan)
        _check_once(seen, run, first.model, model)


def _check_once(
    seen: set[str], run: PlannedRun, section: object, check: Callable[[], object]
) -> None:
    """Make a check of a section of the settings, unless it was made of an equal section."""
    if repr(section) in seen:
        return
    seen.add(repr(section))
    try:
        check()
    except UserError as error:
        raise UserError(f"{error}\n(settings of the run {run.name})") from None
