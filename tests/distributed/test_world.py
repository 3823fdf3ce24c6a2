"""Several processes tell one another values, share lists and move rows of tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks

from jetrl.distributed.agreement import LARGEST_SIZE, OUT_OF_MEMORY, UPDATE_IS_FINITE, agree
from jetrl.distributed.collectives import exchange, gather_equal, gather_rows
from jetrl.distributed.process_group import record_collectives
from jetrl.distributed.shards import Shard, shard_of
from jetrl.distributed.world import ONE_PROCESS, world
from jetrl.errors import RanksDiffer, UserError
from jetrl.rollout.options import Progress
from jetrl.session.training_run import RankProgress


def _shares() -> list[int]:
    items = list(range(7))
    return world().gather_in_order("numbers", [10 * item for item in world().share(items)])


def _speak() -> tuple[Any, ...]:
    rank = world().rank

    def refuse() -> int:
        raise UserError("no such file")

    with pytest.raises(UserError, match="no such file"):
        world().from_first("a number", refuse)
    with pytest.raises(RanksDiffer, match="rank 1 differs from rank 0 in the settings: 'b'"):
        world().same("the settings", "b" if rank == 1 else "a")
    world().same("the settings", "a")
    made = world().from_first("the process", lambda: f"made by {rank}")
    return made, agree(LARGEST_SIZE, 100 - rank), agree(OUT_OF_MEMORY, "full" if rank == 2 else "")


def _move(num_rows: int) -> bool:
    me = world()
    shard = shard_of(num_rows, me.rank, me.size) or Shard((0, num_rows), 0)
    whole = torch.arange(num_rows * 3, dtype=torch.float32).view(num_rows, 3).bfloat16()
    mine = torch.zeros_like(whole)
    mine[shard.own_rows] = whole[shard.own_rows]
    gather_rows(mine, shard.counts())
    present = me.size - 1  # the last rank has no product
    product = (me.rank + 1) * whole if me.rank < present else None
    pieces = whole.new_empty(present, *whole[shard.own_rows].shape)
    exchange(None if product is None else product.split(shard.counts()), pieces)
    everyone = gather_equal(torch.tensor([me.rank, 7]))
    return bool(
        torch.equal(mine, whole)
        and len(pieces) == present
        and all(torch.equal(p, (r + 1) * whole[shard.own_rows]) for r, p in enumerate(pieces))
        and everyone.tolist() == [[rank, 7] for rank in range(me.size)]
    )


def test_ranks_share_a_list_and_put_it_together_again() -> None:
    assert run_ranks(3, _shares) == [[10 * i for i in range(7)]] * 3


def test_ranks_tell_each_other_values_errors_and_decisions() -> None:
    assert run_ranks(3, _speak) == [("made by 0", 98, "full")] * 3


@pytest.mark.parametrize("num_rows", [256, 300, 640])
def test_rows_move_to_their_owners_and_to_all(num_rows: int) -> None:
    assert run_ranks(3, _move, num_rows) == [True] * 3


def test_a_matrix_is_divided_in_whole_blocks() -> None:
    shard = shard_of(1000, rank=1, size=3)
    assert shard == Shard((0, 256, 640, 1000), 1)
    assert shard.own_rows == slice(256, 640)
    assert shard.first_row == 256
    assert shard.counts() == [256, 384, 360]
    assert shard.counts(128) == [2, 3, 3]
    assert shard_of(127, 0, 4) is None
    assert shard_of(4096, 0, 1) is None
    few = shard_of(200, 0, 4)
    assert few is not None
    assert few.counts() == [0, 128, 0, 72]


def test_one_process_is_a_world_of_its_own() -> None:
    assert "RANK" not in os.environ or world() is ONE_PROCESS
    assert world().share([1, 2]) == [1, 2]
    assert world().gather("it", 3) == [3]
    assert world().from_first("it", lambda: 4) == 4
    world().same("it", 5)
    assert agree(OUT_OF_MEMORY, "out") == "out"
    assert agree(UPDATE_IS_FINITE, False) is False


def test_answers_become_one() -> None:
    assert OUT_OF_MEMORY.combine(["", "the GPU is full", "SIGTERM"]) == "the GPU is full"
    assert not UPDATE_IS_FINITE.combine([True, False])
    assert LARGEST_SIZE.combine([4096, 2048, 8192]) == 2048


def _progress() -> list[tuple[int, int, int]]:
    now = 0.0
    progress, shown = RankProgress(lambda: now), []
    for phase, done in ((1, 2), (1, 3), (2, 1)):
        if done != 3:
            progress.begin("rollout", phase)
        own = Progress(done + world().rank, 4, 10 * done, 5.0, 1, 8, 2.0, None)
        if world().rank:
            progress.of_all(own)
        world().barrier("progress was written")
        if world().is_first:
            every = progress.of_all(own)
            shown.append((every.sequences_done, every.sequences_total, every.tokens))
        world().barrier("progress was read")
        now += 0.6  # the second call of the first phase comes too early to look again
    return shown


def test_rank_0_shows_the_progress_of_all() -> None:
    assert run_ranks(2, _progress)[0] == [(5, 8, 40), (6, 8, 50), (3, 8, 20)]


def test_the_flight_recorder_leaves_what_a_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in (*names, "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")  # so that it is removed in the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "77")  # the name before torch 2.9
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", raising=False)
    record_collectives(tmp_path)
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl_timeout_rank_")
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
