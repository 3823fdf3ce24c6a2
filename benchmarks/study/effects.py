"""Effects of a study's arms relative to the reference arm, their lost runs, and their costs.

    python -m benchmarks.study.effects RESULTS.json [...] [--out FILE.json]
    python -m benchmarks.study.effects RESULTS.json [...] --figure FILE.svg
    python -m benchmarks.study.effects RESULTS.json [...] --against mixed alike
    python -m benchmarks.study.effects RESULTS.json [...] --reference int8

The output has a row per grid point and arm. An effect is the final held-out accuracy minus that of
the reference arm's run with the same seed and initial weights. Accuracies are in each run's own
precision if all runs of the point have one, else in the study's. Effects are given in points and in
log-odds; log-odds add half a right and half a wrong answer to each run (Haldane 1956, Anscombe
1956), so that 0% and 100% are finite. The estimate is Hodges and Lehmann's (1963), with the exact
95% interval of the signed-rank test from six pairs on. `gain` is the effect on the improvement
since the start, in log-odds: it has less of the evaluation error of a run's own precision. It is
not tested. Lost runs (docs/studies.md) are compared with the reference arm's by Fisher's exact
test; a run is behind by the study's own reference arm, whatever `--reference` names.

The tests of all rows, on effects and losses, are one family, adjusted by Holm's method (1979).
Tests that cannot reach 0.05 do not count (Tarone 1990): fewer than six pairs, or too few lost runs.

The time of a step is divided into rollout, update and rest, without evaluations and checkpoints.
`--against` only prints the lost runs per arm over all points and files, and Fisher's test of the
named arms against all others. `--figure` plots effects and losses against the K3 KL, without
studies whose arms differ in more than their flow.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
from benchmarks.study.analysis import evaluation_of, lost_names, mean_of_curve, point_name, runs_of
from benchmarks.study.charts import MISMATCH
from benchmarks.study.definition import Definition, definition_of
from benchmarks.study.plan import grid_points
from benchmarks.study.results import FinalEvaluation, Results, RunResult, read_results
from benchmarks.study.statistics import (
    adjusted,
    fisher_p,
    least_fisher_p,
    rank_estimate,
    share_interval,
    signed_rank_test,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from jetrl.errors import UserError
from jetrl.runs.plots import COLORS, STYLE
from jetrl.settings.loading import load_config

Row = dict[str, Any]
LEAST_PAIRS = 6
LEVEL = 0.05
MEANS = {
    "answer_tokens": "response_length/mean",
    "k3_kl": MISMATCH,
    "token_mult_prob_error": "mismatch/token_mult_prob_error",
}
TENTHS = {"entropy": "policy/entropy", "grad_norm": "policy/grad_norm", "reward": "reward/mean"}
OF_A_FLOW = {"precision", "sampler_deviation", "algorithm"}
FLOWS = {
    "exact": ("exact: sampler and trainer share one flow", "slate"),
    "bf16": ("BF16 sampler and trainer", "blue"),
    "alike": ("FP8 sampler and trainer, in two engines", "teal"),
    "deviation": ("known deviation of the sampler (noise, scales)", "violet"),
    "corrected": ("FP8 sampler, BF16 trainer, corrected (TIS, IcePop)", "green"),
    "mixed": ("FP8 sampler, BF16 trainer", "red"),
}
OUR_OWN = "studies/"  # model.path of models that studies trained from nothing
ENDS = ("log_odds_low", "log_odds_high")
HEADS = (
    "Final accuracy minus the reference arm's, same seeds, in log-odds",
    "Share of runs that collapsed or fell behind",
)
TICKS = (-5, -2, -1, -0.5, 0, 0.5, 1, 2, 5)
NOT_OF_A_STEP = ("eval", "checkpoint")


def rows_of(results: Results, reference: str | None = None) -> Iterator[Row]:
    """Yield a row per grid point and arm with runs, without adjusted p-values."""
    definition = definition_of(results.definition, results.path)
    reference = reference or definition.reference
    runs = list(results.runs.values())
    lost = lost_names(definition, runs)
    for point in grid_points(definition):
        arms = {arm: runs_of(runs, point, arm) for arm in definition.arms}
        here = [run for own in arms.values() for run in own]
        kind = evaluation_of(here)
        if reference not in arms:
            raise UserError(f"--reference {reference}: {results.path} has {', '.join(arms)}")
        base = arms[reference]
        base_lost = sum(run.name in lost for run in base)
        for arm, own in arms.items():
            if not own:
                continue
            row: Row = {"study": results.path.stem, "point": point_name(point), "arm": arm}
            row |= _flow(definition, point, arm)
            row |= {"runs": len(own), "precision": kind, **_accuracies(own, kind)}
            row["lost"] = sum(run.name in lost for run in own)
            if arm != reference:
                row |= {"reference": reference, **_effect(own, base, kind)}
                if base:
                    row["lost_p"] = fisher_p(row["lost"], len(own), base_lost, len(base))
                    row["lost_least_p"] = least_fisher_p(
                        row["lost"] + base_lost, len(own), len(base)
                    )
            yield row | _course(own) | _time(own)


def _differs_in_flow(results: Results) -> bool:
    """Return whether the arms of a study differ only in their flow."""
    arms = definition_of(results.definition, results.path).arm_settings.values()
    return all(settings.keys() <= OF_A_FLOW for settings in arms)


def _flow(definition: Definition, point: Mapping[str, str], arm: str) -> Row:
    """Return an arm's kind of flow, its updates per step, and whether its model is pretrained."""
    values = [definition.grid[axis][value] for axis, value in point.items()]
    base = load_config(definition.recipe).train.updates_per_step
    settings: dict[str, Row] = {"train": {"updates_per_step": base}}
    for layer in (definition.common, *values, definition.arm_settings[arm]):
        for section, keys in layer.items():
            settings[section] = settings.get(section, {}) | keys
    flow = settings.get("precision", {}).get("preset", "")
    if settings.get("sampler_deviation"):
        flow = "deviation"
    elif flow == "mixed" and settings.get("algorithm", {}).get("correction", "none") != "none":
        flow = "corrected"
    model = settings.get("model", {}).get("path", OUR_OWN)
    return {
        "flow": flow if flow in FLOWS else "exact",
        "updates_per_step": settings["train"]["updates_per_step"],
        "pretrained": not model.startswith(OUR_OWN),
    }


