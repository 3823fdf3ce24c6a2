"""What several commands share: the form of their help, common arguments, and tables of text."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

PLANS = ("fp32", "bf16", "mixed", "jet", "unified")  # settings.presets, which needs pydantic
DEVICES = ("auto", "cpu", "cuda")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions; shows the default of each argument that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, False, argparse.SUPPRESS) or action.default == []
        if silent or not action.option_strings or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Says how a setting is written where one was given as an option."""

    def error(self, message: str) -> NoReturn:
        setting = re.search(r"unrecognized arguments: --(\w+\.[\w.]+)", message)
        super().error(message + (f"; a setting is {setting[1]}=VALUE" if setting else ""))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --plan and --device, for `jetrl.cli.opening.open_policy`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face directory, a run directory (its exported model), or a checkpoint",
    )
    add_plan_arguments(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan",
        choices=PLANS,
        help="precision preset (default: the run's own, else unified)",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None = 1.0,
    seed: int | None = 0,
) -> None:
    """--max-tokens, --temperature, --top-p, --top-k, --seed. None: the command's own choice."""
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="tokens a completion at most"
    )
    parser.add_argument(
        "--temperature", type=float, default=temperature, help="logits are divided by it; 0: greedy"
    )
    parser.add_argument(
        "--top-p", type=float, default=top_p, help="most probable tokens up to this mass; 1: all"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="this many most probable tokens; 0: all"
    )
    parser.add_argument("--seed", type=int, default=seed, help="fixes every draw")


def tell(text: str) -> None:
    """A line on stderr, of how the program ends. Where it cannot be written the exit code says it
    alone, and is not another one for that."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def table(rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Rows of text in columns as wide as their longest cell; the last column is not padded."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(len(cells[0]))]
    return "\n".join(
        indent
        + "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths[: len(row)], strict=True)
        ).rstrip()
        for row in cells
    )
