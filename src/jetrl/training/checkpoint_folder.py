"""The folder of one checkpoint, as a reader meets it: the files, and what is wrong with them.

One process writes format 2, in which each part is a file (masters.safetensors). Several processes
write format 3, in which each part is a folder with files of every rank (masters/shard-...). Both
have the same state.json and manifest.json.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from jetrl.errors import UserError
from jetrl.files import checked, read_json
from jetrl.training.checkpoint_files import is_known_by
from jetrl.training.checkpoint_schemas import MANIFEST, MOST_STATE_BYTES, STATE

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

    They are those of the manifest alone: nothing beside them was compared with a checksum.
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
        UserError: The file is not a manifest, or leaves out a file of every checkpoint.
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
    """Return the contents of state.json, checked where its format is one of this version's.

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
            f"format {FORMAT} and {SHARDED_FORMAT}: go on with the version that wrote it (log.txt "
            "of the run names it), or start a new run from an exported model"
        )
    return state