def _final(run: RunResult, kind: str) -> FinalEvaluation | None:
    final: FinalEvaluation | None = getattr(run, kind)
    if final is not None and not 0 <= final.mean <= 1:
        raise UserError(
            f"{run.name} ends with a mean reward of {final.mean:g}: log-odds need the share of "
            "right answers, so rewards from 0 to 1"
        )
    return final


def _log_odds(final: FinalEvaluation) -> float:
    num_answers = final.prompts * final.samples
    right = final.mean * num_answers
    return math.log((right + 0.5) / (num_answers - right + 0.5))


def _start(run: RunResult) -> float | None:
    """Return the accuracy before the first step, in percent."""
    steps, means = run.held_out.steps, run.held_out.values.get("mean", [])
    return 100 * means[0] if steps and steps[0] == 0 and means[0] is not None else None


def _accuracies(runs: Sequence[RunResult], kind: str) -> Row:
    starts = [start for run in runs if (start := _start(run)) is not None]
    ends = [100 * final.mean for run in runs if (final := _final(run, kind))]
    means = {"start": starts, "end": ends}
    if kind == "own":  # the same weights in the study's one precision
        finals = [_final(run, "common") for run in runs]
        means["end_common"] = [100 * final.mean for final in finals if final]
    means["end_exported"] = [100 * run.exported.mean for run in runs if run.exported]
    return {name: fmean(values) for name, values in means.items() if values}


def _effect(runs: Sequence[RunResult], base: Sequence[RunResult], kind: str) -> Row:
    """Return the differences from the reference arm's runs, with their test."""
    by_seed = {run.seed: run for run in base}
    pairs = [
        (run, other)
        for run in runs
        if (other := by_seed.get(run.seed)) and run.start_sha256 == other.start_sha256
    ]
    starts = [(_start(run), _start(other)) for run, other in pairs]
    row = _mean("start", [a - b for a, b in starts if a is not None and b is not None])
    finals = [(_final(run, kind), _final(other, kind)) for run, other in pairs]
    known = [(a, b) for a, b in finals if a and b]
    row["pairs"] = len(known)
    if not known:
        return row
    points = [100 * (a.mean - b.mean) for a, b in known]
    log_odds = [_log_odds(a) - _log_odds(b) for a, b in known]
    row |= _mean("end", points)
    estimated = {"log_odds": log_odds, "points": points}
    if gains := [gain for run, other in pairs if (gain := _gain(run, other, kind)) is not None]:
        estimated["gain"] = gains
    for name, values in estimated.items():
        row[name], *ends = rank_estimate(values)
        if len(values) >= LEAST_PAIRS:
            row[f"{name}_low"], row[f"{name}_high"] = ends
    if len(known) >= LEAST_PAIRS:
        row["p"] = signed_rank_test(log_odds)
    return row


