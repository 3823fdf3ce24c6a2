"""A user's own script that torchrun starts as several ranks: `jetrl.train` joins them by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.ranks import run_scripts
from tests.distributed.runs import SMALL, STEPS_ALONE, results

from jetrl.runs.directory import RunDirectory

WORDS = [*SMALL, *STEPS_ALONE, "loop.steps=1", "sft.steps=1"]
SCRIPT = f"""
import os, sys
from jetrl import load_config, train
from jetrl.loop import sft
from jetrl.session.session import Session

WORDS = {WORDS!r}

def settings(name):
    return load_config("demo", [*WORDS, f"run.name={{name}}"])

rank = int(os.environ.get("RANK", "0"))
"""
GROUP = """
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo", Path('own').absolute().as_uri(), rank=rank, world_size=2)
"""


def test_a_script_makes_the_same_runs_on_two_ranks(tmp_path: Path) -> None:
    script = f"{SCRIPT}\nsft(settings('warm'))\nprint('then', train(settings('run')).steps)"
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        ends = run_scripts([script] * size, tmp_path / str(size))
        assert [end.code for end in ends] == [0] * size, ends
        assert all("then 1" in end.out for end in ends), ends
        assert "step 1/1" in ends[0].out
        assert all("step 1/1" not in end.out for end in ends[1:]), ends
    for name in ("warm", "run"):
        alone, both = (tmp_path / size / "runs" / name for size in "12")
        assert results(both) == results(alone)
    assert RunDirectory.open(both).metrics("rl")[-1]["distributed/size"] == 2
    assert (both / "ranks" / "rank_1.txt").is_file()


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
    script = f"{SCRIPT}\n{line}\ntrain(settings('run'))\nprint('on')"
    ends = run_scripts([script] * 2, tmp_path)
    assert [end.code for end in ends] == [code] * 2, ends
    assert all("on\n" not in end.out for end in ends), ends
    assert ends[0].err.count(words) == 1, ends
    assert words not in ends[1].err, ends
