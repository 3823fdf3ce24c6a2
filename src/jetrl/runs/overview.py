"""Output of `jetrl runs` and `jetrl compare`: lists, single runs and comparisons.

Results and speeds are compared over common steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from jetrl.errors import UserError
from jetrl.runs.attempts import read_status
from jetrl.runs.digest import (
    DigestMatch,
    Line,
    check_chain,
    digested_lines,
    match_digests,
    words_of,
)
from jetrl.runs.directory import RunDirectory, settings_that_differ
from jetrl.runs.format import clip, count, date, duration, labels, number, percent, visible
from jetrl.runs.history import (
    RunHistory,
    change_of,
    history_of,
    in_phase,
    mean,
    phase_of,
    values_of,
)
from jetrl.runs.metrics import find_metric, is_share, outside_metric, reproducible
from jetrl.runs.storage import Record
from jetrl.settings.loading import as_override
from jetrl.types import Metrics


@dataclass(frozen=True)
class RunRow:
    """A row in a list of runs; `problem` tells why a damaged run cannot be read."""

    name: str
    path: Path
    state: str
    history: RunHistory
    preset: str = ""
    problem: str = ""


def list_runs(folder: str | Path = "runs") -> list[RunRow]:
    """Return the runs in a folder, newest first, including damaged ones."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; runs are kept in run.dir")
    paths = sorted(path for path in folder.iterdir() if path.is_dir())
    rows = [_row(path) for path in paths if not path.name.startswith(".")]
    return sorted(rows, key=lambda row: -(row.history.started or 0.0))


def runs_table(rows: Sequence[RunRow]) -> Table:
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
            _steps_text(history),
            number(history.reward.last) if history.reward else "",
            history.evals[0].ends[1] if history.evals else "",
            _mismatch_text(history).partition(" ")[0],
            duration(history.elapsed_s),
            date(history.started)[5:],
        )
    return table


def show_run(path: str | Path) -> str:
    """Return a text summary of a run: state, totals, reward and eval changes, and files."""
    run = RunDirectory.open(path)
    history, config, plan, state = run.history(), run.config(), run.plan(), run.state()
    attempts = run.attempts()
    reason = attempts[-1].reason if attempts else ""
    rows = [
        ("run", str(run.path)),
        ("state", f"{state} ({reason})" if reason else state),
        ("started", date(history.started)),
        ("wall time", f"{duration(history.elapsed_s)} in {count(len(attempts))} attempt(s)"),
        ("task", str(config.get("task", {}).get("name", ""))),
        ("precision", str(plan.get("name", ""))),
        ("steps", count(history.num_steps)),
    ]
    status = read_status(run.path)
    if state == "running" and status is not None and status.phase:
        since = duration(max(0.0, time.time() - status.time))
        rows.append(("now", f"{status.phase} of step {status.step} for {since}"))
    if history.num_sft_steps:
        rows.append(("supervised steps", count(history.num_sft_steps)))
        sft_loss = change_of(run.metrics("sft"), "sft/loss")
        rows += [] if sft_loss is None else [(sft_loss.name, " -> ".join(sft_loss.ends))]
    for change in filter(None, (history.reward, *history.evals)):
        ends = " -> ".join(change.ends)
        rows.append((change.name, f"{ends}  (step {change.first_step} to {change.last_step})"))
    if history.num_different is not None:
        rows.append(("mismatch", f"{_mismatch_text(history)} different"))
    rows.append(("digest", history.digest or "none"))
    folder = run.checkpoints_dir
    last = [path for name in ("sft/step_*", "step_*") for path in sorted(folder.glob(name))][-1:]
    rows.append(("last checkpoint", str(last[0].relative_to(folder)) if last else "none"))
    report = run.path / "report.html"
    rows.append(("report", str(report) if report.is_file() else "none"))
    shown = [(clip(visible(label), 60), visible(value)) for label, value in rows]
    width = max(len(label) for label, _ in shown)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in shown)


def _row(path: Path) -> RunRow:
    try:
        run = RunDirectory.open(path)
        return RunRow(path.name, path, run.state(), run.history(), str(run.plan().get("name", "")))
    except Exception as error:  # list other runs even if one is broken
        return RunRow(path.name, path, "damaged", RunHistory(), problem=str(error))


def _mismatch_text(history: RunHistory | RunBeside) -> str:
    """Return how many compared tokens differ between sampler and trainer, or ""."""
    if history.num_different is None:
        return ""
    tokens = f" of {count(history.num_tokens)}" if history.num_tokens is not None else ""
    return count(history.num_different) + tokens


def _steps_text(history: RunHistory) -> str:
    """Return the steps of a run, or the supervised ones if it has no others."""
    if history.num_steps or not history.num_sft_steps:
        return count(history.num_steps)
    return f"{count(history.num_sft_steps)} sft"