def _gain(run: RunResult, other: RunResult, kind: str) -> float | None:
    """Return how much more a run improved since its start than another one, in log-odds."""
    odds = []
    for one in (run, other):
        start, final = _start(one), _final(one, kind)
        if final is None or start is None or not 0 < start < 100:
            return None
        odds.append(_log_odds(final) - math.log(start / (100 - start)))
    return odds[0] - odds[1]


def _mean(name: str, differences: Sequence[float]) -> Row:
    """Return the mean of differences and its standard error."""
    if len(differences) < 2:
        return {}
    error = stdev(differences) / len(differences) ** 0.5
    return {f"{name}_difference": fmean(differences), f"{name}_error": error}


def _course(runs: Sequence[RunResult]) -> Row:
    """Return the means of training metrics over the runs."""
    row: Row = {}
    for name, metric in MEANS.items():
        values = [mean for run in runs if (mean := mean_of_curve(run, metric)) is not None]
        if values:
            row[name] = fmean(values)
    for name, metric in TENTHS.items():
        tenths = [ends for run in runs if (ends := _tenths(run, metric))]
        if tenths:
            row[f"{name}_first"], row[f"{name}_last"] = map(fmean, zip(*tenths, strict=True))
    row["tokens"] = sum(run.compared_tokens for run in runs)
    row["different"] = sum(run.different_tokens for run in runs)
    return row


def _tenths(run: RunResult, metric: str) -> tuple[float, float] | None:
    """Return the means of a metric over the first and the last tenth of a run."""
    kept = [value for value in run.curves.values.get(metric, []) if value is not None]
    tenth = max(1, round(len(kept) / 10))
    return (fmean(kept[:tenth]), fmean(kept[-tenth:])) if kept else None


def _time(runs: Sequence[RunResult]) -> Row:
    """Return the steps of a run, and their seconds by phase."""
    row: Row = {"steps": max(run.steps for run in runs)}
    timed = [run.seconds for run in runs if run.seconds.get("step")]
    if timed:
        rollout, update = (fmean(s.get(name, 0.0) for s in timed) for name in ("rollout", "update"))
        whole = fmean(s["step"] - sum(s.get(name, 0.0) for name in NOT_OF_A_STEP) for s in timed)
        row |= {"rollout_s": rollout, "update_s": update, "rest_s": whole - rollout - update}
        row["rollout_share"] = rollout / whole
    return row


def adjust(rows: Sequence[Row]) -> int:
    """Add Holm-adjusted p-values of all tests of all rows, and return the number of tests."""
    tests = [(row, "p") for row in rows if "p" in row]
    tests += [(row, "lost_p") for row in rows if row.get("lost_least_p", 1.0) < LEVEL]
    for (row, name), p in zip(tests, adjusted([row[name] for row, name in tests]), strict=True):
        row[f"{name}_adjusted"] = p
    return len(tests)


def rounded(row: Row) -> Row:
    """Return a row whose numbers have four significant digits."""
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def tables(rows: Sequence[Row], num_tests: int) -> str:
    """Return the rows as Markdown: effects and losses, the course, and time by answer length."""
    pairs = [row["pairs"] for row in rows if "pairs" in row]
    note = f"One family of {num_tests} tests (Holm)."
    if num_tests:
        least = min(1.0, num_tests * 2 / 2 ** max(pairs))
        note += f" With {max(pairs)} pairs no adjusted p of an effect is below {least:.2g}."
    if min(pairs, default=LEAST_PAIRS) < LEAST_PAIRS:
        note += f" Fewer than {LEAST_PAIRS} pairs have no interval and no test."
    if common := ", ".join(dict.fromkeys(r["study"] for r in rows if r["precision"] == "common")):
        note += f" {common}: accuracy under the study's precision, not each run's own."
    effects = [[*_place(row), *_effect_cells(row)] for row in rows]
    course = [[*_place(row), *_course_cells(row)] for row in rows]
    lengths: dict[str, float] = {}
    for row in rows:
        lengths.setdefault(_place(row)[0], row.get("answer_tokens", 0.0))
    by_length = sorted(rows, key=lambda row: lengths[_place(row)[0]])
    time = [
        [_number(row, "answer_tokens", ".0f"), *_place(row), *_time_cells(row)] for row in by_length
    ]
    return (
        f"{note}\n"
        + _table(
            "point | arm | pairs | start | end | log-odds | points | ranks p (Holm) | lost"
            " | Fisher p (Holm)",
            effects,
        )
        + _table(
            "point | arm | K3 KL | token mult prob error | entropy | gradient norm | reward"
            " | tokens that differ",
            course,
        )
        + _table(
            "answer tokens | point | arm | rollout, s per step | update | rest | rollout share"
            " | log-odds",
            time,
        )
    )


