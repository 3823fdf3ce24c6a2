"""Entry point of `jetrl COMMAND`: dispatch to the command's module and report how it ended.

Heavy imports (torch, transformers) are inside each command's `run`, to keep --help fast.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from jetrl.cli.arguments import HelpFormatter, Parser, tell
from jetrl.cli.recipes import needed
from jetrl.distributed.console import be_silent, drop_output, exit_now, keep_streams
from jetrl.distributed.world import launched_rank, launched_size
from jetrl.errors import RunStopped, Terminated, UserError, ending, is_of_disk
from jetrl.memory.cpu import keep_freed
from jetrl.untrusted import trust_only

COMMANDS = {
    "train": "train with reinforcement learning, from a recipe or settings",
    "sft": "fine-tune on a task's demonstrations, or train a reward model",
    "sample": "generate completions of prompts",
    "serve": "answer OpenAI's API over HTTP from a model (needs jetrl[serve])",
    "eval": "evaluate a model on a task: mean@n, pass@k and maj@k",
    "parity": "compare sampler and trainer log-probs bit by bit",
    "compare": "compare runs: settings, rewards, times, and the first step that differs",
    "study": "run a grid of variants and seeds across GPUs (needs a checkout)",
    "replay": "rerun the steps after a checkpoint, and name the operation that produces a NaN",
    "bench": "measure kernels, training and rollout on a GPU (needs a checkout)",
    "doctor": "check this machine, or find out how a run ended",
    "export": "write a Hugging Face directory (BF16, FP32 or FP8)",
    "runs": "list, show and plot runs",
    "recipes": "list packaged recipes and their requirements",
    "init": "create a tiny model with random weights",
    "init-recipe": "write a recipe for a model and your rows that fits a GPU",
}

# Words that users try that are not commands.
_NO_COMMAND = {
    "pretrain": "jetrl does not pretrain: `jetrl sft` fine-tunes, `jetrl train` is for RL",
    **dict.fromkeys(("finetune", "fine-tune"), "`jetrl sft` fine-tunes on demonstrations"),
    **dict.fromkeys(("grpo", "ppo", "rl"), "write `jetrl train`, with algorithm.name=NAME"),
    "dpo": "`jetrl sft --task dpo` trains on preference pairs",
    "kto": "of preference optimization jetrl has DPO, `jetrl sft --task dpo`",
    "rm": "`jetrl sft --task reward` trains a reward model",
    **dict.fromkeys(
        ("generate", "chat", "infer"), "`jetrl sample` generates text, `jetrl serve` over HTTP"
    ),
}

# Commands that benchmark jetrl itself, available only in a checkout.
IN_CHECKOUT = {"bench": "benchmarks.command", "study": "benchmarks.study.command"}

# Commands that may import Python files named by a recipe; others only import files typed by the
# user.
RUN_USERS_FILES = ("train", "sft", "study")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    keep_streams()
    _set_allocators()
    cause: BaseException
    try:
        several, rank = launched_size() > 1, launched_rank()
    except UserError as error:
        tell(f"error: {error}")
        return 2
    if several and rank > 0:
        be_silent()
    try:
        code = _command(arguments)
        keep_streams()
        if several and code:
            exit_now(code)
        sys.stdout.flush()  # flush while errors are still caught, before interpreter exit
        return code
    except (UserError, RunStopped, KeyboardInterrupt, Terminated) as error:
        cause = error
    except BrokenPipeError:  # as in `jetrl runs list | head -1`
        drop_output()
        return 1
    except SystemExit as end:
        if several and end.code:  # invalid arguments, already reported by argparse
            _end_rank("", 2, printed=True)
        raise
    except Exception as error:
        cause = error
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            cause = UserError(f"{error.filename!s:.60}...: {error.strerror}")
        elif not several and not is_of_disk(error):
            raise
    from jetrl.runs.format import visible

    words, code = ending(cause)
    if isinstance(cause, UserError):
        words += needed(arguments, words)
    words = visible(words, newlines=True)  # a quoted file may contain control characters
    if several:
        _end_rank(words, code, cause)
    tell(words)
    try:
        sys.stdout.flush()
    except OSError:  # stdout is a file on a full disk
        drop_output()
    return code


def _end_rank(
    words: str, code: int, error: BaseException | None = None, printed: bool = False
) -> NoReturn:
    """End this rank and all others after an error."""
    from jetrl.session import ranks

    ranks.end(words, code, error, printed)


def _command(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        from jetrl import __version__

        print(f"jetrl {__version__}")
        return 0
    command, words = parse(arguments[0], arguments[1:])
    if launched_size() > 1 and not getattr(command, "RUNS_ON_RANKS", False):
        raise UserError(
            f"jetrl {arguments[0]} runs as one process, but torchrun started {launched_size()}: "
            "start it without torchrun"
        )
    trusted = arguments[0] in RUN_USERS_FILES or getattr(words, "trust_task", False)
    with nullcontext() if trusted else trust_only():
        try:
            code: int = command.run(words)
        except SystemExit as end:
            if traceback.extract_tb(end.__traceback__)[-1].filename == argparse.__file__:
                raise  # the command's own argument parser
            from jetrl.tasks.base import describe_error

            raise UserError(f"sys.exit() ended the command: {describe_error(end)}") from end
    return code


def _set_allocators() -> None:
    """Configure memory allocators before torch is imported; explicit user settings are kept."""
    # On the CPU, keep freed memory: page faults would cost as much as the arithmetic. On a GPU, use
    # expandable segments: memory freed by one phase (KV pages, gradients, activations) then fits
    # the next phase regardless of block sizes, without fragmentation.
    keep_freed()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def parse(command: str, arguments: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        hint = _NO_COMMAND.get(command, hint)
        raise UserError(f"no command {command!r}; {hint}")
    own = command not in IN_CHECKOUT
    file = command.replace("-", "_")
    module = importlib.import_module(f"jetrl.cli.{file}") if own else _from_checkout(command)
    name, about = f"jetrl {command}", module.__doc__
    parser = Parser(name, description=about, formatter_class=HelpFormatter, allow_abbrev=False)
    module.add_arguments(parser)
    # Options may appear between a recipe and its overrides, except in a command that forwards its
    # remaining arguments.
    foreign = getattr(module, "HANDS_WORDS_ON", False)
    parse_words = parser.parse_args if foreign else parser.parse_intermixed_args
    return module, parse_words(list(arguments))


def _from_checkout(command: str) -> ModuleType:
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "command.py").is_file():
        raise UserError(
            f"jetrl {command} needs a checkout of jetrl; it is not in the installed package: "
            "clone the repository and install it with `pip install -e .`"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(IN_CHECKOUT[command])


def usage() -> str:
    about = "8-bit reinforcement learning of LLMs, with bitwise-equal sampling and training."
    commands = (f"  {name:11} {words}" for name, words in COMMANDS.items())
    more = "`jetrl COMMAND --help` lists the arguments of a command. To start: jetrl train demo"
    return "\n".join(["usage: jetrl COMMAND ...", "", about, "", *commands, "", more])


if __name__ == "__main__":
    sys.exit(main())
