"""The CUDA graphs of one owner and the memory pool that they work in, given up in the right order.

A pool whose memory goes while one of its graphs is there ends the process: torch counts the users
of a pool, and aborts where they outlive it. Python promises no order when it collects a circle of
objects, and an error keeps, in its traceback, a graph that is half captured. So the pool belongs to
a finalizer, which waits until no graph runs and resets every graph first, whoever still holds it.
"""

from __future__ import annotations

import weakref

import torch


class GraphPool:
    """The graphs of one owner, and the memory that they work in, until `close` or until it is gone.

    Attributes:
        close: Waits for the device, resets all graphs, then gives the pool up; a second call does
            nothing.
    """

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pools = [torch.cuda.MemPool()]
        self.close = weakref.finalize(self, _give_up, self._graphs, self._pools)

    @property
    def pool(self) -> torch.cuda.MemPool:
        return self._pools[0]

    def new_graph(self) -> torch.cuda.CUDAGraph:
        self._graphs.append(torch.cuda.CUDAGraph())
        return self._graphs[-1]


def _give_up(graphs: list[torch.cuda.CUDAGraph], pools: list[torch.cuda.MemPool]) -> None:
    """Wait for the device, reset all graphs, then give the pools up, and keep neither."""
    # Graphs may still run where an error or Ctrl-C ended a call. Before torch gives their memory
    # back it waits for the stream alone that they were captured in. Nothing can wait in a capture,
    # where Python may collect an owner that has long ended.
    if graphs and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    while graphs:
        graphs.pop().reset()
    pools.clear()
