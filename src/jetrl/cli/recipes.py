"""List the recipes that come with jetrl, with what each needs; or show one.

For example:

    jetrl recipes                              all of them
    jetrl recipes qwen3-8b-gsm8k               the file, to copy and to change
    jetrl train qwen3-8b-gsm8k --dry-run       its settings, precision plan and memory plan
"""

from __future__ import annotations

import argparse
import shutil
import textwrap

from jetrl.cli.arguments import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe, to show its file")
    parser.add_argument("--json", action="store_true", help="a JSON list of all recipes")


def run(args: argparse.Namespace) -> int:
    from jetrl.settings.loading import find_recipe, packaged_recipes

    if args.name is not None:
        print(find_recipe(args.name).read_text(encoding="utf-8"), end="")
        return 0
    recipes = {
        name: description(find_recipe(name).read_text("utf-8")) for name in packaged_recipes()
    }
    if args.json:
        print_json([{"name": name, **about} for name, about in recipes.items()])
        return 0
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    for name, about in recipes.items():
        print(name)
        for text in (about["what"], f"needs {about['needs']}"):
            print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="      "))
    print("\njetrl train NAME --dry-run shows a recipe's settings and memory plan")
    return 0


def description(recipe: str) -> dict[str, str]:
    """Return what a recipe does, and what it needs, by the comment at its top.

    Args:
        recipe: The text of the TOML file: its first paragraph says what it does, and a paragraph
            that begins with `Needs:` what has to be there.
    """
    lines = []
    for line in recipe.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    paragraphs = [" ".join(p.split("\n")) for p in "\n".join(lines).split("\n\n")]
    needs = next((p for p in paragraphs if p.startswith("Needs: ")), "Needs: ?")
    return {"what": paragraphs[0], "needs": needs.removeprefix("Needs: ")}
