from __future__ import annotations

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
        pass

    def finish(self):
        self.finished += 1
        if self.fails:
            raise ConnectionError("gone")


@pytest.fixture
def fake_wandb(monkeypatch):
    def fake(fails=False, error=None):
        run = FakeRun(fails)

        def init(**arguments):
            if error is not None:
                raise error
            run.arguments = arguments
            return run

        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
        return run

    return fake


def test_wandb_gets_run_and_metrics(fake_wandb, tmp_path):
    run = fake_wandb()
    trackers = open_trackers(["wandb"], "project", tmp_path, {"train": {"lr": 1e-3}})
    trackers.log(3, {"reward/mean": 0.5})
    trackers.close(lambda: {"reward/mean/last": 0.5})
    trackers.close()
    assert run.logged == [(None, {"reward/mean": 0.5, "step": 3})]
    assert run.summary == {"summary/reward/mean/last": 0.5}
    assert run.finished == 1
    first = run.arguments
    open_trackers(["wandb"], "project", tmp_path, {"train": {"lr": 1e-3}})
    assert run.arguments == first, "a resumed run continues its curves"
    assert (first["project"], first["name"]) == ("project", tmp_path.name)
    assert (first["resume"], first["config"]) == ("allow", {"train": {"lr": 1e-3}})


def test_trackio_and_tensorboard(monkeypatch, tmp_path):
    trackio = FakeRun()
    trackio.init = lambda **arguments: None
    scalars = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *values: scalars.append(values),
        flush=lambda: None,
        close=lambda: scalars.append("closed"),
    )
    summary = types.SimpleNamespace(Writer=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    trackers = open_trackers(["trackio", "tensorboard"], "p", tmp_path, {})
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close(lambda: {"steps": 1})
    assert trackio.logged == [(1, {"reward/mean": 0.5}), (1, {"summary/steps": 1})]
    assert scalars == [("reward/mean", 0.5, 1), ("summary/steps", 1, 1), "closed"]


def test_what_cannot_start_is_refused_and_the_others_are_closed(fake_wandb, monkeypatch, tmp_path):
    run = fake_wandb()
    monkeypatch.setitem(sys.modules, "trackio", None)
    for name, words in (
        ("mlflow", "'mlflow' is none of wandb"),
        ("trackio", "pip install trackio"),
    ):
        with pytest.raises(UserError, match=words):
            open_trackers(["wandb", name], "p", tmp_path, {})
    assert run.finished == 2
    fake_wandb(error=RuntimeError("no API key"))
    with pytest.raises(UserError, match=r"wandb could not start .*no API key"):
        open_trackers(["wandb"], "p", tmp_path, {})


def test_failing_tracker_is_logged_once_and_stops_nothing(fake_wandb, tmp_path, caplog):
    run = fake_wandb(fails=True)
    trackers = open_trackers(["wandb"], "p", tmp_path, {})
    with caplog.at_level(logging.WARNING):
        trackers.log(1, {"reward/mean": 0.5})
        trackers.log(2, {"reward/mean": 0.6})
        trackers.close(lambda: {}["lost"])
    (record,) = caplog.records
    assert "tracker wandb could not take the metrics of step 1" in record.getMessage()
    assert run.finished == 1, "a summary that fails still closes the tracker"
