import logging
import sys
import types

import pytest

from jetrl.errors import UserError
from jetrl.runs import open_trackers


class FakeRun:
    def __init__(self, fails=False):
        self.fails, self.logged, self.finished, self.summary = fails, [], 0, {}

    def log(self, metrics, step=None):
        if self.fails:
            raise ConnectionError("gone")
        self.logged.append((step, metrics))

    def define_metric(self, *names, **options):
        self.defined = (names, options)

    def finish(self):
        self.finished += 1
        if self.fails:
            raise ConnectionError("gone")


def fake_wandb(monkeypatch, run, error=None):
    def init(**arguments):
        if error is not None:
            raise error
        run.arguments = arguments
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))


def test_wandb_gets_run_and_metrics(monkeypatch, tmp_path):
    run = FakeRun()
    fake_wandb(monkeypatch, run)
    trackers = open_trackers(["wandb"], "project", tmp_path, {"train": {"lr": 1e-3}})
    trackers.log(3, {"reward/mean": 0.5})
    trackers.close(lambda: {"reward/mean/last": 0.5})
    trackers.close()
    assert run.logged == [(None, {"reward/mean": 0.5, "step": 3})]
    assert run.summary == {"summary/reward/mean/last": 0.5}
    assert run.finished == 1
    first_id = run.arguments["id"]
    open_trackers(["wandb"], "project", tmp_path, {"train": {"lr": 1e-3}})
    assert run.arguments["id"] == first_id
    assert run.arguments["resume"] == "allow"
    assert run.arguments["project"] == "project"
    assert run.arguments["name"] == tmp_path.name
    assert run.arguments["config"] == {"train": {"lr": 1e-3}}


def test_trackio_and_tensorboard(monkeypatch, tmp_path):
    trackio = FakeRun()
    trackio.init = lambda **arguments: None
    scalars = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *values: scalars.append(values),
        flush=lambda: None,
        close=lambda: scalars.append("closed"),
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(
        sys.modules, "tensorboard.summary", types.SimpleNamespace(Writer=lambda folder: writer)
    )
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    trackers = open_trackers(["trackio", "tensorboard"], "p", tmp_path, {})
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close(lambda: {"steps": 1})
    assert trackio.logged == [(1, {"reward/mean": 0.5}), (1, {"summary/steps": 1})]
    assert scalars == [("reward/mean", 0.5, 1), ("summary/steps", 1, 1), "closed"]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_missing_package_is_refused_with_the_command(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"pip install {name}"):
        open_trackers([name], "p", tmp_path, {})


def test_unknown_name_is_refused_and_the_others_are_closed(monkeypatch, tmp_path):
    run = FakeRun()
    fake_wandb(monkeypatch, run)
    with pytest.raises(UserError, match="'mlflow' is none of wandb"):
        open_trackers(["wandb", "mlflow"], "p", tmp_path, {})
    assert run.finished == 1


def test_tracker_that_cannot_start_is_refused(monkeypatch, tmp_path):
    fake_wandb(monkeypatch, FakeRun(), error=RuntimeError("no API key"))
    with pytest.raises(UserError, match=r"wandb could not start .*no API key"):
        open_trackers(["wandb"], "p", tmp_path, {})


def test_failing_tracker_is_logged_once_and_stops_nothing(monkeypatch, tmp_path, caplog):
    fake_wandb(monkeypatch, FakeRun(fails=True))
    trackers = open_trackers(["wandb"], "p", tmp_path, {})
    with caplog.at_level(logging.WARNING):
        trackers.log(1, {"reward/mean": 0.5})
        trackers.log(2, {"reward/mean": 0.6})
        trackers.close()
    assert [record.getMessage()[:50] for record in caplog.records] == [
        "tracker wandb could not take the metrics of step 1"
    ]


def test_a_summary_that_fails_still_closes_the_tracker(monkeypatch, tmp_path, caplog):
    run = FakeRun()
    fake_wandb(monkeypatch, run)
    trackers = open_trackers(["wandb"], "p", tmp_path, {})
    with caplog.at_level(logging.WARNING):
        trackers.close(lambda: {}["lost"])
    assert run.finished == 1
    assert "could not take the summary (KeyError: 'lost')" in caplog.text
