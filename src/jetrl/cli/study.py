"""A study: arms times seeds as runs side by side over the cards that are there, and one report.

For example:

    jetrl study benchmarks/study/flows.toml                 all runs, then the report
    jetrl study flows.toml --dry-run                        its runs, and what is done of them
    jetrl study flows.toml --only bf16 --only unified       some arms
    jetrl study flows.toml --only length=64 --jobs 8        one value of an axis, 8 runs a card
    jetrl study flows.toml --only seed=0 --only seed=1      some seeds
    jetrl study flows.toml --minutes 10                     stop at checkpoints after ten minutes
    jetrl study flows.toml --minutes 10 --no-report         the same, and no report at the end
    jetrl study flows.toml --report-only                    the report of what is there
    jetrl study benchmarks/results/study/flows.json         the report from the committed results

The same command goes on: runs that are done are skipped, runs that were cut are resumed with the
same bits. How to write a study: docs/study.md. Exit codes: 0 done, 1 a run failed or twins differ,
2 bad input, 75 runs are left after --minutes, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.cli.arguments import table, tell
from jetrl.errors import Terminated, TimeLimitReached, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from jetrl.study.definition import Definition
    from jetrl.study.plan import PlannedRun
    from jetrl.study.results import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jetrl study STUDY.toml [--only ARM | AXIS=VALUE | seed=N ...] [--jobs N] [--minutes M] "
        "[--no-report | --report-only | --dry-run]"
    )
    parser.add_argument(
        "study", nargs="?", metavar="STUDY", help="a study file, or a results file (.json)"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ARM | AXIS=VALUE | seed=N",
        help="run these arms, values of the grid and seeds alone (repeatable)",
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
    parser.add_argument("--evaluate", metavar="REQUEST", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.evaluate is not None:
        from jetrl.study.final_evaluation import answer_request

        answer_request(Path(args.evaluate))
        return 0
    if args.study is None:
        raise UserError("jetrl study needs a study file; docs/study.md shows how to write one")
    for name in ("jobs", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} {value:g}: a number above 0 is expected")
    definition, results = opened(Path(args.study))
    if args.report_only or Path(args.study).suffix == ".json":
        if not results.runs:
            raise UserError(f"{results.path}: no run is done yet, so there is nothing to report")
        return report(definition, results)

    from jetrl.study.plan import chosen, planned_runs

    runs = chosen(planned_runs(definition), args.only)
    if args.dry_run:
        print(dry_run(definition, runs, results))
        return 0
    return work_off(args, definition, runs, results)


def opened(path: Path) -> tuple[Definition, Results]:
    """Return the definition and the results of a study file, or of a results file.

    Raises:
        UserError: It is neither, or it is wrong; the message names the line.
    """
    from jetrl.study.definition import definition_of, read_definition
    from jetrl.study.results import Results, read_results

    if path.suffix == ".json":
        results = read_results(path)
        definition = definition_of(results.definition, path)
        # A file from elsewhere does not say where its report goes.
        study = definition.study.model_copy(update={"out": None})
        return dataclasses.replace(definition, study=study), results
    definition = read_definition(path)
    if definition.results_file.is_file():
        results = read_results(definition.results_file)
        results.source, results.definition = str(path), definition.tree
    else:
        results = Results(definition.results_file, str(path), definition.tree)
    return definition, results


def work_off(
    args: argparse.Namespace,
    definition: Definition,
    runs: Sequence[PlannedRun],
    results: Results,
) -> int:
    """Work off runs, write the report, and return an exit code.

    Args:
        args: The arguments of the command.
        definition: The definition of the study.
        runs: The runs to work off.
        results: The results so far.
    """
    from jetrl.runs.attempts import RunLock
    from jetrl.study.checks import check_runs
    from jetrl.study.processes import Pool, cards_for
    from jetrl.study.sitting import Sitting

    check_runs(runs)
    cards = cards_for(runs[0].settings.run.device)
    jobs = args.jobs or definition.study.jobs or (4 if cards else 1)
    definition.out.mkdir(parents=True, exist_ok=True)
    lock = RunLock(definition.out)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        pool = Pool(cards, jobs, definition.study.threads)
        sitting = Sitting(definition, runs, results, pool, args.minutes)
        sitting.work_off()
    except (KeyboardInterrupt, Terminated):
        tell("the runs were stopped at checkpoints; the same command goes on")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.release()
    code = 1 if results.failed or not results.runs else 0
    if results.runs and not args.no_report:
        code = report(definition, results)
    for name, reason in results.failed.items():
        print(f"failed: {name}: {reason}")
    if sitting.left:
        print(f"{len(sitting.left)} of {len(runs)} runs are left; the same command goes on")
        return TimeLimitReached.exit_code
    return code


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def report(definition: Definition, results: Results) -> int:
    """Write the report, say where it is, and return an exit code: 1 for failures and twins."""
    from jetrl.study.report import write_report

    written = write_report(definition, results)
    print(table([("results", str(results.path)), ("report", str(written.html))]))
    for group in written.unequal_twins:
        print(f"twins differ: {group}: the final weights are to be equal, bit for bit")
    return 1 if written.unequal_twins or results.failed else 0


def dry_run(definition: Definition, runs: Sequence[PlannedRun], results: Results) -> str:
    """Return the runs of a study and the state of each, as a table.

    Args:
        definition: The definition of the study.
        runs: The runs.
        results: The results so far.
    """
    from jetrl.runs.attempts import run_state

    rows = [("run", "arm", "seed", "steps", "begins from", "state")]
    for one in runs:
        state = "to do"
        if one.name in results.runs:
            state = "done"
        elif one.path.is_dir():
            state = run_state(one.path)
        start = one.start.name if one.start else one.settings.model.path or "random weights"
        rows.append((one.name, one.arm, str(one.seed), str(one.settings.loop.steps), start, state))
    done = sum(one.name in results.runs for one in runs)
    return f"{table(rows)}\n\n{len(runs)} runs, {done} done; they go to {definition.out}"
