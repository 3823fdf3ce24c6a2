"""The output of `jetrl runs`: the runs of a folder, a run in words, several runs in a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory
from jetrl.runs.format import clip, count, date, duration, metric_value, number, visible
from jetrl.runs.history import RunHistory, in_phase
from jetrl.runs.jsonl import Record
from jetrl.runs.metrics import find_metric, is_eval_mean
from jetrl.runs.plot_style import COLORS, LINES, STYLE, finish, line, series

DEFAULT_METRICS = (
    "reward/mean",
    "eval",
    "response_length/mean",
    "policy/entropy",
    "mismatch/mean_abs_logprob_diff",
    "timing/step_s",
)
SUPERVISED_METRICS = (
    "sft/loss",
    "reward_model/accuracy",
    "reward_model/eval_accuracy",
    "sft/grad_norm",
)
PANEL_INCHES = (5.2, 2.9)


@dataclass(frozen=True)
class RunRow:
    """A row of a listing of runs.

    Attributes:
        state: The run's state, or `damaged`.
        problem: The reason why the run cannot be read; "" if it can.
    """

    name: str
    path: Path
    state: str
    history: RunHistory
    preset: str = ""
    problem: str = ""


def list_runs(folder: str | Path = "runs") -> list[RunRow]:
    """Return the runs in a folder, the newest first; damaged ones have a problem.

    Raises:
        UserError: There is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; run.dir says where runs are kept")
    paths = sorted(path for path in folder.iterdir() if path.is_dir())
    rows = [_row(path) for path in paths if not path.name.startswith(".")]
    return sorted(rows, key=lambda row: -(row.history.started or 0.0))


def runs_table(rows: Sequence[RunRow]) -> Table:
    """Return the listing as a table for the terminal, with the problems of damaged runs below."""
    problems = [f"{row.name}: {row.problem}" for row in rows if row.problem]
    table = Table(box=None, header_style="dim", caption_style="red", caption_justify="left")
    table.caption = Text(visible("\n".join(problems), newlines=True)) if problems else None
    table.add_column("run", overflow="fold")
    for title in ("state", "preset"):
        table.add_column(title, no_wrap=True)
    for title in ("steps", "reward", "eval", "differ", "time", "started"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        name, history = Text(visible(row.name)), row.history
        if row.problem:
            table.add_row(name, Text("damaged", "red"))
            continue
        table.add_row(
            name,
            Text(row.state),
            Text(visible(row.preset)),
            count(history.num_steps),
            number(history.reward.last) if history.reward else "",
            metric_value(history.evals[0].name, history.evals[0].last) if history.evals else "",
            count(history.num_different) if history.num_different is not None else "",
            duration(history.elapsed_s),
            date(history.started)[5:],
        )
    return table


def show_run(path: str | Path) -> str:
    """Return a run in words: state, totals, changes of reward and evaluation, and its files.

    Raises:
        UserError: The path is no run directory, or the run is damaged.
    """
    run = RunDirectory.open(path)
    history, config, plan = run.history(), run.config(), run.plan()
    attempts = run.attempts()
    reason = attempts[-1].reason if attempts else ""
    rows = [
        ("run", str(run.path)),
        ("state", f"{run.state()} ({reason})" if reason else run.state()),
        ("started", date(history.started)),
        ("wall time", f"{duration(history.elapsed_s)} in {count(len(attempts))} attempt(s)"),
        ("task", str(config.get("task", {}).get("name", ""))),
        ("precision", str(plan.get("name", ""))),
        ("steps", count(history.num_steps)),
    ]
    if history.num_sft_steps:
        rows.append(("supervised steps", count(history.num_sft_steps)))
    for change in ((history.reward,) if history.reward else ()) + history.evals:
        ends = " -> ".join(metric_value(change.name, v) for v in (change.first, change.last))
        rows.append((change.name, f"{ends}  (step {change.first_step} to {change.last_step})"))
    if history.num_different is not None:
        differing = mismatch_text(history.num_different, history.num_tokens)
        rows.append(("mismatch", f"{differing} different"))
    checkpoints = [
        path
        for pattern in ("sft/step_*", "step_*")
        for path in sorted(run.checkpoints_dir.glob(pattern))
    ]
    last = str(checkpoints[-1].relative_to(run.checkpoints_dir)) if checkpoints else "none"
    rows.append(("last checkpoint", last))
    report = run.path / "report.html"
    rows.append(("report", str(report) if report.is_file() else "none"))
    shown = [(clip(visible(label), 60), visible(value)) for label, value in rows]
    width = max(len(label) for label, _ in shown)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in shown)


