"""Several ranks in one test: processes that are forked from a server which has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_S = 120.0


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `function(*arguments)` returns on each of `size` ranks of a gloo world."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "store").as_uri()
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(rank, size, meeting, theirs, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _results(pipes)
        finally:
            for process in processes:
                process.join(timeout=1.0)
                process.kill()


def _results(pipes: list[Connection]) -> list[Any]:
    """Return the results of all ranks, or raise as soon as one rank has failed."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=LIMIT_S)
        assert ready, f"ranks {sorted(waiting.values())} have not ended within {LIMIT_S} s"
        for pipe in ready:
            rank = waiting[pipe]
            try:
                result, failure = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} ended without a result") from None
            assert not failure, f"rank {rank}:\n{failure}"
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _run(
    rank: int,
    size: int,
    meeting: str,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Run one rank, and send its result, or its traceback, through the pipe."""
    import torch

    from jetrl.distributed.process_group import open_world

    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    try:
        with open_world("cpu", timeout_s=LIMIT_S, init_method=meeting):
            result = function(*arguments)
        pipe.send((result, ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # not by Python's end, which waits for threads of gloo
