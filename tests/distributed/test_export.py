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
from tests.distributed.tiny_policy import CONFIG, make_policy, update
from torch.multiprocessing.reductions import StorageWeakRef

from jetrl.distributed.collectives import whole_tensor
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import world
from jetrl.errors import StorageError
from jetrl.models import hf
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.precision import PrecisionPlan
from jetrl.session.building import build_reference
from jetrl.settings.loading import Settings

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
        hf.save_model(folder / "split", policy.config, masters, "float32", max_shard_bytes=70_000)
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


def numbers(folder: Path) -> dict[str, Any]:
    """Return numbers of a reference, a new critic, and BF16 weights."""
    settings = Settings.model_validate({"model": {"config": CONFIG}, "algorithm": {"kl": 0.1}})
    policy, optimizer = make_policy(seed=1)
    update(policy, optimizer)
    reference = build_reference(settings, policy, folder)
    assert reference is not None
    masters = policy.whole_masters()
    critic = ScalarModel.with_new_head(policy.config, masters, PLAN, "cpu", None)
    bf16 = Policy(policy.config, PrecisionPlan.preset("bf16"), masters, frozen=True)
    tokens = [[1, 2, 3, 299]]
    return {
        "reference": reference.logprobs(tokens)[0].tolist(),
        "critic": critic.packed_hidden(
            torch.tensor(tokens[0]), torch.tensor([0, 4]), torch.arange(4)
        ).tolist(),
        "bf16": bf16.logprobs(tokens)[0].tolist(),
        "rows": len(critic.weights.masters["embed.weight"]),
    }


def all_of_it(folder: Path, empty: Path) -> tuple[int, str, dict[str, Any]]:
    return export(folder), fail(empty), numbers(folder)


def test_an_export_is_one_directory_with_the_bytes_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    alone = tmp_path / "alone"
    assert export(alone) == 0
    expected = numbers(alone)
    results = run_ranks(3, all_of_it, tmp_path / "ranks", tmp_path / "empty")
    for name in (*DTYPES, "split", "reference"):
        same_bytes(alone / name, tmp_path / "ranks" / name)
    assert len(list((tmp_path / "ranks" / "split").glob("*.safetensors"))) > 5
    assert [found.pop("rows") for _, _, found in results] == [128, 128, 44]
    assert expected.pop("rows") == 300
    num_gathered, message, found = results[0]
    assert num_gathered == 4 * 6  # of each export every matrix once, though it has parts in files
    assert "No space left on device" in message
    assert found == expected, "all that reads whole master weights gets them"
    assert results == results[:1] * 3
