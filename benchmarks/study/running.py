"""Run the studies that `jetrl study` names: check them, work off their runs, report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch
from benchmarks.study import scheduler
from benchmarks.study.definition import Definition, definition_of, read_definition
from benchmarks.study.final_evaluation import answer_request
from benchmarks.study.plan import PlannedRun
from benchmarks.study.processes import Pool, cards_for
from benchmarks.study.report import write_report
from benchmarks.study.results import Outcome, Results, kept_outcome, read_results
from benchmarks.study.scheduler import Progress, Sitting, Work, entries_of, parts_of, work_of

from jetrl.cli.arguments import table, tell
from jetrl.errors import Terminated, TimeLimitReached, UserError
from jetrl.memory.device import free_bytes
from jetrl.memory.plan import GIB, OtherModels, Workload, memory_plan
from jetrl.precision import PrecisionPlan
from jetrl.runs.attempts import RunLock, run_state
from jetrl.session.building import model_config
from jetrl.tasks import build_task


def run(args: argparse.Namespace) -> int:
    if args.evaluate is not None:
        answer_request(Path(args.evaluate))
        return 0
    if not args.study:
        raise UserError("jetrl study needs a study file; docs/studies.md shows how to write one")
    for name in ("jobs", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} {value:g}: a number above 0 is expected")
    entries = entries_of([Path(name) for name in args.study], args.only)
    opened_files = {entry.file: opened(entry.file, args.reference) for entry in entries}
    if args.report_only or all(file.suffix == ".json" for file in opened_files):
        if args.only:
            raise UserError("--only chooses runs to work off; a report is of all that is done")
        for _, results in opened_files.values():
            if not results.runs:
                raise UserError(
                    f"{results.path}: no run is done yet, so there is nothing to report"
                )
        return max(report(definition, results) for definition, results in opened_files.values())
    for file in opened_files:
        if file.suffix == ".json":
            raise UserError(f"{file}: results run nothing; give the study file, or no study file")
    queue = [work_of(entry, *opened_files[entry.file]) for entry in entries]
    if args.dry_run:
        print("\n\n".join(map(dry_run, queue)))
        return 0
    return work_off(args, queue)


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


def work_off(args: argparse.Namespace, queue: Sequence[Work]) -> int:
    """Work off the runs of a queue, write the reports, and return an exit code."""
    check_runs([run for work in queue for run in work.runs])
    first = queue[0]
    cards = cards_for(first.runs[0].settings.run.device)
    jobs = args.jobs or first.definition.study.jobs or (4 if cards else 1)
    left = [run for work in queue for run in work.runs if run.name not in work.results.runs]
    warnings = [room_warning(left, jobs, len(cards), room_of(cards))]
    warnings += [kind_warning(work.runs, work.results, cards) for work in queue]
    for warning in dict.fromkeys(filter(None, warnings)):
        tell(warning)
    before = signal.signal(signal.SIGTERM, _terminate)
    with contextlib.ExitStack() as locks:
        locks.callback(signal.signal, signal.SIGTERM, before)
        for out in {work.definition.out for work in queue}:
            out.mkdir(parents=True, exist_ok=True)
            locks.callback(RunLock(out).release)
        pool, progress = Pool(cards, jobs, first.definition.study.threads), Progress()
        parts = parts_of(queue, progress)
        try:
            scheduler.work_off(parts, pool, progress, args.minutes)
        except (KeyboardInterrupt, Terminated):
            tell("the runs were stopped at checkpoints; the same command goes on")
            raise
    sittings = {id(part.sitting): part.sitting for part in parts}.values()
    return max(ended(sitting, with_report=not args.no_report) for sitting in sittings)


def ended(sitting: Sitting, with_report: bool) -> int:
    """Write the report of a study that was worked at, say what is left, and return an exit code."""
    definition, results = sitting.definition, sitting.results
    code = 1 if results.failed or not results.runs else 0
    if results.runs and with_report:
        code = report(definition, results)
    for reason in dict.fromkeys(results.failed.values()):
        names = [name for name, own in results.failed.items() if own == reason]
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        print(f"failed: {', '.join(names[:3])}{more}: {reason}")
    if sitting.left:
        total = sitting.standing().total
        print(f"{len(sitting.left)} of {total} runs are left; the same command goes on")
        return TimeLimitReached.exit_code
    return code


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def report(definition: Definition, results: Results) -> int:
    """Write the report, say where it is, and return an exit code: 1 for failures and twins."""
    written = write_report(definition, results)
    print(table([("results", str(results.path)), ("report", str(written.html))]))
    for group in written.unequal_twins:
        print(f"twins differ: {group}: the final weights are to be equal, bit for bit")
    return 1 if written.unequal_twins or results.failed else 0


def dry_run(work: Work) -> str:
    """Return the runs of a part of the queue and the state of each, as a table."""
    results = work.results
    rows = [("run", "arm", "seed", "steps", "begins from", "state")]
    for one in work.runs:
        state = "to do"
        if one.name in results.runs:
            state = "done"
        elif one.path.is_dir():
            state = run_state(one.path)
            if isinstance(kept_outcome(work.definition, one), Outcome):
                state = "evaluated, not in the results"
        start = one.start.name if one.start else one.settings.model.path or "random weights"
        rows.append((one.name, one.arm, str(one.seed), str(one.settings.loop.steps), start, state))
    done = sum(one.name in results.runs for one in work.runs)
    out = work.definition.out
    return f"{table(rows)}\n\n{len(work.runs)} runs, {done} done; they go to {out}"


def check_runs(runs: Sequence[PlannedRun]) -> None:
    """Check what the settings name, once for each different task, model and precision."""
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


def room_of(cards: Sequence[str]) -> int | None:
    """Return the bytes of the smallest card, or those that the CPU has free; None: not known.

    Args:
        cards: The GPUs of the study; none: it runs on the CPU.
    """
    if not cards:
        return free_bytes("cpu")
    visible = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(n).total_memory for n in visible), default=None)


def room_warning(runs: Sequence[PlannedRun], jobs: int, num_cards: int, room: int | None) -> str:
    """Return a warning about runs side by side that may need more memory than the device has.

    The warning is empty where they fit.

    Args:
        num_cards: The number of cards; 0: the runs are made on the CPU.
        room: The bytes of a card, or of the CPU; None: not known.
    """
    needs = _needs(runs, "cuda" if num_cards else "cpu")
    needs.sort(key=lambda one: -one[0])
    places = max(num_cards, 1)

    def held(count: int) -> int:
        """Return the bytes of so many runs a card, the largest ones, dealt out evenly."""
        largest = [need for need, _ in needs[: count * places]]
        return -(-sum(largest) // places)

    if room is None or held(jobs) <= room:
        return ""
    fitting = max((count for count in range(1, jobs) if held(count) <= room), default=0)
    need, name = needs[0]
    fewer = f"take --jobs {fitting} or" if fitting else "not even one is sure to fit, so take"
    return (
        f"warning: {min(jobs, len(needs))} runs at once may need {held(jobs) / GIB:.1f} GiB, and "
        f"{'a card' if num_cards else 'the CPU'} has {room / GIB:.1f} ({name} alone "
        f"{need / GIB:.1f}, with prompts as long as answers): {fewer} a smaller "
        "train.tokens_per_micro_batch. A run that finds too little makes smaller micro-batches by "
        "itself, which changes its bits"
    )


def kind_warning(runs: Sequence[PlannedRun], results: Results, cards: Sequence[str]) -> str:
    """Return a warning about starts that would be trained again on another kind of card.

    The warning is empty where there is no such start.

    Args:
        cards: The GPUs of the study; none: it runs on the CPU.
    """
    numbers = range(torch.cuda.device_count()) if cards else ()
    here = sorted({torch.cuda.get_device_name(number) for number in numbers}) or ["CPU"]
    starts = {run.name: run.start for run in runs if run.start is not None}
    begun = {start.name for name, start in starts.items() if name in results.runs}
    again = {
        start.name
        for name, start in starts.items()
        if name not in results.runs and not (start.path / "model" / "config.json").is_file()
    }
    if not begun & again or set(here) & set(results.devices):
        return ""
    return (
        f"warning: {results.path} has runs of {', '.join(results.devices)}, and this machine has "
        f"{', '.join(here)}: if {', '.join(sorted(begun & again))} gets other weights when it is "
        "trained again here, the runs that begin from it fail. Take the same kind of card, or put "
        "the start back from a copy"
    )


def _needs(runs: Sequence[PlannedRun], device: str) -> list[tuple[int, str]]:
    """Return the bytes that each run needs, with its name."""
    known: dict[tuple[object, ...], int] = {}
    needs = []
    for run in runs:
        kind = (run.arm, *run.point.values())  # seeds change nothing
        if kind not in known:
            config = model_config(run.start.settings if run.start else run.settings)
            others, load = OtherModels.of(run.settings), Workload.of(run.settings, config)
            plan = memory_plan(run.settings, config, others, load, device=device)
            known[kind] = plan.needed
        needs.append((known[kind], run.name))
    return needs
