"""The report of a study: report.html, report.md and PNGs, made from its results file alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study.analysis import arm_results, lost_names, lost_runs, point_name, twin_groups
from benchmarks.study.charts import curve_charts
from benchmarks.study.definition import CollapseSection, Definition
from benchmarks.study.plan import grid_points
from benchmarks.study.results import Results, RunResult
from benchmarks.study.tables import (
    Table,
    accuracy_tables,
    lost_table,
    mismatch_table,
    seconds_table,
    seed_tables,
    twin_table,
    unfinished_table,
)

from jetrl.runs.format import count, duration, percent, visible
from jetrl.runs.plots import Chart, to_png
from jetrl.runs.report import Html, figures, folded, join, page, section, table, text, tile
from jetrl.runs.storage import storing, write_atomically


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written."""

    html: Path
    markdown: Path
    unequal_twins: list[str]


def write_report(definition: Definition, results: Results) -> WrittenReport:
    """Write report.html, report.md and plots/*.png into the study's folder."""
    runs = known_runs(definition, results.runs.values())
    tables = report_tables(definition, results)
    curves = {
        point_name(point): curve_charts(definition, runs, point)
        for point in grid_points(definition)
    }
    out = definition.out
    plots = out / "plots"
    with storing(out / "report.html"):
        plots.mkdir(parents=True, exist_ok=True)
        for old in plots.glob("*.png"):
            old.unlink()
        for chart in (chart for charts in curves.values() for chart in charts):
            to_png(chart, plots / f"{chart.key}.png")
        body = _body(definition, results, runs, tables, curves)
        title = definition.study.title or definition.study.name
        write_atomically(out / "report.html", page(f"{title} - jetrl study", body))
        write_atomically(out / "report.md", markdown(definition, results, tables))
    unequal = [group.name for group in twin_groups(definition, runs) if not group.equal]
    return WrittenReport(out / "report.html", out / "report.md", unequal)


def known_runs(definition: Definition, runs: Iterable[RunResult]) -> list[RunResult]:
    """Return the runs whose arm, grid point and seed a study has: its file may have lost some."""
    points, seeds = list(grid_points(definition)), definition.study.seeds
    return [
        run
        for run in runs
        if run.arm in definition.arms and run.point in points and run.seed in seeds
    ]


def report_tables(definition: Definition, results: Results) -> list[Table]:
    """Return the tables of a report, in reading order."""
    runs = known_runs(definition, results.runs.values())
    tables = [
        twin_table(definition, list(twin_groups(definition, runs))),
        *accuracy_tables(definition, arm_results(definition, runs)),
        lost_table(definition, list(lost_runs(definition, runs))),
        *seed_tables(definition, runs, lost_names(definition, runs)),
        mismatch_table(definition, runs),
        seconds_table(definition, runs),
        unfinished_table(runs, results.failed),
    ]
    return [one for one in tables if one is not None]


def _body(
    definition: Definition,
    results: Results,
    runs: Sequence[RunResult],
    tables: Sequence[Table],
    curves: Mapping[str, Sequence[Chart]],
) -> list[Html]:
    """Return the pieces of the page."""
    study = definition.study
    first = [one for one in tables if one.title.startswith(("Twin", "Final", "Lost"))]
    others = [one for one in tables if one not in first]
    about = f"{' · '.join(results.devices)} · {results.date} · {results.source}"
    sections = []
    for point, own in curves.items():
        if own:
            sections.append(section("Curves" + f": {point}" * bool(point), figures(own)))
    return [
        Html(
            "<style>td, th { overflow-wrap: break-word; padding-right: 12px; }</style>"
            '<p class="kicker">jetrl study report</p>'
            f'<div class="title"><h1>{text(study.title or study.name)}</h1></div>'
            f'<p class="soft">{text(study.question)}</p>'
            f'<p class="soft">{text(about)}</p>'
        ),
        _tiles(definition, runs, results),
        *(_table_section(one) for one in first),
        *sections,
        *(_table_section(one) for one in others),
        section(
            "How to read this",
            Html(f'<div class="card" style="padding:14px 18px">{_method(definition, runs)}</div>'),
            folded("The study file", json.dumps(definition.tree, indent=2, ensure_ascii=False)),
        ),
        Html(
            f"<footer>Made by jetrl study from {text(results.path)}. The plots are in plots/ as "
            "PNG files, the tables in report.md.</footer>"
        ),
    ]


