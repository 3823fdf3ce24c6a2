"""Runs beside the first of them: which settings differ, what each reached over the steps that all
have, how long a step took, and up to which step the bits are the same."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory, settings_that_differ
from jetrl.runs.format import count, duration, number
from jetrl.runs.history import history_of
from jetrl.runs.jsonl import Record
from jetrl.runs.metrics import find_metric, reproducible
from jetrl.runs.overview import labels, mismatch_text, value_text
from jetrl.settings.loading import as_override

# Means over the last tenth of the steps, and medians of all.
_REACHED = ("reward/mean", "response_length/mean", "policy/entropy")
_MEDIANS = (
    *("timing/step_s", "timing/rollout_s", "timing/update_s"),
    *("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"),
)
_OWN = ("run.name", "run.dir")  # of every run
_NAMED = 4  # metrics of the first step that differs

Line = tuple[str, int]  # phase and step: a line of metrics.jsonl


@dataclass(frozen=True)
class RunBeside:
    """A run, and how it stands to the first. preset: of its precision plan. reached: by metric,
    over the common steps. settings: by dotted key, (of the first, of this), where they differ.
    same_lines: of metrics.jsonl, from the first on, that have the same bits but for times, speeds
    and memory; of common_lines that both have. different: the metrics that differ in the next one,
    which is `differs_at`."""

    name: str
    path: Path
    state: str
    preset: str
    num_steps: int
    elapsed_s: float
    num_tokens: int | None
    num_different: int | None
    reached: Mapping[str, float]
    settings: Mapping[str, tuple[Any, Any]]
    common_lines: int
    same_lines: int
    differs_at: Line | None
    different: Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class Comparison:
    """common_steps: of the RL phase, that all runs have. runs: the first is what the others are
    compared with."""

    common_steps: int
    runs: tuple[RunBeside, ...]

    @property
    def same(self) -> bool:
        """Whether every run has all lines of the first, with the same bits."""
        first = self.runs[0].common_lines
        return all(r.same_lines == r.common_lines == first for r in self.runs)


def compare_runs(paths: Sequence[str | Path]) -> Comparison:
    """Compares runs with the first of them, from their files alone.

    Raises:
        UserError: fewer than two; not a run directory, or a damaged one.
    """
    if len(paths) < 2:
        raise UserError("a comparison needs two runs or more")
    runs = [RunDirectory.open(path) for path in paths]
    lines = [{_line(r): r for r in run.metrics()} for run in runs]
    common = sorted(set.intersection(*({s for p, s in own if p == "rl"} for own in lines)))
    names, config = labels([run.path for run in runs]), runs[0].config()
    beside = tuple(
        _beside(name, run, own, lines[0], settings_that_differ(config, run.config()), common)
        for name, run, own in zip(names, runs, lines, strict=True)
    )
    return Comparison(sum(step > 0 for step in common), beside)


def comparison_rows(found: Comparison) -> list[tuple[str, ...]]:
    """The comparison as rows of text, a column for each run."""
    runs, first = found.runs, found.runs[0]
    rows = [
        ("", *(run.name for run in runs)),
        ("state", *(run.state for run in runs)),
        ("precision", *(run.preset for run in runs)),
        ("steps", *(count(run.num_steps) for run in runs)),
        ("wall time", *(duration(run.elapsed_s) for run in runs)),
        ("tokens different", *(mismatch_text(r.num_different, r.num_tokens) for r in runs)),
    ]
    for name in dict.fromkeys(name for run in runs for name in run.reached):
        cells = (_reached(name, run.reached, first.reached, run is first) for run in runs)
        rows.append((name, *cells))
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        base = next(run.settings[key][0] for run in runs if key in run.settings)
        rows.append((key, *(_setting(run.settings.get(key, (base, base))[1]) for run in runs)))
    return rows


def bits_in_words(run: RunBeside, first: RunBeside) -> str:
    """Up to where a run has the bits of the first."""
    if run.differs_at is None:
        return (
            f"{run.name}: the bits of {first.name} in all {count(run.common_lines)} lines of "
            "metrics.jsonl that both have, but for times, speeds and memory"
        )
    phase, step = run.differs_at
    named = [
        f"{name} {_exactly(ours)}, not {_exactly(theirs)}"
        for name, (theirs, ours) in list(run.different.items())[:_NAMED]
    ]
    more = len(run.different) - len(named)
    where = f"{'supervised ' if phase == 'sft' else ''}step {step}"
    return (
        f"{run.name}: the bits of {first.name} in {count(run.same_lines)} lines of metrics.jsonl; "
        f"at {where} {'; '.join(named)}" + (f"; and {more} more" if more else "")
    )


def _beside(
    name: str,
    run: RunDirectory,
    lines: Mapping[Line, Record],
    first_lines: Mapping[Line, Record],
    settings: Mapping[str, tuple[Any, Any]],
    common: Sequence[int],
) -> RunBeside:
    history = history_of(list(lines.values()), run.attempts())
    both = [line for line in first_lines if line in lines]
    same, at, different = 0, None, {}
    for line in both:
        different = _different(first_lines[line], lines[line])
        if different:
            at = line
            break
        same += 1
    return RunBeside(
        name=name,
        path=run.path,
        state=run.state(),
        preset=str(run.plan().get("name", "")),
        num_steps=history.num_steps,
        elapsed_s=history.elapsed_s,
        num_tokens=history.num_tokens,
        num_different=history.num_different,
        reached=_reached_by([lines["rl", step] for step in common]),
        settings={key: pair for key, pair in settings.items() if key not in _OWN},
        common_lines=len(both),
        same_lines=same,
        differs_at=at,
        different=different,
    )


def _line(record: Record) -> Line:
    return str(record.get("phase", "rl")), int(record["step"])


def _different(first: Record, other: Record) -> dict[str, tuple[float | None, float | None]]:
    """The metrics that have other bits (a NaN has those of another)."""
    ours, theirs = reproducible(other), reproducible(first)
    return {
        name: (theirs.get(name), ours.get(name))
        for name in {**theirs, **ours}
        if repr(theirs.get(name)) != repr(ours.get(name))
    }


def _reached_by(records: Sequence[Record]) -> dict[str, float]:
    """By metric: of the last evaluation; of the last tenth of the steps; medians; the peak."""
    found: dict[str, float] = {}
    last = records[-max(1, len(records) // 10) :]
    for name in _REACHED:
        values = [r[name] for r in last if name in r]
        if values:
            found[name] = statistics.fmean(values)
    found |= {change.name: change.last for change in history_of(records).evals}
    for name in _MEDIANS:
        values = [r[name] for r in records if name in r]
        if values:
            found[name] = statistics.median(values)
    peaks = [r["memory/peak_gib"] for r in records if "memory/peak_gib" in r]
    return found | ({"memory/peak_gib": max(peaks)} if peaks else {})


def _reached(
    name: str, own: Mapping[str, float], first: Mapping[str, float], is_first: bool
) -> str:
    if name not in own:
        return ""
    value, metric, is_time = own[name], find_metric(name), name.startswith("timing/")
    text = duration(value) if is_time else value_text(name, value)
    if is_first or metric is None or not metric.measured or not first.get(name) or not value:
        return text
    if name.startswith("memory/"):
        return f"{text} ({number(value / first[name])} of the first)"
    faster = first[name] / value if is_time else value / first[name]
    return f"{text} ({number(faster)} times as fast)"


def _setting(value: Any) -> str:
    return "unset" if value is None else as_override(value)


def _exactly(value: float | None) -> str:
    return "nothing" if value is None else repr(value)
