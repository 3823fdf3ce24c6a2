"""Writing, flushing and fingerprinting a checkpoint's files, and reading its tensors."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import safe_open

from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.models.hf_files import reading_tensors

Fingerprint = dict[str, Any]

# By safetensors' format (huggingface.co/docs/safetensors): the names of what a checkpoint holds.
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BUFFER = 2**26  # bytes of a tensor that are in CPU memory at once
_FLUSHED = 2**30  # bytes between flushes: the system need not hold a whole file for the disk
_PIECE, _READ = 2**30, 2**22  # bytes of a file's pieces for its fingerprint, and read at once
_WHOLE, _PIECES = "sha256", "sha256_of_gib_pieces"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, which is on disk when this returns.

    Tensors go through a buffer of 64 MiB: safetensors' own writer takes as much CPU memory as the
    file has bytes.
    """
    # The widest types first: every tensor begins at a multiple of its element.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with open(path, "wb") as file:
        written = flushed = file.write(_header(ordered))
        for piece in chain.from_iterable(map(_pieces, ordered.values())):
            written += file.write(piece)
            if written - flushed >= _FLUSHED:
                _flush(file)
                flushed = written
        _flush(file)


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a file's head: the length of a JSON, and in it each tensor's type and place."""
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, one buffer at a time; each must be used before the next."""
    values = tensor.detach().contiguous().flatten().view(torch.uint8)
    buffer = None if tensor.device.type == "cpu" else _pinned()
    for part in values.split(_BUFFER):
        here = part if buffer is None else buffer[: len(part)].copy_(part)
        yield here.numpy().data


@functools.cache
def _pinned() -> torch.Tensor:
    """Return a buffer in pinned memory, for one writer at a time."""
    return torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True)


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, which is on disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        _flush(file)


def fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a file, as a manifest has it.

    "bytes" and "sha256" of the contents; above 1 GiB instead "sha256_of_gib_pieces", the SHA-256
    of those of its pieces of 1 GiB, which are computed in parallel.
    """
    size = path.stat().st_size
    if size <= _PIECE:
        return {"bytes": size, _WHOLE: _digest(path).hex()}
    return {"bytes": size, _PIECES: _digest_of_pieces(path, size)}


def is_known_by(path: Path, expected: Mapping[str, Any]) -> bool:
    """Return whether a file matches a fingerprint.

    That of a large file may be older: "sha256" of the whole or of the pieces.

    Raises:
        KeyError: The fingerprint has neither.
    """
    if _PIECES in expected:
        return _digest_of_pieces(path, path.stat().st_size) == str(expected[_PIECES])
    known = str(expected[_WHOLE])
    size = path.stat().st_size
    if size > _PIECE and _digest_of_pieces(path, size) == known:
        return True
    return _digest(path, size=size).hex() == known


def _digest_of_pieces(path: Path, size: int) -> str:
    """Return the SHA-256 of the SHA-256 of each piece of a file, in hexadecimal."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(functools.partial(_digest, path), range(0, size, _PIECE)))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(path: Path, begin: int = 0, size: int | None = None) -> bytes:
    """Return the SHA-256 of `size` bytes (by default of a piece) from `begin` on."""
    digest, left = hashlib.sha256(), _PIECE if size is None else size
    with open(path, "rb") as file:
        file.seek(begin)
        while left and (part := file.read(min(left, _READ))):
            digest.update(part)
            left -= len(part)
    return digest.digest()


def as_json(value: Any) -> Any:
    """Return a value as JSON reads it back."""
    return json.loads(json.dumps(value))


def differences(what: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key that two records do not agree on."""
    return [
        f"{what} {key} is {saved.get(key)!r} in the checkpoint and {current.get(key)!r} here"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]


def tensor_differences(tensors: Mapping[str, Layout], masters: Mapping[str, Layout]) -> list[str]:
    """Return a sentence for each tensor that is missing, extra, or of another shape or dtype."""
    return [
        *(f"the checkpoint lacks {name}" for name in masters if name not in tensors),
        *(f"this model has no {name}" for name in tensors if name not in masters),
        *(
            f"{name} is {t.dtype} {tuple(t.shape)} there and {own.dtype} {tuple(own.shape)} here"
            for name, t in tensors.items()
            if (own := masters.get(name)) is not None
            and (t.shape != own.shape or t.dtype != own.dtype)
        ),
    ]


ShardOf = Callable[[str], Shard | None]


class Layout(NamedTuple):
    """The dtype and shape of a whole tensor, of which a rank may have some rows."""

    dtype: torch.dtype
    shape: torch.Size


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of a file, or of a folder of several ranks' files, read from disk at each access.

    Any number of ranks reads either, whole tensors or own rows.

    Raises:
        UserError: A file is missing or damaged; it is named.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: Callable[[str, slice | None], torch.Tensor]
        if path.is_dir():
            # Torch's checkpoints take half a second to import: few processes read any.
            from jetrl.distributed.shard_files import ShardFiles

            files = ShardFiles(path)
            self.layouts = {name: Layout(*found) for name, found in files.properties.items()}
            self._read = files.read
        else:
            self._open_file()

    def _open_file(self) -> None:
        with reading_tensors(self._path):
            self._file = safe_open(str(self._path), framework="pt", device="cpu")
            self.layouts = {}
            for name in self._file.keys():  # noqa: SIM118  (not a mapping)
                shape = torch.Size(self._file.get_slice(name).get_shape())
                self.layouts[name] = Layout(self._rows_of_file(name, slice(0, 0)).dtype, shape)
        self._read = self._rows_of_file

    def _rows_of_file(self, name: str, rows: slice | None) -> torch.Tensor:
        shape = self._file.get_slice(name).get_shape()
        if rows is None or not shape:
            tensor: torch.Tensor = self._file.get_tensor(name)
        else:
            tensor = self._file.get_slice(name)[rows]
        return tensor

    def rows(self, name: str, shard: Shard | None) -> torch.Tensor:
        """Return the rows of a tensor that this rank owns, in CPU memory; all if shard is None.

        Raises:
            UserError: The tensor has another number of rows.
        """
        shape = self.layouts[name].shape
        if shard is None:
            return self._read(name, None)
        if shape[:1] != (shard.num_rows,):
            raise UserError(
                f"{self._path}: {name} is {tuple(shape)}; this model needs {shard.num_rows} rows"
            )
        return self._read(name, shard.own_rows)

    def own(self, shard_of: ShardOf) -> Mapping[str, torch.Tensor]:
        """Return the same tensors, with this rank's rows of those that `shard_of` divides."""
        return _OwnRows(self, shard_of)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.layouts:
            raise KeyError(name)
        return self._read(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)


class _OwnRows(Mapping[str, torch.Tensor]):
    """Stored tensors, of which this rank reads its own rows."""

    def __init__(self, stored: StoredTensors, shard_of: ShardOf) -> None:
        self._stored, self._shard_of = stored, shard_of

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._stored:
            raise KeyError(name)
        return self._stored.rows(name, self._shard_of(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def whole_layouts(
    tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]
) -> dict[str, Layout]:
    """Return the layouts of whole tensors, given this rank's tensors and their division."""
    return {
        name: Layout(
            tensor.dtype,
            torch.Size((shards[name].num_rows, *tensor.shape[1:]))
            if name in shards
            else tensor.shape,
        )
        for name, tensor in tensors.items()
    }


def divided(tensors: Mapping[str, torch.Tensor], shard_of: ShardOf) -> dict[str, Shard]:
    """Return the division of those tensors that are divided among ranks, by name."""
    return {name: shard for name in tensors if (shard := shard_of(name)) is not None}
