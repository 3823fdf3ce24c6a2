"""The command `jetrl study`: read and check a study, make its runs, write its report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.study import scheduler
from benchmarks.study.definition import Definition, definition_of, read_definition
from benchmarks.study.deviation import SECTION, SamplerDeviation
from benchmarks.study.final_evaluation import answer_request
from benchmarks.study.plan import PlannedRun, planned_runs
from benchmarks.study.processes import Pool, cards_for
from benchmarks.study.progress import Progress
from benchmarks.study.report import known_runs, write_report
from benchmarks.study.results import Results, read_results
from benchmarks.study.scheduler import Sitting, read_queue, runs_in_order
from benchmarks.study.tables import loss_table

from jetrl.cli.arguments import table, tell
from jetrl.errors import Terminated, TimeLimitReached, UserError
from jetrl.models.source import model_config
from jetrl.precision import PrecisionPlan
from jetrl.runs.attempts import RunLock, run_state
from jetrl.runs.directory import settings_that_differ
from jetrl.runs.format import clip
from jetrl.settings.model_sections import PrecisionSettings
from jetrl.tasks import build_task


def run(args: argparse.Namespace) -> int:
    if args.evaluate is not None:
        answer_request(Path(args.evaluate))
        return 0
    if args.study is None:
        raise UserError("jetrl study needs a study file; docs/studies.md shows how to write one")
    for name in ("jobs", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} {value:g}: a number above 0 is expected")
    file, parts = read_queue(Path(args.study), args.only)
    definition, results = opened(file, args.reference)
    if args.report_only or file.suffix == ".json":
        if args.only:
            raise UserError("--only chooses runs to work off; a report is of all that is done")
        if not results.runs:
            raise UserError(f"{results.path}: no run is done yet, so there is nothing to report")
        return report(definition, results)
    runs = runs_in_order(definition, parts)
    if args.dry_run:
        print(dry_run(definition, results, runs))
        check_runs(results, runs)
        return 0
    return work_off(args, definition, results, runs)


def opened(path: Path, reference: str | None = None) -> tuple[Definition, Results]:
    """Return the definition and the results of a study file, or of a results file.

    Args:
        reference: The arm that the report compares the others with; None: the study's own.
    """
    if path.suffix == ".json":
        results = read_results(path)
        definition = definition_of(results.definition, path)
        # A file from elsewhere does not say where its report goes.
        study = definition.study.model_copy(update={"out": None})
        definition = dataclasses.replace(definition, study=study)
    else:
        definition = read_definition(path)
        if definition.results_file.is_file():
            results = read_results(definition.results_file)
            check_unchanged(definition, results)
            if results.failed:  # a run that was taken out of the study is not tried again
                names = {run.name for run in planned_runs(definition)}
                failed = {name: why for name, why in results.failed.items() if name in names}
                results.failed = failed
            results.source, results.definition = str(path), definition.tree
        else:
            results = Results(definition.results_file, str(path), definition.tree)
    if reference is not None:
        if reference not in definition.arms:
            known = ", ".join(definition.arms)
            raise UserError(f"--reference {reference}: {path} has no such arm; it has {known}")
        study = definition.study.model_copy(update={"reference": reference})
        definition = dataclasses.replace(definition, study=study)
    return definition, results


def check_unchanged(definition: Definition, results: Results) -> None:
    """Refuse a study file whose rule, or whose settings of runs that are done, was changed."""
    if not results.runs:
        return
    before = definition_of(results.definition, results.path)
    changes = settings_that_differ(_rule(before), _rule(definition))
    now = {run.name: run for run in planned_runs(definition)}
    changed = [
        name
        for name, done in results.runs.items()
        if name in now and done.digest != now[name].digest and done.said != now[name].said
    ]
    then = {run.name: run for run in planned_runs(before)} if changed else {}
    for name in filter(then.__contains__, changed):
        changes |= settings_that_differ(_settings(then[name]), _settings(now[name]))
    if changes or changed:
        named = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
        whose = f" (runs {clip(', '.join(changed), 100)})" * bool(changed)
        raise UserError(
            f"{definition.source} was changed since {len(results.runs)} runs in {results.path} "
            f"were made: {clip(named, 400) or 'their settings'}{whose}. Change it back, or give "
            "it another study.name and study.results, so that all runs are made anew. Seeds, "
            "arms and values of the grid may be added"
        )


def _rule(definition: Definition) -> dict[str, Any]:
    """Return the settings by which the runs of a study are evaluated and judged."""
    study = {"reference": definition.reference}
    study |= definition.study.model_dump(include={"margin", "level", "points"})
    rest = {name: getattr(definition, name).model_dump() for name in ("eval", "collapse")}
    return {"study": study, **rest}


def _settings(run: PlannedRun) -> dict[str, Any]:
    """Return the settings of a run and its start, without those that the study gives them."""
    given = {"run": {"name", "dir"}}
    tree = run.settings.model_dump(mode="json", exclude=given)
    tree[SECTION] = run.deviation.model_dump(mode="json")
    if run.start is not None:
        start = run.start.settings.model_dump(mode="json", exclude=given)
        tree["model"], tree["sft"] = start["model"], start["sft"]
        tree |= {f"start.{section}": start[section] for section in ("precision", "run")}
    return tree


def work_off(
    args: argparse.Namespace, definition: Definition, results: Results, runs: Sequence[PlannedRun]
) -> int:
    """Make the runs, write the report, and return an exit code."""
    check_runs(results, runs)
    cards = cards_for(runs[0].settings.run.device)
    jobs = args.jobs or definition.study.jobs or (4 if cards else 1)
    before = signal.signal(signal.SIGTERM, _terminate)
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        definition.out.mkdir(parents=True, exist_ok=True)
        stack.callback(RunLock(definition.out).release)
        _, results = opened(definition.source)  # as the command before this one left them
        pool, progress = Pool(cards, jobs, definition.study.threads), Progress()
        sitting = Sitting(definition, runs, results, progress.event)
        try:
            scheduler.work_off(sitting, pool, progress, args.minutes)
        except (KeyboardInterrupt, Terminated):
            tell("the runs were stopped at checkpoints; the same command continues them")
            raise
    return ended(sitting, with_report=not args.no_report)


def ended(sitting: Sitting, with_report: bool) -> int:
    """Write the report, print failed and remaining runs, and return an exit code."""
    definition, results = sitting.definition, sitting.results
    code = 1 if results.failed or not results.runs else 0
    if results.runs and with_report:
        code = report(definition, results)
    for reason in dict.fromkeys(results.failed.values()):
        names = [name for name, own in results.failed.items() if own == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(f"failed: {', '.join(names[:3])}{more}: {reason}")
    if sitting.left:
        total = sitting.standing().total
        print(f"{len(sitting.left)} of {total} runs are left; the same command continues")
        return TimeLimitReached.exit_code
    return code


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def report(definition: Definition, results: Results) -> int:
    """Write the report, say where it is, and return an exit code: 1 for failures and twins."""
    if definition.reads_text:
        losses = loss_table(definition, known_runs(definition, results.runs.values()))
        print(f"{losses.note}\n{table([losses.head, *losses.rows])}\nresults  {results.path}")
        return 1 if results.failed else 0
    written = write_report(definition, results)
    print(table([("results", str(results.path)), ("report", str(written.html))]))
    for group in written.unequal_twins:
        print(f"twins differ: {group}: the final weights are to be equal, bit for bit")
    return 1 if written.unequal_twins or results.failed else 0


def dry_run(definition: Definition, results: Results, runs: Sequence[PlannedRun]) -> str:
    """Return a table of the runs and their states."""
    rows = [("run", "arm", "seed", "steps", "begins from", "state")]
    for run in runs:
        state = "to do"
        if run.name in results.runs:
            state = "done"
        elif run.path.is_dir():
            state = run_state(run.path)
        start = run.start.name if run.start else run.settings.model.path or "random weights"
        rows.append((run.name, run.arm, str(run.seed), str(run.steps), start, state))
    done = sum(run.name in results.runs for run in runs)
    return f"{table(rows)}\n\n{len(runs)} runs, {done} done; they go to {definition.out}"


def check_runs(results: Results, runs: Sequence[PlannedRun]) -> None:
    """Check the task, model and precision of the runs to do, each combination once."""
    seen: set[str] = set()
    for run in runs:
        if run.name in results.runs:
            continue
        settings = run.settings
        first = run.start.settings if run.start is not None else settings
        precision = (settings.precision, run.deviation)
        checks: list[tuple[object, Callable[..., object], tuple[Any, ...]]] = [
            (settings.task, build_task, (settings.task,)),
            (precision, _plan_of, precision),
            (first.model, model_config, (first,)),
        ]
        for section, check, words in checks:
            if repr(section) in seen:
                continue
            seen.add(repr(section))
            try:
                check(*words)
            except UserError as error:
                raise UserError(f"{error}\n(settings of the run {run.name})") from None


def _plan_of(settings: PrecisionSettings, deviation: SamplerDeviation) -> PrecisionPlan:
    """Return the precision plan of a run."""
    return deviation.plan_of(PrecisionPlan.from_settings(settings))
