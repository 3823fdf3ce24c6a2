"""Checksums of weights: as defined, of whole and of divided tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks

from jetrl.distributed.checksum import BLOCK, checksum_lines
from jetrl.distributed.shards import shard_of
from jetrl.distributed.world import world

SHAPES = {"norm": (5,), "one": (), "matrix": (300, 7), "long": (3, 2 * BLOCK // 3 + 5)}


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def defined(tensor: torch.Tensor) -> int:
    """The definition of distributed/checksum.py, in NumPy."""

    def mix(number: np.ndarray) -> np.ndarray:
        mixed = number * np.int64(-0x61C8864680B583EB)
        return (mixed ^ (mixed >> np.int64(29))) * np.int64(-0x61C8864680B583EB) | np.int64(1)

    words = tensor.numpy().reshape(-1).view(np.int32).astype(np.int64)
    blocks, places = np.divmod(np.arange(words.size, dtype=np.int64), np.int64(2**22))
    return int((words * mix(places + 1) * mix(-blocks - 1)).sum()) % 2**64


def test_checksums_are_those_of_the_definition() -> None:
    tensors = weights()
    found = dict(line.split(" ", 1) for line in checksum_lines(tensors, {}))
    assert list(found) == ["long", "matrix", "norm", "one"]
    for name, tensor in tensors.items():
        shape = "x".join(map(str, SHAPES[name]))
        assert found[name] == f"{shape} {defined(tensor):016x}"


@pytest.mark.parametrize("change", ["one bit", "two elements swapped", "the sign of zero"])
def test_a_small_change_changes_the_checksum(change: str) -> None:
    tensor = torch.zeros(2 * 2**22 + 2)
    tensor[1], tensor[2**22] = 1.0, 2.0
    before = checksum_lines({"w": tensor}, {})
    if change == "one bit":
        tensor.view(torch.int32)[5] ^= 1
    elif change == "the sign of zero":
        tensor[5] = -0.0
    else:  # also places j and k of the blocks k and j
        tensor[1], tensor[2**22] = 2.0, 1.0
    assert checksum_lines({"w": tensor}, {}) != before


def lines_of_own_rows() -> list[str]:
    tensors, shards = weights(), {}
    shard = shard_of(300, world().rank, world().size)
    assert shard is not None
    tensors["matrix"], shards["matrix"] = tensors["matrix"][shard.own_rows].clone(), shard
    return checksum_lines(tensors, shards)


def test_a_divided_tensor_has_the_checksum_of_the_whole() -> None:
    whole = checksum_lines(weights(), {})
    assert run_ranks(4, lines_of_own_rows) == [whole] * 4  # the fourth rank has no row
