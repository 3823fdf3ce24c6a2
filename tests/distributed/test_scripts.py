"""A user's own script that torchrun starts as several ranks: `jetrl.train` joins them by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.commands import run_scripts
from tests.distributed.runs import SMALL, results

from jetrl.runs import RunDirectory

WORDS = [*SMALL, "eval.every=0", "algorithm.dynamic_sampling=false", "loop.steps=1", "sft.steps=1"]
SCRIPT = """
import sys
from jetrl import load_config, train
from jetrl.loop import sft
from jetrl.session.session import Session

def settings(name):
    return load_config("demo", [*WORDS, f"run.name={name}"])

rank = int(os.environ.get("RANK", "0"))
"""
GROUP = """
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo", Path('own').absolute().as_uri(), rank=rank, world_size=2)
"""


def script(*lines: str) -> str:
    """Return a script that has the settings of a small run, and then the lines."""
    return "\n".join(["import os", f"WORDS = {WORDS!r}", SCRIPT, *lines])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a script has made two runs, alone and on two ranks."""
    folder = tmp_path_factory.mktemp("scripts")
    lines = ["sft(settings('warm'))", "print('then', train(settings('run')).steps)"]
    for size in (1, 2):
        (folder / str(size)).mkdir()
        ends = run_scripts([script(*lines)] * size, folder / str(size))
        assert [end.code for end in ends] == [0] * size, ends
        assert all("then 1" in end.out for end in ends), ends
        assert "step 1/1" in ends[0].out
        assert all("step 1/1" not in end.out for end in ends[1:]), ends
    return folder


@pytest.mark.parametrize("name", ["warm", "run"])
def test_a_script_makes_the_same_runs_on_two_ranks(folder: Path, name: str) -> None:
    alone, both = (folder / size / "runs" / name for size in "12")
    assert results(both) == results(alone)


def test_the_ranks_of_a_script_train_together(folder: Path) -> None:
    last = RunDirectory.open(folder / "2" / "runs" / "run").metrics("rl")[-1]
    assert last["distributed/size"] == 2
    assert (folder / "2" / "runs" / "run" / "ranks" / "rank_1.txt").is_file()


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("train(settings('nowhere'), resume=True)", 2, "error: "),
        ("if rank: Session.sample = lambda self, step: 1 / 0", 1, "rank 1: Traceback"),
        ("if rank: WORDS.append('train.lr=1e-9')", 2, "error: train.lr is 1e-09 on rank 1"),
        (GROUP, 2, "error: this program has opened a process group itself"),
    ],
    ids=["a mistake", "a bug on one rank", "other settings", "a group of its own"],
)
def test_an_error_in_a_script_ends_all_ranks(
    tmp_path: Path, line: str, code: int, words: str
) -> None:
    ends = run_scripts([script(line, "train(settings('run'))", "print('on')")] * 2, tmp_path)
    assert [end.code for end in ends] == [code] * 2, ends
    assert all("on\n" not in end.out for end in ends), ends
    assert ends[0].err.count(words) == 1, ends
    assert words not in ends[1].err, ends
