"""The files of a checkpoint, as one process or all ranks of a run write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from jetrl.distributed.shards import Shard
from jetrl.distributed.world import World
from jetrl.models.hf_files import sync
from jetrl.training.checkpoint_files import Fingerprint, fingerprint, write_tensors, write_text
from jetrl.training.checkpoint_folder import MANIFEST_FILE, STATE_FILE


def write_parts(
    folder: Path,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    shards: Mapping[str, Mapping[str, Shard]],
    ranks: World,
) -> list[Path]:
    """Write the tensors of a checkpoint: a file for each part, or a folder of the ranks' files.

    Every rank calls this function.

    Args:
        parts: The tensors by part and name; own rows of those that are divided among ranks.
        shards: The division of the rows of those that are divided, by part and name.

    Returns:
        The files of this rank, which are on the disk.

    Raises:
        OSError: A rank could not write; every rank raises it.
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
    """Return the fingerprints of the files of all ranks, by their names in a checkpoint's folder.

    Every rank calls this function.

    Raises:
        OSError: A rank could not read; every rank raises it.
    """
    what = "the checksums of a checkpoint"
    found_here = ranks.together(
        what, lambda: {path.relative_to(folder).as_posix(): fingerprint(path) for path in own}
    )
    return {
        name: found for files in ranks.gather(what, found_here) for name, found in files.items()
    }


def complete_folder(folder: Path, state: str, files: Mapping[str, Fingerprint]) -> None:
    """Write state.json and, when all else is on the disk, the manifest; rank 0 does that.

    Raises:
        OSError: A file could not be written, or one of another rank is not there.
    """
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
    write_text(folder / MANIFEST_FILE, json.dumps(dict(sorted(manifest.items())), indent=1))
    sync(folder)