def _table(head: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *map(" | ".join, rows)]
    return "\n" + "".join(f"| {line} |\n" for line in lines)


def _place(row: Row) -> tuple[str, str]:
    return ": ".join(filter(None, (row["study"], row["point"]))), row["arm"]


def _number(row: Row, name: str, form: str) -> str:
    return format(row[name], form) if name in row else ""


def _interval(row: Row, name: str, form: str) -> str:
    shown = _number(row, name, f"+{form}")
    if f"{name}_low" in row:
        shown += f" [{row[f'{name}_low']:+{form}}, {row[f'{name}_high']:+{form}}]"
    return shown


def _p(row: Row, name: str) -> str:
    holm = f" ({row[f'{name}_adjusted']:.3g})" if f"{name}_adjusted" in row else ""
    return _number(row, name, ".3g") + holm


def _effect_cells(row: Row) -> list[str]:
    return [
        _number(row, "pairs", "d"),
        *(_number(row, name, ".2f") + "%" * (name in row) for name in ("start", "end")),
        _interval(row, "log_odds", ".3f"),
        _interval(row, "points", ".2f"),
        _p(row, "p"),
        f"{row['lost']} of {row['runs']}",
        _p(row, "lost_p"),
    ]


def _course_cells(row: Row) -> list[str]:
    ends = [
        " to ".join(_number(row, f"{name}_{end}", ".3g") for end in ("first", "last"))
        for name in TENTHS
    ]
    means = _number(row, "k3_kl", ".2g"), _number(row, "token_mult_prob_error", ".4g")
    return [*means, *ends, f"{row['different']:,} of {row['tokens']:,}"]


def _time_cells(row: Row) -> list[str]:
    seconds = [row.get(f"{name}_s") for name in ("rollout", "update", "rest")]
    cells = ["" if s is None else f"{s / max(1, row['steps']):.2f}" for s in seconds]
    return [*cells, _number(row, "rollout_share", ".1%"), _interval(row, "log_odds", ".3f")]


def lost_table(rows: Sequence[Row], against: Sequence[str]) -> str:
    """Return the lost runs of each arm over all rows, and Fisher's test of some of the arms."""

    def counts(arms: Collection[str]) -> list[int]:
        return [sum(row[name] for row in rows if row["arm"] in arms) for name in ("lost", "runs")]

    arms = dict.fromkeys(row["arm"] for row in rows)
    if unknown := sorted(set(against) - arms.keys()):
        raise UserError(f"no run of {unknown[0]!r}; there are {', '.join(sorted(arms))}")
    (lost, num), (other_lost, other_num) = counts(against), counts(arms.keys() - against)
    p = fisher_p(lost, num, other_lost, other_num)
    return (
        _table("arm | lost | of", [[arm, *map(str, counts([arm]))] for arm in arms])
        + f"\n{' and '.join(against)}: {lost} of {num}; all others: {other_lost} of {other_num}; "
        f"Fisher's exact test, p {p:.4f}"
    )


