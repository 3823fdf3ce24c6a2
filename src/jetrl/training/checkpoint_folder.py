"""The folder of one checkpoint: its schemas, its checks, and its writing.

One rank writes format 2: each part is a file (masters.safetensors). Several ranks write format 3:
each part is a folder with the files of every rank (masters/shard-...). Both have the same
state.json and manifest.json.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self

import torch
from pydantic import Field, TypeAdapter, model_validator

from jetrl.distributed.shards import Shard
from jetrl.distributed.world import World
from jetrl.errors import UserError
from jetrl.files import Count, Step, Stored, checked, read_json
from jetrl.models.hf_files import sync
from jetrl.training.checkpoint_files import (
    Fingerprint,
    fingerprint,
    is_known_by,
    write_tensors,
    write_text,
)

MOST_STATE_BYTES = 2**30  # of state.json: partial rollouts keep a token in some 40 bytes

_PLAIN = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
FileName = Annotated[str, Field(pattern=rf"^({_PLAIN}/)?{_PLAIN}$", max_length=255)]
"""The name of a file beside the manifest, or in a folder beside it, none of them hidden."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredFingerprint(Stored):
    """The fingerprint of a file (`checkpoint_files.fingerprint`)."""

    bytes: Count
    sha256: Digest | None = None
    sha256_of_gib_pieces: Digest | None = None

    @model_validator(mode="after")
    def _check_digest(self) -> Self:
        if self.sha256 is None and self.sha256_of_gib_pieces is None:
            raise ValueError("has no SHA-256")
        return self


class State(Stored):
    """The contents of state.json.

    Attributes:
        score: The score of the step, if any.
        extra: JSON values of the run (`session.stored_states`).
        alphabet: The characters of a character tokenizer; None for another one, and in older files.
    """

    format: Count
    step: Step
    num_updates: Count
    plan: dict[str, Any]
    model: dict[str, Any]
    score: float | None
    extra: dict[str, Any]
    alphabet: str | None = None
    ranks: Annotated[int, Field(ge=1, lt=2**31)] = 1


MANIFEST = TypeAdapter(dict[FileName, StoredFingerprint])
STATE = TypeAdapter(State)


FORMAT, SHARDED_FORMAT = 2, 3
MASTERS, OPTIMIZER = "masters", "optimizer"
STATE_FILE, MANIFEST_FILE = "state.json", "manifest.json"
_SUFFIX = ".safetensors"


def masters_of(path: Path) -> Path | None:
    """Return the file or folder with the master weights of a checkpoint, None without any."""
    found = (path / f"{MASTERS}{_SUFFIX}", path / MASTERS)
    if found[0].is_file():
        return found[0]
    return found[1] if any(found[1].glob(f"*{_SUFFIX}")) else None


def parts_of(path: Path) -> dict[str, Path]:
    """Return the file or folder of each part of a checkpoint: masters, optimizer and others.

    Only the manifest's: nothing else was compared with a checksum.
    """
    parts = {}
    for name in map(PurePosixPath, manifest_of(path)):
        if name.suffix == _SUFFIX:
            folder = len(name.parts) > 1
            parts[name.parts[0] if folder else name.stem] = path / name.parts[0]
    return parts


def problem_of(path: Path) -> str | None:
    """Return how a checkpoint is damaged, None if it is not."""
    try:
        manifest = manifest_of(path)
        # Cheap checks of all files first, then the checksums, in parallel.
        for name, expected in manifest.items():
            found = (path / name).stat()
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a regular file"
            if found.st_size != expected["bytes"]:
                return f"{name} has {found.st_size} bytes instead of {expected['bytes']}"
        for name in _beside(path, manifest):
            return f"{name} is not a file of this checkpoint: {MANIFEST_FILE} does not list it"
        names = sorted(manifest)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            known = pool.map(lambda name: is_known_by(path / name, manifest[name]), names)
            for name, is_good in zip(names, known, strict=True):
                if not is_good:
                    return f"{name} does not match its checksum"
        # Last, once the bytes are known to be those that were written.
        any_state_of(path)
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror or error}"
    except UserError as error:
        return str(error)
    return None


