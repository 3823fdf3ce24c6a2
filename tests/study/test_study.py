"""A tiny study through the command: what it leaves, what a second call does, what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.study.results import read_results
from tests.study.conftest import PoolInThisProcess

from jetrl.cli.main import main


class NoPool(PoolInThisProcess):
    """A pool in which nothing may be started."""

    def run(self, words: list[str]) -> int:
        raise AssertionError(f"started {words}")


@pytest.fixture
def copy(tiny_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study file with the results of the tiny study and none of its other files.

    Its reports have no pictures, which take seconds.
    """
    monkeypatch.setattr("benchmarks.study.report.to_png", lambda *_: None)
    monkeypatch.setattr("jetrl.runs.report.to_svg", lambda _: "")
    (tmp_path / "out").mkdir()
    for name in ("tiny.toml", "out/results.json"):
        text = (tiny_study.parent / name).read_text()
        (tmp_path / name).write_text(text.replace(str(tiny_study.parent), str(tmp_path)))
    return tmp_path / "tiny.toml"


def test_arms_begin_from_the_same_weights_and_twins_end_with_the_same(tiny_study: Path) -> None:
    runs = read_results(tiny_study.parent / "out" / "results.json").runs
    assert list(runs) == ["unified-s0", "pages-s0", "unified-s1", "pages-s1"]
    assert len({run.start_sha256 for run in runs.values()}) == 1
    shas = {name: run.weights_sha256 for name, run in runs.items()}
    assert all(re.fullmatch(r"[0-9a-f]{64}", sha) for sha in shas.values())
    assert shas["unified-s0"] == shas["pages-s0"] != shas["unified-s1"] == shas["pages-s1"]
    for run in runs.values():
        assert (run.end, run.steps, run.different_tokens) == ("finished", 3, 0)
        assert run.compared_tokens > 0
        assert run.common is not None
        assert run.own is not None
        assert run.exported is not None
        presets = (run.common.preset, run.own.preset, run.exported.preset)
        assert presets == ("bf16", "unified", "bf16")
        assert (run.common.prompts, run.common.samples) == (4, 2)
        assert run.curves.steps == [2, 3]  # at most two points of three steps
        assert {"reward/mean", "mismatch/k3_kl"} <= set(run.curves.values)
        assert run.seconds["step"] >= run.seconds["rollout"] > 0
        assert run.seconds["final_evaluation"] > 0


def test_the_report_has_tables_and_pictures(tiny_study: Path) -> None:
    out = tiny_study.parent / "out"
    page, tables = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert (out / "plots" / "reward.png").is_file()
    assert "<svg" in page
    assert "http://" not in re.sub(r'xmlns[:\w]*="[^"]*"|"http://www.w3.org[^"]*"', "", page)
    row = next(line for line in tables.splitlines() if line.startswith("| pages of 8 | 2 |"))
    equal = "| +0.00% | 1.000 | 1.000 | 1.000 (Holm 1.000) | yes (p below 0.001) | 0 of 2 |"
    assert f"| +0.00% [+0.00, +0.00] {equal}" in row
    assert "| seed 0 | equal |" in tables


def test_what_is_done_is_not_run_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results file alone says what is done: runs, weights and logs may be elsewhere."""
    monkeypatch.setattr("benchmarks.study.running.Pool", NoPool)
    assert main(["study", str(copy)]) == 0
    assert main(["study", str(copy), "--dry-run"]) == 0
    assert "4 runs, 4 done" in capsys.readouterr().out


def test_the_failure_of_a_run_that_was_taken_out_does_not_stay(copy: Path) -> None:
    results = read_results(copy.parent / "out" / "results.json")
    results.failed = {"pages-s1": "no memory", "pages-s2": "no memory"}
    results.write()
    assert main(["study", str(copy), "--report-only"]) == 1
    report = (copy.parent / "out" / "report.md").read_text()
    assert ("| pages-s1 | failed |" in report, "pages-s2" in report) == (True, False)


def test_what_another_command_adds_while_this_one_checks_stays(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = copy.parent / "out" / "results.json"
    text = results.read_text()
    results.unlink()
    monkeypatch.setattr("benchmarks.study.running.Pool", NoPool)
    monkeypatch.setattr("benchmarks.study.running.check_runs", lambda *_: results.write_text(text))
    assert main(["study", str(copy)]) == 0


def test_the_report_is_made_from_the_results_file_alone(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report goes to the working folder, wherever the file says that the runs went."""
    results = copy.parent / "out" / "results.json"
    copy.unlink()
    monkeypatch.chdir(copy.parent)
    assert main(["study", str(results)]) == 0
    assert "| seed 1 | equal |" in Path("studies/tiny/report.md").read_text()
    assert not (results.parent / "report.md").exists()


