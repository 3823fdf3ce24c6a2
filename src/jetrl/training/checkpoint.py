"""Crash-safe checkpoints with everything needed to resume a run bit for bit.

    checkpoints/step_000050/
        masters.safetensors     float32 master weights, by internal name
        optimizer.safetensors   AdamW moments, by master weight
        NAME.safetensors        tensors of other components, if any
        state.json              step, updates, plan, model, key factors, score, loop state
        manifest.json           size and SHA-256 of every other file

With several ranks, each tensor file is a folder with the rows of every rank
(`distributed.shard_files`). Either format can be loaded with any number of ranks.

A checkpoint is written to a hidden folder, flushed to disk, then renamed, so a checkpoint under its
final name is complete. Older checkpoints are removed only afterwards. Nothing is pickled: loading a
checkpoint cannot run code. A copied `snapshot` can be written by another thread (`Background`)
while training continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from jetrl.distributed.shards import Shard
from jetrl.distributed.world import World, world
from jetrl.errors import NonFiniteError, StorageError, UserError
from jetrl.files import free_space
from jetrl.models.hf_files import sync
from jetrl.models.key_smoothing import to_text
from jetrl.models.model import Model
from jetrl.models.tiny import alphabet_of
from jetrl.training import checkpoint_files as files
from jetrl.training.extras import Learner
from jetrl.training.guard import nonfinite
from jetrl.training.optimizer import Optimizer
from jetrl.types import Json

_NAME = re.compile(r"step_(\d{6,})")
_WRITING, _REPLACED = ".writing-", ".replaced-"
_TOWER = "train.tower"


@dataclass(frozen=True)
class Snapshot:
    """Contents of a checkpoint before it is written.

    `state` becomes state.json; tensors are by component and name. Sharded tensors hold only this
    rank's rows.
    """

    step: int
    state: str
    tensors: Mapping[str, Mapping[str, Tensor]]
    shards: Mapping[str, Mapping[str, Shard]]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.tensors.values() for t in tensors.values())

    def copied(self) -> Snapshot:
        """Return a copy in CPU memory, independent of further training."""
        tensors = {
            part: {name: t.to("cpu", copy=True) for name, t in named.items()}
            for part, named in self.tensors.items()
        }
        return dataclasses.replace(self, tensors=tensors)


class Latest(NamedTuple):
    """The newest intact checkpoint of a run."""

    path: Path
    notes: list[str]


class Loaded(NamedTuple):
    """Contents of a checkpoint except weights and optimizer state, which are loaded in place."""

    step: int
    extra: Json
    tensors: dict[str, files.StoredTensors]
    ranks: int


class CheckpointFolder:
    """The folder of a run's checkpoints; only rank 0 may change it.

    Other programs may read the checkpoints meanwhile. `prune` keeps the newest `keep_last` and the
    `keep_best` with the highest score.
    """

    def __init__(self, directory: str | Path, keep_last: int = 2, keep_best: int = 0) -> None:
        self.directory = Path(directory)
        self.keep_last, self.keep_best = keep_last, keep_best

    def steps(self) -> list[int]:
        """Return all steps that have a checkpoint, intact or damaged, ascending."""
        matches = (_NAME.fullmatch(entry.name) for entry in self.directory.glob("step_*"))
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Return the folder for a step's checkpoint, which may not exist."""
        return self.directory / f"step_{step:06d}"

    def writing_path(self, step: int) -> Path:
        """Return the hidden folder for a step's checkpoint until it is complete."""
        return self.directory / f"{_WRITING}{self.path(step).name}"

    def newest(self) -> Latest:
        """Return the newest intact checkpoint; UserError if all are damaged."""
        self.put_back()
        notes: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            problem = files.problem_of(path)
            if problem is None:
                files.state_of(path)
                return Latest(path, notes)
            notes.append(f"checkpoint {path} is damaged ({problem}) and was skipped")
        if notes:
            raise UserError(
                f"no good checkpoint in {self.directory}: {'; '.join(notes)}. Restore one from a "
                "copy, or start a new run under another run.name"
            )
        raise UserError(f"no checkpoint in {self.directory}: the run ended before its first one")

    def begin(self, step: int) -> None:
        """Make the hidden folder in which the checkpoint of a step is written."""
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True)
            sync(self.directory.parent)
        self.put_back()
        self.clean()
        self.writing_path(step).mkdir()

    def put_in_place(self, step: int, state: str, written: Mapping[str, files.Fingerprint]) -> None:
        """Complete a checkpoint and rename it into place; remove the one it replaces last."""
        writing, target = self.writing_path(step), self.path(step)
        files.complete_folder(writing, state, written)
        replaced = self.directory / f"{_REPLACED}{target.name}"
        # Move the old one away first: a rename cannot replace a non-empty folder.
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

    def put_back(self) -> None:
        """Undo a replacement that a crash interrupted."""
        # The old folder is complete: restore its name.
        for entry in self._hidden(_REPLACED):
            target = self.directory / entry.name.removeprefix(_REPLACED)
            if not target.exists():
                os.rename(entry, target)

    def clean(self) -> None:
        """Remove leftovers of interrupted writes."""
        for entry in [*self._hidden(_WRITING), *self._hidden(_REPLACED)]:
            shutil.rmtree(entry)

    def _hidden(self, prefix: str) -> list[Path]:
        return list(self.directory.glob(f"{prefix}step_*"))

    def prune(self, saved: int, steps: Sequence[int]) -> None:
        """Remove each of `steps` that is neither among the newest nor the best up to `saved`."""
        # Ignore later steps: they are stale after a resume from an earlier one.
        past = [step for step in self.steps() if step <= saved]
        scores = [(score, step) for step in past if (score := self._score(step)) is not None]
        best = [step for _, step in sorted(scores, reverse=True)[: self.keep_best]]
        for step in steps:
            if step not in past[-self.keep_last :] and step not in best:
                # Rename first, so that concurrent readers see all of its files or none.
                with contextlib.suppress(OSError):
                    shutil.rmtree(self.path(step).rename(self.writing_path(step)))

    def best(self) -> int | None:
        """Return the step with the highest score (of equals the last); None without keep_best."""
        scored = [(score, s) for s in self.steps() if (score := self._score(s)) is not None]
        return max(scored)[1] if scored else None

    def _score(self, step: int) -> float | None:
        """Return the score of a checkpoint, or None if it has none or is damaged."""
        with contextlib.suppress(OSError, UserError, TypeError):  # of None
            return float(files.state_of(self.path(step))["score"]) if self.keep_best else None
        return None

    def explain_failure(self, step: int, error: Exception) -> str:
        """Return the message of a StorageError: why a checkpoint could not be written."""
        reason = getattr(error, "strerror", None) or str(error)
        kept = self.steps()
        good = f"the last one before it is {self.path(kept[-1])}" if kept else "there is none yet"
        return (
            f"checkpoint {self.path(step)} could not be written: {reason} "
            f"({free_space(self.directory)}). Nothing of it was left, earlier checkpoints are "
            f"unchanged; {good}. Free some space and continue with --resume"
        )


