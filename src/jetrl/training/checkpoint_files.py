"""Files of a checkpoint: schemas, validation, writing and reading.

A single rank writes format 2, with one file per component (masters.safetensors). Several ranks
write format 3, with one folder per component (masters/shard-...). Both share state.json and
manifest.json.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, Self

import torch
from pydantic import Field, TypeAdapter, model_validator
from torch import Tensor

from jetrl.distributed.shard_files import ShardFiles, file_of, own_part
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import World
from jetrl.errors import UserError
from jetrl.files import Count, Step, Stored, checked, read_json
from jetrl.models.hf_files import open_tensors, sync
from jetrl.models.model import Model
from jetrl.types import Json

MOST_STATE_BYTES = 2**30  # state.json: partial rollouts need about 40 bytes per token

_PLAIN = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
FileName = Annotated[str, Field(pattern=rf"^({_PLAIN}/)?{_PLAIN}$", max_length=255)]
"""File name next to the manifest or in a subfolder, not hidden."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredFingerprint(Stored):
    """Stored fingerprint of a file (`fingerprint`)."""

    bytes: Count
    sha256: Digest | None = None
    sha256_of_gib_pieces: Digest | None = None

    @model_validator(mode="after")
    def _check_digest(self) -> Self:
        if self.sha256 is None and self.sha256_of_gib_pieces is None:
            raise ValueError("has no SHA-256")
        return self


class State(Stored):
    """Contents of state.json; `alphabet` holds the characters of a character tokenizer."""

    format: Count
    step: Step
    num_updates: Count
    plan: Json
    model: Json
    score: float | None
    extra: Json
    alphabet: str | None = None
    key_exponents: str | None = None
    ranks: Annotated[int, Field(ge=1, lt=2**31)] = 1


MANIFEST = TypeAdapter(dict[FileName, StoredFingerprint])
STATE = TypeAdapter(State)


FORMAT, SHARDED_FORMAT = 2, 3
MASTERS, OPTIMIZER = "masters", "optimizer"
STATE_FILE, MANIFEST_FILE = "state.json", "manifest.json"
_SUFFIX = ".safetensors"


def masters_of(path: Path) -> Path | None:
    """Return the file or folder with a checkpoint's master weights, or None."""
    file, folder = path / f"{MASTERS}{_SUFFIX}", path / MASTERS
    sharded = any(folder.glob(f"*{_SUFFIX}"))
    return file if file.is_file() else folder if sharded else None


def parts_of(path: Path) -> dict[str, Path]:
    """Return the file or folder of each component in the manifest; only these have checksums."""
    parts = {}
    for name in map(PurePosixPath, manifest_of(path)):
        if name.suffix == _SUFFIX:
            folder = len(name.parts) > 1
            parts[name.parts[0] if folder else name.stem] = path / name.parts[0]
    return parts


def problem_of(path: Path) -> str | None:
    """Return the damage of a checkpoint as text, or None if it is intact."""
    try:
        manifest = manifest_of(path)
        # Cheap checks of all files first, then checksums, in parallel.
        for name, expected in manifest.items():
            found = (path / name).stat()
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a regular file"
            if found.st_size != expected["bytes"]:
                return f"{name} has {found.st_size} bytes instead of {expected['bytes']}"
        for name in _unlisted(path, manifest):
            return f"{name} is not a file of this checkpoint: {MANIFEST_FILE} does not list it"
        names = sorted(manifest)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            known = pool.map(lambda name: is_known_by(path / name, manifest[name]), names)
            for name, is_good in zip(names, known, strict=True):
                if not is_good:
                    return f"{name} does not match its checksum"
        # Parse last, once the checksums are verified.
        state_of(path, any_format=True)
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror or error}"
    except UserError as error:
        return str(error)
    return None


def check_intact(path: Path) -> None:
    """Verify a checkpoint against its manifest; raise UserError with the damage."""
    problem = problem_of(path)
    if problem is not None:
        raise UserError(f"checkpoint {path} is damaged: {problem}; use another one")
    state_of(path)


def _unlisted(path: Path, manifest: Json) -> list[str]:
    """Return files in component folders that the manifest does not list."""
    folders = {name.parent for name in map(PurePosixPath, manifest) if len(name.parts) > 1}
    files = [file for folder in sorted(folders) for file in (path / folder).glob(f"*{_SUFFIX}")]
    names = (file.relative_to(path).as_posix() for file in sorted(files))
    return [name for name in names if name not in manifest]


