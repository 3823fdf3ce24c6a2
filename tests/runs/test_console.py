from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re

import pytest

from jetrl.runs.console import Console
from jetrl.types import StepStats


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colors(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def show(synthetic, file, mismatch=0, **options):
    with contextlib.closing(Console(30, file=file, **options)) as console:
        console.phase("rollout")
        console.progress(3, 8, 1234.5)
        metrics = synthetic.metrics_of(5, mismatch=mismatch, evaluate=True)
        console.step(StepStats(5, metrics, synthetic.samples_of(5)))
        console.note("checkpoint written")
    return file.getvalue()


def test_plain_lines_have_what_matters_and_no_control_codes(synthetic):
    text = show(synthetic, io.StringIO(), samples_every=5)
    expected = r"step  5/30  reward 0\.\d{3}  eval arithmetic \d\d\.\d%  length \d+\.\d  "
    expected += r"entropy 0\.\d{3}  mismatch 0 different of 4,096  \d\.\d s  [\d,]+ tokens/s"
    assert re.fullmatch(expected, text.splitlines()[0])
    assert "reward 1  4+5=  ->  <script>" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert text.endswith("checkpoint written\n")


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_an_answer_is_shown_as_people_write_it_with_the_raw_text_beside(synthetic, file):
    shown, samples = file(), synthetic.samples_of(5)
    read = [dataclasses.replace(sample, readable="4 + 5 = \x1b9") for sample in samples]
    with contextlib.closing(Console(30, file=shown)) as console:
        console.samples(5, [*read, samples[0]])
    text = shown.getvalue()
    assert "4 + 5 = \\x1b9" in text
    assert "4+5=" in text


@pytest.mark.parametrize("mismatch, style", [(0, "32m0 different"), (3, "31m15 different")])
def test_a_terminal_has_colors_and_model_text_cannot_drive_it(synthetic, mismatch, style):
    text = show(synthetic, Terminal(), mismatch, samples_every=5)
    assert style in text
    assert "completions of step 5" in text
    assert "\x1b[31mred" not in text
    assert "\\x1b[31mred" in text


def test_a_long_phase_reports_every_half_minute_when_plain(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("jetrl.runs.console.monotonic", lambda: now[0])
    with contextlib.closing(Console(4)) as console:
        console.phase("rollout")
        for done in range(1, 8):
            now[0] += 10
            console.progress(done, 8, 1000, pages=(30, 120), eta_s=75)
    shown = "1,000 tokens/s, 25% of the KV pages, about 1m 15s left after"
    assert capsys.readouterr().out.splitlines() == [
        f"  rollout 3/8, {shown} 30.0 s",
        f"  rollout 6/8, {shown} 1m 00s",
    ]


@pytest.mark.parametrize("opened", [os.pipe, os.openpty, None])
def test_a_reader_that_goes_away_or_a_full_disk_leaves_the_run_alone(opened, synthetic, caplog):
    """`jetrl train | head`, a terminal that is closed, `jetrl train > /full/train.log`."""
    reading, writing = opened() if opened else (None, os.open("/dev/full", os.O_WRONLY))
    with os.fdopen(writing, "w") as file:
        console = Console(3, file=file, samples_every=1)
        assert console.interactive == (opened is os.openpty)
        if reading is not None:
            os.close(reading)
        console.step(StepStats(1, {"reward/mean": 0.5}, synthetic.samples_of(1)))
        console.step(StepStats(2, {"reward/mean": 0.5}))
        console.close()
    assert caplog.text.count("cannot write to the console anymore") == 1


def test_a_descriptor_that_was_closed_makes_the_console_silent_once(tmp_path, caplog):
    """The null device, opened in its place, gets the same number and has to stay open."""
    file = open(tmp_path / "console", "w", encoding="utf-8")  # noqa: SIM115
    os.close(file.fileno())
    console = Console(3, file=file)
    console.note("one")
    console.note("two")
    assert caplog.text.count("cannot write to the console") == 1
    file.close()
