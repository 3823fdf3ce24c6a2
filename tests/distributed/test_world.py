"""Several processes tell one another values, share lists and move rows of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks

from jetrl.cli.main import main
from jetrl.distributed.agreement import LARGEST_SIZE, OUT_OF_MEMORY, agree
from jetrl.distributed.collectives import exchange, gather_equal, gather_rows
from jetrl.distributed.shards import Shard, shard_of
from jetrl.distributed.world import launched_rank, world
from jetrl.errors import RanksDiffer, UserError


def _speak() -> tuple[Any, ...]:
    rank = world().rank

    def refuse() -> int:
        raise UserError("no such file")

    with pytest.raises(UserError, match="no such file"):
        world().from_first("a number", refuse)
    with pytest.raises(RanksDiffer, match="rank 1 differs from rank 0 in the settings: 'b'"):
        world().same("the settings", "b" if rank == 1 else "a")
    world().same("the settings", "a")
    items = list(range(7))
    whole = world().gather_in_order("numbers", [10 * item for item in world().share(items)])
    assert whole == [10 * item for item in items]
    for num_rows in (256, 300, 640):
        _move(num_rows)
    made = world().from_first("the process", lambda: f"made by {rank}")
    return made, agree(LARGEST_SIZE, 100 - rank), agree(OUT_OF_MEMORY, "full" if rank == 2 else "")


def _move(num_rows: int) -> None:
    """Let rows move to their owners and to all."""
    me = world()
    shard = shard_of(num_rows, me.rank, me.size)
    assert shard is not None
    whole = torch.arange(num_rows * 3, dtype=torch.float32).view(num_rows, 3).bfloat16()
    mine = torch.zeros_like(whole)
    mine[shard.own_rows] = whole[shard.own_rows]
    gather_rows(mine, shard.counts())
    assert torch.equal(mine, whole)
    present = me.size - 1  # the last rank has no product
    product = (me.rank + 1) * whole if me.rank < present else None
    pieces = whole.new_empty(present, *whole[shard.own_rows].shape)
    exchange(None if product is None else product.split(shard.counts()), pieces)
    assert all(torch.equal(p, (r + 1) * whole[shard.own_rows]) for r, p in enumerate(pieces))
    everyone = gather_equal(torch.tensor([me.rank, 7]))
    assert everyone.tolist() == [[rank, 7] for rank in range(me.size)]


def test_ranks_tell_each_other_values_errors_decisions_and_rows() -> None:
    assert run_ranks(3, _speak) == [("made by 0", 98, "full")] * 3


def test_a_matrix_is_divided_in_whole_blocks() -> None:
    shard = shard_of(1000, rank=1, size=3)
    assert shard == Shard((0, 256, 640, 1000), 1)
    assert shard.own_rows == slice(256, 640)
    assert shard.counts() == [256, 384, 360]
    assert shard.counts(128) == [2, 3, 3]
    assert shard_of(127, 0, 4) is None
    assert shard_of(4096, 0, 1) is None
    few = shard_of(200, 0, 4)
    assert few is not None
    assert few.counts() == [0, 128, 0, 72]


def test_a_rank_that_is_not_a_number_is_named(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="RANK=x, which is not a number: start ranks with torchrun"):
        launched_rank()
    assert main(["--version"]) == 2
    assert "RANK=x" in capsys.readouterr().err