def _beside(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files in the folders of parts that the manifest does not list."""
    folders = {name.parent for name in map(PurePosixPath, manifest) if len(name.parts) > 1}
    files = [file for folder in sorted(folders) for file in (path / folder).glob(f"*{_SUFFIX}")]
    names = (file.relative_to(path).as_posix() for file in sorted(files))
    return [name for name in names if name not in manifest]


def manifest_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the fingerprints of a checkpoint's files by their names.

    Raises:
        FileNotFoundError: There is no manifest.
        UserError: The file is not a manifest, or lacks a file that every checkpoint has.
    """
    try:
        manifest: dict[str, dict[str, Any]] = read_json(path / MANIFEST_FILE)
        checked(MANIFEST, manifest, str(path / MANIFEST_FILE))
    except UserError as error:
        raise UserError(f"{MANIFEST_FILE} is not a checkpoint's manifest ({error})") from None
    sharded = any(name.startswith(f"{MASTERS}/") for name in manifest)
    # Before its first update an optimizer of several ranks has no tensor, and so no file.
    parts = [] if sharded else [f"{MASTERS}{_SUFFIX}", f"{OPTIMIZER}{_SUFFIX}"]
    for name in (*parts, STATE_FILE):
        if name not in manifest:
            raise UserError(f"{MANIFEST_FILE} is not a checkpoint's manifest (it lacks {name})")
    return manifest


def any_state_of(path: Path) -> dict[str, Any]:
    """Return the contents of state.json, checked if the format is one of this version's.

    Raises:
        FileNotFoundError: There is no state.json.
        UserError: The file is not a checkpoint's state.
    """
    state: Any = read_json(path / STATE_FILE, MOST_STATE_BYTES)
    version = state.get("format") if isinstance(state, dict) else None
    if type(version) is int and version not in (FORMAT, SHARDED_FORMAT):
        return {"format": version}
    checked(STATE, state, str(path / STATE_FILE))
    return dict(state)


def state_of(path: Path) -> dict[str, Any]:
    """Return the contents of state.json of an undamaged checkpoint.

    Raises:
        UserError: The checkpoint has another format.
    """
    state = any_state_of(path)
    if state["format"] not in (FORMAT, SHARDED_FORMAT):
        raise UserError(
            f"checkpoint {path} has format {state['format']}, and this version of jetrl reads "
            f"format {FORMAT} and {SHARDED_FORMAT}: continue with the version that wrote it "
            "(log.txt of the run names it), or start a new run from an exported model"
        )
    return state


def write_parts(
    folder: Path,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    shards: Mapping[str, Mapping[str, Shard]],
    ranks: World,
) -> list[Path]:
    """Write a checkpoint's tensors: a file per part, or a folder of the ranks' files; a collective.

    Returns this rank's files, which are on disk. If a rank could not write, every rank raises its
    OSError.

    Args:
        parts: The tensors by part and name; own rows of divided ones.
        shards: How divided tensors are owned by ranks, by part and name.
    """
    own: list[Path] = []
    if ranks.size == 1:
        for part, tensors in parts.items():
            own.append(folder / f"{part}.safetensors")
            write_tensors(own[-1], tensors)
        return own
    # Torch's checkpoints take half a second to import, and a run of one process writes none.
    from jetrl.distributed.shard_files import write_shards

    for part, tensors in parts.items():
        own += write_shards(folder / part, tensors, shards.get(part, {}), ranks)
    return own


def fingerprints(folder: Path, own: Sequence[Path], ranks: World) -> dict[str, Fingerprint]:
    """Return the fingerprints of all ranks' files, by their names in the folder; a collective."""
    what = "the checksums of a checkpoint"
    found_here = ranks.together(
        what, lambda: {path.relative_to(folder).as_posix(): fingerprint(path) for path in own}
    )
    return {
        name: found for files in ranks.gather(what, found_here) for name, found in files.items()
    }


def complete_folder(folder: Path, state: str, files: Mapping[str, Fingerprint]) -> None:
    """Write state.json and, when all else is on disk, the manifest; on rank 0.

    Raises:
        OSError: A file could not be written, or one of another rank is missing.
    """
    # Without a shared file system rank 0 would seal a folder that lacks other ranks' files.
    for name, expected in files.items():
        file = folder / name
        if not file.exists() or file.stat().st_size != expected["bytes"]:
            raise OSError(
                f"rank 0 does not find {name} as its rank wrote it: all machines of a run need its "
                "directory on one file system that they share"
            )
    for part in sorted({(folder / name).parent for name in files} - {folder}):
        sync(part)
    write_text(folder / STATE_FILE, state)
    manifest = {**files, STATE_FILE: fingerprint(folder / STATE_FILE)}
    # The manifest makes the checkpoint good, so it is written last.
    write_text(folder / MANIFEST_FILE, json.dumps(dict(sorted(manifest.items())), indent=1))
    sync(folder)