def manifest_of(path: Path) -> dict[str, Json]:
    """Return the fingerprints of a checkpoint's files, by file name."""
    try:
        manifest: dict[str, Json] = read_json(path / MANIFEST_FILE)
        checked(MANIFEST, manifest, str(path / MANIFEST_FILE))
    except UserError as error:
        raise UserError(f"{MANIFEST_FILE} is not a checkpoint's manifest ({error})") from None
    sharded = any(name.startswith(f"{MASTERS}/") for name in manifest)
    # Before the first update, a sharded optimizer has no tensors and no file.
    parts = [] if sharded else [f"{MASTERS}{_SUFFIX}", f"{OPTIMIZER}{_SUFFIX}"]
    for name in (*parts, STATE_FILE):
        if name not in manifest:
            raise UserError(f"{MANIFEST_FILE} is not a checkpoint's manifest (it lacks {name})")
    return manifest


def state_of(path: Path, any_format: bool = False) -> Json:
    """Return the contents of state.json; `any_format` also returns other versions, unvalidated."""
    # Other versions may have other fields, so check the format first.
    state: Any = read_json(path / STATE_FILE, MOST_STATE_BYTES)
    version = state.get("format") if isinstance(state, dict) else None
    if type(version) is not int or version in (FORMAT, SHARDED_FORMAT):
        checked(STATE, state, str(path / STATE_FILE))
    elif not any_format:
        raise UserError(
            f"checkpoint {path} has format {version}, and this version of jetrl reads format "
            f"{FORMAT} and {SHARDED_FORMAT}: continue with the version that wrote it (log.txt of "
            "the run names it), or start a new run from an exported model"
        )
    return dict(state)


def write_parts(
    folder: Path,
    parts: Mapping[str, Mapping[str, Tensor]],
    shards: Mapping[str, Mapping[str, Shard]],
    ranks: World,
) -> dict[str, Fingerprint]:
    """Write a checkpoint's tensors, as one file or one folder per component; a collective.

    Returns the fingerprints of all files by relative name. If a rank fails, all ranks raise its
    OSError.
    """
    own: list[Path] = []
    if ranks.size == 1:
        for part, tensors in parts.items():
            own.append(folder / f"{part}{_SUFFIX}")
            write_tensors(own[-1], tensors)
    else:
        for part, tensors in parts.items():
            own.append(folder / part / file_of(ranks.rank))
            make = functools.partial(own[-1].parent.mkdir, exist_ok=True)
            ranks.together("a folder of a checkpoint", make)
            rows, metadata = own_part(tensors, shards.get(part, {}), ranks.rank)
            write = functools.partial(write_tensors, own[-1], rows, metadata)
            ranks.together("the files of a checkpoint", write)
    what = "the checksums of a checkpoint"
    found = ranks.together(
        what, lambda: {path.relative_to(folder).as_posix(): fingerprint(path) for path in own}
    )
    # Each rank hashes its own files; rank 0 needs all fingerprints.
    return {name: known for files in ranks.gather(what, found) for name, known in files.items()}


def complete_folder(folder: Path, state: str, files: Mapping[str, Fingerprint]) -> None:
    """Write state.json and then, once everything else is on disk, the manifest; rank 0 only."""
    # Without a shared file system, rank 0 would seal a folder that lacks other ranks' files.
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
    # The manifest marks the checkpoint as complete, so it is written last.
    write_text(folder / MANIFEST_FILE, json.dumps(dict(sorted(manifest.items())), indent=1))
    sync(folder)


Fingerprint = Json

# Checkpoint dtypes by safetensors name (huggingface.co/docs/safetensors).
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.uint8: "U8",
}
_BUFFER = 2**26  # staging buffer in CPU memory, in bytes
_FLUSHED = 2**30  # bytes between flushes, to limit the dirty page cache
_PIECE, _READ = 2**30, 2**22  # bytes per hashed piece, and per read
_WHOLE, _PIECES = "sha256", "sha256_of_gib_pieces"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write and flush a safetensors file with only 64 MiB of host memory."""
    # Widest dtypes first, so that every tensor is aligned to its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with open(path, "wb") as file:
        written = flushed = file.write(_header(ordered, metadata))
        for piece in chain.from_iterable(map(_pieces, ordered.values())):
            written += file.write(piece)
            if written - flushed >= _FLUSHED:
                _flush(file)
                flushed = written
        _flush(file)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Return a safetensors header: length, then JSON with dtype, shape and offsets per tensor."""
    entries: Json = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        place = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        entries[name] = {"dtype": _DTYPES[tensor.dtype], **place}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes one buffer at a time; use each before requesting the next."""
    # Stage through one buffer: a GPU tensor needs no full copy on the host.
    values = tensor.detach().contiguous().flatten().view(torch.uint8)
    buffer = None if tensor.device.type == "cpu" else _pinned()
    for part in values.split(_BUFFER):
        here = part if buffer is None else buffer[: len(part)].copy_(part)
        yield here.numpy().data


@functools.cache
def _pinned() -> Tensor:
    """Return a pinned-memory buffer, for one writer at a time."""
    return torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True)


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file and flush it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        _flush(file)


def fingerprint(path: Path) -> Fingerprint:
    """Return a file's fingerprint as stored in a manifest: "bytes" and "sha256".

    Files above 1 GiB have "sha256_of_gib_pieces" instead: the SHA-256 over the SHA-256s of 1 GiB
    pieces.
    """
    size = path.stat().st_size
    # Hash pieces in parallel: a single core would take minutes for a large model.
    if size <= _PIECE:
        return {"bytes": size, _WHOLE: _digest(path).hex()}
    return {"bytes": size, _PIECES: _digest_of_pieces(path, size)}


def is_known_by(path: Path, expected: Json) -> bool:
    """Return True if a file matches a fingerprint, also in an older format."""
    if _PIECES in expected:
        return _digest_of_pieces(path, path.stat().st_size) == str(expected[_PIECES])
    # Older versions stored either digest under the same key.
    known, size = str(expected[_WHOLE]), path.stat().st_size
    if size > _PIECE and _digest_of_pieces(path, size) == known:
        return True
    return _digest(path, size=size).hex() == known


def _digest_of_pieces(path: Path, size: int) -> str:
    """Return the SHA-256 over the SHA-256s of a file's pieces, in hexadecimal."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(functools.partial(_digest, path), range(0, size, _PIECE)))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(path: Path, begin: int = 0, size: int | None = None) -> bytes:
    """Return the SHA-256 of `size` bytes (default: one piece) starting at `begin`."""
    digest, left = hashlib.sha256(), _PIECE if size is None else size
    with open(path, "rb") as file:
        file.seek(begin)
        while left and (part := file.read(min(left, _READ))):
            digest.update(part)
            left -= len(part)
    return digest.digest()


