"""Studies: arms times seeds as runs side by side over the cards that are there, and a report each.

For example:

    jetrl study benchmarks/study/flows.toml                 all runs, then the report
    jetrl study flows.toml --dry-run                        its runs, and what is done of them
    jetrl study flows.toml --only bf16 --only unified       some arms
    jetrl study flows.toml --only length=64 --jobs 8        one value of an axis, 8 runs a card
    jetrl study flows.toml --only seed=0 --only seed=1      some seeds
    jetrl study flows.toml --minutes 10                     stop at checkpoints after ten minutes
    jetrl study flows.toml --minutes 10 --no-report         the same, and no report at the end
    jetrl study flows.toml --report-only                    the report of what is there
    jetrl study doses.toml flows.toml --jobs 15             two studies, which share 15 places
    jetrl study queue.toml --jobs 15 --minutes 9            those that a queue file names
    jetrl study benchmarks/results/study/flows.json         the report from the committed results
    jetrl study flows.json --reference unified              the same, compared with another arm

The same command goes on: runs that are done are skipped, runs that were cut are resumed with the
same bits. How to write a study and a queue file: docs/studies.md. Exit codes: 0 done, 1 a run
failed or twins differ, 2 bad input, 75 runs are left after --minutes, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.cli.arguments import table, tell
from jetrl.errors import Terminated, TimeLimitReached, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from benchmarks.study.definition import Definition
    from benchmarks.study.queue import Work
    from benchmarks.study.results import Results
    from benchmarks.study.sitting import Sitting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jetrl study STUDY.toml [...] [--only ARM | AXIS=VALUE | seed=N ...] [--jobs N] "
        "[--minutes M] [--reference ARM] [--no-report | --report-only | --dry-run]"
    )
    parser.add_argument(
        "study",
        nargs="*",
        metavar="STUDY",
        help="a study file, a results file (.json), or a queue file that names several studies",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ARM | AXIS=VALUE | seed=N",
        help="run these arms, values of the grid and seeds of each study alone (repeatable)",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs side by side on a card (default: study.jobs)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin no run after these minutes, and stop those that run at a checkpoint",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="run nothing: write the report of what is there"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs and their state, and stop"
    )
    parser.add_argument(
        "--no-report", action="store_true", help="run, and leave the report to --report-only"
    )
    parser.add_argument(
        "--reference",
        metavar="ARM",
        help="compare the others with this arm in the report (default: study.reference)",
    )
    parser.add_argument("--evaluate", metavar="REQUEST", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.evaluate is not None:
        from benchmarks.study.final_evaluation import answer_request

        answer_request(Path(args.evaluate))
        return 0
    if not args.study:
        raise UserError("jetrl study needs a study file; docs/studies.md shows how to write one")
    for name in ("jobs", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} {value:g}: a number above 0 is expected")

    from benchmarks.study.queue import work_of
    from benchmarks.study.queue_file import entries_of

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
        path: The file.
        reference: The arm that the report compares the others with; None: the study's own.

    Raises:
        UserError: It is neither, or it is wrong; the message names the line. It has no such arm.
    """
    from benchmarks.study.definition import definition_of, read_definition
    from benchmarks.study.results import Results, read_results

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
    """Work off the runs of a queue, write the reports, and return an exit code.

    Args:
        args: The arguments of the command.
        queue: The runs, in the order in which places go to them.
    """
    from benchmarks.study import places
    from benchmarks.study.checks import check_runs
    from benchmarks.study.machine import kind_warning, room_of, room_warning
    from benchmarks.study.processes import Pool, cards_for
    from benchmarks.study.progress import Progress
    from benchmarks.study.queue import parts_of

    from jetrl.runs.attempts import RunLock

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
            places.work_off(parts, pool, progress, args.minutes)
        except (KeyboardInterrupt, Terminated):
            tell("the runs were stopped at checkpoints; the same command goes on")
            raise
    sittings = {id(part.sitting): part.sitting for part in parts}.values()
    return max(ended(sitting, with_report=not args.no_report) for sitting in sittings)


def ended(sitting: Sitting, with_report: bool) -> int:
    """Write the report of a study that was worked at, say what is left, and return an exit code.

    Args:
        sitting: The sitting at the study.
        with_report: Whether the report is written.
    """
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
    from benchmarks.study.report import write_report

    written = write_report(definition, results)
    print(table([("results", str(results.path)), ("report", str(written.html))]))
    for group in written.unequal_twins:
        print(f"twins differ: {group}: the final weights are to be equal, bit for bit")
    return 1 if written.unequal_twins or results.failed else 0


def dry_run(work: Work) -> str:
    """Return the runs of a part of the queue and the state of each, as a table.

    Args:
        work: The part.
    """
    from benchmarks.study.outcome import Outcome, kept_outcome

    from jetrl.runs.attempts import run_state

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
