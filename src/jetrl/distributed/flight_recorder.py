"""The flight recorder of torch, which remembers the last collectives of a process.

It is read when a rank is lost or hangs. NCCL's own thread writes its record as well, when a
collective takes longer than the time limit of the process group.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torch._C import _distributed_c10d as c10d

_KEPT = "2000"  # collectives
TIMEOUT_FILES, FILES = "nccl_timeout_rank_", "collectives_rank_"


def record_collectives(folder: Path) -> None:
    """Turn the flight recorder on, before a process group is opened; what is set already stays."""
    # Each with the name that it had before torch 2.9, which is read as well and may be set.
    settings = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): _KEPT,
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(
            (folder / TIMEOUT_FILES).absolute()
        ),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    for names, value in settings.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value
    # torchrun's own choice, 1, makes NCCL clean up first, which may wait for what hangs.
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"


def write_collectives(folder: Path, rank: int) -> None:
    """Write the collectives that this process remembers into a folder, as JSON."""
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(
        c10d, "_dump_fr_trace_json", None
    )
    if dump is None:
        return
    with contextlib.suppress(RuntimeError, OSError):  # a full disk may be the trouble
        (folder / f"{FILES}{rank}.json").write_bytes(dump())
