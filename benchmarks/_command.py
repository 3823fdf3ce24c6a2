"""The command line that a result file names, by which its rows are measured again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from jetrl.distributed.world import world

_FILES = ("--out", "--beside", "--wait-for")


def command_typed(program: str, argv: Sequence[str] | None) -> str:
    """Return the command as it was typed, without files that another run would have elsewhere.

    Args:
        program: The words before the arguments, such as `jetrl bench step`.
        argv: The arguments; None: those of this process.
    """
    words = iter(sys.argv[1:] if argv is None else argv)
    kept = []
    for word in words:
        if word in _FILES:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in _FILES)):
            kept.append(word)
    ranks = world().size
    launch = f"torchrun --nproc-per-node {ranks} -m " if ranks > 1 else ""
    return launch + " ".join(filter(None, [program, shlex.join(kept)]))
