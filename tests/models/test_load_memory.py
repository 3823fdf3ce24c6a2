"""A model directory is read tensor by tensor, and is never as a whole in a process's memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jetrl.models.hf import model_config, open_weights
from jetrl.models.tiny import make_tiny

SMAPS = Path("/proc/self/smaps")


def resident(file: Path) -> int:
    """Return the bytes of a file that are mapped into this process and in memory."""
    total, inside = 0, False
    for line in SMAPS.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not say what is mapped")
def test_tensors_that_were_read_do_not_stay_in_memory(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "model", hidden_size=256, num_layers=4, intermediate_size=1024)
    file = path / "model.safetensors"
    weights = open_weights(path, model_config(path))
    for name in weights:
        weights[name].sum()
    tensor = weights["embed.weight"]
    tensor.sum()
    most = resident(file)
    del tensor
    last = resident(file)
    assert last < file.stat().st_size / 8
    assert most > last, "a tensor is mapped while it is used"
