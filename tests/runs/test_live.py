"""The live view of a run: what it shows, when it ends, and who is served."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from jetrl.errors import UserError
from jetrl.runs import RunDirectory
from jetrl.runs import live as module
from jetrl.runs.live import curve, frame, page_server, watch


def shown(path: Path) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(frame(path))
    return console.export_text()


def test_a_frame_has_the_last_steps_the_curve_the_times_and_completions(make_run, synthetic):
    path = make_run()
    text = shown(path)
    assert "demo: finished" in text
    assert "step 30/" in text
    assert "step 22/" not in text, "eight steps"
    assert "mismatch 0 different of 4,096" in text
    assert "reward  " in text
    assert "\u2588" in text
    assert "rollout " in text
    assert "completions of step 30" in text
    assert "\x1b[31m" not in text, "what a model writes does not drive the terminal"


def test_a_frame_of_a_run_without_a_step(make_run):
    assert "no step yet" in shown(make_run(steps=0))


def test_how_completions_are_read_is_said(make_run):
    path = make_run(steps=1)
    RunDirectory(path).write_reading("answers are written backwards")
    assert "in this task answers are written backwards" in shown(path)


def test_an_answer_is_shown_as_people_write_it_too(make_run):
    path = make_run()
    for file in (path / "rollouts").iterdir():
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        read = [json.dumps({**line, "readable": "20 + 5 = <25>"}) for line in lines]
        file.write_text("\n".join([*read, ""]), encoding="utf-8")
    assert "   (20 + 5 = <25>)" in shown(path)


def test_watching_ends_with_the_run(make_run, monkeypatch):
    path, states = make_run(steps=2), ["running", "running", "finished"]
    slept = []
    monkeypatch.setattr(module, "frame", lambda path: "frame")
    monkeypatch.setattr(RunDirectory, "state", lambda run: states.pop(0))
    watch(path, 2.5, slept.append, Console(file=open("/dev/null", "w")))  # noqa: SIM115
    assert slept == [2.5, 2.5]
    assert states == []


def test_the_page_is_made_anew_and_served_to_this_machine_alone(make_run):
    path = make_run(steps=1)
    with page_server(path, 0, 5.0) as server:
        assert server.server_address[0] == "127.0.0.1"
        address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            body = urllib.request.urlopen(f"{address}/").read().decode()
            assert '<meta http-equiv="refresh" content="5">' in body
            assert "written backwards" not in body
            RunDirectory(path).write_reading("answers are written backwards")
            assert "written backwards" in urllib.request.urlopen(f"{address}/").read().decode()
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address}/config.toml")
        finally:
            server.shutdown()


def test_what_cannot_be_watched_is_refused(tmp_path, make_run):
    with pytest.raises(UserError):
        frame(tmp_path / "none")
    with pytest.raises(UserError):
        page_server(tmp_path / "none", 0, 1.0)
    path = make_run(steps=1)
    with (
        page_server(path, 0, 1.0) as server,
        pytest.raises(UserError, match=r"--port .* name another"),
    ):
        page_server(path, server.server_address[1], 1.0)


@pytest.mark.parametrize(
    "values, line",
    [([1.0, 1.0], "\u2588\u2588"), ([0.0, 1.0], "\u2581\u2588"), ([0, 1, 2, 3], "\u2581\u2588")],
)
def test_curve(values, line):
    assert curve(values, 2) == line
