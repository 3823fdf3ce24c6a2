"""Graphs of decode are given up before the memory that they work in, however their owner ends."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from jetrl.memory.graphs import GraphPool, pool_in_use
from jetrl.rollout.decode import DecodeBuffers, GraphForwards
from jetrl.rollout.kv_cache import PagedCache


class Pool:
    """In place of torch's memory pool, which ends the process if a graph still uses it."""

    log: list[str]

    def __init__(self) -> None:
        self.users = 0

    def __del__(self) -> None:
        self.log.append(f"pool gone, {self.users} graphs use it")


class Graph:
    """In place of a CUDA graph."""

    log: list[str]
    pool: Pool | None = None

    def capture(self, pool: Pool) -> None:
        self.pool = pool
        pool.users += 1

    def reset(self) -> None:
        self.log.append("graph reset")
        if self.pool is not None:
            self.pool.users -= 1
            self.pool = None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for name, kind in (("MemPool", Pool), ("CUDAGraph", Graph)):
        monkeypatch.setattr(torch.cuda, name, kind)
        monkeypatch.setattr(kind, "log", found, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("device has ended"))
    return found


def captured(pool: GraphPool) -> Any:
    graph: Any = Graph()
    pool.graphs.append(graph)
    graph.capture(pool.pools[0])
    return graph


ENDED = ["device has ended", "graph reset", "graph reset", "pool gone, 0 graphs use it"]


def test_graphs_end_before_their_pool_and_once(log: list[str]) -> None:
    pool = GraphPool()
    kept = [captured(pool), captured(pool)]
    pool.close()
    assert log == ENDED
    pool.close()
    del pool, kept
    assert log == ENDED


def test_a_circle_that_is_collected_ends_in_the_same_order(log: list[str]) -> None:
    class Owner:
        pass

    owner: Any = Owner()
    owner.pool = GraphPool()
    owner.graphs = {1: captured(owner.pool), 2: captured(owner.pool)}
    owner.itself = owner
    del owner
    gc.collect()
    assert log == ENDED


def test_a_pool_is_not_freed_while_another_is_in_use(log: list[str]) -> None:
    pool, other = GraphPool(), GraphPool()
    kept = [captured(pool), captured(pool)]
    with pool_in_use(other.pools[0]):
        with pool_in_use(other.pools[0]):
            pool.close()
        assert log == []
    assert log == ENDED
    del kept


def test_a_traceback_that_holds_a_graph_keeps_no_memory(log: list[str], policy: Any) -> None:
    """The forward fails while its graph is captured; its owner is closed while the error lives."""
    cache = PagedCache(policy.config, policy.plan, 2, 4, policy.device)
    buffers = DecodeBuffers.empty(8, 2, 4, policy.device)
    forwards = GraphForwards(policy, cache, buffers)

    def capture() -> None:
        captured(forwards._captures._pool)
        graph = captured(forwards._captures._pool)
        raise RuntimeError(f"no room for {graph}")

    with pytest.raises(RuntimeError, match="no room") as error:
        capture()
    forwards.close()
    assert error.traceback[-1].frame.f_locals["graph"].pool is None
    assert log == ENDED