def plot_runs(
    paths: Sequence[str | Path], metrics: Sequence[str] = (), out_png: str | Path = "runs.png"
) -> Path:
    """Draw metrics of several runs over each other, a panel for each metric, as a PNG.

    Args:
        metrics: Names of metrics, or `eval` for the mean of every evaluated task; default: the
            usual ones that any of the runs has.

    Raises:
        UserError: A path is no run directory, no run has a metric, or the file cannot be written.
    """
    runs = {
        label: RunDirectory.open(path).metrics()
        for label, path in zip(labels(paths), paths, strict=True)
    }
    in_rl = any(in_phase(records, "rl") for records in runs.values())
    usual = DEFAULT_METRICS if in_rl else SUPERVISED_METRICS
    names = _chosen(metrics or usual, runs, strict=bool(metrics))
    # A panel for each metric, with a line for each run.
    num_columns = 1 if len(names) == 1 else 2
    num_rows = math.ceil(len(names) / num_columns)
    width, height = PANEL_INCHES
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(width * num_columns, height * num_rows + 0.4), layout="constrained"
        )
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)
        for name, axes in zip(names, grid.flat, strict=False):
            for number_of_run, (label, records) in enumerate(runs.items()):
                color = COLORS[LINES[number_of_run % len(LINES)]]
                line(axes, *series(_phase_of(records, name), name), clip(visible(label), 60), color)
            metric = find_metric(name)
            finish(axes, metric.unit if metric else "")
            axes.set_title(clip(visible(name), 60), loc="left", fontsize=10, fontweight="bold")
        handles, texts = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper left", ncols=4)
        out = Path(out_png)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, format="png", dpi=150, facecolor="white")
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{out}: cannot be written: {why}; --out names another file") from None
    return out


def labels(paths: Sequence[str | Path]) -> list[str]:
    """Return the names of runs beside each other: paths where two names are the same."""
    names = [Path(path).name for path in paths]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def _row(path: Path) -> RunRow:
    try:
        run = RunDirectory.open(path)
        preset = str(run.plan().get("name", ""))
        return RunRow(path.name, path, run.state(), run.history(), preset)
    except Exception as error:  # whatever is wrong with one run, the others are listed
        return RunRow(path.name, path, "damaged", RunHistory(), problem=str(error))


def _chosen(metrics: Sequence[str], runs: dict[str, list[Record]], strict: bool) -> list[str]:
    present = {name for records in runs.values() for record in records for name in record}
    names: list[str] = []
    for name in metrics:
        matches = sorted(filter(is_eval_mean, present)) if name == "eval" else {name} & present
        if strict and not matches:
            known = ", ".join(sorted(n for n in present if find_metric(n)))
            raise UserError(f"metric {name}: none of these runs has it; they have {known}")
        names += matches
    if not names:
        raise UserError("nothing to plot: these runs have no finished step")
    return names


def _phase_of(records: list[Record], name: str) -> list[Record]:
    """Return the RL lines, or the supervised ones where no RL line has the metric."""
    rl = in_phase(records, "rl")
    return rl if any(name in record for record in rl) else in_phase(records, "sft")


def mismatch_text(num_different: int | None, num_tokens: int | None) -> str:
    """Return how many of the compared tokens differ between sampler and trainer, or ""."""
    if num_different is None:
        return ""
    return count(num_different) + (f" of {count(num_tokens)}" if num_tokens is not None else "")
