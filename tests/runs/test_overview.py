from __future__ import annotations

import io
import json

import pytest
from rich.console import Console as RichConsole

import jetrl.runs.plots
from jetrl.errors import UserError
from jetrl.runs.console import _step_line
from jetrl.runs.overview import compare_runs, comparison_rows, list_runs, runs_table, show_run
from jetrl.runs.plots import plot_runs
from jetrl.runs.report import write_report


def test_listing_has_good_and_damaged_runs(make_run):
    good = make_run("good", steps=10, sft=2)
    make_run("cut", steps=3, evaluate=False, mismatch=1, end="interrupted")
    for name, file in (("no-plan", "plan.json"), ("bad-metrics", "metrics.jsonl")):
        (make_run(name, steps=2) / file).write_text("nonsense\nmore\n")
    (good.parent / "other").mkdir()
    rows = {row.name: row for row in list_runs(good.parent)}
    assert set(rows) == {"good", "cut", "no-plan", "bad-metrics", "other"}
    assert (rows["good"].state, rows["good"].preset) == ("finished", "unified")
    assert (rows["good"].history.num_steps, rows["good"].history.num_sft_steps) == (10, 2)
    assert rows["good"].history.evals[0].last_step == 10
    assert rows["cut"].state == "interrupted"
    assert rows["cut"].history.num_different == 6
    assert "plan.json" in rows["no-plan"].problem
    assert "metrics.jsonl, line 1" in rows["bad-metrics"].problem
    assert "not a run directory" in rows["other"].problem
    out = io.StringIO()
    RichConsole(file=out, width=120).print(runs_table(list(rows.values())))
    lines = out.getvalue().splitlines()
    assert any("good" in line and "finished" in line and "10" in line for line in lines)
    assert any("no-plan" in line and "damaged" in line for line in lines)
    with pytest.raises(UserError, match="no such folder"):
        list_runs(good.parent / "none")


def test_plot_overlays_runs(make_run, tmp_path, recwarn):
    runs = [make_run("日🙂", steps=4), make_run("b", steps=60), make_run("c", steps=0)]
    out = plot_runs(runs, (), tmp_path / "plots" / "all.png")
    assert (out.read_bytes()[:4], list(recwarn)) == (b"\x89PNG", [])
    for metric in ("policy/kl_ref", "nonsense"):
        with pytest.raises(UserError, match=f"metric {metric}: none of these runs has it; they"):
            plot_runs(runs, [metric], tmp_path / "out.png")
    with pytest.raises(UserError, match="nothing to plot"):
        plot_runs(runs[2:], (), tmp_path / "out.png")


def test_a_supervised_run_is_plotted_from_its_own_lines(make_run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        jetrl.runs.plots, "line", lambda axes, curve, *_: drawn.append(len(curve[0]))
    )
    plot_runs([make_run("warm", steps=0, sft=3, evaluate=False)], (), tmp_path / "warm.png")
    assert set(drawn) == {3}
    drawn.clear()
    plot_runs([make_run("rl", steps=5, sft=3)], ["timing/step_s"], tmp_path / "rl.png")
    assert drawn == [5], "not those of its warm-up"


MEAN, OUTSIDE = "eval/a/mean", "eval/a/outside_0_1"


@pytest.mark.parametrize(
    "early, late, ends",
    [
        ({MEAN: 0.776}, {MEAN: 0.006}, ("77.6%", "0.6%")),
        ({MEAN: 0.776, OUTSIDE: 3}, {MEAN: 0.006}, ("0.776", "0.006")),
        ({MEAN: 1.02}, {MEAN: 0.006}, ("1.02", "0.006")),  # an earlier version wrote the run
    ],
    ids=["rewards from 0 to 1", "rewards above 1", "a mean above 1"],
)
def test_an_evaluation_is_a_percentage_if_its_rewards_are_from_0_to_1(
    early, late, ends, make_run, monkeypatch
):
    monkeypatch.setattr("jetrl.runs.report.to_svg", lambda chart: "")
    monkeypatch.setattr("jetrl.runs.report.to_png", lambda chart, path: None)
    runs = [make_run(name, steps=2, evaluate=False) for name in "ab"]
    file = runs[0] / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    changed = [line | more for line, more in zip(lines, (early, late), strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert f"{ends[0]} -> {ends[1]}  (step 1 to 2)" in show_run(runs[0])
    out = io.StringIO()
    RichConsole(file=out, width=120).print(runs_table(list_runs(runs[0].parent)))
    assert f" {ends[1]} " in out.getvalue()
    report = write_report(runs[0]).read_text(encoding="utf-8")
    assert f"{ends[0]} &rarr;" in report
    assert f"a/mean {' to '.join(ends)}" in report
    if early != {MEAN: 1.02}:
        rows = {row[0]: row[1:] for row in comparison_rows(compare_runs(runs))}
        assert rows[MEAN][0] == ends[1]
    line = "".join(text for text, _ in _step_line("step", 1, 2, early))
    assert f"eval a {ends[0]}" in line
