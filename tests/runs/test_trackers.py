from __future__ import annotations

import logging
import sys
import types

import pytest

from jetrl.errors import UserError
from jetrl.runs.trackers import open_trackers
from jetrl.settings.sections import TrackerSettings


def opened(path, *names, config=None, **settings):
    return open_trackers(TrackerSettings(names=names, **settings), path, config or {})


class FakeRun:
    offline = False

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
    arguments = {"config": {"train": {"lr": 1e-3}}, "project": "project", "group": "seeds"}
    trackers = opened(tmp_path, "wandb", **arguments)
    trackers.log(3, {"reward/mean": 0.5})
    # Supervised updates count from 1 too: what RL steps also have gets another name.
    trackers.log(3, {"sft/loss": 1.5, "eval/sums/mean": 0.5})
    supervised = {"sft/loss": 1.5, "sft/eval/sums/mean": 0.5, "step": 3}
    trackers.close(lambda: {"reward/mean/last": 0.5})
    trackers.close()
    assert run.logged == [(None, {"reward/mean": 0.5, "step": 3}), (None, supervised)]
    assert run.summary == {"summary/reward/mean/last": 0.5}
    assert run.finished == 1
    first = run.arguments
    opened(tmp_path, "wandb", **arguments)
    assert run.arguments == first, "a resumed run continues its curves"
    assert arguments.items() <= first.items()
    assert (first["resume"], first["name"]) == ("allow", tmp_path.name)
    assert len(run.logged) == 2, "online, wandb has the earlier steps"


def test_the_project_is_the_setting_or_the_environment(fake_wandb, monkeypatch, tmp_path):
    run = fake_wandb()
    cases = ((None, None, "jetrl"), ("mine", None, "mine"), ("mine", "set", "set"))
    for variable, setting, expected in cases:
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
        if variable:
            monkeypatch.setenv("WANDB_PROJECT", variable)
        opened(tmp_path, "wandb", project=setting)
        assert run.arguments["project"] == expected
        assert "group" not in run.arguments, "WANDB_RUN_GROUP is wandb's to read"


def test_a_run_resumed_offline_sends_its_earlier_steps_again(fake_wandb, make_run):
    run, path = fake_wandb(), make_run(sft=2, steps=3)
    run.offline = True
    opened(path, "wandb")
    assert run.logged == [], "the first attempt"
    trackers = opened(path, "wandb")
    # A resume drops the lines after its checkpoint, and writes its own before it sends it.
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join([*lines[:-1], lines[-1].replace("mean", "std")]))
    trackers.log(3, {"reward/std": 0.5})
    trackers.close()
    sent = [metrics for _, metrics in run.logged]
    assert [metrics["step"] for metrics in sent] == [1, 2, 0, 1, 2, 3]
    assert "reward/mean" not in sent[-1]
    opened(path, "wandb").close()
    assert len(run.logged) == 12, "an attempt without a step"
    assert not any("time" in metrics or "phase" in metrics for metrics in sent)


def test_trackio_and_tensorboard(monkeypatch, tmp_path, make_run):
    trackio, resumed = FakeRun(), []
    trackio.init = lambda **arguments: resumed.append(arguments["resume"])
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
    trackers = opened(tmp_path, "trackio", "tensorboard", group="seeds")
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close(lambda: {"steps": 1})
    assert trackio.logged == [(1, {"reward/mean": 0.5}), (1, {"summary/steps": 1})]
    assert scalars == [("reward/mean", 0.5, 1), ("summary/steps", 1, 1), "closed"]
    opened(make_run(steps=1), "trackio")
    assert resumed == ["never", "allow"], "a new run is not another one of its name"


def test_what_cannot_start_is_refused_and_the_others_are_closed(fake_wandb, monkeypatch, tmp_path):
    run = fake_wandb()
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="pip install trackio"):
        opened(tmp_path, "wandb", "trackio")
    assert run.finished == 1
    fake_wandb(error=RuntimeError("no API key"))
    with pytest.raises(UserError, match=r"wandb could not start .*no API key"):
        opened(tmp_path, "wandb")


def test_failing_tracker_is_logged_once_and_stops_nothing(fake_wandb, tmp_path, caplog):
    run = fake_wandb(fails=True)
    trackers = opened(tmp_path, "wandb")
    with caplog.at_level(logging.WARNING):
        trackers.log(1, {"reward/mean": 0.5})
        trackers.log(2, {"reward/mean": 0.6})
        trackers.close(lambda: {}["lost"])
    (record,) = caplog.records
    assert "tracker wandb could not log the metrics of step 1" in record.getMessage()
    assert run.finished == 1, "a summary that fails still closes the tracker"
