"""The tables of single runs: how many of each arm were lost, and where each seed ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.study.analysis import common_accuracy, point_name, runs_of
from benchmarks.study.counts import least_shown
from benchmarks.study.definition import Definition
from benchmarks.study.lost import Loss, LostRuns
from benchmarks.study.plan import grid_points
from benchmarks.study.results import RunResult
from benchmarks.study.tables import (
    DASH,
    Table,
    accuracy_name,
    shown_interval,
    shown_p,
    without_point,
)


def lost_table(definition: Definition, lost: Sequence[LostRuns]) -> Table | None:
    """Return the table of lost runs; None where no arm has two runs.

    Args:
        definition: The definition of the study.
        lost: The lost runs of each arm at each grid point.
    """
    if not any(one.num_runs > 1 for one in lost):
        return None
    level, reference = definition.study.level, definition.label(definition.reference)
    most = max(one.num_runs for one in lost)
    least = least_shown(most, 0, most, level)
    enough = f"at least {least} lost runs of" if least is not None else "more than"
    note = (
        "Lost: collapsed, or fell behind, which is a final accuracy more than "
        f"{100 * definition.collapse.behind:g} points below the median of {reference} at the same "
        f"grid point. Shares have exact {100 * level:g}% intervals; p of Fisher's exact test, "
        f"two-sided, against {reference}. Beside {most} runs without a loss it takes {enough} "
        f"{most} for a p below {1 - level:.2g}."
    )
    head = (
        *("point", "arm", "runs", "collapsed", "fell behind", "share lost"),
        *("Fisher p", "Holm p", "more than " + reference),
    )
    return without_point(
        Table("Lost runs", note, head, [_lost_row(definition, one) for one in lost])
    )


def _lost_row(definition: Definition, lost: LostRuns) -> list[str]:
    """Return the row of an arm at a grid point."""
    verdict = DASH
    if lost.p < 1 - definition.study.level and lost.runs_needed is not None:
        verdict = "yes"
    elif lost.runs_needed is not None:
        verdict = f"not shown; {lost.runs_needed} runs would do"
    elif lost.p == lost.p:  # not NaN: there is a comparison
        verdict = "not shown"
    return [
        lost.point,
        definition.label(lost.arm),
        str(lost.num_runs),
        str(lost.num_collapsed),
        str(lost.num_behind),
        shown_interval(lost.share),
        shown_p(lost.p),
        shown_p(lost.adjusted_p),
        verdict,
    ]


def seed_tables(
    definition: Definition, runs: Sequence[RunResult], lost: Mapping[str, Loss]
) -> Iterator[Table]:
    """Yield the table of the final accuracy of each run, a column a seed, of each grid point.

    Args:
        definition: The definition of the study.
        runs: The runs of the study.
        lost: The names of the runs that were lost, with the rule that found each.
    """
    seeds = definition.study.seeds
    for point in grid_points(definition):
        rows = []
        for arm in definition.arms:
            own = {run.seed: run for run in runs_of(runs, point, arm)}
            if own:
                cells = (_ending(own[seed], lost) if seed in own else DASH for seed in seeds)
                rows.append([definition.label(arm), *cells])
        if rows and len(seeds) > 1:
            name = point_name(point)
            title = f"{accuracy_name(definition)} of each seed" + f": {name}" * bool(name)
            head = ("arm", *(f"seed {seed}" for seed in seeds))
            yield Table(title, "", head, rows)


def _ending(run: RunResult, lost: Mapping[str, Loss]) -> str:
    """Return where a run ended: its accuracy, and whether it was lost."""
    accuracy = common_accuracy(run)
    words = ["no weights" if accuracy is None else f"{100 * accuracy:.1f}%"]
    return ", ".join([*words, *([lost[run.name]] if run.name in lost else [])])
