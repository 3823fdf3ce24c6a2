"""Shared parts of commands: help formatting, common arguments, tables and JSON."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jetrl.distributed.console import tell as tell
from jetrl.errors import UserError
from jetrl.settings.presets import PRESETS

if TYPE_CHECKING:
    from jetrl.types import SamplingParams

PLANS = tuple(PRESETS)
DEVICES = ("auto", "cpu", "cuda")
_AS_OPTIONS = {  # settings of a run, and the options of commands on a model
    ", or run.backend=reference (slow)": "",
    "run.device=": "--device ",
    "precision.preset = ": "--plan ",
    "precision.preset=": "--plan ",
    "precision.preset": "--plan",
    "rollout.num_pages": "--num-pages",
    "rollout.max_tokens": "--max-model-len",
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps line breaks and appends each option's default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, False, True, argparse.SUPPRESS) or action.default == []
        if silent or not action.option_strings or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Argument parser that suggests KEY=VALUE if a setting was given as an option."""

    def error(self, message: str) -> NoReturn:
        setting = re.search(r"unrecognized arguments: --([\w.]+)(?![\w-])", message)
        if setting and ("." in setting[1] or "KEY=VALUE" in (self.usage or "")):
            message += f"; a setting is {setting[1]}=VALUE"
        super().error(message)


def print_json(value: Any, indent: int | None = 2) -> None:
    from jetrl.runs.format import json_text

    print(json_text(value, indent))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --plan, --device and --trust-task."""
    add, preset = parser.add_argument, "precision preset (default: from the run, or int8)"
    add(
        "model",
        metavar="MODEL",
        help="a Hugging Face directory or hub name, a run directory, or a checkpoint",
    )
    add("--plan", choices=PLANS, help=preset)
    add("--device", choices=DEVICES, default="auto", help="device to use")
    add_trust_argument(parser)


@contextlib.contextmanager
def advice_in_options() -> Iterator[None]:
    """Name the options of `add_model_arguments` in errors, in place of settings of a run."""
    try:
        yield
    except UserError as error:
        words = str(error)
        for setting, option in _AS_OPTIONS.items():
            words = words.replace(setting, option)
        raise UserError(words) from error


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add --trust-task, which is read by `jetrl.cli.main`."""
    parser.add_argument(
        "--trust-task",
        action="store_true",
        help="allow the Python files named in the run's settings (task, checker, algorithm) to run",
    )


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None = 1.0,
    min_p: float | None = 0.0,
    seed: int | None = 0,
) -> None:
    """Add --max-tokens, --temperature, --top-p, --top-k, --min-p, --seed and --template-arg."""
    add = parser.add_argument
    add("--max-tokens", type=int, default=max_tokens, help="maximum tokens per completion")
    add("--temperature", type=float, default=temperature, help="sampling temperature; 0: greedy")
    add(
        "--top-p",
        type=float,
        default=top_p,
        help="nucleus sampling: cumulative probability to keep; 1: all",
    )
    add("--top-k", type=int, default=0, help="keep only the k most probable tokens; 0: all")
    add(
        "--min-p",
        type=float,
        default=min_p,
        help="keep only tokens with at least this fraction of the largest probability; 0: all",
    )
    add("--seed", type=int, default=seed, help="sampling seed")
    add_template_argument(parser)


def add_template_argument(parser: argparse.ArgumentParser) -> None:
    """Add --template-arg, whose words `key_values` reads."""
    parser.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="extra variable for the chat template, such as enable_thinking=false (repeatable)",
    )


def key_values(words: Sequence[str], option: str) -> dict[str, Any]:
    """Return an option's `KEY=VALUE` words as a dict; values that are not TOML stay strings."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"{option} {word!r}: write it as KEY=VALUE")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values


def sampling_params(**values: Any) -> SamplingParams:
    """Return sampling parameters, or raise UserError for an invalid option."""
    from jetrl.types import SamplingParams

    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise UserError(str(error)) from None


def table(rows: Iterable[Sequence[str]], indent: str = "") -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*cells, fillvalue="")]
    padded = [map(str.ljust, row, widths) for row in cells]
    return "\n".join(indent + "  ".join(row).rstrip() for row in padded)
