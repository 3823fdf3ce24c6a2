"""Runs are compared with the first run: in what they differ, and from where on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.runs.overview import bits_in_words, compare_runs, comparison_rows


def rewritten(run: Path, change: Callable[[dict], None]) -> None:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_that_took_other_times_have_the_same_bits(make_run) -> None:
    runs = [make_run(name, steps=20) for name in ("first", "again")]
    for run in runs:
        rewritten(run, lambda line: line.update({"policy/loss": float("nan")}))
    rewritten(runs[1], lambda line: line.update({"timing/step_s": 4.0, "memory/peak_gib": 3.0}))
    found = compare_runs(runs)
    assert (found.same, found.common_steps) == (True, 20)
    other = found.runs[1]
    assert (other.differs_at, dict(other.different)) == (None, {})
    assert bits_in_words(other, found.runs[0]).startswith("again: the same bits as first in all ")
    rows = {row[0]: row[1:] for row in comparison_rows(found)}
    assert rows[""] == ("first", "again")
    assert rows["tokens different"] == ("0 of 81,920",) * 2
    seconds = found.runs[0].reached["timing/step_s"]
    assert rows["timing/step_s"][1] == f"4.0 s ({seconds / 4:.3g} times as fast)"
    assert not any(key.startswith("run.") for key in rows)


def test_the_first_step_with_other_bits_is_named(make_run) -> None:
    first, other = make_run("first", steps=20), make_run("other", steps=20)

    def nudge(line: dict) -> None:
        if line["step"] >= 7 and "reward/mean" in line:
            line["reward/mean"] += 1e-16 + line["reward/mean"] * 2.3e-16

    rewritten(other, nudge)
    found = compare_runs([first, other])
    assert not found.same
    beside = found.runs[1]
    assert beside.differs_at == ("rl", 7)
    ((name, (theirs, ours)),) = beside.different.items()
    said = bits_in_words(beside, found.runs[0])
    assert f"at step 7: {name} {ours!r}, not {theirs!r}" in said
    assert f"in {beside.same_lines} lines" in said


def test_only_steps_that_all_have_are_looked_at(make_run) -> None:
    runs = [make_run("long", steps=40, sft=2), make_run("short", steps=10)]
    rewritten(runs[0], lambda line: line.update({"timing/step_s": line["step"]}))
    found = compare_runs(runs)
    assert found.common_steps == 10
    assert found.runs[0].reached["timing/step_s"] == pytest.approx(5.5, abs=0.6)
    assert not found.same, "the first has steps that the other has not"
    assert found.runs[1].differs_at is None
    assert compare_runs(runs[::-1]).same, "and the other has none that it has not"


def test_supervised_runs_are_compared_by_their_losses(make_run) -> None:
    runs = [make_run(name, steps=0, sft=20) for name in ("first", "other")]
    rewritten(runs[0], lambda line: line.update({"sft/loss": 2.0, "timing/step_s": 1.0}))
    rewritten(runs[1], lambda line: line.update({"sft/loss": line["step"], "timing/step_s": 0.5}))
    found = compare_runs(runs)
    assert (found.common_steps, found.common_sft_steps) == (0, 20)
    rows = {row[0]: row[1:] for row in comparison_rows(found)}
    assert rows["supervised steps"] == ("20", "20")
    assert rows["sft/loss"] == ("2", "19.5"), "the mean of the last tenth"
    assert rows["timing/step_s"][1] == "0.5 s (2 times as fast)"


def test_settings_that_differ_are_a_row_each(make_run) -> None:
    runs = [make_run("first", steps=2), make_run("other", steps=2)]
    config = runs[1] / "config.toml"
    assert "seed = 0\n" in config.read_text()
    config.write_text(config.read_text().replace("seed = 0\n", "seed = 7\n", 1))
    found = compare_runs([*runs, runs[0]])
    assert dict(found.runs[1].settings) == {"run.seed": (0, 7)}
    rows = {row[0]: row[1:] for row in comparison_rows(found)}
    assert rows["run.seed"] == ("0", "7", "0")
    with pytest.raises(UserError, match="at least two runs"):
        compare_runs(runs[:1])