def draw(rows: Sequence[Row], out: Path) -> None:
    """Plot effects and shares of lost runs against the measured K3 KL, one mark per row."""
    rows = [row for row in rows if "k3_kl" in row]
    rows.sort(key=lambda row: list(FLOWS).index(row["flow"]))
    kls = [row["k3_kl"] for row in rows if row["k3_kl"]]
    if not kls:
        raise UserError("--figure: no arm has a K3 KL above 0; name studies with bf16 or mixed")
    first, last = (math.floor(math.log10(f(kls))) for f in (min, max))
    zero, powers = 10.0 ** (first - 1), [10.0**n for n in range(first, last + 1)]
    exact = [row for row in rows if not row["k3_kl"]]
    # Rows at 0 share a place: they are spread over a decade.
    at = {id(row): zero * 10 ** (i / len(exact) - 0.5) for i, row in enumerate(exact)}
    with mpl.rc_context({**STYLE, "svg.hashsalt": "jetrl effects"}):
        figure = Figure(figsize=(8.6, 7.0), layout="constrained")
        effects, losses = figure.subplots(2, sharex=True)
        for row in rows:
            x = at.get(id(row), float(row["k3_kl"]))
            if "log_odds" in row:
                ends = [row[name] for name in ENDS if name in row]
                _mark(effects, row, x, row["log_odds"], ends)
            share = share_interval(row["lost"], row["runs"], 0.95)
            _mark(losses, row, x, share.mean, [share.low, share.high] if row["lost"] else [0, 0])
        effects.axhline(0, color=COLORS["axis"], linewidth=1)
        effects.set_yscale("symlog", linthresh=0.5)
        effects.set_yticks(TICKS, [f"{tick:+g}" if tick else "0" for tick in TICKS])
        effects.set_title(f"{HEADS[0]} (-0.7: half the odds)", loc="left", fontsize=10)
        losses.set_title(HEADS[1], loc="left", fontsize=10)
        losses.yaxis.set_major_formatter("{x:.0%}")
        losses.set_xscale("log")
        losses.set_xticks([zero, *powers], ["0 (exact)", *(f"{power:.0e}" for power in powers)])
        losses.xaxis.set_minor_formatter(NullFormatter())
        losses.set_xlabel("measured K3 KL of sampler and trainer, nats per token")
        for axes in (effects, losses):
            axes.axvspan(zero / 4, zero * 4, color=COLORS["grid"], alpha=0.6, linewidth=0)
            axes.set_xlim(zero / 4, 3 * max(kls))
        figure.legend(handles=_legend(rows), loc="outside upper left", ncols=2)
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None})


def _mark(axes: Axes, row: Row, x: float, y: float, ends: Sequence[float]) -> None:
    """Draw the mark of a row with its interval; it is hollow without an interval."""
    color = COLORS[FLOWS[row["flow"]][1]]
    if ends:
        axes.plot([x, x], ends, color=color, linewidth=1.1, alpha=0.6)
    axes.plot(
        [x], [y], "s" if row["updates_per_step"] > 1 else "o", color=color, alpha=0.8,
        markersize=2.5 + math.sqrt(row["runs"]), markerfacecolor=color if ends else "white",
        markeredgecolor="black" if row["pretrained"] else color,
        markeredgewidth=1.5 if row["pretrained"] else 1.0,
    )  # fmt: skip


def _legend(rows: Sequence[Row]) -> list[Line2D]:
    text, there = COLORS["text"], {row["flow"] for row in rows}
    flows = [FLOWS[flow] for flow in FLOWS if flow in there]
    num_runs = [row["runs"] for row in rows]
    marks = [
        *(("o", COLORS[color], COLORS[color], label) for label, color in flows),
        ("o", "white", text, "hollow: fewer than six pairs, no interval"),
        ("s", text, text, "square: several updates per step"),
        ("o", COLORS["grid"], "black", "black edge: a pretrained model"),
        ("", text, text, f"larger: more runs ({min(num_runs)} to {max(num_runs)})"),
    ]
    return [
        Line2D([], [], ls="", marker=mark, mfc=face, mec=edge, label=label)
        for mark, face, edge, label in marks
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables of the results files that the command names.

    Args:
        words: The words of the command; by default those that were typed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study.effects", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("results", nargs="+", type=Path, help="results files of studies")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--figure", type=Path, help="draw this SVG file")
    parser.add_argument("--reference", metavar="ARM", help="compare with this arm")
    parser.add_argument("--against", nargs="+", metavar="ARM", help="pool lost runs by arm")
    args = parser.parse_args(words)
    files = [read_results(path) for path in args.results]
    if args.figure:
        files = [results for results in files if _differs_in_flow(results)]
    rows = [row for results in files for row in rows_of(results, args.reference)]
    if args.against:
        print(lost_table(rows, args.against))
        return
    if args.figure:
        draw(rows, args.figure)
        return
    num_tests = adjust(rows)
    print(tables(rows, num_tests))
    if args.out:
        other = ["--reference", args.reference] if args.reference else []
        command = shlex.join([*parser.prog.split(), *map(str, args.results), *other])
        head = {
            "command": command,
            "date": max(results.date for results in files),
            "devices": sorted({device for results in files for device in results.devices}),
            "commits": sorted({commit for results in files for commit in results.commits}),
            "tests": num_tests,
        }
        text = json.dumps({**head, "rows": [rounded(row) for row in rows]}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
