"""A queue file: the order of a study's runs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.study.processes import Child, Job
from benchmarks.study.results import read_results
from tests.study.conftest import TINY, PoolInThisProcess

from jetrl.cli.main import main


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the study files one.toml and two.toml, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.study.scheduler.POLL_S", 0.0)
    for name in ("one", "two"):
        text = TINY.replace('"tiny"', f'"{name}"').replace("OUT", f"out-{name}")
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


class ThreePlaces(PoolInThisProcess):
    """Three places; a command lasts until the study looks again, and those of runs fail."""

    begun: list[list[str]]
    has_place = property(lambda self: len(self.children) < 3)

    def start(self, job: Job) -> None:
        is_start = job.name.startswith("start-")
        self.begun[-1].append("start" if is_start else job.name)
        process = SimpleNamespace(returncode=0 if is_start else 2, pid=0)
        self.children.append(Child(job, None, process))  # type: ignore[arg-type]

    def ended(self) -> list[Child]:
        self.begun.append([])
        return super().ended()


QUEUE = """
[[study]]
file = "one.toml"
only = ["pages", "seed=1"]
[[study]]
file = "one.toml"
"""


def test_runs_start_in_the_order_of_the_queue_after_their_start(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ThreePlaces.begun = []
    monkeypatch.setattr("benchmarks.study.running.Pool", ThreePlaces)
    (files / "queue.toml").write_text(QUEUE)
    assert main(["study", "queue.toml", "--no-report"]) == 1
    assert [names for names in ThreePlaces.begun if names] == [
        ["start"],
        ["pages-s1", "unified-s0", "pages-s0"],
        ["pages-s1", "unified-s0", "pages-s0"],
        ["unified-s1"],
        ["unified-s1"],
    ]
    assert "pages-s0: failed: exit code 2" in capsys.readouterr().out
    failed = read_results(files / "out-one" / "results.json").failed
    assert sorted(failed) == ["pages-s0", "pages-s1", "unified-s0", "unified-s1"]


@pytest.mark.parametrize(
    ("queue", "words", "message"),
    [
        (QUEUE, ["--only", "pages"], "queue.toml is a queue file, which says itself what is run"),
        (QUEUE + "[[study]]\nfile = 'two.toml'", [], "names one.toml and two.toml: give each"),
        ("[[study]]\nfile = 3", [], "queue.toml: study.0.file: "),
        ("[[study]]\nfile = 'no.toml'", [], "study no.toml: no such file"),
    ],
)
def test_wrong_queues(
    files: Path, capsys: pytest.CaptureFixture[str], queue: str, words: list[str], message: str
) -> None:
    (files / "queue.toml").write_text(queue)
    assert main(["study", "queue.toml", *words]) == 2
    assert message in capsys.readouterr().err