def _tiles(definition: Definition, runs: Sequence[RunResult], results: Results) -> Html:
    """Return the headline: how many runs, collapses and tokens there were."""
    planned = (
        len(list(grid_points(definition))) * len(definition.arms) * len(definition.study.seeds)
    )
    lost = list(lost_names(definition, runs).values())
    kinds = f"{lost.count('collapsed')} collapsed, {lost.count('behind')} fell behind"
    tokens = sum(run.compared_tokens for run in runs)
    failed = f", {len(results.failed)} failed" * bool(results.failed)
    seconds = sum(run.wall_s for run in runs)
    tiles = [
        tile("Runs", text(f"{len(runs)} of {planned}"), f"{len(definition.arms)} arms{failed}"),
        tile("Lost", text(str(len(lost))), kinds, "bad" if lost else ""),
        tile("Tokens compared", text(count(tokens)), "of sampler and trainer"),
        tile("Time of all runs", text(duration(seconds)), "several at a time"),
    ]
    return Html(f'<div class="tiles">{join(tiles)}</div>')


def _table_section(one: Table) -> Html:
    note = Html(f'<p class="soft" style="margin:-8px 0 14px">{text(one.note)}</p>')
    return section(one.title, note if one.note else Html(""), table(one.rows, one.head))


def _method(definition: Definition, runs: Sequence[RunResult]) -> Html:
    """Return how the numbers were made, in words."""
    sentences = method(definition, runs)
    return join(Html(f'<p style="margin:6px 0">{text(one)}</p>') for one in sentences)


def method(definition: Definition, runs: Sequence[RunResult]) -> list[str]:
    """Return sentences on how the numbers of a report were made."""
    study, settings = definition.study, definition.eval
    kind = "training" if definition.evaluates_training_set else "held-out"
    # A task may have fewer prompts, and runs of an earlier sitting fewer draws.
    finals = [run.common for run in runs if run.common is not None]
    prompts = " or ".join(map(str, sorted({final.prompts for final in finals}))) or "no"
    samples = " or ".join(map(str, sorted({final.samples for final in finals}))) or "no"
    sentences = [
        f"Accuracy is the mean reward of {samples} completions of each of {prompts} {kind} "
        f"prompts at temperature {settings.temperature:g}, drawn from the final weights by one "
        f"engine under the preset {settings.preset}, alike for all runs; a run that ended on "
        "numbers that are not finite is evaluated with its last checkpoint.",
        f"Intervals are {100 * study.level:g}% t intervals over seeds. Differences are "
        "paired by seed: arms of one seed share prompts, draws and first weights until their first "
        "real difference. The rank p is that of the signed-rank test, which one outlier does "
        "not decide; with n seeds it cannot be below 2 / 2^n. Holm's method adjusts both for the "
        "number of arms, t tests and signed-rank tests apart.",
        _rule(definition.collapse),
        f"A run that has not collapsed fell behind if its final accuracy is more than "
        f"{100 * definition.collapse.behind:g} points below the median of the runs of "
        f"{definition.label(definition.reference)} at the same grid point.",
        f"Curves are means over steps, at most {study.points} points a run. Bands reach from the "
        "lowest seed to the highest; a run that collapsed or fell behind has a thin line of its "
        "own.",
    ]
    if definition.start is not None:
        sentences.append(
            f"All arms of a grid point and seed begin from the very same weights, trained under "
            f"{definition.start.precision} on worked answers."
        )
    return sentences


def _rule(rule: CollapseSection) -> str:
    """Return the rule of collapse in words."""
    return (
        f"A run has collapsed if it ended on numbers that are not finite, or if its {rule.metric} "
        f"over the last {percent(rule.window)} of its steps is below {percent(rule.share)} of the "
        f"highest mean over any stretch as long, and that was at least {rule.least:g}."
    )


def markdown(definition: Definition, results: Results, tables: Sequence[Table]) -> str:
    """Return the tables of a report in Markdown, with how they were made."""
    study, runs = definition.study, known_runs(definition, results.runs.values())
    lines = [f"# {study.title or study.name}", ""]
    lines += [study.question, ""] if study.question else []
    lines += [f"{', '.join(results.devices)}, {results.date}, from `{results.source}`.", ""]
    for one in tables:
        lines += [f"## {one.title}", ""]
        lines += [one.note, ""] if one.note else []
        lines += [_markdown_row(one.head), _markdown_row(["---"] * len(one.head))]
        lines += [*map(_markdown_row, one.rows), ""]
    lines += [
        "## How to read this",
        "",
        *(f"- {sentence}" for sentence in method(definition, runs)),
        "",
    ]
    return visible("\n".join(lines), newlines=True)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(visible(cell).replace("|", "\\|") for cell in cells) + " |"
