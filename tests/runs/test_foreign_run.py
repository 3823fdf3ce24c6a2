"""Runs of others: one that is damaged hides no other, and no text of a file drives a terminal."""

from __future__ import annotations

import io
import json
import os
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from jetrl.cli.main import main
from jetrl.cli.run_checks import run_checks
from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory, check_start
from jetrl.runs.format import count, duration, number, percent, visible
from jetrl.runs.overview import compare_runs, list_runs, runs_table, show_run
from jetrl.runs.plots import plot_runs
from jetrl.runs.report import write_report
from jetrl.runs.writer import RunWriter
from jetrl.settings.loading import load_config

ODD_NAME = "eval/\x1b]0;title\x07\u202e[red]x[/red]/mean"


@pytest.fixture
def folder(make_run) -> Path:
    """A folder of two whole runs, `one` and `two`."""
    runs = [make_run(name, steps=12) for name in ("one", "two")]
    return runs[0].parent


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


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("metrics.jsonl", {"time": float("nan")}, "time = nan"),
        ("metrics.jsonl", {"step": -3}, "step = -3"),
        ("metrics.jsonl", {"phase": []}, r"phase = \[\]"),
        ("metrics.jsonl", {"mismatch/num_different": float("inf")}, "num_different = inf"),
        ("attempts.jsonl", {"state": ["failed"]}, "state = "),
    ],
)
def test_a_damaged_line_is_named_and_hides_no_other_run(folder, name, changes, message, capsys):
    rewrite(folder / "one" / name, 1, **changes)
    text = listed(folder)
    assert "two" in text
    assert "finished" in text
    with pytest.raises(UserError, match=rf"{name}, line 2: .*{message}.*repair or delete"):
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
    assert any(f.name == "disk" for f in findings)


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json", ".lock"])
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / "one" / name).unlink()
    os.mkfifo(folder / "one" / name)
    assert "two" in listed(folder)


@pytest.mark.parametrize("name", [".lock", "log.txt", "status.json", "hang.txt", "plots/x.png"])
def test_a_pipe_in_its_place_is_refused_and_not_opened(folder, name):
    """`--resume` and `--dry-run` come by `check`, a start by `create`."""
    run = folder / "one"
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    settings = load_config(run / "config.toml", [f"run.dir={folder}", "run.name=one"])
    plan = RunDirectory.open(run).plan()
    for resume in (True, False):
        with pytest.raises(UserError, match=rf"one/{name}: a pipe, .*; delete it, or"):
            check_start(settings, plan, resume)
        with pytest.raises(UserError, match=rf"one/{name}: a pipe, .*; delete it, or"):
            RunWriter.create(settings, plan, resume=resume)


def test_measures_that_are_not_finite_or_huge_are_shown(folder):
    """A run may measure them: they are no damage."""
    file = folder / "one" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = ("step", "time", "phase", "mismatch/num_tokens", "mismatch/num_different")
    values = [float("nan"), float("-inf"), 1e308, 10**300]
    for line, value in zip(lines[5:], values * 2, strict=True):
        line |= {name: value for name in line if name not in kept}
    lines[7]["reward/mean"] = float("inf")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "damaged" not in listed(folder)
    assert show_run(folder / "one")
    assert compare_runs([folder / "one", folder / "two"]).runs
    assert write_report(folder / "one").is_file()
    assert plot_runs([folder / "one", folder / "two"], out_png=folder / "x.png").is_file()
    assert run_checks(folder / "one")
    for value in (1e308, -1e308, 10**300):
        assert all(len(form(value)) < 12 for form in (number, count, percent, duration))


def test_names_and_states_reach_no_terminal_and_no_picture_raw(folder, capsys):
    file = folder / "one" / "metrics.jsonl"
    for line in (0, 1):
        rewrite(file, line, **{ODD_NAME: 0.5})
    (folder / "one" / "plan.json").write_text(json.dumps({"name": "[red]\x1b]0;t\x07[/red]"}))
    rewrite(folder / "one" / "attempts.jsonl", 1, reason="\x1b[2J")
    renamed = (folder / "one").rename(folder / "o\x1b]0;t\x07ne")
    text = listed(folder)
    assert "[red]" in text  # as it is: no markup was interpreted
    assert "\x1b]0;" not in text
    for words in (["runs", "show"], ["doctor"], ["compare", "two"]):
        main([*words, renamed.name, "--dir", str(folder)])
        shown = capsys.readouterr()
        assert visible(shown.out + shown.err, newlines=True) == shown.out + shown.err
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plot_runs([folder / "two", renamed], ["eval", ODD_NAME], folder / "x.png")
        page = write_report(renamed).read_text(encoding="utf-8")
    assert visible(page, newlines=True) == page
    assert all(str(warning.message).isprintable() for warning in caught)
