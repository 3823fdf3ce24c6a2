"""Files of tensors whose rows are divided among ranks.

    FOLDER/shard-00002-model-00001-of-00001.safetensors    the file of rank 1

Each rank writes the rows that it owns; rank 0 also writes the tensors that all have whole. The
metadata's DCP_SHARDING_INFO says where a tensor's rows begin. Any number of processes can read any
rows.

The layout is that of torch.distributed.checkpoint (DCP), whose HuggingFaceStorageReader reads it.
Earlier versions wrote several files per rank by DCP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.files import Count, Stored, checked, open_regular


class _Place(Stored):
    """The place in a whole tensor at which the rows in a file begin."""

    saved_offsets: list[Count]


_PLACES = TypeAdapter(dict[str, _Place])
_KEY = "DCP_SHARDING_INFO"


def file_of(rank: int) -> str:
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def own_part(
    tensors: Mapping[str, Tensor], shards: Mapping[str, Shard], rank: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a rank's own rows of divided tensors, whole other ones, and the file's metadata."""
    own, places = {}, {}
    for name, tensor in tensors.items():
        shard = shards.get(name)
        if len(tensor) > 0 if shard is not None else rank == 0:
            first_row = 0 if shard is None else shard.first_row
            own[name] = tensor
            places[name] = {"saved_offsets": [first_row, *[0] * tensor.dim()][: tensor.dim()]}
    return own, {_KEY: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}


class ShardFiles:
    """The tensors in the files of all ranks, read one at a time; `properties` are of whole ones.

    Raises UserError for a damaged file, or a tensor whose rows are missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.properties: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._pieces: dict[str, list[tuple[int, int, Any]]] = {}  # rows from, to, and their file
        for file in sorted(folder.glob("*.safetensors")):
            try:
                open_regular(file).close()
                self._open(file)
            except UserError:
                raise
            except (SafetensorError, OSError, ValueError, RecursionError) as error:
                raise UserError(f"{file}: missing or not a safetensors file ({error})") from None
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[:2])
            bounds = [0, *(end for _, end, _ in pieces)]
            if [first for first, _, _ in pieces] != bounds[:-1]:
                raise UserError(f"{folder}: the files do not have every row of {name} once")
            dtype, shape = self.properties[name]
            self.properties[name] = dtype, torch.Size([bounds[-1], *shape[1:]] if shape else [])

    def _open(self, file: Path) -> None:
        handle: Any = safe_open(str(file), framework="pt")
        text = (handle.metadata() or {}).get(_KEY)
        if text is None:
            raise UserError(f"{file}: no rank's file: its metadata lacks {_KEY}")
        places = checked(_PLACES, json.loads(text), f"{file}: {_KEY}")
        for name in handle.keys():  # noqa: SIM118  (not a mapping)
            rows = handle.get_slice(name)
            shape, place = torch.Size(rows.get_shape()), places.get(name)
            if place is None or len(place.saved_offsets) != len(shape):
                raise UserError(f"{file}: {_KEY} does not say where {name} begins")
            first, num_rows = (place.saved_offsets[0], shape[0]) if shape else (0, 1)
            dtype = (rows[:0] if shape else handle.get_tensor(name)).dtype
            known, other = self.properties.setdefault(name, (dtype, shape))
            alike = (known, len(other), other[1:]) == (dtype, len(shape), shape[1:])
            if not alike or any(place.saved_offsets[1:]):
                raise UserError(f"{file}: the rows of {name} do not go with those of other files")
            self._pieces.setdefault(name, []).append((first, first + num_rows, handle))

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return rows of a tensor, or the whole tensor, in CPU memory."""
        dtype, shape = self.properties[name]
        whole: Tensor
        try:
            if not shape:
                whole = self._pieces[name][0][2].get_tensor(name)
                return whole
            first, end = (0, shape[0]) if rows is None else (rows.start, rows.stop)
            parts = [torch.empty((0, *shape[1:]), dtype=dtype)]
            for begin, stop, handle in self._pieces[name]:
                if begin < end and first < stop:
                    own = slice(max(first, begin) - begin, min(end, stop) - begin)
                    parts.append(handle.get_slice(name)[own])
            return torch.cat(parts)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self._folder}: {name} could not be read: {error}") from None
