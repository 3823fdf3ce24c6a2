"""Several studies whose runs share the places: who gets them first, and what is refused."""

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
        self.begun[-1].append(f"{job.study[:3]} {'start' if is_start else job.name}")
        code = 0 if is_start else 2
        process = SimpleNamespace(returncode=code, pid=0)
        self.children.append(Child(job, None, process))  # type: ignore[arg-type]

    def ended(self) -> list[Child]:
        self.begun.append([])
        return super().ended()


QUEUE = """
[[study]]
file = "one.toml"
only = ["pages", "seed=1"]
[[study]]
file = "two.toml"
only = ["seed=0"]
[[study]]
file = "one.toml"
only = ["seed=0"]
"""


def test_places_go_to_the_first_of_the_queue_that_has_a_command(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the first study's start is trained the second gets places, and its runs come first."""
    ThreePlaces.begun = []
    monkeypatch.setattr("benchmarks.study.running.Pool", ThreePlaces)
    (files / "queue.toml").write_text(QUEUE)
    assert main(["study", "queue.toml", "--no-report"]) == 1
    assert [names for names in ThreePlaces.begun if names] == [
        ["one start", "two start"],
        ["one pages-s1", "two unified-s0", "two pages-s0"],
        ["one pages-s1", "two unified-s0", "two pages-s0"],
        ["one unified-s0", "one pages-s0"],
        ["one unified-s0", "one pages-s0"],
    ]
    printed = capsys.readouterr().out
    assert "two: pages-s0: failed: exit code 2" in printed
    assert sorted(read_results(files / "out-one" / "results.json").failed) == [
        "pages-s0",
        "pages-s1",
        "unified-s0",
    ]


@pytest.mark.parametrize(
    ("queue", "words", "message"),
    [
        (QUEUE, ["--only", "pages"], "queue.toml is a queue file, which says itself what is run"),
        ("[[study]]\nfile = 3", [], "queue.toml: study.0.file: "),
        ("[[study]]\nfile = 'no.toml'", [], "study no.toml: no such file"),
        ("[[study]]\nfile = 'one.toml'", ["./one.toml", "copy.toml"], "both write "),
    ],
)
def test_wrong_queues(
    files: Path, capsys: pytest.CaptureFixture[str], queue: str, words: list[str], message: str
) -> None:
    (files / "queue.toml").write_text(queue)
    (files / "copy.toml").write_text((files / "one.toml").read_text())
    assert main(["study", "queue.toml", *words]) == 2
    assert message in capsys.readouterr().err
