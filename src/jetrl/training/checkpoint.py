"""Checkpoints: everything that a run needs to continue with the same bits, safe from any crash.

    checkpoints/step_000050/
        masters.safetensors     the float32 master weights, by internal name
        optimizer.safetensors   AdamW's moments, by master weight
        NAME.safetensors        tensors of other parts of the run, if it has any
        state.json              format, step, updates, plan, model, alphabet of a tokenizer of
                                characters, score, and what the loop added
        manifest.json           size and SHA-256 of each of the other files

A checkpoint is written into a folder whose name starts with a dot, every file is flushed to the
disk, and the folder is then renamed: under its real name it is complete or it does not exist. Older
ones are removed after that, never before. Nothing is pickled, so a checkpoint cannot run code.

`snapshot` and `write` are the two halves of `save`: a copied snapshot can be written by another
thread while training continues.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jetrl.errors import StorageError, UserError
from jetrl.files import checked, read_json
from jetrl.models.hf_files import load_tensors, sync
from jetrl.models.tiny_tokenizers import alphabet_of
from jetrl.training.checkpoint_files import (
    as_json,
    differences,
    fingerprint,
    is_known_by,
    tensor_differences,
    write_tensors,
    write_text,
)
from jetrl.training.checkpoint_schemas import MANIFEST, MOST_STATE_BYTES, STATE
from jetrl.training.optimizer import Optimizer

if TYPE_CHECKING:
    from jetrl.models.model import Model

FORMAT = 2
_MASTERS, _OPTIMIZER = "masters", "optimizer"
_STATE, _MANIFEST = "state.json", "manifest.json"
_NAME = re.compile(r"step_(\d{6,})")
_WRITING, _REPLACED = ".writing-", ".replaced-"


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint, before they are written.

    Attributes:
        step: How many steps are done.
        state: The text of state.json.
        tensors: The tensors by file, then by name.
    """

    step: int
    state: str
    tensors: Mapping[str, Mapping[str, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the tensors have together."""
        return sum(t.nbytes for tensors in self.tensors.values() for t in tensors.values())

    def copied(self) -> Snapshot:
        """Return a copy in CPU memory, which can be written while training changes the tensors."""
        tensors = {
            file: {name: t.to("cpu", copy=True) for name, t in named.items()}
            for file, named in self.tensors.items()
        }
        return dataclasses.replace(self, tensors=tensors)


class Latest(NamedTuple):
    """The newest good checkpoint of a run.

    Attributes:
        path: The folder of the checkpoint.
        notes: One message for each newer checkpoint, all of which are damaged.
    """

    path: Path
    notes: list[str]


class Loaded(NamedTuple):
    """The contents of a checkpoint beside weights and optimizer, which were put in their places.

    Attributes:
        step: How many steps are done.
        extra: What `save` was given as `extra`, as JSON reads it back.
        tensors: The tensors of other parts of the run, by part and name.
    """

    step: int
    extra: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]


class Checkpoints:
    """The checkpoints of a run, which one process may save while others read.

    Args:
        directory: The folder of the checkpoints; the first `save` makes it.
        keep_last: How many of the newest checkpoints `save` leaves.
        keep_best: How many of the checkpoints with the highest score `save` leaves as well.
    """

    def __init__(self, directory: str | Path, keep_last: int = 2, keep_best: int = 0) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        self.directory = Path(directory)
        self.keep_last, self.keep_best = keep_last, keep_best
        # What `latest` has found to be undamaged, so that `load` need not read it twice.
        self._verified: Path | None = None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, good or damaged, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(
            int(match.group(1))
            for entry in self.directory.iterdir()
            if (match := _NAME.fullmatch(entry.name))
        )

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step, which need not exist."""
        return self.directory / f"step_{step:06d}"

    def save(
        self,
        step: int,
        policy: Model,
        optimizer: Optimizer,
        extra: Mapping[str, Any],
        score: float | None = None,
    ) -> Path:
        """Write the checkpoint of a step, and return its folder: `write(snapshot(...))`.

        Args:
            step: How many steps are done.
            policy: The model whose master weights are kept.
            optimizer: The optimizer whose state is kept.
            extra: JSON values that are needed to continue.
            score: The score of the step, for keep_best.
        """
        return self.write(self.snapshot(step, policy, optimizer, extra, score))

    def snapshot(
        self,
        step: int,
        policy: Model,
        optimizer: Optimizer,
        extra: Mapping[str, Any],
        score: float | None = None,
        others: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    ) -> Snapshot:
        """Return the contents of a checkpoint, which are the run's own tensors until `copied`.

        Args:
            step: How many steps are done.
            policy: The model whose master weights are kept.
            optimizer: The optimizer whose state is kept.
            extra: What else is needed to continue: JSON values (floats survive exactly), under
                string keys.
            score: The score of the step, for keep_best; higher is better.
            others: Tensors of other parts of the run, by part (a file name) and name.

        Raises:
            TypeError: extra holds what JSON cannot say.
        """
        state = {
            "format": FORMAT,
            "step": step,
            "num_updates": optimizer.num_updates,
            "plan": policy.plan.to_dict(),
            "model": _model_dict(policy),
            "alphabet": alphabet_of(policy.tokenizer),
            "score": score,
            "extra": dict(extra),
        }
        masters = {name: p.detach() for name, p in policy.master_weights().items()}
        assert not {_MASTERS, _OPTIMIZER} & set(others or {}), "names of the policy's own files"
        tensors = {_MASTERS: masters, _OPTIMIZER: optimizer.state_tensors(), **(others or {})}
        return Snapshot(step, json.dumps(state, indent=1), tensors)

    def write(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, then remove all but the newest and best ones, and return its folder.

        What an interrupted write left behind is removed first. A checkpoint of the same step is
        replaced; those of later steps belong to a future that this run has left (it resumed from an
        earlier checkpoint) and are removed too.

        Raises:
            StorageError: The checkpoint could not be written (a full disk): the path and the free
                space are named, what was written is removed and the older ones are as they were.
        """
        target = self.path(snapshot.step)
        writing = self.directory / f"{_WRITING}{target.name}"
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True)
                sync(self.directory.parent)
            self._put_back()
            self._clean()
            writing.mkdir()
            self._write_files(writing, snapshot)
            sync(writing)
            self._put_in_place(writing, target)
        except BaseException as error:
            shutil.rmtree(writing, ignore_errors=True)
            if isinstance(error, OSError):
                raise StorageError(self._explain_failure(target, error)) from None
            raise
        self._prune(snapshot.step, self.steps())
        return target

    @staticmethod
    def _write_files(folder: Path, snapshot: Snapshot) -> None:
        """Write the files of a checkpoint, the manifest last."""
        for name, tensors in snapshot.tensors.items():
            write_tensors(folder / f"{name}.safetensors", tensors)
        write_text(folder / _STATE, snapshot.state)
        manifest = {path.name: fingerprint(path) for path in sorted(folder.iterdir())}
        write_text(folder / _MANIFEST, json.dumps(manifest, indent=1))

    def latest(self) -> Latest:
        """Return the newest good checkpoint, after comparing every file with its checksum.

        Raises:
            UserError: No checkpoint is good; says how each is damaged. Or the newest good one is of
                another format: an older one is not taken in its place.
        """
        self._put_back()
        notes: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            problem = self._problem(path)
            if problem is None:
                self._state(path)
                self._verified = path
                return Latest(path, notes)
            notes.append(f"checkpoint {path} is damaged ({problem}) and was skipped")
        if notes:
            raise UserError(
                f"no good checkpoint in {self.directory}: {'; '.join(notes)}. Put one back from a "
                "copy, or start a new run under another run.name"
            )
        raise UserError(f"no checkpoint in {self.directory}: the run was cut before its first one")

    def load(self, path: str | Path, policy: Model, optimizer: Optimizer) -> Loaded:
        """Put a checkpoint's master weights and optimizer state, bit for bit, into a model.

        Args:
            path: The folder of the checkpoint.
            policy: A model made from the same settings, which is requantized afterwards.
            optimizer: The optimizer over the model's master weights.

        Raises:
            UserError: The checkpoint is damaged, or its precision plan, model or tensors are not
                this run's: each difference is named. Nothing was changed then.
        """
        path = Path(path)
        if path != self._verified:
            self.check(path)
        self._verified = None
        state = self._state(path)
        problems = [
            *differences("precision plan", state["plan"], as_json(policy.plan.to_dict())),
            *differences("model", state["model"], _model_dict(policy)),
        ]
        masters = policy.master_weights()
        # The manifest's files alone: nothing beside them was compared with a checksum.
        names = map(Path, self._manifest(path))
        files = {name.stem: path / name for name in names if name.suffix == ".safetensors"}
        tensors = load_tensors(files.pop(_MASTERS))
        problems += tensor_differences(tensors, masters)
        if problems:
            raise UserError(
                f"checkpoint {path} does not fit this run: {'; '.join(problems)}. Resume with "
                "the settings it was made with"
            )
        optimizer.load_state(load_tensors(files.pop(_OPTIMIZER)), state["num_updates"])
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(tensors[name])
        policy.requantize()
        others = {name: load_tensors(file) for name, file in files.items()}
        return Loaded(state["step"], state["extra"], others)

    @classmethod
    def check(cls, path: Path) -> None:
        """Compare the sizes and checksums of a checkpoint's files with its manifest.

        Raises:
            UserError: The checkpoint is damaged, or of another format; the message says how.
        """
        problem = cls._problem(path)
        if problem is not None:
            raise UserError(f"checkpoint {path} is damaged: {problem}; use another one")
        cls._state(path)

    @classmethod
    def alphabet(cls, path: Path) -> str | None:
        """Return the alphabet of an undamaged checkpoint, whose tokenizer is one of characters.

        Returns:
            None where the tokenizer is another one, or the checkpoint of a version that did not
            store the alphabet.
        """
        alphabet: str | None = cls._state(path).get("alphabet")
        return alphabet

    @classmethod
    def _problem(cls, path: Path) -> str | None:
        """Return how a checkpoint is damaged, None if it is not."""
        try:
            manifest = cls._manifest(path)
            for name, expected in manifest.items():
                found = (path / name).stat()
                if not stat.S_ISREG(found.st_mode):
                    return f"{name} is not a regular file"
                if found.st_size != expected["bytes"]:
                    return f"{name} has {found.st_size} bytes instead of {expected['bytes']}"
            for name in sorted(manifest):
                if not is_known_by(path / name, manifest[name]):
                    return f"{name} does not match its checksum"
            cls._any_state(path)
        except OSError as error:
            return f"{Path(error.filename or path).name}: {error.strerror or error}"
        except UserError as error:
            return str(error)
        return None

    @staticmethod
    def _manifest(path: Path) -> dict[str, dict[str, Any]]:
        """Return the fingerprints of a checkpoint's files by their names.

        Raises:
            FileNotFoundError: There is no manifest.
            UserError: The file is not a manifest, or leaves out a file of every checkpoint.
        """
        try:
            manifest: dict[str, dict[str, Any]] = read_json(path / _MANIFEST)
            checked(MANIFEST, manifest, str(path / _MANIFEST))
        except UserError as error:
            raise UserError(f"{_MANIFEST} is not a checkpoint's manifest ({error})") from None
        for name in (f"{_MASTERS}.safetensors", f"{_OPTIMIZER}.safetensors", _STATE):
            if name not in manifest:
                raise UserError(f"{_MANIFEST} is not a checkpoint's manifest (it lacks {name})")
        return manifest

    @staticmethod
    def _any_state(path: Path) -> dict[str, Any]:
        """Return the contents of state.json, checked where its format is this version's.

        Raises:
            FileNotFoundError: There is no state.json.
            UserError: The file is not a checkpoint's state.
        """
        state: Any = read_json(path / _STATE, MOST_STATE_BYTES)
        version = state.get("format") if isinstance(state, dict) else None
        if type(version) is int and version != FORMAT:
            return {"format": version}
        checked(STATE, state, str(path / _STATE))
        return dict(state)

    @classmethod
    def _state(cls, path: Path) -> dict[str, Any]:
        """Return the contents of state.json of an undamaged checkpoint.

        Raises:
            UserError: The checkpoint has another format.
        """
        state = cls._any_state(path)
        if state["format"] != FORMAT:
            raise UserError(
                f"checkpoint {path} has format {state['format']}, and this version of jetrl reads "
                f"format {FORMAT}: go on with the version that wrote it (log.txt of the run names "
                "it), or start a new run from an exported model"
            )
        return state

    def _put_in_place(self, writing: Path, target: Path) -> None:
        """Give a complete checkpoint its real name; one that has that name goes only afterwards."""
        replaced = self.directory / f"{_REPLACED}{target.name}"
        if target.exists():
            os.rename(target, replaced)
        try:
            os.rename(writing, target)
        except OSError:
            if replaced.exists():
                os.rename(replaced, target)
            raise
        sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _put_back(self) -> None:
        """Undo a replacement that a crash cut before the successor had taken the name."""
        for entry in self._hidden(_REPLACED):
            target = self.directory / entry.name.removeprefix(_REPLACED)
            if not target.exists():
                os.rename(entry, target)

    def _clean(self) -> None:
        """Remove what interrupted writes have left."""
        for entry in [*self._hidden(_WRITING), *self._hidden(_REPLACED)]:
            shutil.rmtree(entry)

    def _hidden(self, prefix: str) -> list[Path]:
        """Return the folders of unfinished checkpoints with a prefix."""
        return list(self.directory.glob(f"{prefix}step_*"))

    def tidy(self, step: int) -> None:
        """Remove what a crash kept `write` from removing, up to the step that is resumed from."""
        self._clean()
        self._prune(step, [s for s in self.steps() if s <= step])

    def _prune(self, saved: int, steps: Sequence[int]) -> None:
        """Remove those of `steps` that are neither among the last nor the best up to `saved`."""
        past = [step for step in self.steps() if step <= saved]
        scores = [(score, step) for step in past if (score := self._score(step)) is not None]
        best = [step for _, step in sorted(scores, reverse=True)[: self.keep_best]]
        for step in steps:
            if step not in past[-self.keep_last :] and step not in best:
                shutil.rmtree(self.path(step), ignore_errors=True)

    def _score(self, step: int) -> float | None:
        """Return the score of a checkpoint; None if it has none, or is too damaged to say."""
        if not self.keep_best:
            return None
        try:
            score = self._state(self.path(step))["score"]
        except (OSError, UserError):
            return None
        return None if score is None else float(score)

    def _explain_failure(self, target: Path, error: Exception) -> str:
        """Return the message about a checkpoint that could not be written."""
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


def _model_dict(policy: Model) -> dict[str, Any]:
    """Return the configuration of a model as a checkpoint keeps it."""
    config = dataclasses.asdict(policy.config)
    config.pop("raw", None)  # the source's config.json; what matters of it is in the other fields
    if not config.get("layers_without_rope"):  # checkpoints of earlier versions have no such key
        config.pop("layers_without_rope", None)
    return as_json(config)
