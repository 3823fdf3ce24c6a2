"""A run on a full disk says so, loses nothing that was written, and can be resumed.

The disk is a small tmpfs in a mount namespace of its own, where the system lets us make one.
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetrl import train
from jetrl.cli.main import main
from jetrl.errors import StorageError
from jetrl.runs import RunDirectory, storage
from jetrl.session import Session
from jetrl.training import Checkpoints

PROGRAM = """
import contextlib, logging, os, subprocess, sys
from pathlib import Path
from jetrl.cli.main import main
from jetrl.runs import RunDirectory, reproducible

disk, case = Path(sys.argv[1]), sys.argv[2]
words = sys.argv[3:]
mount = ["mount", "-t", "tmpfs", "none", str(disk), "-o"]
subprocess.run([*mount, "size=6m" if case == "checkpoint" else "size=64m"], check=True)

def lines(name):
    found = RunDirectory.open(disk / name).metrics()
    return [{"step": line["step"], **reproducible(line)} for line in found]

run = ["train", "demo", *words, f"run.dir={disk}"]
if case == "lines":  # room for a few steps
    (disk / "ballast").write_bytes(b"x" * (64 * 2**20 - 60 * 2**10))
if case == "everything":  # somebody else fills it, to the last byte
    from jetrl.session import Session
    record = Session.record
    def filled(self, step):
        if step.number == 3:
            with contextlib.suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            logging.getLogger("jetrl").warning("x" * 5000)
        record(self, step)
    Session.record = filled
code = main([*run, "run.name=full"])
assert code == 6, code
before = lines("full")
assert 0 < len(before) < int(words[-1].removeprefix("loop.steps=")), len(before)
(disk / "ballast").unlink(missing_ok=True)
if case == "everything":
    Session.record = record
subprocess.run([*mount, "remount,size=64m"], check=True)
assert main([*run, "run.name=full", "--resume"]) == 0
assert main([*run, "run.name=uncut"]) == 0
assert lines("full") == lines("uncut")
assert lines("full")[:len(before)] == before
masters = [max((disk / n / "checkpoints").glob("step_*")) for n in ("full", "uncut")]
masters = [(path / "masters.safetensors").read_bytes() for path in masters]
assert masters[0] == masters[1]
print("same bits")
"""
TASK = Path(__file__).with_name("soak_task.py")
WORDS = [
    f"task.name={TASK}:Digits",
    "task.options={max_operand = 29, test_share = 0.2}",
    "task.workers=0",
    "sft.steps=0",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "eval.every=0",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
]


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The command that runs another one where it may mount."""
    command = ["unshare", "--map-root-user", "--mount"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system makes no mount namespaces")
    return command


@pytest.mark.parametrize(
    "case, words, message",
    [
        ("checkpoint", ["checkpoint.every=1", "loop.steps=4"], "could not be written"),
        ("lines", ["checkpoint.every=0", "loop.steps=9"], "could not be written: No space left"),
        ("everything", ["report.enabled=true", "loop.steps=4"], "could not be written: No space"),
    ],
)
def test_a_real_full_disk(
    case: str, words: list[str], message: str, namespace: list[str], tmp_path: Path
) -> None:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), case]
    command = [*namespace, *program, *WORDS, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert message in done.stderr
    assert "with --resume" in done.stderr
    assert done.stdout.rstrip().endswith("same bits")


@pytest.mark.parametrize("room", [0, 1000, 3000])
def test_a_disk_that_is_full_from_the_start(
    room: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first file, a later one or the first rollouts do not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        code = main(["train", "demo", *WORDS, f"run.dir={tmp_path}", "loop.steps=2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 6
    assert "File too large" in capsys.readouterr().err


def test_a_sentence_that_cannot_be_written(
    small: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        if path.name == "reading.txt":
            raise OSError(28, "No space left on device")
        write(path, text)

    write = storage.write_atomically
    monkeypatch.setattr("jetrl.runs.directory.write_atomically", full)
    with pytest.raises(StorageError, match=r"reading\.txt could not be written: No space"):
        train(small())


@pytest.mark.parametrize("name", ["log.txt", "status.json", "hang.txt"])
def test_a_file_that_cannot_be_opened(name: str, small: Callable, tmp_path: Path) -> None:
    train(small("loop.steps=2"))
    file = tmp_path / "run" / name
    file.unlink(missing_ok=True)
    file.mkdir()
    with pytest.raises(StorageError, match=f"{name} could not be written"):
        train(small(), resume=True)
    file.rmdir()
    assert train(small(), resume=True).steps == 5


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_any_checkpoint_of_the_warm_up(
    failing: int, every: int, small: Callable, same: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from a checkpoint on, and has room again when the run is resumed.

    The checkpoint fails in the background, so the line of the next update is written.
    """
    words = ("sft.steps=4", "sft.examples_per_step=4", f"checkpoint.every={every}", "loop.steps=2")
    uncut = train(small(*words, name="uncut"))
    begun = 0

    def full(self: Any, snapshot: Any) -> Path:
        nonlocal begun
        begun += 1
        if begun >= failing:
            raise StorageError("checkpoint could not be written; go on with --resume")
        return write(self, snapshot)

    with monkeypatch.context() as patch:
        write = Checkpoints.write
        patch.setattr(Checkpoints, "write", full)
        with pytest.raises(StorageError, match="go on with --resume"):
            train(small(*words))
    assert same(train(small(*words), resume=True).run_path, uncut.run_path)


def test_a_model_that_cannot_be_exported(
    small: Callable, same: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    uncut = train(small(name="uncut"))
    with monkeypatch.context() as patch:
        patch.setattr("jetrl.models.hf_save.write_json", full)
        with pytest.raises(StorageError, match=r"model: not written: .*No space left.*--resume"):
            train(small())
    assert same(train(small(), resume=True).run_path, uncut.run_path)


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_directory_that_is_deleted_ends_the_run_as_a_file_that_cannot_be_written(
    every: int, small: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Session.record

    def deleted(self: Session, step: Any) -> None:
        if step.number == 2:
            shutil.rmtree(tmp_path / "run")
        record(self, step)

    monkeypatch.setattr(Session, "record", deleted)
    words = (f"checkpoint.every={every}", "rollout.keep_every=9", "report.enabled=true")
    with pytest.raises(StorageError, match=r"metrics.jsonl (was deleted|could not be written)"):
        train(small(*words))
    assert not (tmp_path / "run").exists()


def test_a_file_system_that_cannot_flush_names(
    small: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def without_directories(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", without_directories)
    assert train(small()).steps == 5


def test_the_first_error_is_the_one_that_is_said(
    small: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the end of the attempt nor the report can be written either."""
    import jetrl.runs.directory as module

    settings = small("report.enabled=true")

    class Full(module.JsonlWriter):
        def write(self, record: Any) -> None:
            if record.get("step", 0) >= 3 or record.get("event") == "end":
                raise OSError(28, "No space left on device")
            super().write(record)

    def no_report(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "JsonlWriter", Full)
    monkeypatch.setattr("jetrl.session.training_run.write_report", no_report)
    with pytest.raises(StorageError, match=r"metrics.jsonl could not be written.*--resume"):
        train(settings)
    run = RunDirectory.open(tmp_path / "run")
    assert [line["step"] for line in run.metrics("rl")] == [1, 2]
    assert run.state() == "interrupted", "how it ended could not be written"