class Checkpoints(CheckpointFolder):
    """Saves and loads the checkpoints of a run.

    Every rank calls `save`, `snapshot`, `write`, `latest`, `load` and `tidy`. Rank 0 inspects the
    disk; if a rank fails, all ranks raise its error. `ranks` is None for `world()`; a `write` in
    another thread needs its own channel.
    """

    def __init__(
        self,
        directory: str | Path,
        keep_last: int = 2,
        keep_best: int = 0,
        ranks: World | None = None,
    ) -> None:
        super().__init__(directory, keep_last, keep_best)
        self._ranks = ranks or world()
        # Checkpoints verified by `latest`, so that `load` need not read them twice.
        self._verified: Path | None = None

    def save(
        self,
        step: int,
        policy: Model,
        optimizer: Optimizer,
        extra: Json,
        score: float | None = None,
        parts: Mapping[str, Learner] | None = None,
    ) -> Path:
        """Write the checkpoint of a step, and return its folder: `write(snapshot(...))`."""
        return self.write(
            self.snapshot(step, policy, optimizer, extra=extra, score=score, parts=parts)
        )

    def snapshot(
        self,
        step: int,
        policy: Model,
        optimizer: Optimizer,
        extra: Json,
        score: float | None = None,
        parts: Mapping[str, Learner] | None = None,
    ) -> Snapshot:
        """Return the contents of a checkpoint, with references to tensors; `extra` becomes JSON.

        Raises NonFiniteError for a tensor with a NaN or infinity, which must not be saved.
        """
        size = self._ranks.size
        sharded = {"format": files.SHARDED_FORMAT, "ranks": size}
        exponents = policy.key_exponents
        state = {
            **(sharded if size > 1 else {"format": files.FORMAT}),
            "step": step,
            "num_updates": optimizer.num_updates,
            "plan": policy.plan.to_dict(),
            "model": model_dict(policy),
            "alphabet": alphabet_of(policy.tokenizer),
            **({} if exponents is None else {"key_exponents": to_text(exponents)}),
            "score": score,
            "extra": dict(extra),
        }
        tensors = {files.MASTERS: {name: p.detach() for name, p in policy.master_weights().items()}}
        shards = {files.MASTERS: policy.weights.shards}
        # The optimizer is one component among others, such as a critic or a draft head.
        owners: dict[str, Optimizer | Learner] = {files.OPTIMIZER: optimizer, **(parts or {})}
        for part, owner in owners.items():
            tensors[part] = owner.state_tensors()
            shards[part] = files.divided(tensors[part], owner.shard_of)
        self._check_finite(step, tensors)
        return Snapshot(step, json.dumps(state, indent=1), tensors, shards)

    def write(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, remove all but the newest and best ones, and return its folder.

        Replaces a checkpoint of the same step, and removes checkpoints of later steps, which are
        stale after a resume from an earlier step. After a StorageError (disk full), the incomplete
        checkpoint is removed and older ones are unchanged.
        """
        step, ranks = snapshot.step, self._ranks
        try:
            # 1. Create an empty hidden folder. 2. Write every rank's tensors. 3. Compute checksums.
            # 4. On rank 0, once everything else is on disk: state.json, manifest, rename.
            ranks.from_first("the folder of a checkpoint", lambda: self.begin(step))
            written = files.write_parts(
                self.writing_path(step), snapshot.tensors, snapshot.shards, ranks
            )
            ranks.from_first(
                "the end of a checkpoint", lambda: self.put_in_place(step, snapshot.state, written)
            )
        except BaseException as error:
            # Remove the incomplete checkpoint, to free its space on a full disk.
            if ranks.is_first:
                shutil.rmtree(self.writing_path(step), ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            explain = partial(self.explain_failure, step, error)
            raise StorageError(ranks.from_first("why a checkpoint failed", explain)) from None
        ranks.from_first("the checkpoints to keep", lambda: self.prune(step, self.steps()))
        return self.path(step)

    def _check_finite(self, step: int, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise NonFiniteError if AdamW produced a NaN, which no gradient check catches."""
        tensors = {
            f"{part}/{name}": t for part, named in parts.items() for name, t in named.items()
        }
        if found := nonfinite(tensors):
            kept = self.steps()
            good = f"{self.path(kept[-1])} is good" if kept else "there is no checkpoint before it"
            raise NonFiniteError(
                f"after step {step} there is a NaN or an infinity in {found}, which AdamW made of "
                f"finite gradients. No checkpoint and no model of it is written; {good}. Lower "
                "train.lr (sft.lr of supervised updates, critic.lr of a critic), and continue with "
                "--resume"
            )

    def latest(self) -> Latest:
        """Return the newest intact checkpoint, after verifying the checksum of every file.

        Raises UserError if all are damaged, with the damage of each. A newest intact checkpoint of
        another format is also an error; `latest` does not fall back to an older one.
        """
        latest = self._ranks.from_first("the newest checkpoint", self.newest)
        self._verified = latest.path
        return latest

    def load(self, path: str | Path, policy: Model, optimizer: Optimizer) -> Loaded:
        """Load master weights and optimizer state bit for bit into a model.

        Raises UserError if plan, model or tensors differ; the model is then unchanged.
        """
        # `latest` has just verified the checksums of the path that it returned.
        path, ranks = Path(path), self._ranks
        if path != self._verified:
            ranks.from_first("whether a checkpoint is good", lambda: files.check_intact(path))
        self._verified = None
        state, parts = ranks.from_first(
            "the contents of a checkpoint", lambda: (files.state_of(path), files.parts_of(path))
        )

        def read() -> dict[str, files.StoredTensors]:
            stored = {part: files.StoredTensors(place) for part, place in parts.items()}
            tensors, moments = stored.pop(files.MASTERS), stored.pop(files.OPTIMIZER, None)
            # Validate everything first, so that a mismatch changes nothing.
            plan = files.as_json(policy.plan.to_dict())
            saved, current = state["model"], model_dict(policy)
            problems = [
                *files.differences("precision plan", state["plan"], plan),
                *files.differences("model", saved, current),
            ]
            if saved.get(_TOWER) == current.get(_TOWER):  # else the whole tower is missing
                problems += tensors.differences(policy)
            if problems:
                raise UserError(
                    f"checkpoint {path} does not fit this run: {'; '.join(problems)}. Resume with "
                    "the settings it was made with"
                )
            updates = state["num_updates"]
            if moments is None and updates:
                raise UserError(
                    f"checkpoint {path} is damaged: it has made {updates} updates, and has no "
                    "optimizer state; use another one"
                )
            where = str(path / files.STATE_FILE)
            policy.restore_key_exponents(state.get("key_exponents"), where)
            # Load only this rank's rows. The optimizer comes first, since it validates and may
            # raise.
            own = {} if moments is None else moments.own(optimizer.shard_of)
            optimizer.load_state(own, updates)
            tensors.copy_to(policy)
            return stored

        others = ranks.together("the tensors of a checkpoint", read)
        if found := nonfinite({**policy.master_weights(), **optimizer.state_tensors()}):
            raise NonFiniteError(
                f"checkpoint {path} has a NaN or an infinity in {found}; remove its folder, and "
                "resume from the checkpoint before it"
            )
        policy.requantize()
        return Loaded(state["step"], state["extra"], others, state.get("ranks", 1))

    def tidy(self, step: int) -> None:
        """Remove what a crash kept `write` from removing, up to the resumed step."""

        def remove() -> None:
            self.clean()
            self.prune(step, [s for s in self.steps() if s <= step])

        self._ranks.from_first("the checkpoints to keep", remove)


def model_dict(policy: Model) -> Json:
    """Return a model configuration in the form stored in checkpoints."""
    config = policy.config.flat()
    config.pop("raw", None)  # the source's config.json; the other fields contain everything needed
    if not config.get("layers_without_rope"):  # absent in checkpoints of earlier versions
        config.pop("layers_without_rope", None)
    if policy.trained_tower != "frozen":
        config[_TOWER] = policy.trained_tower
    if policy.lora is not None:
        config["adapter"] = {**dataclasses.asdict(policy.lora), "base": policy.base_digest}
    return dict(files.as_json(config))


class Background:
    """Worker thread that runs one job at a time and raises its error in the calling thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object], name: str) -> None:
        """Start a job once the previous one has finished; raise the previous one's error."""
        self.wait()
        # Daemon thread, so that a second Ctrl-C does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """True if the last job failed; `wait` raises its error."""
        return self._error is not None

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the running job, at most `limit_s` seconds, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join(limit_s)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
