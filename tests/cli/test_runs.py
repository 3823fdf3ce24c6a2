"""`jetrl runs`: list, show and plot, on a run directory written by the real writer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jetrl.precision import PrecisionPlan
from jetrl.runs.attempts import StatusFile
from jetrl.runs.digest import START, next_digest
from jetrl.runs.writer import RunWriter
from jetrl.settings.loading import load_config
from jetrl.types import StepStats

PLAN = PrecisionPlan.preset("unified").to_dict()
FIRST = next_digest(START, ("rl", 1), {"weights": f"{1:016x}"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one run of two steps."""
    settings = load_config("demo", [f"run.dir={tmp_path}", "run.name=first"])
    counts = {"mismatch/num_tokens": 100.0, "mismatch/num_different": 0.0}
    with RunWriter.create(settings, PLAN) as run:
        for step, reward in ((1, 0.25), (2, 0.75)):
            run.write_step(StepStats(step, {"reward/mean": reward, **counts}))
    return tmp_path


def test_list(jetrl: Callable, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert jetrl("runs", "list", "--dir", empty).out == f"no runs in {empty}\n"
    done = jetrl("runs", "list", "--dir", folder)
    assert jetrl("runs", "--dir", folder).out == done.out
    header, line = done.out.splitlines()[:2]
    assert header.split()[:4] == ["run", "state", "preset", "steps"]
    assert line.split()[0] == "first"
    assert "unified" in line
    assert "0.75" in line
    found = json.loads(jetrl("runs", "list", "--dir", folder, "--json").out)
    assert [(row["name"], row["history"]["num_steps"]) for row in found] == [("first", 2)]


def test_show_by_name_and_by_path(jetrl: Callable, folder: Path) -> None:
    done = jetrl("runs", "show", "first", "--dir", folder)
    assert "0.25 -> 0.75" in done.out
    assert "0 of 200 different" in done.out
    for name in ("sft/step_000050", "step_000000"):
        (folder / "first" / "checkpoints" / name).mkdir(parents=True)
        shown = jetrl("runs", "show", folder / "first").out
        assert re.search(f"last checkpoint +{name}\n", shown)
    found = json.loads(jetrl("runs", "show", folder / "first", "--json").out)
    assert found["last_line"]["reward/mean"] == 0.75
    assert found["num_tokens"] == 200


def test_plot_and_watch(jetrl: Callable, folder: Path) -> None:
    out = folder / "png" / "first.png"
    done = jetrl("runs", "plot", folder / "first", "--out", out, "--metric", "reward/mean")
    assert (done.code, done.out) == (0, f"{out}\n")
    assert out.read_bytes().startswith(b"\x89PNG")
    done = jetrl("runs", "watch", "first", "--dir", folder)
    assert (done.code, done.out) == (0, jetrl("runs", "show", folder / "first").out)
    assert f"wrote {folder / 'first' / 'report.html'}" in done.err
    assert (folder / "first" / "report.html").is_file()


def test_show_has_the_phase_of_a_run_that_is_running(jetrl: Callable, folder: Path) -> None:
    settings = load_config("demo", [f"run.dir={folder}", "run.name=first"])
    with RunWriter.create(settings, PLAN, resume=True):
        status = StatusFile(folder / "first")
        status.begin("update", 3)
        assert re.search("now +update of step 3 for", jetrl("runs", "show", folder / "first").out)
        status.close()
    assert "now " not in jetrl("runs", "show", folder / "first").out


@pytest.mark.parametrize(
    "words, message",
    [
        (["show"], "needs a run"),
        (["list", "first"], "did you mean: jetrl runs show first?"),
        (["show", "elsewhere/second"], "error: elsewhere/second: no such run directory"),
        (["plot", "first", "--out", "/"], "/: cannot be written: "),
        (["plot", "first", "--metric", "reward/men"], "metric reward/men"),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, jetrl: Callable, folder: Path
) -> None:
    done = jetrl("runs", *words, "--dir", folder)
    assert (done.code, message in done.err) == (2, True), done.err


def test_a_listing_breaks_no_name(
    jetrl: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    name = "a-name-that-is-longer-than-what-eighty-columns-leave-for-it"
    settings = load_config("demo", [f"run.dir={tmp_path}", f"run.name={name}"])
    RunWriter.create(settings, PLAN).close()
    assert name in jetrl("runs", "list", "--dir", tmp_path).out


def test_compare_tells_by_its_exit_code_if_all_bits_are_the_same(
    jetrl: Callable, folder: Path
) -> None:
    settings = load_config("demo", [f"run.dir={folder}", "run.name=digested"])
    with RunWriter.create(settings, PLAN) as run:
        for step, before in ((1, START), (2, FIRST)):
            digest = next_digest(before, ("rl", step), {"weights": f"{step:016x}"})
            run.write_step(StepStats(step, {"reward/mean": 0.5}), digest=digest)
    shutil.copytree(folder / "digested", folder / "again")
    words = ("compare", "digested", "again", "--dir", folder)
    done = jetrl(*words, "--same")
    assert done.code == 0
    assert re.search(r"\nreward/mean +0.5 +0.5\n", done.out)
    assert "again: the same bits as digested in all 2 lines" in done.out
    assert f"again: the same digest as digested after step 2: {digest['run']}\n" in done.out
    file = folder / "again" / "metrics.jsonl"
    other = next_digest(FIRST, ("rl", 2), {"weights": "f" * 16})
    text = file.read_text().replace(digest["run"], other["run"]).replace("0.5", "0.7")
    file.write_text(text.replace(digest["weights"], other["weights"]))
    assert jetrl(*words).code == 0
    done = jetrl(*words, "--same", "--json")
    found = json.loads(done.out)
    assert (done.code, found["same"], found["same_digest"]) == (1, False, False)
    assert found["runs"][1]["differs_at"] == ["rl", 1]
    assert found["runs"][1]["match"] == [False, ["rl", 2], ["weights"], []]
    assert "at step 2, first in weights\n" in jetrl(*words, "--same").out
    # The lines of "first" have no digests, so they show nothing.
    done = jetrl("compare", "digested", "first", "--dir", folder, "--same")
    assert (done.code, "no digest of step 1 in first" in done.out) == (1, True)
    assert re.search(r"\ndigest +none\n", jetrl("runs", "show", folder / "first").out)
    assert re.search(f"\ndigest +{digest['run']}\n", jetrl("runs", "show", folder / "digested").out)
    # A file that was changed is not compared by digest.
    file.write_text(text)
    done = jetrl(*words, "--same")
    assert (done.code, "the digest of step 2 does not follow" in done.err) == (2, True)
