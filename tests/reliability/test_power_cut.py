"""A power cut: what was not flushed to the disk is gone.

`Disk` notes what is flushed while something is written, and can lay out at any moment what a disk
would hold if the power went then. Two kinds of disk, the extremes of what file systems promise:

    ordered   names of files and directories are there as they were given; contents as last flushed,
              empty if they never were
    strict    names are as well only what a flush of their directory made last
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jetrl import train
from jetrl.training.checkpoint import Checkpoints

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
    def watched(self, patch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
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
            yield inside
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


def test_a_run_goes_on_with_the_same_bits(
    small: Callable[..., Any],
    same: Callable[[Path, Path], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last checkpoint that was reported as written is whole, or the next one is."""
    words = ["checkpoint.every=1", "loop.steps=4", "checkpoint.keep_last=1"]
    root, write = tmp_path / "run", Checkpoints.write
    root.mkdir()
    disk = Disk(root)

    def reported(checkpoints: Checkpoints, snapshot: Any) -> Path:
        path = write(checkpoints, snapshot)
        disk.done = snapshot.step
        disk.cut()
        return path

    with disk.watched(monkeypatch) as patch:
        patch.setattr(Checkpoints, "write", reported)
        whole = train(small(*words, "checkpoint.background=false")).run_path
    assert {cut.done for cut in disk.cuts} == {0, 1, 2, 3, 4}
    for kind in KINDS:
        begun = [cut for cut in disk.cuts if "config.toml" in cut.names[kind].get(cut.root, {})]
        assert len(begun) > 40
        for number, cut in enumerate(random.Random(1).sample(begun, 40)):
            run = cut.lay_out(kind, tmp_path / f"{kind}-{number}")
            checkpoints = Checkpoints(run / "checkpoints")
            if cut.done or checkpoints.steps():
                name = checkpoints.latest().path.name
                assert name in (f"step_{cut.done:06}", f"step_{cut.done + 1:06}")
            if number < 2:
                again = train(small(*words, name=run.name), resume=True).run_path
                assert same(again, whole), (kind, number)
