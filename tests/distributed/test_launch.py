"""Commands as several ranks: one message on one console, exit codes, and what is refused."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.distributed.ranks import run_commands

from jetrl.cli.main import COMMANDS, main
from jetrl.distributed import meeting
from jetrl.distributed.meeting import Meeting
from jetrl.distributed.world import ONE_PROCESS, world
from jetrl.errors import RankLost, Terminated, UserError
from jetrl.models.tiny import make_tiny
from jetrl.session import ranks


@pytest.mark.parametrize(
    "words, message",
    [
        (["demo train.lrr=1"] * 3, r"^error: override 'train.lrr=1': unknown setting train.lrr"),
        (["demo", "demo", "nowhere.toml"], r"rank 2: .*nowhere\.toml"),
        (["demo train.lr=1e-3", "demo train.lr=2e-3"], "on rank 1 and "),
        (["demo run.device=cuda"] * 2, "2 processes and 0 GPUs"),
        (["demo precision.preset=fp32"] * 2, "precision.preset = fp32 cannot use 2 processes"),
    ],
)
def test_runs_that_cannot_begin_are_refused_once(
    words: list[str], message: str, tmp_path: Path
) -> None:
    ends = run_commands([["train", *own.split()] for own in words], tmp_path)
    assert [end.code for end in ends] == [2] * len(ends), ends
    assert all(end.out == "" for end in ends), ends
    assert all(end.err == "" for end in ends[1:]), ends
    assert ends[0].err.count("\n") == 1, ends
    assert re.search(message, ends[0].err), ends
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        rank_0 = run_commands([["train", "demo"]], tmp_path, port, size=2)
    assert rank_0[0].code == 2
    assert f"rank 0 could not be joined to the others at 127.0.0.1:{port}" in rank_0[0].err


@pytest.mark.parametrize(
    "ranks, message",
    [
        ([(0, 3), (1, 3), (1, 3)], r"two processes have RANK=1"),
        ([(0, 2), (1, 3)], r"WORLD_SIZE is (2 on rank 0 and 3 on rank 1|3 .* 1 and 2 .* 0)"),
        ([(0, 2)], r"rank 1 of 2 \(WORLD_SIZE\) did not come within"),
        ([(1, 4), (3, 4)], r"ranks 0, 2 of 4 \(WORLD_SIZE\) did not come within"),
    ],
)
def test_ranks_that_are_started_wrong_are_named(
    ranks: list[tuple[int, int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    alone = len({size for _, size in ranks}) == 1 and len(set(ranks)) == len(ranks)
    monkeypatch.setattr(meeting, "START_S", 0.1 if alone else 60.0)

    def problem(place: tuple[int, int]) -> str:
        with pytest.raises(UserError) as caught:
            Meeting(store, *place).compare({})
        return str(caught.value)

    with ThreadPoolExecutor(len(ranks)) as pool:
        for words in pool.map(problem, ranks):
            assert re.search(message, words)


def test_rank_0_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        raise Terminated

    monkeypatch.setattr(meeting, "SILENT_S", -1.0)
    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(RankLost, match=r"^terminated while waiting for rank 1 of 2") as caught:
        Meeting(dist.HashStore(), 0, 2).compare({})
    assert caught.value.exit_code == 143
    assert capsys.readouterr().err.startswith("waiting for rank 1 of 2 (WORLD_SIZE)")


def test_commands_of_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int]] = []

    def end(words: str, code: int, *_: object) -> None:
        said.append((words, code))
        raise SystemExit(code)

    monkeypatch.setattr(ranks, "end", end)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = {
        "sample": ["m", "p"],
        "parity": ["m"],
        "compare": ["a", "b"],
        "replay": ["f"],
        "export": ["m", "out"],
        "runs": ["list"],
        "init": ["out"],
        "init-recipe": ["m"],
        "serve": ["m"],
    }
    for command in COMMANDS.keys() - {"train", "sft", "eval", "bench"}:
        with pytest.raises(SystemExit):
            main([command, *arguments.get(command, [])])
        assert said[-1][1] == 2
        assert f"jetrl {command} runs as one process, but torchrun started 2" in said[-1][0]
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match="RANK=2 and WORLD_SIZE=2"):
        meeting.meet()


def test_an_evaluation_is_divided_and_printed_once(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", hidden_size=64, num_heads=1, num_kv_heads=1)
    (tmp_path / "by_rank.py").write_text(
        "import os\n"
        "from jetrl.tasks import Task\n"
        "from jetrl.types import Prompt\n"
        "class ByRank(Task):\n"
        "    def prompts(self, split): return [Prompt(id=i, text=i, answer=i) for i in '12345']\n"
        "    def score(self, prompt, completion): return float(os.environ['RANK'])\n"
    )
    words = "eval tiny --task by_rank.py:ByRank --max-tokens 4 --workers 1 --json --device cpu"
    ends = run_commands([words.split()] * 2, tmp_path)
    assert [(end.code, end.err) for end in ends] == [(0, "")] * 2
    samples = json.loads(ends[0].out)["samples"]
    assert [sample["reward"] for sample in samples] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert ends[1].out == ""


def test_a_run_without_torchrun_has_no_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    opened: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: opened.append("a group"))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: opened.append("another"))
    settings = "task.options.max_operand=4 sft.steps=1 sft.until=none eval.every=0 loop.steps=0"
    words = [*settings.split(), "report.enabled=false", f"run.dir={tmp_path}"]
    assert main(["train", "demo", *words]) == 0
    assert not opened
    assert not dist.is_initialized()
    assert world() is ONE_PROCESS
