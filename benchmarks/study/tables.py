"""The tables of a study's report, as text that HTML and Markdown are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.study.analysis import (
    NOTHING_LEARNED,
    ArmComparison,
    ArmResult,
    Loss,
    LostRuns,
    TwinGroup,
    by_seed,
    common_accuracy,
    learned_nothing,
    mean_of_curve,
    own_accuracy,
    point_name,
    runs_of,
)
from benchmarks.study.definition import Definition
from benchmarks.study.plan import grid_points
from benchmarks.study.results import FINAL_EVALUATION, MEMORY, SPEED, RunResult
from benchmarks.study.statistics import Comparison, Interval, mean_interval

from jetrl.runs.format import number, percent

PHASES = ("rollout", "reward", "update", "requantize", "checkpoint", "eval", "step")
DASH = "-"


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def accuracy_name(definition: Definition) -> str:
    """Return the name of the final accuracy: on held-out prompts, or on the training set."""
    on_training_set = definition.evaluates_training_set
    return "Final accuracy on the training set" if on_training_set else "Final held-out accuracy"


def accuracy_tables(definition: Definition, results: Sequence[ArmResult]) -> Iterator[Table]:
    """Yield the tables of final accuracy at each grid point, in common and in own precision."""
    study, preset = definition.study, definition.eval.preset
    reference, level = definition.label(definition.reference), 100 * study.level
    note = (
        f"Final weights of each run, all evaluated under {preset}, mean over seeds with its "
        f"{level:g}% interval; differences from {reference} are taken seed by seed. Equivalent: "
        f"two one-sided t tests put the difference within {percent(study.margin)} "
        f"(p below {1 - study.level:.2g})."
    )
    own_note = "The same weights, each evaluated in the precision that it was trained in."
    tests = (*(f"minus {reference}", "median", "t test p", "Holm p"), *("rank p", "equivalent"))
    head = ("arm", "seeds", f"accuracy ({preset})", "own precision", *tests, "collapsed")
    own_head = ("arm", "seeds", "accuracy (own precision)", *tests)
    for point in dict.fromkeys(result.point for result in results):
        here = [result for result in results if result.point == point and result.collapsed]
        title = accuracy_name(definition) + f": {point}" * bool(point)
        if here:
            yield Table(title, note, head, [_accuracy_row(definition, r) for r in here])
            note = ""
        if any(result.own_comparison for result in here):
            rows = [_own_accuracy_row(definition, r) for r in here]
            yield Table(f"{title}, in its own precision", own_note, own_head, rows)
            own_note = ""


def _accuracy_row(definition: Definition, result: ArmResult) -> list[str]:
    """Return the row of an arm at a grid point."""
    collapsed = result.collapsed
    assert collapsed is not None
    seeds = str(result.common.n if result.common else 0)
    if result.without_weights:
        seeds += f" ({result.without_weights} without weights)"
    return [
        definition.label(result.arm),
        seeds,
        shown_interval(result.common),
        shown_interval(result.own),
        *_tests(definition, result.common, result.comparison),
        f"{result.num_collapsed} of {collapsed.n}",
    ]


def _own_accuracy_row(definition: Definition, result: ArmResult) -> list[str]:
    """Return the row of an arm at a grid point, in the arm's own precision."""
    return [
        definition.label(result.arm),
        str(result.own.n if result.own else 0),
        shown_interval(result.own),
        *_tests(definition, result.own, result.own_comparison),
    ]


def loss_table(definition: Definition, runs: Sequence[RunResult]) -> Table:
    """Return the held-out losses of runs on raw text, with the speed and memory of training."""
    study, preset = definition.study, definition.eval.preset
    reference = definition.reference
    note = (
        f"Held-out loss in nats per token, mean over seeds; differences from "
        f"{definition.label(reference)} are taken seed by seed, with their {study.level:.0%} t "
        f"interval. Own: in the precision of training. {preset}: the exported file."
    )
    head = ["point", "arm", "seeds", "own loss", f"own - {reference}"]
    head += [f"{preset} loss", f"{preset} - {reference}", "tokens/s", "GiB"]
    rows = []
    for point in grid_points(definition):
        compared = runs_of(runs, point, reference)
        for arm in definition.arms:
            if not (here := runs_of(runs, point, arm)):
                continue
            losses = [
                text
                for loss in (own_accuracy, common_accuracy)
                for text in _losses(by_seed(here, loss), by_seed(compared, loss), study.level)
            ]
            speeds = [mean for run in here if (mean := mean_of_curve(run, SPEED)) is not None]
            kept = [value for run in here for value in run.curves.values.get(MEMORY, [])]
            peaks = [value for value in kept if value is not None]
            seen = [f"{fmean(speeds):,.0f}" if speeds else DASH]
            seen.append(f"{max(peaks):.2f}" if peaks else DASH)
            label = definition.label(arm)
            rows.append([point_name(point), label, str(len(here)), *losses, *seen])
    return Table("Held-out loss", note, head, rows)


