"""The error of a file of a run directory that cannot be written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jetrl.errors import StorageError


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an OSError of writing `path` into a StorageError that names a remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror or error} ({free_space(path.parent)}). "
            "What was written before is whole; free some space and go on with --resume"
        ) from None


def free_space(folder: Path) -> str:
    """Return words for the free space on the disk of a folder."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB free there"
    except OSError:
        return "the free space there cannot be read"
