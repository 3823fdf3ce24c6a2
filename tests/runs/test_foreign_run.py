"""Runs of others: one that is damaged hides no other, and no text of a file drives a terminal."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from jetrl.cli.doctor import run_checks
from jetrl.cli.main import main
from jetrl.errors import UserError
from jetrl.runs import (
    RunDirectory,
    compare_runs,
    list_runs,
    plot_runs,
    runs_table,
    show_run,
    write_report,
)
from jetrl.runs.format import count, duration, number, percent, visible
from jetrl.runs.plots import charts_of, to_svg
from jetrl.settings.loading import load_config
from jetrl.types import StepStats

ODD_NAME = "eval/\x1b]0;title\x07\u202e[red]x[/red]/mean"
METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.1,
    "policy/grad_norm": 1.0,
    "policy/loss": 0.1,
    "policy/entropy": 1.0,
    "mismatch/num_tokens": 10,
    "mismatch/num_different": 0,
    "timing/step_s": 1.0,
    "timing/rollout_s": 0.5,
    "throughput/rollout_tokens_per_s": 10.0,
    "memory/peak_gib": 0.1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two whole runs, `one` and `two`, of 40 steps each."""
    for name in ("one", "two"):
        chosen = load_config("demo", [f"run.dir={tmp_path}/runs", f"run.name={name}"])
        run = RunDirectory.create(chosen, {"name": "unified"})
        with run, run.attempt(["jetrl", "train"]):
            for step in range(1, 41):
                run.write_step(StepStats(step, METRICS))
    return tmp_path / "runs"


def rewrite(path: Path, number: int, **changes: object) -> None:
    """Change a line of a file of JSON lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def listed(folder: Path) -> str:
    """Return the text that `jetrl runs list` writes to a terminal."""
    console = Console(file=io.StringIO(), width=300, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(runs_table(list_runs(folder)))
    return captured.get()


DAMAGE = [
    pytest.param("metrics.jsonl", {"time": float("nan")}, r"time = nan", id="nan-time"),
    pytest.param("metrics.jsonl", {"step": -3}, "step = -3", id="negative-step"),
    pytest.param("metrics.jsonl", {"phase": []}, r"phase = \[\]", id="phase"),
    pytest.param(
        "metrics.jsonl",
        {"mismatch/num_different": float("inf")},
        "mismatch/num_different = inf",
        id="infinite-count",
    ),
    pytest.param("attempts.jsonl", {"state": ["failed"]}, "state = ", id="list-state"),
]


@pytest.mark.parametrize("name, changes, message", DAMAGE)
def test_a_damaged_line_is_named_and_hides_no_other_run(folder, name, changes, message, capsys):
    file = folder / "one" / name
    rewrite(file, 1, **changes)
    text = listed(folder)
    assert "two" in text
    assert "finished" in text
    with pytest.raises(UserError, match=rf"{name}, line 2: {message}.*repair or delete that line"):
        show_run(folder / "one")
    # The other of two that are shown is shown, and the exit code tells.
    assert main(["runs", "show", "one", "two", "--dir", str(folder)]) == 2
    shown = capsys.readouterr()
    assert "two" in shown.out
    assert f"{name}, line 2: " in shown.err
    with pytest.raises(UserError, match=name):
        compare_runs([folder / "two", folder / "one"])
    with pytest.raises(UserError, match=name):
        write_report(folder / "one")
    findings = run_checks(folder / "one")
    assert any(f.status == "FAIL" and name in f.detail for f in findings)
    assert any(f.name == "checkpoints" or f.name == "disk" for f in findings)


@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl", "plan.json", ".lock"])
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / "one" / name).unlink()
    os.mkfifo(folder / "one" / name)
    assert "two" in listed(folder)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e308, 10**300], ids=str)
def test_measures_that_are_not_finite_are_shown(folder, value):
    """A run may measure them: they are no damage."""
    file = folder / "one" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    counts = ("step", "time", "phase", "mismatch/num_tokens", "mismatch/num_different")
    for line in lines[5:]:
        line |= {name: value for name in line if name not in counts}
    lines[7]["reward/mean"] = -value
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "damaged" not in listed(folder)
    assert show_run(folder / "one")
    assert compare_runs([folder / "one", folder / "two"]).runs
    assert write_report(folder / "one").is_file()
    assert plot_runs([folder / "one", folder / "two"], out_png=folder / "x.png").is_file()
    assert run_checks(folder / "one")


def test_numbers_of_hundreds_of_digits_fill_no_line():
    for value in (1e308, -1e308, 10**300):
        for form in (number, count, percent, duration):
            assert len(form(value)) < 12
    assert count(2**63 - 1) == "9,223,372,036,854,775,807"


def test_names_and_states_reach_no_terminal_raw(folder, capsys):
    file = folder / "one" / "metrics.jsonl"
    for line in (0, 1):
        rewrite(file, line, **{ODD_NAME: 0.5})
    (folder / "one" / "plan.json").write_text(json.dumps({"name": "[red]\x1b]0;t\x07[/red]"}))
    rewrite(folder / "one" / "attempts.jsonl", 1, reason="\x1b[2J")
    text = listed(folder)
    assert "[red]" in text  # as it is: no markup was interpreted
    assert "\x1b]0;" not in text
    for words in (["runs", "show", "one"], ["doctor", "one"], ["compare", "one", "two"]):
        main([*words, "--dir", str(folder)])
        shown = capsys.readouterr()
        assert visible(shown.out + shown.err, newlines=True) == shown.out + shown.err


def test_pictures_hold_no_control_characters(folder):
    rewrite(folder / "one" / "metrics.jsonl", 0, **{ODD_NAME: 0.5})
    renamed = folder / "o\x1b]0;t\x07ne"
    shutil.copytree(folder / "one", renamed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plot_runs([folder / "one", renamed], ["eval", ODD_NAME], folder / "x.png")
        for chart in charts_of(RunDirectory.open(folder / "one").metrics()):
            svg = to_svg(chart)
            assert visible(svg, newlines=True) == svg
        page = write_report(folder / "one").read_text(encoding="utf-8")
    assert "\x1b" not in page
    assert "\u202e" not in page
    for warning in caught:
        assert str(warning.message).isprintable()