def _losses(
    own: Mapping[int, float], reference: Mapping[int, float], level: float
) -> tuple[str, str]:
    """Return the mean loss of an arm, and its mean difference from the reference arm."""
    shared = [own[seed] - reference[seed] for seed in own if seed in reference]
    if not shared:
        return (f"{fmean(own.values()):.4f}" if own else DASH), DASH
    gap = mean_interval(shared, level)
    ends = "" if math.isnan(gap.low) else f" [{gap.low:+.4f}, {gap.high:+.4f}]"
    return f"{fmean(own.values()):.4f}", f"{gap.mean:+.4f}{ends}"


def _tests(
    definition: Definition, accuracy: Interval | None, comparison: ArmComparison | None
) -> list[str]:
    """Return the cells of a comparison with the reference arm."""
    if comparison is None:
        return [DASH] * 6
    tests, rank = comparison.tests, comparison.adjusted_rank_p
    learnt = accuracy is not None and accuracy.mean > 0
    return [
        shown_interval(tests.difference, signed=True),
        f"{100 * tests.median:+.2f}%",
        shown_p(tests.t_p),
        shown_p(comparison.adjusted_t_p),
        DASH if math.isnan(rank) else f"{shown_p(tests.rank_p)} (Holm {shown_p(rank)})",
        _equivalence(tests, 1 - definition.study.level)
        if learnt
        else "not shown (nothing was learnt)",
    ]


def _equivalence(comparison: Comparison, level: float) -> str:
    """Return the verdict of an equivalence test, with its p-value."""
    p = comparison.equivalence_p
    if math.isnan(p):
        return DASH
    return f"{'yes' if p < level else 'not shown'} (p {shown_p(p)})"


def shown_mean(mean: float) -> str:
    """Return a mean reward as a percentage, or as a number if it is not from 0 to 1."""
    return percent(mean) if 0 <= mean <= 1 else number(mean)


def shown_interval(interval: Interval | None, signed: bool = False) -> str:
    """Return a mean of shares with its interval in percent, clipped to possible values.

    A mean that no shares have is a number.

    Args:
        interval: The interval; None: a dash.
    """
    if interval is None:
        return DASH
    if not (-1 if signed else 0) <= interval.mean <= 1:
        ends = "" if math.isnan(interval.low) else f" [{interval.low:.4g}, {interval.high:.4g}]"
        return f"{interval.mean:.4g}{ends}"
    form = "+.2f" if signed else ".2f"
    mean = f"{100 * interval.mean:{form}}%"
    if math.isnan(interval.low):
        return mean
    low, high = max(interval.low, -1.0 if signed else 0.0), min(interval.high, 1.0)
    return f"{mean} [{100 * low:{form}}, {100 * high:{form}}]"


def shown_p(p: float) -> str:
    """Return a p-value with at most three decimals."""
    if math.isnan(p):
        return DASH
    return f"{p:.3f}" if p >= 0.001 else "below 0.001"


def mismatch_table(definition: Definition, runs: Sequence[RunResult]) -> Table | None:
    """Return the table of the mismatch per arm, averaged over steps and seeds."""
    names = ("mean_abs_logprob_diff", "k3_kl", "token_mult_prob_error")
    rows = []
    for point, arm, own in _by_point_and_arm(definition, runs):
        tokens = sum(run.compared_tokens for run in own)
        if not tokens:
            continue
        different = sum(run.different_tokens for run in own)
        shown = [_mean_and_range(own, f"mismatch/{name}") for name in names]
        rows.append(
            [point, definition.label(arm), number(tokens), percent(different / tokens), *shown]
        )
    head = ("point", "arm", "tokens compared", "tokens that differ", *names)
    note = (
        "Log-probs of the trainer against the sampler's, over all steps and seeds; in brackets the "
        "means of the lowest and the highest run."
    )
    return without_point(Table("Mismatch of sampler and trainer", note, head, rows))


def seconds_table(definition: Definition, runs: Sequence[RunResult]) -> Table | None:
    """Return the table of seconds per step by phase."""
    rows = []
    for point, arm, own in _by_point_and_arm(definition, runs):
        steps = sum(run.steps for run in own)
        if steps:
            sums = [sum(run.seconds.get(phase, 0.0) for run in own) for phase in PHASES]
            known = [
                run.seconds[FINAL_EVALUATION] for run in own if FINAL_EVALUATION in run.seconds
            ]
            ends = [f"{fmean(run.wall_s for run in own):.3g}", DASH]
            if known:
                ends[1] = f"{fmean(known):.3g}"
            means = (f"{total / steps:.3g}" for total in sums)
            rows.append([point, definition.label(arm), *means, *ends])
    note = (
        "Mean seconds of a step, of a whole run and of its final evaluation; runs shared their "
        "card or cores with others."
    )
    head = ("point", "arm", *PHASES[:-1], "whole step", "whole run", "final evaluation")
    return without_point(Table("Seconds by phase", note, head, rows))


