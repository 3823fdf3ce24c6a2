"""A run on a full disk says so, loses nothing that was written, and can be resumed.

The disk is a small tmpfs in a mount namespace of its own, where the system lets us make one.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import before_call
from tests.reliability.conftest import made

from jetrl import train
from jetrl.cli.main import main
from jetrl.errors import StorageError
from jetrl.runs.directory import RunDirectory
from jetrl.session import Session
from jetrl.training.checkpoint import Checkpoints

PROGRAM = """
import contextlib, logging, subprocess, sys
from pathlib import Path
from jetrl.cli.main import main
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible
from jetrl.session import Session

disk, record = Path(sys.argv[1]), Session.record
mount = ["mount", "-t", "tmpfs", "none", str(disk), "-o"]
run = ["train", "demo", *sys.argv[2:], f"run.dir={disk}"]

def lines(name):
    found = RunDirectory.open(disk / name).metrics()
    return [{"step": line["step"], **reproducible(line)} for line in found]

def results(name):
    last = max((disk / name / "checkpoints").glob("step_*"))
    return lines(name), (last / "masters.safetensors").read_bytes()

def filled(self, step):  # somebody else fills it, to the last byte
    if step.number == 3:
        with contextlib.suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        logging.getLogger("jetrl").warning("x" * 5000)
    record(self, step)

subprocess.run([*mount, "size=6m"], check=True)  # less than two checkpoints
cut = {}
for case in ("checkpoint", "everything"):
    Session.record = filled if case == "everything" else record
    code = main([*run, f"run.name={case}"])
    assert code == 6, code
    cut[case] = lines(case)
    assert 0 < len(cut[case]) < 4
    (disk / "ballast").unlink(missing_ok=True)
    Session.record = record
    subprocess.run([*mount, "remount,size=96m"], check=True)
    assert main([*run, f"run.name={case}", "--resume", "report.enabled=false"]) == 0
assert main([*run, "run.name=uncut", "report.enabled=false"]) == 0
for case, before in cut.items():
    assert results(case) == results("uncut")
    assert lines(case)[:len(before)] == before
print("same bits")
"""


def test_a_real_full_disk(small_words: list[str], tmp_path: Path) -> None:
    namespace = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system makes no mount namespaces")
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), *small_words]
    words = ["checkpoint.every=1", "loop.steps=4", "report.enabled=true"]
    done = subprocess.run(
        [*namespace, *program, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stopped = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    assert ["could not be written: No space left" in line for line in stopped] == [True] * 2
    assert all("with --resume" in line for line in stopped)
    assert done.stdout.rstrip().endswith("same bits")


@pytest.mark.parametrize("room", [0, 1000, 3000])
def test_a_disk_that_is_full_from_the_start(
    room: int, small_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        code = main(["train", "demo", *small_words, f"run.dir={tmp_path}", "loop.steps=2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 6
    assert "File too large" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["log.txt", "status.json", "hang.txt"])
def test_a_file_that_cannot_be_opened(
    name: str, finished: Path, small: Callable[..., Any], tmp_path: Path
) -> None:
    file = Path(shutil.copytree(finished, tmp_path / "run")) / name
    file.unlink(missing_ok=True)
    file.mkdir()
    with pytest.raises(StorageError, match=f"{name} could not be written"):
        train(small("loop.steps=4"), resume=True)
    file.rmdir()
    assert train(small("loop.steps=4"), resume=True).steps == 4


WARM = ("sft.steps=4", "sft.examples_per_step=4", "loop.steps=2")


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run; its bits do not depend on when checkpoints are written."""
    return made(tmp_path_factory.mktemp("runs"), *WARM, "checkpoint.every=1")


@pytest.mark.parametrize("failing, every", [(1, 1), (3, 1), (1, 2), (2, 2), (5, 1)])
def test_any_checkpoint(
    failing: int,
    every: int,
    warmed: Path,
    small: Callable[..., Any],
    same: Callable[[Path, Path], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full from one of the warm-up or of a step on, and has room again on resuming.

    The checkpoint fails in the background, so the line of the next update is written.
    """
    words = (*WARM, f"checkpoint.every={every}")
    begun, write = itertools.count(1), Checkpoints.write

    def full(self: Any, snapshot: Any) -> Path:
        if next(begun) >= failing:
            raise StorageError("checkpoint could not be written; go on with --resume")
        return write(self, snapshot)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "write", full)
        with pytest.raises(StorageError, match="go on with --resume"):
            train(small(*words))
    assert RunDirectory.open(tmp_path / "run").state() == "stopped"
    assert same(train(small(*words), resume=True).run_path, warmed)


def test_a_model_that_cannot_be_written(
    small: Callable[..., Any],
    same: Callable[[Path, Path], bool],
    uncut: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jetrl.models.hf_save.write_json", full)
        with pytest.raises(StorageError, match=r"model: not written: .*No space left.*--resume"):
            train(small())
    assert same(train(small(), resume=True).run_path, uncut)


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_directory_that_is_deleted_ends_the_run_as_a_file_that_cannot_be_written(
    every: int, small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = partial(shutil.rmtree, tmp_path / "run")
    before_call(Session, "record", 2, gone, monkeypatch.setattr)
    words = (f"checkpoint.every={every}", "rollout.keep_every=9", "report.enabled=true")
    with pytest.raises(StorageError, match=r"metrics.jsonl (was deleted|could not be written)"):
        train(small(*words))
    assert not (tmp_path / "run").exists()


def test_a_file_system_that_cannot_flush_names(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def without_directories(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", without_directories)
    assert train(small("loop.steps=2")).steps == 2