# Means over the last tenth of the steps, and medians of all.
_REACHED = ("reward/mean", "response_length/mean", "policy/entropy")
_MEDIANS = (
    *("timing/step_s", "timing/rollout_s", "timing/update_s"),
    *("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"),
)
# Fields of a run's history.
_TOTALS = ("num_steps", "num_sft_steps", "elapsed_s", "num_tokens", "num_different")
_OWN = ("run.name", "run.dir")  # settings that differ between any two runs
_SHORT = 12  # digits of a digest in the table
_NAMED = 4  # maximum metrics named for the first differing step


@dataclass(frozen=True)
class RunBeside:
    """A run in comparison with the first run.

    Attributes:
        reached: Means, medians and peaks by metric, over the common steps: times, speeds and memory
            of supervised ones only if the runs have no others in common.
        same_lines: Common lines before the first one with other bits, without times, speeds and
            memory.
        differs_at: That line; None if all common lines are the same.
        different: Its metrics that differ, as (first run, this run).
        digest: After its last step; "" if it has none.
        match: The comparison of its digests with those of the first run.
    """

    name: str
    path: Path
    state: str
    preset: str
    num_steps: int
    num_sft_steps: int
    elapsed_s: float
    num_tokens: int | None
    num_different: int | None
    reached: Metrics
    settings: Mapping[str, tuple[Any, Any]]
    common_lines: int
    same_lines: int
    differs_at: Line | None
    different: Mapping[str, tuple[float | None, float | None]]
    digest: str
    match: DigestMatch


@dataclass(frozen=True)
class Comparison:
    common_steps: int
    common_sft_steps: int
    runs: tuple[RunBeside, ...]

    @property
    def same(self) -> bool:
        """Return True if every run has all lines of the first, bit for bit."""
        first = self.runs[0].common_lines
        return all(r.same_lines == r.common_lines == first for r in self.runs)

    @property
    def same_digest(self) -> bool:
        """Return True if every run has all steps of the first, with the same digests."""
        return all(run.match.same for run in self.runs)


def compare_runs(paths: Sequence[str | Path], check_digests: bool = False) -> Comparison:
    """Compare runs; `check_digests` raises UserError for a digest that does not fit its steps."""
    if len(paths) < 2:
        raise UserError("a comparison needs at least two runs")
    runs = [RunDirectory.open(path) for path in paths]
    for run in runs if check_digests else ():
        check_chain(digested_lines(run.metrics()), str(run.metrics_file))
    lines = [{(phase_of(r), int(r["step"])): r for r in run.metrics()} for run in runs]
    common = sorted(set.intersection(*map(set, lines)))
    names, config = labels([run.path for run in runs]), runs[0].config()
    beside = tuple(
        _beside(name, run, own, lines[0], settings_that_differ(config, run.config()), common)
        for name, run, own in zip(names, runs, lines, strict=True)
    )
    steps = [phase for phase, step in common if step > 0]
    return Comparison(steps.count("rl"), steps.count("sft"), beside)


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    runs, first = comparison.runs, comparison.runs[0]
    rows = [
        ("", *(run.name for run in runs)),
        ("state", *(run.state for run in runs)),
        ("precision", *(run.preset for run in runs)),
        ("steps", *(count(run.num_steps) for run in runs)),
        ("wall time", *(duration(run.elapsed_s) for run in runs)),
        ("tokens different", *map(_mismatch_text, runs)),
        ("digest", *(run.digest[:_SHORT] or "none" for run in runs)),
    ]
    if any(run.num_sft_steps for run in runs):
        rows.append(("supervised steps", *(count(run.num_sft_steps) for run in runs)))
    for name in dict.fromkeys(name for run in runs for name in run.reached):
        form = percent if is_share(name, [run.reached for run in runs]) else number
        cells = (
            _reached(name, run.reached, first=first.reached, is_first=run is first, form=form)
            for run in runs
        )
        rows.append((name, *cells))
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        base = next(run.settings[key][0] for run in runs if key in run.settings)
        values = (run.settings.get(key, (base, base))[1] for run in runs)
        rows.append((key, *("unset" if v is None else as_override(v) for v in values)))
    return rows


def bits_in_words(run: RunBeside, first: RunBeside) -> str:
    """Describe the first line in which a run differs from the first run."""
    if run.differs_at is None:
        return (
            f"{run.name}: the same bits as {first.name} in all {count(run.common_lines)} lines of "
            "metrics.jsonl that both have, except times, speeds and memory"
        )
    named = [
        f"{name} {_exactly(ours)}, not {_exactly(theirs)}"
        for name, (theirs, ours) in list(run.different.items())[:_NAMED]
    ]
    more = len(run.different) - len(named)
    return (
        f"{run.name}: the same bits as {first.name} in {count(run.same_lines)} lines of "
        f"metrics.jsonl; differs at {words_of(run.differs_at)}: {'; '.join(named)}"
        + (f"; and {more} more" if more else "")
    )


