"""Commands of `jetrl` on several ranks, as torchrun starts them, without torchrun's own start."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 120.0


@dataclass(frozen=True)
class Ended:
    """The end of a command on one rank."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_commands(
    words: Sequence[Sequence[object]],
    folder: Path,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Return the ends of `jetrl` commands, each on one of as many ranks of this machine."""
    texts = [[str(word) for word in own] for own in words]
    return _run(_command, texts, folder, port, environment)


def run_scripts(scripts: Sequence[str], folder: Path) -> list[Ended]:
    """Return the ends of Python scripts, each on one of as many ranks; a single one is no rank."""
    return _run(_script, [[script] for script in scripts], folder, alone=len(scripts) == 1)


def _run(
    body: Callable[[list[str]], int],
    words: Sequence[Sequence[str]],
    folder: Path,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    alone: bool = False,
) -> list[Ended]:
    """Return the ends of ranks, each of which calls a function with its words."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(len(words)),
        "LOCAL_WORLD_SIZE": str(len(words)),
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory() as outputs:
        processes = []
        for rank, own in enumerate(words):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = str(Path(outputs) / str(rank))
            arguments = (body, list(own), {} if alone else variables, str(folder), output)
            processes.append(context.Process(target=_rank, args=arguments, daemon=False))
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=LIMIT_S)
        ends = []
        for rank, process in enumerate(processes):
            running = process.is_alive()
            process.kill()
            process.join()
            out, err = (Path(f"{outputs}/{rank}.{end}").read_text() for end in ("out", "err"))
            assert not running, f"rank {rank} has not ended within {LIMIT_S} s: {out}{err}"
            ends.append(Ended(process.exitcode or 0, out, err))
        return ends


def _rank(
    body: Callable[[list[str]], int],
    words: list[str],
    variables: dict[str, str],
    folder: str,
    output: str,
) -> None:
    """Call a function as the program that a rank is."""
    import torch

    torch.set_num_threads(1)
    os.environ |= variables
    os.chdir(folder)
    for descriptor, end in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    code = 1
    try:
        code = body(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not by Python's end, which waits for threads of gloo


def _command(words: list[str]) -> int:
    """Run one command and return its exit code."""
    from jetrl.cli.main import main

    sys.argv = ["jetrl", *words]
    return main()


def _script(words: list[str]) -> int:
    """Run a script and return its exit code."""
    sys.argv = ["script.py"]
    exec(compile(words[0], "script.py", "exec"), {"__name__": "__main__"})
    return 0
