"""`jetrl COMMAND`: find the command's file, parse its arguments, run it, and tell how it ended.

Errors become messages and exit codes. There is one file a command, imported only when that command
is called; the heavy imports (torch, transformers) are inside its `run`. So `jetrl --help` answers
at once.

Exit codes are those of jetrl.errors.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from jetrl.cli.arguments import HelpFormatter, Parser, tell
from jetrl.distributed.console import be_silent, exit_now
from jetrl.distributed.world import launched_rank, launched_size
from jetrl.errors import RunStopped, Terminated, UserError, ending, is_of_disk
from jetrl.memory.cpu import keep_freed
from jetrl.users_code import trust_only

COMMANDS = {
    "train": "reinforcement learning from a recipe; without one, the demo",
    "sft": "supervised training on a task's worked answers",
    "sample": "completions of prompts",
    "eval": "mean@n and pass@k of a model on a task",
    "parity": "compare the sampler's log-probs with the trainer's, bit by bit",
    "compare": "runs beside each other: settings, rewards, times, and where bits begin to differ",
    "study": "run a grid of variants and seeds across GPUs, and report on them (in a checkout)",
    "replay": "run again what gave a NaN or an infinity, and name the operation",
    "bench": "speed of the kernels, and parity at a real model's shape, on a GPU (in a checkout)",
    "doctor": "what works on this machine, and what to do about the rest",
    "export": "write a Hugging Face directory (BF16, FP32 or FP8)",
    "runs": "list, show and plot finished and running runs",
    "recipes": "list the recipes that come with jetrl, and what each needs",
    "init": "make a tiny model with random weights, to try things out",
}

# Commands that measure jetrl itself: they are not installed, a checkout has them.
IN_CHECKOUT = {"bench": "benchmarks.command", "study": "benchmarks.study.command"}

# They run the Python files that their recipe names; the others, none that was not typed.
RUN_USERS_FILES = ("train", "sft", "study")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    _set_allocators()
    several = launched_size() > 1
    cause: BaseException
    if several and launched_rank() > 0:
        be_silent()
    try:
        code = _command(arguments)
        if several and code:
            exit_now(code)
        sys.stdout.flush()  # here, where its errors are caught, and not when Python ends
        return code
    except (UserError, RunStopped, KeyboardInterrupt, Terminated) as error:
        cause = error
    except BrokenPipeError:  # the reader of our output went away: `jetrl runs list | head -1`
        _drop_output()
        return 1
    except SystemExit as end:
        if several and end.code:  # wrong words; argparse has said so
            _end_rank("", 2, printed=True)
        raise
    except Exception as error:
        if not several and not is_of_disk(error):
            raise
        cause = error
    words, code = ending(cause)
    words = shown(words)
    if several:
        _end_rank(words, code, cause)
    tell(words)
    try:
        sys.stdout.flush()
    except OSError:  # it goes to a full disk
        _drop_output()
    return code


def _end_rank(
    words: str, code: int, error: BaseException | None = None, printed: bool = False
) -> NoReturn:
    """End this rank, and the others with it, after an error."""
    from jetrl.session import last_words

    last_words.end(words, code, error, printed)


def _open_closed_streams() -> None:
    """Open the null device in place of closed standard streams: files would take their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _drop_output() -> None:
    """Send what is left of the output nowhere: Python's end would write it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are raised."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(version())
        return 0
    command, words = parse(arguments[0], arguments[1:])
    if launched_size() > 1 and not getattr(command, "RUNS_ON_RANKS", False):
        raise UserError(
            f"jetrl {arguments[0]} is one process, and {launched_size()} were started: start it "
            "without torchrun"
        )
    with _users_files(arguments[0], words):
        try:
            code: int = command.run(words)
        except SystemExit as end:
            if traceback.extract_tb(end.__traceback__)[-1].filename == argparse.__file__:
                raise  # a command that parses more words itself
            from jetrl.tasks.base import describe_error

            raise UserError(f"the command was left by sys.exit(): {describe_error(end)}") from end
    return code


def _users_files(command: str, words: argparse.Namespace) -> AbstractContextManager[None]:
    """Return the context in which a command may import the users' files that it may import."""
    if command in RUN_USERS_FILES or getattr(words, "trust_task", False):
        return nullcontext()
    return trust_only()


def _set_allocators() -> None:
    """Set the allocators of memory, which must happen before torch is imported.

    On a GPU segments grow: what one phase gives back (KV pages, gradients, activations) serves the
    next one whatever its sizes, where fixed segments would be left with holes. On the CPU freed
    memory stays: else every operation's page faults take as long as its sums. A user's own choices
    stay.
    """
    keep_freed()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def parse(command: str, arguments: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Return the module of a command, whose `run` runs it, and its parsed arguments.

    Raises:
        UserError: There is no such command; the message names the nearest one.
    """
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise UserError(f"no command {command!r}; {hint}")
    in_checkout = command in IN_CHECKOUT
    module = (
        _from_checkout(command) if in_checkout else importlib.import_module(f"jetrl.cli.{command}")
    )
    parser = Parser(
        prog=f"jetrl {command}",
        description=module.__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    # Intermixed: options may stand between a recipe and its overrides; not where a command hands
    # the rest of its words on.
    foreign = getattr(module, "HANDS_WORDS_ON", False)
    parse_words = parser.parse_args if foreign else parser.parse_intermixed_args
    return module, parse_words(list(arguments))


def _from_checkout(command: str) -> ModuleType:
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "command.py").is_file():
        raise UserError(
            f"jetrl {command} comes with a checkout, not with the installed package: clone the "
            "repository of jetrl and install it with `pip install -e .`"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(IN_CHECKOUT[command])


def shown(text: str) -> str:
    """Return a message without control characters, which a quoted file may contain."""
    from jetrl.runs.format import visible

    return visible(text, newlines=True)


def usage() -> str:
    """Return the help of `jetrl` itself: its commands."""
    lines = [
        "usage: jetrl COMMAND ...",
        "",
        "FP8 reinforcement learning of language models in one exact flow.",
        "",
        *(f"  {name:8} {words}" for name, words in COMMANDS.items()),
        "",
        "jetrl COMMAND --help has the arguments with their defaults. To start: jetrl train",
    ]
    return "\n".join(lines)


def version() -> str:
    from jetrl import __version__

    return f"jetrl {__version__}"


if __name__ == "__main__":
    sys.exit(main())
