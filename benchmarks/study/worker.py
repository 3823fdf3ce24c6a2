"""A process that runs a sequence of commands, to load modules and kernels only once.

A run of a small model takes less time than the start of a process: imports, CUDA context, kernels.
The study sends one line of JSON per command, with its words and its log file. A command that ends
with exit code 0 is answered with a line; any other ends the process with its exit code, so that an
error cannot affect later runs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence

DONE = b"done\n"
"""The answer to a command with exit code 0."""


def order_of(words: Sequence[str], log: str) -> bytes:
    """Return the line that orders a command."""
    return json.dumps({"words": list(words), "log": log}).encode() + b"\n"


def serve(run: Callable[[list[str]], int], between: Callable[[], None]) -> int:
    """Run the commands from standard input, until it ends or a command fails.

    Returns:
        The exit code of this process.
    """
    orders = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    _replace(os.devnull, os.O_RDONLY, [0])
    for line in orders:
        order = json.loads(line)
        _replace(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, [1, 2])
        code = _exit_code(run, order["words"])
        if not code:
            between()
        sys.stdout.flush()
        sys.stderr.flush()
        if code:
            return code
        os.write(answers, DONE)
    return 0


def _replace(file: str, flags: int, descriptors: Sequence[int]) -> None:
    """Redirect file descriptors of this process and its children to a file."""
    opened = os.open(file, flags, 0o666)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)


def _exit_code(run: Callable[[list[str]], int], words: list[str]) -> int:
    """Return the exit code of a command; print exceptions as Python would."""
    try:
        return run(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return 1


if __name__ == "__main__":  # what all commands need is imported before the first one
    import benchmarks.study.final_evaluation  # noqa: F401
    import torch
    import torch._dynamo  # optimizers import it when the first one is made
    from benchmarks.study.deviation import main

    def give_back() -> None:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    sys.exit(serve(main, give_back))
