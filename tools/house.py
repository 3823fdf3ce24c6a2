#!/usr/bin/env python3
"""Print measures of the sources: how they are laid out, worded and connected.

    python tools/house.py                    the working tree
    python tools/house.py --base 746c0b4     a commit's measures beside the working tree's

The measures are read from the sources of src/jetrl, but for the hops from the command to
`backward()`: for these a recipe of one step, with a model of one layer, is run on the CPU, and the
Python stack of the last `Tensor.backward` is taken. Nothing is written into either tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from docstrings import FRAGMENT
from module_graph import read_graph

ROOT = Path(__file__).resolve().parents[1]

# The demo with one update of a model of one layer; every setting is as old as the command.
TINY = [
    "sft.steps=0",
    "loop.steps=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "eval.prompts=4",
    "eval.max_tokens=6",
    "train.updates_per_step=1",
    "train.warmup_steps=0",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
    "model.config.max_position_embeddings=64",
]

# Run in a process whose PYTHONPATH is the tree's src: calls the command's `main` and prints, as the
# last line, the frames (file, line, function) of the last backward, from `main` inwards.
PROBE = """
import importlib, json, os, sys
import torch

module, function, *arguments = sys.argv[1:]
main = getattr(importlib.import_module(module), function)
package = os.path.dirname(importlib.import_module("jetrl").__file__)
stacks = []

def watched(original):
    def backward(*args, **kwargs):
        frame, frames = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            frames.insert(0, (code.co_filename, frame.f_lineno, code.co_qualname))
            if code is main.__code__:
                break
            frame = frame.f_back
        stacks.append(frames)
        return original(*args, **kwargs)
    return backward

