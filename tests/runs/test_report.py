import json
from html.parser import HTMLParser

import pytest

from jetrl.errors import UserError
from jetrl.runs import RunDirectory, write_report
from jetrl.runs.format import clip, duration, number, visible
from jetrl.types import StepStats

VOID = {"meta", "br", "hr", "link", "img", "input"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts, self.addresses = [], [], [], []
        self.feed(text)
        assert self.open == []

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


def test_report_of_a_whole_run(make_run):
    path = make_run(sft=5)
    report = write_report(path)
    page = Page(report.read_text(encoding="utf-8"))
    text = " ".join(page.texts)
    assert "0 different tokens at every step" in text
    for expected in ("42.0%", "93.1%", "0 different", "of 122,880 tokens compared", "train.lr"):
        assert expected in text, expected
    for title in ("Reward", "Held-out evaluation", "Response length", "Policy entropy"):
        assert title in text, title
    for title in ("Sampler against trainer", "Time per step", "Supervised updates", "Step 30"):
        assert title in text, title
    pngs = sorted(p.name for p in (path / "plots").iterdir())
    assert len(pngs) == page.tags.count("svg") == 10
    assert (path / "plots" / "mismatch.png").read_bytes().startswith(b"\x89PNG")


def test_report_is_one_file_that_runs_nothing(make_run, synthetic):
    text = write_report(make_run(steps=2)).read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert all(address.startswith("#") for address in page.addresses)
    assert visible(synthetic.HOSTILE) in " ".join(page.texts)
    assert "default-src" in text


def test_hostile_names_are_escaped(make_run, undrawn):
    path = make_run(name="<img src=x onerror=alert(1)>", steps=1, end="interrupted")
    page = Page(write_report(path).read_text(encoding="utf-8"))
    assert "img" not in page.tags
    assert "<img src=x onerror=alert(1)>" in page.texts


@pytest.mark.parametrize("steps, evaluate", [(0, True), (1, False), (2, True), (450, True)])
def test_any_number_of_steps(make_run, steps, evaluate):
    text = write_report(make_run(steps=steps, evaluate=evaluate)).read_text(encoding="utf-8")
    page = Page(text)
    assert ("No step was finished" in text) == (steps == 0)
    assert ("Held-out" in text) == (evaluate and steps > 0)
    assert len(page.tags) > 30
    assert len(text) < 1_000_000


def test_mismatch_that_is_not_zero_is_counted(make_run, undrawn):
    text = write_report(make_run(steps=6, mismatch=2)).read_text(encoding="utf-8")
    assert "42 different" in text  # 2 * (1 + 2 + 3 + 4 + 5 + 6)
    assert "0 is expected from an exact plan" in text
    assert "Mean |log-prob difference|" in text


def test_odd_values_and_a_torn_line(make_run):
    path = make_run(steps=3)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "time": 1, "reward/mean": NaN, "policy/entropy": -Infinity}\n')
        file.write('{"step": 5, "reward')
    text = write_report(path).read_text(encoding="utf-8")
    assert "nan" in text


def test_damaged_rollouts_are_said_and_damaged_metrics_refused(make_run, undrawn):
    path = make_run(steps=3)
    (path / "rollouts" / "step_000001.jsonl").write_text("nonsense\n{}\n")
    assert "step_000001.jsonl, line 1" in write_report(path).read_text(encoding="utf-8")
    (path / "metrics.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        write_report(path)


def test_report_of_a_run_that_goes_on(synthetic, create, undrawn):
    with create() as run:
        assert "running" in write_report(run.path).read_text(encoding="utf-8")


def test_drafts_are_shown_where_a_run_verified_some(synthetic, create, undrawn):
    with create() as run:
        for step, tokens in ((1, 1.25), (2, 1.75)):
            drafts = {"speculation/tokens_per_forward": tokens}
            if step == 2:
                drafts["speculation/acceptance_head"] = 0.625
            run.write_step(StepStats(step, {**synthetic.metrics_of(step), **drafts}))
        text = write_report(run.path).read_text(encoding="utf-8")
    assert "Tokens per decode forward, with drafts" in text
    assert "1.75" in text
    assert "Acceptance rate of the draft head" in text
    assert "0.625" in text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0004, "0 ms"),
        (0.0996, "0.1 s"),
        (59.96, "1m 00s"),
        (3599.6, "1h 00m"),
        (86399.9, "1d 00h"),
        (float("nan"), "nan"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "value, text",
    [(0.53149, "0.531"), (1.0, "1"), (12345.6, "12,346"), (0.00001, "1e-05"), (-2, "-2")],
)
def test_number(value, text):
    assert number(value) == text


def test_visible_and_clip():
    assert visible("a\x1b[0m\n\u202eb\u00e9") == "a\\x1b[0m\\n\\u202eb\u00e9"
    assert visible("a\nb", newlines=True) == "a\nb"
    assert clip("abcdef", 5) == "ab..."


def test_an_answer_is_shown_as_people_write_it_and_how_to_read_it(make_run, undrawn):
    path = make_run()
    for file in (path / "rollouts").iterdir():
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        read = [json.dumps({**line, "readable": "20 + 5 = <25>"}) for line in lines]
        file.write_text("\n".join([*read, ""]), encoding="utf-8")
    page = write_report(path).read_text(encoding="utf-8")
    assert '<p class="readable">20 + 5 = &lt;25&gt;</p>' in page
    assert "In this task" not in page
    RunDirectory(path).write_reading("answers are written backwards: <52>")
    page = write_report(path).read_text(encoding="utf-8")
    assert "In this task answers are written backwards: &lt;52&gt;." in page
