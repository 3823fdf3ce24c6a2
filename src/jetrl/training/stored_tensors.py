"""The tensors of a part of a checkpoint, read one at a time, whole or some rows of one.

One process writes a part into one file, NAME.safetensors; several write files each, into a folder
NAME (`distributed.shard_files`). Either is read by any number of processes, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.models.hf_files import reading_tensors

ShardOf = Callable[[str], Shard | None]


class Layout(NamedTuple):
    """The dtype and shape of a whole tensor.

    Attributes:
        shape: The shape of the whole tensor, of which a rank may have some rows.
    """

    dtype: torch.dtype
    shape: torch.Size


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of a file or of a folder of files by name, read from the disk at each access.

    Attributes:
        layouts: The dtype and shape of each tensor, by name.

    Raises:
        UserError: The file, or a file in the folder, is missing or damaged; it is named.
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
        """Return the rows of a tensor that this rank owns, in CPU memory.

        Args:
            shard: The division of the tensor's rows; None: the whole tensor.

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
        """Return the same tensors, of which those that are divided have the rows of this rank.

        Args:
            shard_of: Returns the division of a tensor's rows, None of one that is not divided.
        """
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
    """Stored tensors, of which this rank reads the rows that it owns."""

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
    """Return the layouts of whole tensors, of which this rank has all or some rows.

    Args:
        tensors: The tensors by name: own rows of those that are divided, and whole other ones.
        shards: The division of the rows of those that are divided, by name.
    """
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
    """Return the division of the rows of those tensors that are divided among ranks, by name.

    Args:
        shard_of: Returns the division of a tensor's rows, None of one that is not divided.
    """
    return {name: shard for name in tensors if (shard := shard_of(name)) is not None}