torch.Tensor.backward = watched(torch.Tensor.backward)
code = main(arguments)
inside = [
    (os.path.relpath(file, package), line, name)
    for file, line, name in (stacks[-1] if stacks else [])
    if file.startswith(package + os.sep) and not name.endswith(("comp>", "<genexpr>"))
]
print()
print(json.dumps({"code": code, "frames": inside}))
"""


@dataclass(frozen=True)
class Measure:
    """A row of the table.

    Attributes:
        name: What is measured.
        aim: The value aimed at; "" where no value is.
    """

    name: str
    aim: str = ""


MEASURES = {
    "fragments": Measure("docstrings that open with a fragment", "under 2%"),
    "docstrings": Measure("docstrings in all"),
    "entries": Measure("entries at the top of src/jetrl", "about 20"),
    "strings": Measure("string imports", "0"),
    "computed": Measure("  beside these, by a name from a table or an argument"),
    "public": Measure("  beside these, packages' public names on first use"),
    "circles": Measure("circles between modules", "0"),
    "comments": Measure("comment lines, of code and comments"),
    "kernel comments": Measure("  in kernels", "6 to 10%"),
    "engine comments": Measure("  in the rollout's scheduler and engine", "6 to 10%"),
    "file": Measure("longest file, lines", "500 at most"),
    "function": Measure("longest function outside kernels, lines", "60"),
    "kernel": Measure("longest function of kernels, lines", "120"),
    "lines": Measure("lines in all", "30,000 or fewer"),
    "code": Measure("  code"),
    "docstring lines": Measure("  docstrings"),
    "comment lines": Measure("  comments"),
    "blank": Measure("  blank"),
    "modules": Measure("modules"),
    "readme": Measure("README lines before its list of documents", "120"),
    "hops": Measure("from the command to backward()", "6 calls, 4 files"),
}


@dataclass
class Lines:
    """The lines of some files by kind.

    Attributes:
        code: Lines with code, among them those inside of a string that is no docstring.
        docstring: Lines of docstrings, the blank ones among them included.
        comment: Lines with nothing but a comment.
        blank: Empty lines.
    """

    code: int = 0
    docstring: int = 0
    comment: int = 0
    blank: int = 0

    @property
    def all(self) -> int:
        """The number of lines of every kind together."""
        return self.code + self.docstring + self.comment + self.blank

    def add(self, other: Lines) -> None:
        """Add the numbers of another record to these numbers."""
        self.code += other.code
        self.docstring += other.docstring
        self.comment += other.comment
        self.blank += other.blank

    def comment_share(self) -> str:
        """Return the share and the number of comment lines among lines of code and comments."""
        return share(self.comment, self.code + self.comment)


def share(part: int, whole: int) -> str:
    """Return a percentage with the two counts it was made of."""
    return f"{100 * part / max(whole, 1):.1f}% ({part:,} of {whole:,})"


@dataclass(frozen=True)
class Source:
    """A Python file, read and parsed.

    Attributes:
        name: Path inside of src/jetrl.
        text: Contents.
        tree: Syntax tree of the contents.
    """

    name: str
    text: str
    tree: ast.Module

    def is_kernel(self) -> bool:
        """Return True for a file of kernels: by its folder, or for a function that is compiled."""
        if {"kernels", "hopper"} & set(Path(self.name).parts[:-1]):
            return True
        functions = (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))
        decorators = (ast.unparse(item) for f in functions for item in f.decorator_list)
        return any(text.split("(")[0].endswith("jit") for text in decorators)

    def is_engine(self) -> bool:
        """Return True for the scheduler and the engine of the rollout."""
        path = Path(self.name)
        return path.parts[0] == "rollout" and path.stem.startswith(("scheduler", "engine"))

    def lines(self) -> Lines:
        """Count the lines of each kind."""
        docstring: set[int] = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
                continue
            if isinstance(node.value.value, str):
                docstring |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        comment, code = set(), set()
        empty = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            span = set(range(token.start[0], token.end[0] + 1))
            if token.type == tokenize.COMMENT:
                comment |= span
            elif token.type not in (*empty, tokenize.ENDMARKER):
                code |= span
        code -= docstring
        comment -= code | docstring
        blank = len(self.text.splitlines()) - len(code | comment | docstring)
        return Lines(len(code), len(docstring), len(comment), blank)

    def longest_function(self) -> tuple[int, str]:
        """Return the lines of the longest function, and its place; (0, "") without a function."""
        functions = [
            ((node.end_lineno or 0) - node.lineno + 1, f"{self.name} {node.name}")
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        return max(functions, default=(0, ""))


def read_sources(package: Path) -> list[Source]:
    """Return every Python file of a package."""
    sources = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        sources.append(Source(str(path.relative_to(package)), text, ast.parse(text)))
    return sources


def docstring_first_lines(sources: Iterable[Source]) -> list[str]:
    """Return the first line of the docstring of each module, class and function."""
    first = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and text.strip():
                    first.append(text.strip().splitlines()[0])
    return first


def readme_lines(root: Path) -> int:
    """Return the number of README lines before the heading of its list of documents."""
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#") and "document" in line.lower():
            return number
    return len(lines)


def hops(root: Path, show: bool) -> str:
    """Return how many calls, in how many files, lead from the command to the update's backward.

    Args:
        root: Tree whose `jetrl train` is run.
        show: True to print the calls to standard error.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry = project["scripts"]["jetrl"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["train", "demo", *TINY, f"run.dir={folder}", "run.name=hops"]
        done = subprocess.run(
            [sys.executable, "-c", PROBE, *entry.split(":"), *arguments],
            env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        result = {"code": done.returncode, "frames": []}
    frames = result["frames"]
    if result["code"] or not frames:
        print(f"jetrl train ended with {result['code']}:\n{done.stderr[-2000:]}", file=sys.stderr)
        return "not measured"
    if show:
        print(f"from `jetrl train` to backward(), {root}:", file=sys.stderr)
        for file, line, name in frames:
            print(f"  {file}:{line} {name}", file=sys.stderr)
    return f"{len(frames)} calls, {len({file for file, _, _ in frames})} files"


def measures(root: Path, show: bool = False) -> dict[str, str]:
    """Return the value of each measure of a tree, by the keys of `MEASURES`.

    Args:
        root: Folder that holds src/jetrl, README.md and pyproject.toml.
        show: True to print what was counted (circles, string imports, calls) to standard error.
    """
    package = root / "src" / "jetrl"
    sources = read_sources(package)
    kernels = {source.name for source in sources if source.is_kernel()}
    totals = {"all": Lines(), "kernels": Lines(), "engine": Lines()}
    for source in sources:
        lines = source.lines()
        totals["all"].add(lines)
        if source.name in kernels:
            totals["kernels"].add(lines)
        if source.is_engine():
            totals["engine"].add(lines)
    first = docstring_first_lines(sources)
    graph = read_graph(package)
    kinds = [place.kind for place in graph.strings]
    if show:
        for circle in graph.circles():
            print(f"circle: {', '.join(circle)}", file=sys.stderr)
        for place in graph.strings:
            if place.kind != "public":
                print(f"string import: {place.module}:{place.line} ({place.kind})", file=sys.stderr)
    longest = [(source.longest_function(), source.name in kernels) for source in sources]
    entries = [
        item
        for item in package.iterdir()
        if item.suffix == ".py" or (item.is_dir() and item.name != "__pycache__")
    ]
    file_lines, file = max((len(source.text.splitlines()), source.name) for source in sources)
    outside = max(item for item, kernel in longest if not kernel)
    inside = max((item for item, kernel in longest if kernel), default=(0, ""))
    circles = graph.circles()
    every = totals["all"]
    return {
        "fragments": share(sum(1 for line in first if FRAGMENT.match(line)), len(first)),
        "docstrings": f"{len(first):,}",
        "entries": str(len(entries)),
        "strings": str(kinds.count("named")),
        "computed": str(kinds.count("computed")),
        "public": str(kinds.count("public")),
        "circles": f"{len(circles)} ({sum(map(len, circles))} modules)" if circles else "0",
        "comments": every.comment_share(),
        "kernel comments": totals["kernels"].comment_share(),
        "engine comments": totals["engine"].comment_share(),
        "file": f"{file_lines} ({file})",
        "function": f"{outside[0]} ({outside[1]})",
        "kernel": f"{inside[0]} ({inside[1]})",
        "lines": f"{every.all:,}",
        "code": f"{every.code:,}",
        "docstring lines": f"{every.docstring:,}",
        "comment lines": f"{every.comment:,}",
        "blank": f"{every.blank:,}",
        "modules": str(len(sources)),
        "readme": str(readme_lines(root)),
        "hops": hops(root, show),
    }


def table(before: dict[str, str], now: dict[str, str]) -> str:
    """Return a Markdown table with a row for each measure.

    Args:
        before: Values of the commit that is compared with; empty without one.
        now: Values of the working tree.
    """
    rows = [("measure", "before", "now", "aim"), ("---",) * 4]
    for key, measure in MEASURES.items():
        rows.append((measure.name, before.get(key, ""), now[key], measure.aim))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    )


def measures_of_commit(commit: str, show: bool) -> dict[str, str]:
    """Return the measures of a commit of this repository, unpacked into a temporary folder.

    Args:
        commit: Anything that git takes for a commit.
        show: True to print what was counted to standard error.

    Raises:
        SystemExit: Git knows no such commit.
    """
    done = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"error: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return measures(Path(folder), show)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", metavar="COMMIT", help="measure this commit too")
    parser.add_argument("--show", action="store_true", help="print circles, strings and calls")
    args = parser.parse_args(argv)
    before = measures_of_commit(args.base, args.show) if args.base else {}
    print(table(before, measures(ROOT, args.show)))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the output may go to head
    sys.exit(main())
