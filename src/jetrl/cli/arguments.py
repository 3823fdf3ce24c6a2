"""Parts that several commands share: the form of help, common arguments, tables and JSON."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jetrl.distributed.console import tell as tell
from jetrl.presets import PRESETS

PLANS = tuple(PRESETS)
DEVICES = ("auto", "cpu", "cuda")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter of help that keeps line breaks and shows the default of each argument."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, False, argparse.SUPPRESS) or action.default == []
        if silent or not action.option_strings or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser that says how a setting is written where one was given as an option."""

    def error(self, message: str) -> NoReturn:
        """End the program with a message about its arguments."""
        setting = re.search(r"unrecognized arguments: --(\w+\.[\w.]+)", message)
        super().error(message + (f"; a setting is {setting[1]}=VALUE" if setting else ""))


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as JSON, for the option --json; a terminal is safe from its texts."""
    from jetrl.runs.format import json_text

    print(json_text(value, indent))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --plan and --device, for `jetrl.cli.opening.open_policy`, and --trust-task."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face directory, a run directory (its exported model), or a checkpoint",
    )
    add_plan_arguments(parser)
    add_trust_argument(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan", choices=PLANS, help="precision preset (default: the run's own, else unified)"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add --trust-task, which `jetrl.cli.main` reads."""
    parser.add_argument(
        "--trust-task",
        action="store_true",
        help="run the Python files that the run's own settings name (its task, checker, algorithm)",
    )


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None = 1.0,
    seed: int | None = 0,
) -> None:
    """Add --max-tokens, --temperature, --top-p, --top-k and --seed.

    Args:
        max_tokens: The default of --max-tokens; None, here and below: the command chooses.
    """
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


def table(rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Return rows of text as columns as wide as their longest cell, the last one not padded."""
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
