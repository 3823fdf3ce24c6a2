"""Runs of two ranks of which one is lost, fails, or is started again."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import apart

sys.path.insert(0, str(Path(__file__).parent))

SHORT = ["sft.steps=2", "checkpoint.every=1", "loop.steps=3", "eval.prompts=4"]


def _faults(folder: Path) -> Any:
    """Return the ends of a run with a fault of one rank after the other, and of its last resume."""
    from fail_ranks import SETTINGS, Fault, fail_ranks

    listed = [
        Fault("killed", 0, "making the run directory"),
        Fault("raises", 1, "before AdamW", 2),
        Fault("full disk", 0, "before a rollouts file"),
        Fault("no memory", 1, "in the held-out evaluation"),
        Fault("killed", 1, "before AdamW"),
    ]
    return fail_ranks(folder, listed=listed, settings=[*SETTINGS, *SHORT])


def test_a_rank_that_is_lost_ends_all_and_the_run_goes_on(tmp_path: Path) -> None:
    """fail_ranks.KINDS says how each kind of fault has to look."""
    done, same = apart(_faults, tmp_path)
    assert [fault["problems"] for fault in done] == [[]] * 5, done
    assert same
    ranks = tmp_path / "cut-1" / "ranks"
    record = json.loads((ranks / "board.json").read_text())
    assert record["rank"] == 1
    assert [line["rank"] for line in record["ranks"]] == [0, 1]
    assert {"rank_1.txt", "collectives_rank_0.json"} <= {file.name for file in ranks.iterdir()}
    log = (tmp_path / "cut-1" / "log.txt").read_text()
    assert "ERROR jetrl: stopped: rank 1 is gone" in log


def _restarts(folder: Path) -> tuple[list[int], str]:
    """Start two ranks as torchrun does, of which rank 1 is killed in the first attempt."""
    from fail_ranks import SETTINGS
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="a test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        start_method="fork",
        monitor_interval=0.1,
    )
    words = ["train", "demo", *SETTINGS, *SHORT, f"run.dir={folder}", "run.name=again"]
    try:
        codes = elastic_launch(config, _rank)(words, str(folder / "again"))
    except Exception as error:
        return [], str(error)
    return sorted(codes.values()), ""


def _rank(words: list[str], log: str) -> int:
    import faults

    from jetrl.cli.main import main

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        faults.arm("before AdamW", 2)
    faults.redirect(Path(f"{log}.{os.environ['RANK']}"))
    code = main(words)
    sys.stdout.flush()
    # Python's end would kill a thread of the watch within C++, and so abort the process.
    left = {thread.name for thread in threading.enumerate()} & {"peers"}
    return 99 if left else code


def test_torchrun_starts_a_lost_run_again_where_it_was(tmp_path: Path) -> None:
    codes, failure = apart(_restarts, tmp_path)
    console, other = ((tmp_path / f"again.{rank}").read_text() for rank in range(2))
    assert codes == [0, 0], (failure, console)
    assert console.count("step 3/3") == console.count("sample from it: ") == 1
    assert "step 3/3" not in other
    assert console.count("rank 1 is gone") == 1
    assert console.count("resumed after") + console.count("the run starts over") == 1
    attempts = (tmp_path / "again" / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 4
    assert json.loads(attempts[-1])["state"] == "finished"


def test_a_restart_does_not_go_on_with_a_run_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl.errors import Terminated, TimeLimitReached
    from jetrl.session.ranks import is_restart
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

    began(4e9)
    assert not is_restart(settings)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert is_restart(settings)
    began(1e6)
    assert not is_restart(settings)
    began(4e9, state="interrupted", reason="SIGTERM")
    with pytest.raises(Terminated):
        is_restart(settings)
    began(4e9, state="stopped", reason="run.max_hours = 1: 0 s are left")
    with pytest.raises(TimeLimitReached, match="continue with --resume"):
        is_restart(settings)
    began(4e9, state="stopped", reason="rank 1 is gone")
    assert is_restart(settings)