def test_twins_that_differ_fail_loudly(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = copy.parent / "out" / "results.json"
    sha = read_results(results).runs["pages-s1"].weights_sha256
    text = results.read_text()
    at = text.rindex(sha)
    results.write_text(text[:at] + "0" * 64 + text[at + 64 :])
    assert main(["study", str(copy), "--report-only"]) == 1
    assert "twins differ: seed 1: " in capsys.readouterr().out
    assert "| seed 1 | DIFFERENT |" in (results.parent / "report.md").read_text()


class FailingPool(PoolInThisProcess):
    """A pool whose commands of one run fail, and that ends others as a run of 3 steps would."""

    calls: list[str]

    def run(self, words: list[str]) -> int:
        name = Path(words[1]).stem
        type(self).calls.append(name)
        if name.startswith("start"):
            return 0
        print("error: nothing works today")
        return 2


def test_what_fails_is_tried_once_more_and_then_reported(
    tiny_study: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "fails.toml"
    file.write_text(tiny_study.read_text().replace(str(tiny_study.parent), str(tmp_path)))
    FailingPool.calls = []
    monkeypatch.setattr("benchmarks.study.running.Pool", FailingPool)
    monkeypatch.setattr("benchmarks.study.scheduler.POLL_S", 0.0)
    assert main(["study", str(file), "--only", "pages"]) == 1
    start, *calls = FailingPool.calls
    assert start.startswith("start-")
    assert calls == ["pages-s0", "pages-s0", "pages-s1", "pages-s1"]
    printed = capsys.readouterr().out
    assert "failed: pages-s0, pages-s1: exit code 2: error: nothing works today" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a study file"),
        (["no.toml"], "study no.toml: no such file"),
        (["FILE", "--jobs", "0"], "--jobs 0: a number above 0"),
        (["FILE", "--only", "unify"], "--only unify: no such arm or value"),
        (["FILE", "--only", "pages", "--report-only"], "a report is of all that is done"),
        (["FILE", "--reference", "bf17"], "--reference bf17: FILE has no such arm; it has "),
    ],
)
def test_wrong_words(
    copy: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["study", *(word.replace("FILE", str(copy)) for word in words)]) == 2
    assert message.replace("FILE", str(copy)) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr = 1e-3", "lr = 2e-3", "train.lr: 0.001 -> 0.002 (runs unified-s0, pages-s0, unified"),
        ("sft.steps = 60", "sft.steps = 61", "sft.steps: 60 -> 61 (runs "),
        ("page_size = 8", "page_size = 16", "rollout.page_size: 8 -> 16 (runs pages-s0, pages-s1)"),
        ("[eval]\nprompts = 4", "[eval]\nprompts = 5", "eval.prompts: 4 -> 5. Change it back"),
        ("points = 2", "points = 3", "study.points: 2 -> 3. Change it back"),
        ("share = 0.0", "share = 0.5", "collapse.share: 0.0 -> 0.5. Change it back, or give it"),
    ],
)
@pytest.mark.parametrize("flag", ["--dry-run", "--report-only"])
def test_a_study_changed_after_its_first_run_is_refused_by_name(
    copy: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str, flag: str
) -> None:
    assert old in copy.read_text()
    copy.write_text(copy.read_text().replace(old, new))
    assert main(["study", str(copy), flag]) == 2
    printed = capsys.readouterr().err
    assert f"{copy} was changed since 4 runs in {copy.parent / 'out' / 'results.json'} " in printed
    assert message in printed


def test_seeds_and_arms_are_added_to_a_study_that_has_runs(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = copy.read_text().replace("seeds = [0, 1]", "seeds = [2, 1, 0]")
    copy.write_text(text + "[arms.jet]\nprecision.preset = 'jet'\n")
    assert main(["study", str(copy), "--dry-run"]) == 0
    assert "9 runs, 4 done" in capsys.readouterr().out


def test_a_first_model_that_is_not_there_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = re.sub(r"^model\.config.*\n", "", copy.read_text(), flags=re.MULTILINE)
    copy.write_text(text.replace("[settings]", '[settings]\nmodel.path = "nothere"'))
    (copy.parent / "out" / "results.json").unlink()
    assert main(["study", str(copy), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "4 runs, 0 done" in printed.out
    assert "model.path: nothere: no such directory; a Hugging Face model directory" in printed.err
    assert "(settings of the run unified-s0)" in printed.err
