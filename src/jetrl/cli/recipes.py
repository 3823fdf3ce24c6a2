"""List packaged recipes and their requirements, or print one.

For example:

    jetrl recipes                              list all
    jetrl recipes qwen3-8b-gsm8k               print one, to copy and edit
    jetrl train qwen3-8b-gsm8k --dry-run       its settings, precision plan and memory plan
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import textwrap
from collections.abc import Sequence

from jetrl.cli.arguments import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a recipe to print")
    add("--json", action="store_true", help="print all recipes as a JSON list")


def run(args: argparse.Namespace) -> int:
    from jetrl.settings.loading import find_recipe, packaged_recipes

    if args.name is not None:
        print(find_recipe(args.name).read_text(encoding="utf-8"), end="")
        return 0
    recipes = {name: description(name) for name in packaged_recipes()}
    if args.json:
        print_json([{"name": name, **about} for name, about in recipes.items()])
        return 0
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    for name, about in recipes.items():
        print(name)
        for text in (about["what"], f"needs {about['needs']}"):
            print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="      "))
    print("\n`jetrl train NAME --dry-run` prints the settings and the memory plan of a recipe")
    return 0


def description(name: str) -> dict[str, str]:
    """Return what a packaged recipe does, needs and takes, from its opening comment."""
    from jetrl.settings.loading import find_recipe

    lines = itertools.takewhile(
        lambda line: line.startswith("#"), find_recipe(name).read_text("utf-8").splitlines()
    )
    text = "\n".join(line.removeprefix("#").strip() for line in lines)
    what, *others = [" ".join(paragraph.split("\n")) for paragraph in text.split("\n\n")]
    found = {"what": what, "needs": "?"}
    for key, colon, words in (paragraph.partition(": ") for paragraph in others):
        if colon and key in ("Needs", "Takes"):
            found[key.lower()] = words
    return found


def needed(arguments: Sequence[str], error: str) -> str:
    """Return a packaged recipe's requirement that an error is about, such as a missing model."""
    from jetrl.settings.loading import packaged_recipes

    for name in set(arguments).intersection(packaged_recipes()):
        for need in description(name)["needs"].rstrip(".").split("; "):
            if f"{need.split()[0].rstrip(',')}:" in error:
                return f"; recipe {name} needs {need}"
    return ""