def digest_in_words(run: RunBeside, first: RunBeside) -> str:
    """Tell whether a run has the digest of the first run, or the first field that differs."""
    match = run.match
    if match.at is None:
        return f"{first.name}: no steps, so {run.name} cannot be compared with it by digest"
    step, names = words_of(match.at), {"first": first.name, "other": run.name}
    lacking = " and ".join(names[which] for which in match.lacking)
    if match.same is None:
        return (
            f"{run.name}: not compared with {first.name} by digest: no digest of {step} in "
            f"{lacking} (an earlier version of jetrl wrote it, or began the run)"
        )
    if match.same:
        return f"{run.name}: the same digest as {first.name} after {step}: {first.digest}"
    if lacking:
        return f"{run.name}: not the same steps as {first.name}: {lacking} has no {step}"
    if not match.fields:
        return (
            f"{run.name}: the digest differs from {first.name}'s at {step}, because of an earlier "
            "step whose line is missing in metrics.jsonl"
        )
    field, *more = match.fields
    others = f" (also {', '.join(more)})" if more else ""
    return f"{run.name}: the digest differs from {first.name}'s at {step}, first in {field}{others}"


def _beside(
    name: str,
    run: RunDirectory,
    lines: Mapping[Line, Record],
    first_lines: Mapping[Line, Record],
    settings: Mapping[str, tuple[Any, Any]],
    common: Sequence[Line],
) -> RunBeside:
    history = history_of(list(lines.values()), run.attempts())
    common_lines = [line for line in first_lines if line in lines]
    differing = ((line, _different(first_lines[line], lines[line])) for line in common_lines)
    at, different = next(((line, names) for line, names in differing if names), (None, {}))
    return RunBeside(
        name=name,
        path=run.path,
        state=run.state(),
        preset=str(run.plan().get("name", "")),
        **{name: getattr(history, name) for name in _TOTALS},
        reached=_reached_by([lines[line] for line in common]),
        settings={key: pair for key, pair in settings.items() if key not in _OWN},
        common_lines=len(common_lines),
        same_lines=len(common_lines) if at is None else common_lines.index(at),
        differs_at=at,
        different=different,
        digest=history.digest,
        match=match_digests(digested_lines(first_lines.values()), digested_lines(lines.values())),
    )


def _different(first: Record, other: Record) -> dict[str, tuple[float | None, float | None]]:
    ours, theirs = reproducible(other), reproducible(first)
    # A run of an earlier version has no digest, which is no difference in bits.
    for name in {"digest/run"} & (ours.keys() ^ theirs.keys()):
        ours.pop(name, None), theirs.pop(name, None)
    return {
        name: (theirs.get(name), ours.get(name))
        for name in {**theirs, **ours}
        if repr(theirs.get(name)) != repr(ours.get(name))
    }


def _reached_by(lines: Sequence[Record]) -> Metrics:
    """Return means, last evaluations, medians and peaks of a run, by metric."""
    rl, sft = in_phase(lines, "rl"), in_phase(lines, "sft")
    records = rl if any(record["step"] > 0 for record in rl) else sft
    evals = history_of(lines).evals
    outside = [outside_metric(change.name) for change in evals]
    found: list[tuple[str, Callable[[list[float]], float], list[float]]] = [
        *((name, mean, values_of(_last_tenth(rl), name)) for name in _REACHED),
        ("sft/loss", mean, values_of(_last_tenth(sft), "sft/loss")),
        *((change.name, max, [change.last]) for change in evals),
        *((name, max, values_of(rl, name)) for name in outside),
        *((name, statistics.median, values_of(records, name)) for name in _MEDIANS),
        ("memory/peak_gib", max, values_of(records, "memory/peak_gib")),
    ]
    return {name: reduce(values) for name, reduce, values in found if values}


def _last_tenth(records: Sequence[Record]) -> Sequence[Record]:
    return records[-max(1, len(records) // 10) :]


def _reached(
    name: str, own: Metrics, first: Metrics, is_first: bool, form: Callable[[float], str]
) -> str:
    if name not in own:
        return ""
    value, metric, is_time = own[name], find_metric(name), name.startswith("timing/")
    text = duration(value) if is_time else form(value)
    if is_first or metric is None or not metric.measured or not first.get(name) or not value:
        return text
    if name.startswith("memory/"):
        return f"{text} ({number(value / first[name])} of the first)"
    faster = first[name] / value if is_time else value / first[name]
    return f"{text} ({number(faster)} times as fast)"


def _exactly(value: float | None) -> str:
    return "nothing" if value is None else repr(value)
