"""Files of tensors whose rows are divided among ranks, by torch.distributed.checkpoint (DCP).

    FOLDER/shard-00002-model-00001-of-00003.safetensors    the first of three files of rank 1

Each rank writes the rows that it owns; one rank writes the tensors that all have whole. In a file,
which is a safetensors file, a tensor's rows have the tensor's name; the metadata's
DCP_SHARDING_INFO says where they begin. Any number of processes can read any rows, even without a
process group.

A planner says which rows a rank has: ranks own blocks of 128, and DTensor divides rows evenly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from jetrl.distributed.process_group import ProcessGroupWorld
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import World
from jetrl.errors import UserError
from jetrl.files import Count, Stored, checked, open_regular

_FILE_BYTES = 2**30  # of a rank's file, about: DCP makes a file in memory before it is written


class _Place(Stored):
    """The place in a whole tensor at which the rows in a file begin."""

    saved_offsets: list[Count]


_PLACES = TypeAdapter(dict[str, _Place])
_KEY = "DCP_SHARDING_INFO"


def write_shards(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, Shard],
    ranks: World,
) -> list[Path]:
    """Write the tensors of all ranks; every rank calls this function with the same names.

    Args:
        tensors: Own rows of the divided tensors, and whole other ones.
        shards: How the divided tensors are divided.

    Returns:
        The files of this rank, which are on the disk.

    Raises:
        OSError: A rank could not write; on every rank, and the message names the rank.
    """
    assert isinstance(ranks, ProcessGroupWorld), "one process writes a file of its own"
    whole = {name: _whole_shape(tensor, shards.get(name)) for name, tensor in tensors.items()}
    ranks.together("a folder of a checkpoint", lambda: folder.mkdir(exist_ok=True))
    writer = _Writer(folder, _files_of(tensors, whole, ranks.size))
    with ranks.awaiting("the files of a checkpoint"):
        dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=_OwnRows(shards, whole),
            process_group=ranks.hosts,
        )
    ranks.together("the files of a checkpoint", writer.check)
    return sorted(folder.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors"))


def _whole_shape(tensor: Tensor, shard: Shard | None) -> torch.Size:
    return tensor.shape if shard is None else torch.Size((shard.num_rows, *tensor.shape[1:]))


def _files_of(
    tensors: Mapping[str, Tensor], whole: Mapping[str, torch.Size], size: int
) -> dict[str, int]:
    """Return the number, from 1, of the file for each tensor."""
    numbers, number, used = {}, 1, 0
    for name, tensor in tensors.items():
        num_bytes = whole[name].numel() * tensor.element_size() // size
        if used and used + num_bytes > _FILE_BYTES:
            number, used = number + 1, 0
        numbers[name] = number
        used += num_bytes
    return numbers


def _chunk(shape: torch.Size, first_row: int) -> ChunkStorageMetadata:
    offsets = torch.Size([first_row, *[0] * (len(shape) - 1)] if shape else [])
    return ChunkStorageMetadata(offsets, shape)


class _Writer(HuggingFaceStorageWriter):
    """A writer that keeps an error of the disk until all ranks have written.

    DCP's own way to tell the other ranks fails under Python 3.13 before torch 2.13.
    """

    def __init__(self, folder: Path, files: dict[str, int]) -> None:
        super().__init__(str(folder), files, thread_count=1, save_distributed=True)
        # Else another thread would copy by a stream of the machine's first GPU, not of this rank's.
        self.per_thread_copy_ahead = 0
        self._failure: OSError | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of a plan, and flush them."""
        try:
            return super().write_data(plan, planner)
        except OSError as error:
            self._failure = error
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def check(self) -> None:
        """Raise the error of writing, if there was one."""
        if self._failure is not None:
            raise self._failure


class _OwnRows(DefaultSavePlanner):
    """The plan of a rank's writing, without the tensors of other ranks."""

    def __init__(self, shards: Mapping[str, Shard], whole: Mapping[str, torch.Size]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards, self._whole = shards, whole

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's rows, and all whole tensors, which DCP gives to one rank."""
        items = []
        for name, tensor in self.state_dict.items():
            shard = self._shards.get(name)
            if shard is not None and not len(tensor):
                continue
            chunk = _chunk(tensor.shape, 0 if shard is None else shard.first_row)
            properties = TensorProperties.create_from_tensor(tensor)
            data = TensorWriteData(chunk, properties, self._whole[name])
            kind = WriteItemType.TENSOR if shard is None else WriteItemType.SHARD
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor


class _RowsToRead(DefaultLoadPlanner):
    """The plan of reading into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._target


class ShardFiles:
    """The tensors in the files of all ranks, read one at a time.

    Attributes:
        properties: The dtype and shape of each whole tensor, by name.

    Raises:
        UserError: A file is damaged, or rows of a tensor are missing; the message names which.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for file in sorted(folder.glob("*.safetensors")):
            _check_file(file)
        self._reader = HuggingFaceStorageReader(str(folder))
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored: dict[str, TensorStorageMetadata] = {}
        self.properties: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), "safetensors holds tensors alone"
            _check_complete(folder, name, stored)
            self._stored[name] = stored
            self.properties[name] = stored.properties.dtype, stored.size

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return rows of a tensor, or the whole tensor, in CPU memory."""
        dtype, shape = self.properties[name]
        first = 0 if rows is None else rows.start
        if rows is not None:
            shape = torch.Size((rows.stop - rows.start, *shape[1:]))
        tensor = torch.empty(shape, dtype=dtype)
        if not tensor.numel():
            return tensor
        chunk = _chunk(shape, first)
        items = create_read_items_for_chunk_list(name, self._stored[name], [chunk])
        try:
            self._reader.read_data(LoadPlan(items), _RowsToRead(tensor)).wait()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self._folder}: {name} could not be read: {error}") from None
        return tensor


def _check_file(file: Path) -> None:
    """Raise a UserError if no rank has written a file."""
    try:
        open_regular(file).close()
        with safe_open(str(file), framework="pt") as handle:
            text = (handle.metadata() or {}).get(_KEY)
            if text is None:
                raise UserError(f"{file}: no rank's file: its metadata lacks {_KEY}")
            places = checked(_PLACES, json.loads(text), f"{file}: {_KEY}")
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                place, dimensions = places.get(name), len(handle.get_slice(name).get_shape())
                if place is None or len(place.saved_offsets) != dimensions:
                    raise UserError(f"{file}: {_KEY} does not say where {name} begins")
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: missing or not a safetensors file ({error})") from None


def _check_complete(folder: Path, name: str, stored: TensorStorageMetadata) -> None:
    """Raise a UserError unless the files have every row of a tensor once."""
    end = 0
    for chunk in sorted(stored.chunks, key=lambda chunk: tuple(chunk.offsets)):
        first = chunk.offsets[0] if chunk.offsets else 0
        whole_rows = not any(chunk.offsets[1:]) and chunk.sizes[1:] == stored.size[1:]
        if first != end or not whole_rows:
            break
        end += chunk.sizes[0] if chunk.sizes else 1
    else:
        if end == (stored.size[0] if stored.size else 1):
            return
    raise UserError(f"{folder}: the files have not every row of {name} once: one is missing")
