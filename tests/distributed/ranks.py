"""Several ranks in one test: processes that are forked from a server which has imported torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_S = 600.0


@dataclass(frozen=True)
class Ended:
    """The end of a command on one rank."""

    code: int
    out: str
    err: str


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `function(*arguments)` returns on each of `size` ranks of a gloo world."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "store").as_uri()
        return _results([(_in_world, meeting, function, *arguments)] * size, size)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own, which is no rank and may fork."""
    return _results([(function, *arguments)])[0]


def run_commands(
    words: Sequence[Sequence[object]],
    folder: Path,
    port: int | None = None,
    size: int | None = None,
) -> list[Ended]:
    """Return the ends of `jetrl` commands, each on one of as many ranks of this machine."""
    texts = [[str(word) for word in own] for own in words]
    return _run([(_command, own) for own in texts], folder, size or len(words), port)


def run_scripts(scripts: Sequence[str], folder: Path) -> list[Ended]:
    """Return the ends of Python scripts, each on one of as many ranks; a single one is no rank."""
    return _run([(_script, each) for each in scripts], folder, len(scripts) if scripts[1:] else 0)


def _run(
    calls: list[tuple[Any, ...]], folder: Path, size: int, port: int | None = None
) -> list[Ended]:
    """Return the ends of ranks that torchrun starts, which meet at a port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free)} if size else {}
    return _results([(_ended, str(folder), meet, *call) for call in calls], size)


def _results(calls: list[tuple[Any, ...]], size: int = 0) -> list[Any]:
    """Return the results of functions, each in a process that is a rank, unless `size` is 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    pipes, processes, results = [], [], {}
    for rank, call in enumerate(calls):
        ours, theirs = context.Pipe()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        process = context.Process(target=_child, args=(theirs, place if size else {}, *call))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        while len(results) < len(pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
            ready = wait(list(waiting), timeout=LIMIT_S)
            assert ready, f"ranks {sorted(waiting.values())} have not ended within {LIMIT_S} s"
            for pipe in ready:
                with contextlib.suppress(EOFError):
                    results[waiting[pipe]], failure = pipe.recv()
                    assert not failure, f"rank {waiting[pipe]}:\n{failure}"
                assert waiting[pipe] in results, f"rank {waiting[pipe]} ended without a result"
    finally:
        for process in processes:
            process.join(timeout=1.0)
            process.kill()
    return [results[rank] for rank in range(len(pipes))]


def _child(pipe: Connection, place: Mapping[str, int], function: Any, *arguments: Any) -> None:
    """Send a function's result, or its traceback, through the pipe."""
    import torch

    torch.set_num_threads(1)
    os.environ |= {name: str(value) for name, value in place.items()}
    try:
        pipe.send((function(*arguments), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # not by Python's end, which waits for threads of gloo


def _in_world(meeting: str, function: Callable[..., Any], *arguments: Any) -> Any:
    from jetrl.distributed.process_group import open_world

    with open_world("cpu", timeout_s=LIMIT_S, init_method=meeting):
        return function(*arguments)


def _ended(folder: str, variables: Mapping[str, str], function: Any, words: Any) -> Ended:
    """Return how a program ends, which a fork of this process is."""
    os.environ |= variables
    os.chdir(folder)
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs) / name for name in ("out", "err")]
        pid = os.fork()
        if not pid:
            for descriptor, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
            _exit_with(function, words)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Ended(code, *(file.read_text() for file in files))


def _exit_with(function: Callable[[Any], int], words: Any) -> None:
    code = 1
    try:
        code = function(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(words: list[str]) -> int:
    from jetrl.cli.main import main

    sys.argv = ["jetrl", *words]
    return main()


def _script(text: str) -> int:
    sys.argv = ["script.py"]
    exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return 0
