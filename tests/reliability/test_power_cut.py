"""A power cut: what was not flushed to the disk is gone.

`Disk` notes what is flushed while something is written, and can lay out at any moment what a disk
would hold if the power went then. Two kinds of disk, the extremes of what file systems promise:

    ordered   names of files and directories are there as they were given; contents as last flushed,
              empty if they never were
    strict    names are as well only what a flush of their directory made last
"""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jetrl import train
from jetrl.errors import UserError
from jetrl.precision import PrecisionPlan
from jetrl.settings.sections import TrainSettings
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.optimizer import Optimizer

KINDS = ["ordered", "strict"]
Names = dict[int, dict[str, int]]  # of each directory, by inode: the inodes by name


@dataclass(frozen=True)
class Cut:
    """The state of a disk at a moment at which the power may fail."""

    root: int
    files: dict[int, bytes]  # contents as flushed, by inode
    folders: frozenset[int]
    names: dict[str, Names]  # as they are, and as flushed
    done: int  # what had been reported as written by then

    def lay_out(self, kind: str, target: Path) -> Path:
        """Write into a folder what is on the disk when the power is back."""

        def directory(inode: int, path: Path) -> None:
            path.mkdir(parents=True)
            for name, child in self.names[kind].get(inode, {}).items():
                if child in self.folders:
                    directory(child, path / name)
                else:
                    (path / name).write_bytes(self.files.get(child, b""))

        directory(self.root, target)
        return target


class Disk:
    """A disk that records a moment before and one after everything done below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.done = root, 0
        self.cuts: list[Cut] = []
        self._files: dict[int, bytes] = {}
        self._flushed: Names = {}
        self._folders: frozenset[int] = frozenset()
        self._held: list[int] = []  # open, so that no inode is used twice

    @contextmanager
    def watched(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        fsync = os.fsync

        def noted(action: Callable[..., None]) -> Callable[..., None]:
            def wrapped(*args: Any) -> None:
                self.cut()
                action(*args)
                if action is fsync:
                    self._flush(args[0])
                self.cut()

            return wrapped

        with patch.context() as inside:
            for name in ("fsync", "rename", "replace"):
                inside.setattr(os, name, noted(getattr(os, name)))
            yield
        for handle in self._held:
            os.close(handle)

    def cut(self) -> None:
        names: Names = {}
        for folder, _, _ in os.walk(self.root):
            entries = list(os.scandir(folder))
            names[os.stat(folder).st_ino] = {entry.name: entry.inode() for entry in entries}
        flushed = {inode: dict(entries) for inode, entries in self._flushed.items()}
        kinds = {"ordered": names, "strict": flushed}
        self._folders |= names.keys()
        root = os.stat(self.root).st_ino
        self.cuts.append(Cut(root, dict(self._files), self._folders, kinds, self.done))

    def _flush(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if self.root not in (path, *path.parents):
            return
        self._held.append(os.dup(handle))
        about = os.fstat(handle)
        if stat.S_ISDIR(about.st_mode):
            self._flushed[about.st_ino] = {e.name: e.inode() for e in os.scandir(path)}
        else:
            self._files[about.st_ino] = path.read_bytes()


def parts() -> tuple[Any, Optimizer, nn.Parameter]:
    """Return as much of a model as a checkpoint asks for, its optimizer, and its weight."""
    weight = nn.Parameter(torch.zeros(3, 3))
    masters = {"w.weight": weight}
    model = SimpleNamespace(
        config=SimpleNamespace(flat=lambda: {"hidden_size": 3}),
        plan=PrecisionPlan.preset("unified"),
        tokenizer=None,
        weights=SimpleNamespace(shards={}),
        lora=None,
        master_weights=lambda: masters,
        requantize=lambda: None,
    )
    return model, Optimizer(masters, TrainSettings(), 10), weight


def test_a_checkpoint_that_was_written_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment: the last one that was reported as written, or the next, whole."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    disk = Disk(root)
    model, optimizer, weight = parts()
    checkpoints = Checkpoints(root, keep_last=1)
    with disk.watched(monkeypatch):
        for step in (1, 2, 2, 3):  # the second time it is replaced
            with torch.no_grad():
                weight.fill_(float(step))
            checkpoints.save(step, model, optimizer, extra={})
            disk.done = step
            disk.cut()
    assert len(disk.cuts) > 40
    steps = set()
    for number, (cut, kind) in enumerate(itertools.product(disk.cuts, KINDS)):
        found = Checkpoints(cut.lay_out(kind, tmp_path / f"{number}"), keep_last=1)
        if not cut.done and not found.steps():
            with pytest.raises(UserError, match="no checkpoint"):
                found.latest()
            continue
        latest, model_found, optimizer_found, weight_found = found.latest(), *parts()
        step = found.load(latest.path, model_found, optimizer_found).step
        assert cut.done <= step <= cut.done + 1
        assert weight_found.detach().eq(step).all()
        steps.add(step)
        found.save(step + 1, model_found, optimizer_found, extra={})  # and it goes on from there
    assert steps == {1, 2, 3}


def test_a_run_goes_on_with_the_same_bits(
    small: Callable[..., Any],
    same: Callable[[Path, Path], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["checkpoint.every=1", "loop.steps=4"]
    root = tmp_path / "run"
    root.mkdir()
    disk = Disk(root)
    with disk.watched(monkeypatch):
        whole = train(small(*words, "checkpoint.background=false")).run_path
    for kind in KINDS:
        begun = [cut for cut in disk.cuts if "config.toml" in cut.names[kind].get(cut.root, {})]
        assert len(begun) > 20
        for number, cut in enumerate(random.Random(1).sample(begun, 2)):
            run = cut.lay_out(kind, tmp_path / f"{kind}-{number}")
            again = train(small(*words, name=run.name), resume=True).run_path
            assert same(again, whole), (kind, number)