def twin_table(definition: Definition, groups: Sequence[TwinGroup]) -> Table | None:
    """Return the table of twins, if there are any."""
    rows = [
        [
            group.name,
            _twins(group),
            ", ".join(
                f"{definition.label(arm)} {sha[:12] or 'no weights'}"
                + f" ({group.attempts[arm]} attempts)" * (group.attempts[arm] > 1)
                for arm, sha in group.digests.items()
            ),
        ]
        for group in groups
    ]
    note = "SHA-256 of the final FP32 master weights, which are to be equal in a group."
    return Table("Twin runs", note, ("group", "weights", "SHA-256"), rows) if rows else None


def _twins(group: TwinGroup) -> str:
    """Return whether the weights of twins are equal, in words."""
    if not group.equal:
        return "DIFFERENT"
    return "equal" if group.learnt else "equal, but no run had a gradient: this shows nothing"


def unfinished_table(runs: Sequence[RunResult], failed: Mapping[str, str]) -> Table | None:
    """Return the table of runs that ended early, failed or learned nothing, if any."""
    rows = [
        [run.name, "collapsed: numbers that are not finite", run.reason]
        for run in runs
        if run.end == "nonfinite"
    ]
    rows += [
        [run.name, "finished", NOTHING_LEARNED]
        for run in runs
        if run.end == "finished" and learned_nothing(run)
    ]
    rows += [[name, "failed", reason] for name, reason in failed.items()]
    note = "Runs that failed are in no other table."
    title, head = "Runs that ended early, failed or learned nothing", ("run", "end", "message")
    return Table(title, note, head, rows) if rows else None


def _by_point_and_arm(
    definition: Definition, runs: Sequence[RunResult]
) -> Iterator[tuple[str, str, list[RunResult]]]:
    """Yield (grid point, arm, runs) for each grid point and arm with runs."""
    for point in grid_points(definition):
        for arm in definition.arms:
            own = runs_of(runs, point, arm)
            if own:
                yield point_name(point), arm, own


def _mean_and_range(runs: Sequence[RunResult], metric: str) -> str:
    """Return the mean of a metric over runs, with the lowest and highest mean of a run."""
    means = [mean for run in runs if (mean := mean_of_curve(run, metric)) is not None]
    if not means:
        return DASH
    low, high = min(means), max(means)
    ends = f" [{low:.3g}, {high:.3g}]" if f"{low:.3g}" != f"{high:.3g}" else ""
    return f"{fmean(means):.3g}{ends}"


def without_point(table: Table) -> Table | None:
    """Return a table, without its first column if that is empty; None without rows."""
    if not table.rows:
        return None
    if any(row[0] for row in table.rows):
        return table
    return Table(table.title, table.note, table.head[1:], [row[1:] for row in table.rows])


def lost_table(definition: Definition, lost: Sequence[LostRuns]) -> Table | None:
    """Return the table of lost runs; None if no arm has two runs."""
    if not any(one.num_runs > 1 for one in lost):
        return None
    level, reference = definition.study.level, definition.label(definition.reference)
    note = (
        "Lost: collapsed, or fell behind, which is a final accuracy more than "
        f"{100 * definition.collapse.behind:g} points below the median of {reference} at the same "
        f"grid point. Shares have exact {100 * level:g}% intervals; p of Fisher's exact test, "
        f"two-sided, against {reference}."
    )
    head = (
        *("point", "arm", "runs", "collapsed", "fell behind", "share lost"),
        *("Fisher p", "Holm p"),
    )
    return without_point(
        Table("Lost runs", note, head, [_lost_row(definition, one) for one in lost])
    )


def _lost_row(definition: Definition, lost: LostRuns) -> list[str]:
    """Return the row of an arm at a grid point."""
    return [
        lost.point,
        definition.label(lost.arm),
        str(lost.num_runs),
        str(lost.num_collapsed),
        str(lost.num_behind),
        shown_interval(lost.share),
        shown_p(lost.p),
        shown_p(lost.adjusted_p),
    ]


def seed_tables(
    definition: Definition, runs: Sequence[RunResult], lost: Mapping[str, Loss]
) -> Iterator[Table]:
    """Yield a table per grid point with the final accuracy of each run, one column per seed."""
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
    """Return the final accuracy of a run, and how it was lost."""
    accuracy = common_accuracy(run)
    words = ["no weights" if accuracy is None else shown_mean(accuracy)]
    return ", ".join([*words, *([lost[run.name]] if run.name in lost else [])])