ShardOf = Callable[[str], Shard | None]


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a file, or of a folder of per-rank files, read from disk on access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shard_of: ShardOf = lambda name: None
        self._read: Callable[[str, slice | None], Tensor]
        if path.is_dir():
            files = ShardFiles(path)
            self.layouts = dict(files.properties)
            self._read = files.read
        else:
            self._file, self.layouts = open_tensors(path), {}
            for name in self._file.keys():  # noqa: SIM118  (not a mapping)
                shape = torch.Size(self._file.get_slice(name).get_shape())
                self.layouts[name] = (self._rows_of_file(name, slice(0, 0)).dtype, shape)
            self._read = self._rows_of_file

    def _rows_of_file(self, name: str, rows: slice | None) -> Tensor:
        part = self._file.get_slice(name)
        whole = rows is None or not part.get_shape()
        return self._file.get_tensor(name) if whole else part[rows]

    def rows(self, name: str, shard: Shard | None) -> Tensor:
        """Return this rank's rows of a tensor in CPU memory; all rows if shard is None."""
        _, shape = self.layouts[name]
        if shard is None:
            return self._read(name, None)
        # The shard comes from the model, so the number of rows must match.
        if shape[:1] != (shard.num_rows,):
            raise UserError(
                f"{self._path}: {name} is {tuple(shape)}; this model needs {shard.num_rows} rows"
            )
        return self._read(name, shard.own_rows)

    def differences(self, model: Model) -> list[str]:
        """Return a message for each master weight that is missing, extra or has another layout."""
        here = {}
        for name, master in model.master_weights().items():
            shard, shape = model.weights.shards.get(name), master.shape
            whole = shape if shard is None else torch.Size((shard.num_rows, *shape[1:]))
            here[name] = (master.dtype, whole)
        return [
            *(f"the checkpoint lacks {name}" for name in here if name not in self.layouts),
            *(f"this model has no {name}" for name in self.layouts if name not in here),
            *(
                f"{n} is {t[0]} {tuple(t[1])} there and {h[0]} {tuple(h[1])} here"
                for n, t in self.layouts.items()
                if (h := here.get(n, t)) != t
            ),
        ]

    @torch.no_grad()
    def copy_to(self, model: Model) -> None:
        """Copy master weights into a model, which must be requantized afterwards."""
        for name, master in model.master_weights().items():
            master.copy_(self.rows(name, model.weights.shards.get(name)))

    def own(self, shard_of: ShardOf) -> Mapping[str, Tensor]:
        """Return these tensors with only this rank's rows of each sharded tensor."""
        own = copy.copy(self)
        own._shard_of = shard_of
        return own

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.layouts:
            raise KeyError(name)
        return self.rows(name, self._shard_of(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)


def divided(tensors: Mapping[str, Tensor], shard_of: ShardOf) -> dict[str, Shard]:
    """Return the shards of all sharded tensors, by name."""
    return {name: shard for name in tensors if (shard := shard_of(name)) is not None}


def as_json(value: Any) -> Any:
    """Return a value after a JSON round trip."""
    return json.loads(json.dumps(value))


def differences(what: str, saved: Json, current: Json) -> list[str]:
    """Return a message for each key on which two records differ."""
    return [
        f"{what} {key} is {saved.get(key)!r} in the checkpoint and {current.get(key)!r} here"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
