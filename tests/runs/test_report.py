from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.runs import plots
from jetrl.runs.format import visible
from jetrl.runs.report import write_report
from jetrl.runs.writer import RunWriter
from jetrl.types import StepStats

VOID = {"meta", "br", "hr", "link", "img", "input"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed in order."""

    def __init__(self, run):
        super().__init__()
        self.source = write_report(run).read_text(encoding="utf-8")
        self.tags, self.open, self.texts, self.addresses = [], [], [], []
        self.feed(self.source)
        assert self.open == []
        self.text = " ".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without their charts, which take most of the time."""
    monkeypatch.setattr("jetrl.runs.report.to_svg", lambda chart: "")
    monkeypatch.setattr("jetrl.runs.report.to_png", lambda chart, path: None)


def test_report_of_a_whole_run_is_one_file_that_runs_nothing(make_run, synthetic):
    path = make_run(sft=5)
    page = Page(path)
    for expected in ("42.0%", "93.1%", "0 different", "of 122,880 tokens compared", "train.lr"):
        assert expected in page.text, expected
    for title in ("Reward", "Held-out evaluation", "Response length", "Policy entropy"):
        assert title in page.text, title
    for title in ("Sampler against trainer", "Time per step", "Supervised updates", "Step 30"):
        assert title in page.text, title
    assert "0 different tokens at every step" in page.text
    pngs = sorted(p.name for p in (path / "plots").iterdir())
    assert len(pngs) == page.tags.count("svg") == 10
    assert (path / "plots" / "mismatch.png").read_bytes().startswith(b"\x89PNG")
    assert "script" not in page.tags
    assert all(address.startswith("#") for address in page.addresses)
    assert visible(synthetic.HOSTILE) in page.text
    assert "default-src" in page.source


def test_hostile_names_are_escaped_and_mismatch_is_counted(make_run, undrawn):
    name = "<img src=x onerror=alert(1)>"
    page = Page(make_run(name=name, steps=6, mismatch=2, end="interrupted"))
    assert "img" not in page.tags
    assert name in page.texts
    assert "42 different" in page.text  # 2 * (1 + 2 + 3 + 4 + 5 + 6)
    assert "0 is expected from an exact plan" in page.text
    assert "Mean |log-prob difference|" in page.text


@pytest.mark.parametrize("steps, evaluate", [(0, True), (1, False), (450, True)])
def test_any_number_of_steps(make_run, steps, evaluate):
    page = Page(make_run(steps=steps, evaluate=evaluate))
    assert ("No step was finished" in page.text) == (steps == 0)
    assert ("Held-out" in page.text) == (evaluate and steps > 0)
    assert len(page.source) < 1_000_000


def test_odd_values_and_damaged_lines(make_run, undrawn):
    path = make_run(steps=3)
    (path / "rollouts" / "step_000001.jsonl").write_text("nonsense\n{}\n")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "time": 1, "reward/mean": NaN, "policy/entropy": -Infinity}\n')
        file.write('{"step": 5, "reward')
    page = Page(path)
    assert "nan" in page.text
    assert "step_000001.jsonl, line 1" in page.text
    (path / "metrics.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        write_report(path)


def test_a_completion_without_a_reward_is_shown_as_such(make_run, undrawn):
    path = make_run(steps=1)
    rollouts = path / "rollouts" / "step_000001.jsonl"
    lines = [json.loads(line) for line in rollouts.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line.update(reward=None, failure="ValueError: no answer")
    rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = Page(path)
    assert "reward none" in page.text
    assert "not scored: ValueError: no answer" in page.text


def test_drafts_are_shown_of_a_run_that_verifies_some(synthetic, create, undrawn):
    with create() as run:
        for step, tokens in ((1, 1.25), (2, 1.75)):
            drafts = {"speculation/tokens_per_forward": tokens, "speculation/acceptance_head": 0.6}
            run.write_step(StepStats(step, {**synthetic.metrics_of(step), **drafts}))
        text = Page(run.path).text
    assert "running" in text
    for expected in ("per decode forward, with drafts", "1.75", "rate of the draft head", "0.6"):
        assert expected in text


def test_an_answer_is_shown_as_people_write_it_and_how_to_read_it(make_run, undrawn):
    path = make_run()
    for file in (path / "rollouts").iterdir():
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        read = [json.dumps({**line, "readable": "20 + 5 = <25>"}) for line in lines]
        file.write_text("\n".join([*read, ""]), encoding="utf-8")
    page = Page(path).source
    assert '<p class="readable">20 + 5 = &lt;25&gt;</p>' in page
    assert "In this task" not in page
    RunWriter(path).write_reading("answers are written backwards: <52>")
    assert "In this task answers are written backwards: &lt;52&gt;." in Page(path).source


def test_a_title_is_not_drawn_over_a_legend(monkeypatch):
    drawn = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *a, **k: drawn.append(figure))
    record = {"step": 1, "response_length/clip_ratio": 0.5, "policy/clip_fraction": 0.1}
    plots.to_png(plots.charts_of([record])[0], Path())
    drawn[0].draw_without_rendering()
    (legend,) = drawn[0].legends
    assert legend.get_title().get_window_extent().y0 > legend.get_texts()[0].get_window_extent().y1
