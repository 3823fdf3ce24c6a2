"""Checkpoints: all that a run needs to go on, bit for bit, and written so that no crash spoils one.

    checkpoints/step_000050/
        masters.safetensors     the float32 masters, by internal name
        optimizer.safetensors   AdamW's moments, by master
        state.json              format, step, updates, plan, model, and what the loop added
        manifest.json           size and SHA-256 of each of the other files

A checkpoint is written into a folder whose name starts with a dot, every file is flushed to the
disk, and the folder is then renamed: under its real name it is complete or it does not exist. Older
ones are removed after that, never before. Nothing is pickled, so a checkpoint cannot run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from jetrl.errors import RunStopped, UserError
from jetrl.training.optimizer import Optimizer

if TYPE_CHECKING:
    from jetrl.policy import Policy

FORMAT = 1
_MASTERS, _OPTIMIZER = "masters.safetensors", "optimizer.safetensors"
_STATE, _MANIFEST = "state.json", "manifest.json"
_FILES = (_MASTERS, _OPTIMIZER, _STATE)
_NAME = re.compile(r"step_(\d{6,})")
_WRITING, _REPLACED = ".writing-", ".replaced-"


class Latest(NamedTuple):
    """path: the newest good checkpoint. notes: one message for each newer one that is damaged."""

    path: Path
    notes: list[str]


class Loaded(NamedTuple):
    """step: the steps done. extra: what `save` was given, as JSON reads it back."""

    step: int
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run. One process may save; others may read meanwhile.

    Args:
        directory: made by the first `save`.
        keep_last: how many `save` leaves.
    """

    def __init__(self, directory: str | Path, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self._verified: Path | None = (
            None  # by the last call of latest: load need not read it twice
        )

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, good or damaged, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(
            int(match.group(1))
            for entry in self.directory.iterdir()
            if (match := _NAME.fullmatch(entry.name))
        )

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"step_{step:06d}"

    def save(
        self, step: int, policy: Policy, optimizer: Optimizer, extra: Mapping[str, Any]
    ) -> Path:
        """Writes the checkpoint of a step and then removes all but the `keep_last` newest up to it.
        What an interrupted write left behind is removed first.

        A checkpoint of the same step is replaced; later ones belong to a future that this run has
        left (it resumed from an earlier one) and go too.

        Args:
            step: steps done. extra: what else is needed to go on; JSON values (floats survive
                exactly), under string keys.

        Raises:
            RunStopped: it could not be written (a full disk): the path and the free space are
                named, what was written is removed and the older checkpoints are as they were.
        """
        state = {
            "format": FORMAT,
            "step": step,
            "num_updates": optimizer.num_updates,
            "plan": policy.plan.to_dict(),
            "model": _model_dict(policy),
            "extra": dict(extra),
        }
        text = json.dumps(state, indent=1)
        masters = {name: p.detach() for name, p in policy.named_masters().items()}
        target = self.path(step)
        writing = self.directory / f"{_WRITING}{target.name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._put_back()
            self._clean()
            writing.mkdir()
            _write_tensors(writing / _MASTERS, masters)
            _write_tensors(writing / _OPTIMIZER, optimizer.state_tensors())
            _write_text(writing / _STATE, text)
            manifest = {name: _fingerprint(writing / name) for name in _FILES}
            _write_text(writing / _MANIFEST, json.dumps(manifest, indent=1))
            _sync(writing)
            self._put_in_place(writing, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise RunStopped(self._explain_failure(target, error)) from None
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        self._prune(step)
        return target

    def latest(self) -> Latest:
        """The newest good checkpoint: every file is read and compared with its checksum.

        Raises:
            UserError: there is none; says whether there were damaged ones and how each is damaged.
        """
        self._put_back()
        notes: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            problem = self._problem(path)
            if problem is None:
                self._verified = path
                return Latest(path, notes)
            notes.append(f"checkpoint {path} is damaged ({problem}) and was skipped")
        if notes:
            raise UserError(
                f"no good checkpoint in {self.directory}: {'; '.join(notes)}. Put one back from a "
                "copy, or start a new run under another run.name"
            )
        raise UserError(f"no checkpoint in {self.directory}: the run was cut before its first one")

    def load(self, path: str | Path, policy: Policy, optimizer: Optimizer) -> Loaded:
        """Puts a checkpoint's masters and optimizer state, bit for bit, into a policy made from
        the same settings, and requantizes it.

        Raises:
            UserError: it is damaged, or its precision plan, model or tensors are not this run's:
                each difference is named. Nothing was changed then.
        """
        path = Path(path)
        if path != self._verified:
            self.check(path)
        self._verified = None
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        differences = [
            *_differences("precision plan", state["plan"], _as_json(policy.plan.to_dict())),
            *_differences("model", state["model"], _model_dict(policy)),
        ]
        masters = policy.named_masters()
        tensors = load_file(path / _MASTERS)
        differences += _tensor_differences(tensors, masters)
        if differences:
            raise UserError(
                f"checkpoint {path} does not fit this run: {'; '.join(differences)}. Resume with "
                "the settings it was made with"
            )
        optimizer.load_state(load_file(path / _OPTIMIZER), state["num_updates"])
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(tensors[name])
        policy.requantize()
        return Loaded(state["step"], state["extra"])

    @classmethod
    def check(cls, path: Path) -> None:
        """Reads a checkpoint's files and compares sizes and checksums.

        Raises:
            UserError: it is damaged; the message says what is wrong.
        """
        problem = cls._problem(path)
        if problem is not None:
            raise UserError(f"checkpoint {path} is damaged: {problem}; use another one")

    @staticmethod
    def _problem(path: Path) -> str | None:
        """What is wrong with a checkpoint, None if nothing is."""
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            for name in _FILES:
                size = (path / name).stat().st_size
                expected = manifest[name]
                if size != expected["bytes"]:
                    return f"{name} has {size} bytes instead of {expected['bytes']}"
                if _fingerprint(path / name) != expected:
                    return f"{name} does not match its checksum"
            state = json.loads((path / _STATE).read_text(encoding="utf-8"))
            if state["format"] != FORMAT:
                return f"format {state['format']}, this version reads {FORMAT}"
        except OSError as error:
            return f"{Path(error.filename or path).name}: {error.strerror or error}"
        except (ValueError, KeyError, TypeError):
            return f"{_MANIFEST} is not a checkpoint's manifest"
        return None

    def _put_in_place(self, writing: Path, target: Path) -> None:
        replaced = self.directory / f"{_REPLACED}{target.name}"
        if target.exists():
            os.rename(target, replaced)
        try:
            os.rename(writing, target)
        except OSError:
            if replaced.exists():
                os.rename(replaced, target)
            raise
        _sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _put_back(self) -> None:
        """Undoes a replacement that a crash cut before the successor had taken the name."""
        for entry in self._hidden(_REPLACED):
            target = self.directory / entry.name.removeprefix(_REPLACED)
            if not target.exists():
                os.rename(entry, target)

    def _clean(self) -> None:
        for entry in [*self._hidden(_WRITING), *self._hidden(_REPLACED)]:
            shutil.rmtree(entry)

    def _hidden(self, prefix: str) -> list[Path]:
        return list(self.directory.glob(f"{prefix}step_*"))

    def _prune(self, saved: int) -> None:
        steps = self.steps()
        kept = [step for step in steps if step <= saved][-self.keep_last :]
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.path(step), ignore_errors=True)

    def _explain_failure(self, target: Path, error: Exception) -> str:
        try:
            free = f"{shutil.disk_usage(self.directory).free / 2**30:.2f} GiB free there"
        except OSError:
            free = "the free space there cannot be read"
        reason = getattr(error, "strerror", None) or str(error)
        kept = self.steps()
        good = f"the last one before it is {self.path(kept[-1])}" if kept else "there is none yet"
        return (
            f"checkpoint {target} could not be written: {reason} ({free}). Nothing of it was left, "
            f"earlier checkpoints are unchanged; {good}. Free some space and go on with --resume"
        )


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _model_dict(policy: Policy) -> dict[str, Any]:
    config = dataclasses.asdict(policy.config)
    config.pop("raw", None)  # the source's config.json; what matters of it is in the other fields
    return _as_json(config)


def _differences(what: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [
        f"{what} {key} is {saved.get(key)!r} in the checkpoint and {current.get(key)!r} here"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]


def _tensor_differences(
    tensors: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]
) -> list[str]:
    found = [f"the checkpoint lacks {name}" for name in masters if name not in tensors]
    found += [f"this model has no {name}" for name in tensors if name not in masters]
    found += [
        f"{name} is {t.dtype} {tuple(t.shape)} there and {masters[name].dtype} "
        f"{tuple(masters[name].shape)} here"
        for name, t in tensors.items()
        if name in masters and (t.shape != masters[name].shape or t.dtype != masters[name].dtype)
    ]
    return found
