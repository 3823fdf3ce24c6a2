"""Runs of two ranks of which one is lost, fails, or is started again.

Each is driven by a process of its own, which plays torchrun and is forked from a server that has
imported everything.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TASK = Path(__file__).with_name("soak_task.py")
SMALL = [
    "train",
    "demo",
    f"task.name={TASK}:Digits",
    "task.options={max_operand = 29, test_share = 0.2, mistakes = 0.55}",
    "task.workers=0",
    "train.lr=3e-3",
    "sft.steps=2",
    "sft.until=2.0",
    "sft.check_every=2",
    "sft.examples_per_step=8",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "eval.every=2",
    "eval.prompts=4",
    "checkpoint.every=1",
    "loop.steps=4",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
    "model.config.max_position_embeddings=64",
]
LIMIT_S = 120.0


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own, which may fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_apart, args=(theirs, function, arguments), daemon=False)
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), "no answer"
        result, failure = ours.recv()
    finally:
        process.kill()
        process.join()
    assert not failure, failure
    return result


def _apart(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((function(*arguments), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    os._exit(0)


def _words(folder: Path, name: str) -> list[str]:
    return [*SMALL, f"run.dir={folder}", f"run.name={name}"]


def _chain(folder: Path) -> dict[str, Any]:
    """Run to the end with a fault of one rank after the other, and without; return all ends."""
    import kill_ranks

    log, name = folder / "log", _words(folder, "cut")
    place = folder / "place"

    def start(prepare: Callable[[int], None]) -> kill_ranks.Ended:
        resume = ["--resume"] if (folder / "cut" / "config.toml").is_file() else []
        return kill_ranks.launch([*name, *resume], log, prepare=prepare)

    def full_disk(rank: int) -> None:
        if rank == 0:
            kill_ranks.faults.fill_disk("disk full in a rollouts file", 1)

    at, fails = kill_ranks.ends_at, kill_ranks.raises_at
    ends = {
        "killed at its start": start(at("making the run directory", 0, 1, place)),
        "raises": start(fails("before AdamW", 1, 2, ZeroDivisionError("a bug"))),
        "full disk": start(full_disk),
        "no memory": start(fails("in the held-out evaluation", 1, 1, MemoryError("of a test"))),
        "killed": start(at("before AdamW", 1, 1, place)),
    }
    ends["its place"] = place.read_text() if place.exists() else "nowhere"
    ends["resumed"] = start(lambda rank: None)
    ends["uncut"] = kill_ranks.launch(_words(folder, "uncut"), log)
    for run in ("cut", "uncut"):
        (folder / run / "report.html").touch()
        ends[f"bits of {run}"] = kill_ranks.fingerprint(folder / run)
    return ends


def test_a_rank_that_is_lost_ends_all_and_the_run_goes_on(tmp_path: Path) -> None:
    ends = apart(_chain, tmp_path)
    expected = {
        "killed at its start": ([-9, 5], "stopped: rank 0 is gone (", "before step 1"),
        "raises": ([1, 1], "rank 1: Traceback (most recent call last)", "ZeroDivisionError: a bug"),
        "full disk": ([6, 6], "stopped: ", "No space left on device"),
        "no memory": ([7, 7], "rank 1: stopped: out of memory in the phase eval", "of a test"),
        "killed": ([5, -9], "stopped: rank 1 is gone (", "it was last in update of step"),
    }
    for name, (codes, begin, end) in expected.items():
        ended = ends[name]
        assert ended.codes == codes, (name, ended)
        assert ended.gone_s < 10, (name, ended)
        assert ended.console.count("stopped:") + ended.console.count("Traceback") == 1, ended
        told = ended.console[ended.console.index(begin) :]
        assert end in told, (name, ended)
    assert ends["its place"] in ends["killed"].console
    assert ends["resumed"].codes == ends["uncut"].codes == [0, 0], ends["resumed"]
    assert ends["bits of cut"] == ends["bits of uncut"]
    record = json.loads((tmp_path / "cut" / "ranks" / "board.json").read_text())
    assert record["rank"] == 1
    assert [line["rank"] for line in record["ranks"]] == [0, 1]
    names = {file.name for file in (tmp_path / "cut" / "ranks").iterdir()}
    assert {"rank_1.txt", "board.json", "collectives_rank_0.json"} <= names
    log = (tmp_path / "cut" / "log.txt").read_text()
    assert "ERROR jetrl: stopped: rank 1 is gone" in log


def _restarts(folder: Path, name: str, restarts: int) -> tuple[list[int], list[str]]:
    """Start two ranks as torchrun does, of which rank 1 is killed in the first attempt."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="a test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
        monitor_interval=0.1,
    )
    try:
        codes = elastic_launch(config, _rank)(_words(folder, name), str(folder / name))
    except Exception as error:
        return [], str(error).splitlines()
    return sorted(codes.values()), []


def _rank(words: list[str], log: str) -> int:
    import kill_ranks

    from jetrl.cli.main import main

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        kill_ranks.faults.arm("before AdamW", 2)
    output = os.open(f"{log}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    code = main(words)
    sys.stdout.flush()
    # Python's end would kill a thread of the watch within C++, and so abort the process.
    left = {thread.name for thread in threading.enumerate()} & {"peers"}
    return 99 if left else code


def test_torchrun_starts_a_lost_run_again_where_it_was(tmp_path: Path) -> None:
    codes, failure = apart(_restarts, tmp_path, "again", 1)
    console = (tmp_path / "again.0").read_text()
    assert codes == [0, 0], (failure, console)
    assert console.count("rank 1 is gone") == 1
    assert console.count("resumed after") + console.count("the run begins anew") == 1
    attempts = (tmp_path / "again" / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 4
    assert json.loads(attempts[-1])["state"] == "finished"


def test_a_restart_does_not_go_on_with_a_run_of_before(tmp_path: Path) -> None:
    from jetrl.session.ranks import goes_on
    from jetrl.settings.loading import load_config

    settings = load_config("demo", [f"run.dir={tmp_path}", "run.name=old"])
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.toml").touch()

    def began(seconds: float, **end: str) -> None:
        lines = [{"event": "start", "time": seconds}]
        if end:
            lines.append({"event": "end", "time": seconds, **end})
        (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    from jetrl.errors import Terminated, TimeLimitReached

    began(4e9)
    assert not goes_on(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        assert goes_on(settings)
        began(1e6)
        assert not goes_on(settings)
        began(4e9, state="interrupted", reason="SIGTERM")
        with pytest.raises(Terminated):
            goes_on(settings)
        began(4e9, state="stopped", reason="run.max_hours = 1: 0 s are left")
        with pytest.raises(TimeLimitReached, match="go on with --resume"):
            goes_on(settings)
        began(4e9, state="stopped", reason="rank 1 is gone")
        assert goes_on(settings)
