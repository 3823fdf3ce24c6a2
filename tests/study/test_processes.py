"""The processes of a study: places on cards, logs, and how they are ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.study.processes import Job, Pool, last_line

Wait = Callable[[Callable[[], object]], None]


# A program whose commands are Python code, without the site packages that take long to find.
SERVE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import benchmarks.study.worker as worker\n"
    "def run(words): exec(words[0], {}); return 0\n"
    "sys.exit(worker.serve(run, lambda: sys.modules.setdefault('given_back', sys)))"
)
SOURCE = str(Path(__file__).parents[2] / "src")
SERVER = (sys.executable, "-S", "-E", "-c", SERVE, SOURCE)


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    """Make pools whose processes are ended after the test."""
    pools: list[Pool] = []

    def make(cards: list[str], jobs: int, threads: int) -> Pool:
        pools.append(Pool(cards, jobs, threads, SERVER))
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop(grace_s=0.0)


def job(folder: Path, name: str, code: str) -> Job:
    """A command that runs Python code."""
    return Job(name, [code], folder / f"{name}.txt")


def ended(pool: Pool, wait_until: Wait) -> None:
    wait_until(lambda: all(child.process.poll() is not None for child in pool.children))


def test_children_are_dealt_out_to_the_cards(
    tmp_path: Path, wait_until: Wait, make_pool: Callable[..., Pool]
) -> None:
    pool = make_pool(["3", "5"], jobs=2, threads=2)
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])"
    for number in range(4):
        assert pool.has_place
        pool.start(job(tmp_path, f"run{number}", code))
    assert not pool.has_place
    ended(pool, wait_until)
    assert len(pool.ended()) == 4
    assert pool.has_place
    printed = [last_line(tmp_path / f"run{number}.txt") for number in range(4)]
    assert printed == ["3 2", "5 2", "3 2", "5 2"]


def test_a_process_runs_one_command_after_the_other(
    tmp_path: Path, wait_until: Wait, make_pool: Callable[..., Pool]
) -> None:
    """The second command finds what the first one loaded, and each has its own log."""
    pool = make_pool([], jobs=1, threads=1)
    pool.warm_up(5)
    seen = "import sys; print(*(name in sys.modules for name in ('colorsys', 'given_back')))"
    codes = [f"import colorsys; {seen}", seen]
    ids = []
    for number, code in enumerate(codes):
        child = pool.start(job(tmp_path, f"run{number}", code))
        ids.append(child.process.pid)
        ended(pool, wait_until)
        assert [one.process.returncode for one in pool.ended()] == [0]
    assert ids[0] == ids[1]
    assert [last_line(tmp_path / f"run{number}.txt") for number in (0, 1)] == [
        "True False",
        "True True",
    ]


@pytest.mark.parametrize(
    ("code", "expected"), [("import sys; sys.exit(3)", 3), ("import os; os._exit(9)", 9)]
)
def test_a_command_that_fails_ends_its_process(
    tmp_path: Path, wait_until: Wait, make_pool: Callable[..., Pool], code: str, expected: int
) -> None:
    """The next command has a new process, so what an error left behind does not reach it."""
    pool = make_pool([], jobs=1, threads=1)
    first = pool.start(job(tmp_path, "run", code))
    ended(pool, wait_until)
    assert [child.process.returncode for child in pool.ended()] == [expected]
    second = pool.start(job(tmp_path, "run", "print('after it')"))
    ended(pool, wait_until)
    assert second.process.returncode == 0
    assert second.process.pid != first.process.pid
    assert "after it" in lines(tmp_path / "run.txt")


def test_children_are_asked_to_end(
    tmp_path: Path, wait_until: Wait, make_pool: Callable[..., Pool]
) -> None:
    """A run saves itself on SIGTERM, however long that takes."""
    pool = make_pool([], jobs=1, threads=1)
    code = (
        "import signal, sys, time\n"
        "def end(*_): print('saved', flush=True); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(600)"
    )
    child = pool.start(job(tmp_path, "saves", code))
    wait_until(lambda: lines(tmp_path / "saves.txt").count("ready") == 1)
    pool.stop(grace_s=600)
    assert child.process.returncode == 143
    assert last_line(tmp_path / "saves.txt") == "saved"
    assert pool.ended() == [child]


def lines(log: Path) -> list[str]:
    """Return the lines of a log; the command, which it begins with, is no line of its own."""
    return log.read_text().splitlines()
