"""A model that several ranks export has the bytes of one process's export."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.runs import same_bytes
from tests.distributed.tiny_policy import make_policy, update
from torch.multiprocessing.reductions import StorageWeakRef

from jetrl.distributed.collectives import whole_tensor
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import world
from jetrl.errors import StorageError
from jetrl.models import hf
from jetrl.precision import PrecisionPlan

DTYPES = ("bfloat16", "float32", "fp8")
PLAN = PrecisionPlan.preset("unified")


def export(folder: Path) -> int:
    """Write a policy in each dtype, and in files that divide the parts of a parameter.

    Returns:
        How many whole tensors were gathered from ranks: one at a time is in memory.
    """
    policy, optimizer = make_policy(seed=1)
    update(policy, optimizer)
    gathered: list[StorageWeakRef] = []

    def counted(own: torch.Tensor, shard: Shard) -> torch.Tensor:
        deadline = time.monotonic() + 60
        while gathered and not gathered[-1].expired():  # gloo's thread lets go a moment later
            time.sleep(0.001)
            assert time.monotonic() < deadline, "two whole tensors are in memory"
        whole = whole_tensor(own, shard)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    with mock.patch("jetrl.models.weights.whole_tensor", counted):
        for dtype in DTYPES:
            policy.save_pretrained(folder / dtype, dtype=dtype)
        masters = policy.whole_masters()
        in_fp32 = hf.Encoding("float32")
        hf.save_model(folder / "split", policy.config, masters, in_fp32, max_shard_bytes=70_000)
    return len(gathered)


def fail(folder: Path) -> str:
    """Export where rank 0 meets a full disk; return the message."""
    policy, _ = make_policy(seed=1)

    def full_disk(*arguments: Any, **words: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        mock.patch("jetrl.models.hf_save.save_file", full_disk),
        pytest.raises(StorageError) as caught,
    ):
        policy.save_pretrained(folder / "model")
    world().barrier("all have failed")
    assert list(folder.iterdir()) == []
    return str(caught.value)


def export_and_fail(folder: Path, empty: Path) -> tuple[int, str]:
    return export(folder), fail(empty)


def test_an_export_is_one_directory_with_the_bytes_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    alone = tmp_path / "alone"
    assert export(alone) == 0
    results = run_ranks(3, export_and_fail, tmp_path / "ranks", tmp_path / "empty")
    for name in (*DTYPES, "split"):
        same_bytes(alone / name, tmp_path / "ranks" / name)
    assert len(list((tmp_path / "ranks" / "split").glob("*.safetensors"))) > 5
    num_gathered, message = results[0]
    assert num_gathered == 4 * 6  # of each export every matrix once, though it has parts in files
    assert "No space left on device" in message
    assert results == results[:1] * 3
