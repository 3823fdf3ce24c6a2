#!/usr/bin/env python3
"""Measure the sources, and hold them to the budget of tools/budget.toml.

The size of the program is its number of AST nodes: unlike lines, it does not fall when code gets
dense. Nodes, tests, benchmarks, files, public names and the places of rare features may exceed
their budget by 3%; lines are printed and have no limit.

    python tools/house.py            print each measure beside its budget
    python tools/house.py --check    fail if a measure is over its budget (part of make check)
    python tools/house.py --lower    lower the budget to the current measures, never raise it
    python tools/house.py --hops     also count the calls from `jetrl train` to `backward()`

To raise a number, edit tools/budget.toml and add a line to LOG.md that says what users get for it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from docstrings import violations

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_name("budget.toml")
AT_LEAST = {"comments in training, rollout, session (%)"}  # the other measures may only fall
NO_LIMIT = {"source lines", "code lines", "test lines", "benchmark lines"}
MOST_PARAMETERS, MOST_METHODS = 8, 15
FORMATS = {"fp32", "bf16", "fp8", "int8", "nvfp4"}
# Calls that take any number of arguments of one kind: spreading a sequence there hides nothing.
VARIADIC = {
    # texts and values to log, print, format or hash; the cells of a row
    *("add_row", "assemble", "debug", "derive_seed", "error", "format", "info", "note", "print"),
    "warning",
    # sequences, sets, paths and coroutines to join
    *("chain", "gather", "intersection", "join", "Union", "union", "zip", "zip_longest"),
    # the sizes of a tensor's dimensions, its place in a storage, the shapes that it may have
    *("normal", "randn", "read", "set_", "view"),
    # names of attributes and settings, unknowns, tensors to keep, models to compare
    *("attrgetter", "compare_weights", "save_for_backward", "solve", "unread"),
    # the words of a command
    "create_subprocess_exec",
    # the arguments of a wrapped function: a task's method, a user's reward function
    *("asked", "bind", "function"),
    # both ends of a slice
    "slice",
}

# Words of a rare feature, and the files that are its own. Every other place is counted.
RARE = {
    "adapters": (r"adapter|lora", r"adapter|peft|merging"),
    "ranks": (r"\brank|\bworld\(", r"distributed/|rank|replica|process_group"),
    "critic": (r"critic", r"critic|scalar_model"),
    "partial rollouts": (r"partial", r"partial"),
    "speculation": (r"speculat", r"speculat|draft|verify"),
    "sampler deviation": (r"deviation|noise", r"deviation|noise"),
    "NVFP4": (r"nvfp4", r"nvfp4"),
    "draft head": (r"draft_?head", r"draft_?head|head_drafts"),
}
SLACK = {f"{feature} outside its files" for feature in RARE}
SLACK |= {"AST nodes", "files", "public names", "AST nodes of tests", "AST nodes of benchmarks"}
FILES_WITH = {
    "files with gate_up|swiglu|intermediate": r"gate_up|swiglu|intermediate",
    "files with is_cuda": r"is_cuda",
}
DOCUMENTS = {"LOG.md": "bytes", "docs/benchmarks.md": "lines", "docs/study.md": "lines"}

# The demo with one update of a model of one layer.
TINY = """sft.steps=0 loop.steps=1 rollout.prompts_per_step=4 rollout.samples_per_prompt=4
rollout.max_tokens=6 eval.prompts=4 eval.max_tokens=6 train.updates_per_step=1 train.warmup_steps=0
report.enabled=false model.config.num_hidden_layers=1 model.config.max_position_embeddings=64"""


def kinds(text: str, tree: ast.Module) -> dict[str, set[int]]:
    """Return the line numbers of code, docstrings and comments."""
    docstring: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstring |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    comment, code = set(), set()
    empty = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        span = set(range(token.start[0], token.end[0] + 1))
        if token.type == tokenize.COMMENT:
            comment |= span
        elif token.type not in empty:
            code |= span
    code -= docstring
    return {"code": code, "docstring": docstring, "comment": comment - code - docstring}


def program(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module except docstrings."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                continue
        yield node
        pending += ast.iter_child_nodes(node)


def spreads_a_tuple(node: ast.AST) -> bool:
    """Return if a call spreads a tuple over positional parameters of different meanings."""
    if not isinstance(node, ast.Call) or not any(isinstance(a, ast.Starred) for a in node.args):
        return False
    called = node.func
    while isinstance(called, ast.Subscript):  # kernel[grid](...)
        called = called.value
    return getattr(called, "attr", getattr(called, "id", "")) not in VARIADIC


def has_many_parameters(node: ast.AST) -> bool:
    """Return if a function, other than a GPU kernel, has more than 8 parameters."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    args = node.args
    return len([*args.posonlyargs, *args.args, *args.kwonlyargs]) > MOST_PARAMETERS


def has_many_methods(node: ast.AST) -> bool:
    kinds_of_method = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (
        isinstance(node, ast.ClassDef)
        and sum(isinstance(part, kinds_of_method) for part in node.body) > MOST_METHODS
    )


def quotes_a_format(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in FORMATS


def num_nodes(folder: Path) -> int:
    """Return the AST nodes of the Python files of a folder, docstrings left out."""
    return sum(len(list(program(ast.parse(text)))) for text in python_files(folder).values())


def num_lines(folder: Path) -> int:
    return sum(len(text.splitlines()) for text in python_files(folder).values())


def python_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def public_names(tree: ast.Module) -> list[str]:
    """Return the functions and classes that a module defines for others."""
    kinds_of_name = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in tree.body if isinstance(node, kinds_of_name)]
    return [name for name in names if not name.startswith("_")]


def rare_places(files: dict[str, str], words: str, own: str) -> int:
    """Count the lines of code that name a feature outside of the feature's own files."""
    pattern, mine = re.compile(words, re.IGNORECASE), re.compile(own)
    return sum(
        bool(pattern.search(line)) and not line.lstrip().startswith(("#", "import", "from"))
        for name, text in files.items()
        if not mine.search(name) and not name.startswith("settings/")
        for line in text.splitlines()
    )


def bodies(files: dict[str, str]) -> tuple[int, int]:
    """Return the lines of comments and of code in training, rollout and session."""
    comments = code = 0
    for name, text in files.items():
        if name.split("/")[0] in ("training", "rollout", "session"):
            lines = kinds(text, ast.parse(text))
            comments += len(lines["comment"])
            code += len(lines["code"])
    return comments, code


def measures(root: Path = ROOT) -> dict[str, float]:
    """Return each measure of a tree by name, as budget.toml has them."""
    package = root / "src" / "jetrl"
    files = python_files(package)
    trees = {name: ast.parse(text) for name, text in files.items()}
    lines = [kinds(text, trees[name]) for name, text in files.items()]
    code, docstring = (sum(len(item[key]) for item in lines) for key in ("code", "docstring"))
    comments, in_bodies = bodies(files)
    entries = [
        p for p in package.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name[0] != "_")
    ]
    readme = (root / "README.md").read_text(encoding="utf-8").splitlines()
    heading = [i for i, line in enumerate(readme) if re.match(r"#.*document", line, re.IGNORECASE)]
    nodes = [list(program(tree)) for tree in trees.values()]
    flat = [node for of_file in nodes for node in of_file]
    statements = sum(isinstance(node, ast.stmt) for node in flat)
    found: dict[str, float] = {
        "AST nodes": len(flat),
        "nodes per code line": round(len(flat) / max(code, 1), 2),
        "nodes per statement": round(len(flat) / max(statements, 1), 2),
        "calls that spread a tuple": sum(map(spreads_a_tuple, flat)),
        "functions with more than 8 parameters": sum(map(has_many_parameters, flat)),
        "classes with more than 15 methods": sum(map(has_many_methods, flat)),
        "files that quote a number format": sum(any(map(quotes_a_format, n)) for n in nodes),
        "source lines": sum(len(text.splitlines()) for text in files.values()),
        "code lines": code,
        "docstring lines per code line": round(docstring / max(code, 1), 3),
        "docstring entries that repeat a name": sum(
            rule == "repeats" for text in files.values() for _, rule, _ in violations(text, True)
        ),
        "comments in training, rollout, session (%)": round(100 * comments / max(in_bodies, 1), 1),
        "files": len(files),
        "public names": sum(len(public_names(tree)) for tree in trees.values()),
        "entries at the top": len(entries),
        "AST nodes of tests": num_nodes(root / "tests"),
        "AST nodes of benchmarks": num_nodes(root / "benchmarks"),
        "test lines": num_lines(root / "tests"),
        "benchmark lines": num_lines(root / "benchmarks"),
        "README lines before its list": heading[0] if heading else len(readme),
    }
    for name, words in FILES_WITH.items():
        found[name] = sum(bool(re.search(words, text)) for text in files.values())
    for name, (words, own) in RARE.items():
        found[f"{name} outside its files"] = rare_places(files, words, own)
    for name, unit in DOCUMENTS.items():
        text = (root / name).read_text(encoding="utf-8")
        found[f"{name} {unit}"] = len(text.encode() if unit == "bytes" else text.splitlines())
    return found


def hops() -> list[tuple[str, int, str]]:
    """Run one tiny step and return the frames from the command to its last `backward()`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["train", "demo", *TINY.split(), f"run.dir={folder}", "run.name=hops"]
        done = subprocess.run(
            [sys.executable, __file__, "--probe", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"jetrl train ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [(file, line, name) for file, line, name in json.loads(done.stdout.splitlines()[-1])]


def probe(arguments: list[str]) -> None:
    """Run a command of jetrl; print the frames (file, line, function) of the last `backward()`."""
    torch = importlib.import_module("torch")
    main = importlib.import_module("jetrl.cli.main").main
    package = str(ROOT / "src" / "jetrl")
    stack: list[tuple[str, int, str]] = []
    original = torch.Tensor.backward

    def backward(*args: object, **kwargs: object) -> object:
        stack.clear()
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not main.__code__:
            if frame.f_code.co_filename.startswith(package):
                file = os.path.relpath(frame.f_code.co_filename, package)
                stack.insert(0, (file, frame.f_lineno, frame.f_code.co_qualname))
            frame = frame.f_back
        return original(*args, **kwargs)

    torch.Tensor.backward = backward
    code = main(arguments)
    inside = [item for item in stack if not item[2].endswith(("comp>", "<genexpr>"))]
    print("\n" + json.dumps([("cli/main.py", main.__code__.co_firstlineno, "main"), *inside]))
    sys.exit(code)


def read_budget() -> dict[str, float]:
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))["budget"]


def write_budget(budget: dict[str, float]) -> None:
    lines = [
        "# `make check` holds these numbers. They only fall; the share of comments only rises:",
        "# `python tools/house.py --lower`. Raising one takes a line in LOG.md.",
        "[budget]",
        *(f'"{name}" = {value}' for name, value in budget.items()),
    ]
    BUDGET.write_text("\n".join(lines) + "\n", encoding="utf-8")


def over(found: dict[str, float], budget: dict[str, float]) -> list[str]:
    """Return a line for each measure that breaks its budget or has none."""
    lines = []
    for name, value in found.items():
        limit = limit_of(name, budget)
        if limit is None:
            if name not in NO_LIMIT:
                lines.append(f"{name}: {value:g}, without a budget in tools/budget.toml")
        elif value < limit if name in AT_LEAST else value > limit:
            lines.append(f"{name}: {value:g}, and the limit is {limit:g}")
    return lines


def limit_of(name: str, budget: dict[str, float]) -> float | None:
    """Return what a measure may be at most, or at least; None if it has no budget."""
    if name not in budget:
        return None
    return math.ceil(budget[name] * 1.03) if name in SLACK else budget[name]


def table(found: dict[str, float], budget: dict[str, float]) -> Iterable[str]:
    width = max(map(len, found))
    yield f"{'measure':{width}}  {'now':>10}  {'limit':>10}"
    for name, value in found.items():
        bound = limit_of(name, budget)
        limit = "none" if bound is None else f"{bound:,}"
        yield f"{name:{width}}  {value:>10,}  {limit:>10}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in ("check", "lower", "hops"):
        parser.add_argument(f"--{option}", action="store_true")
    args = parser.parse_args()
    found, budget = measures(), read_budget()
    if args.lower:
        kept = {n: v for n, v in found.items() if n not in NO_LIMIT}
        best = {n: (max if n in AT_LEAST else min)(v, budget.get(n, v)) for n, v in kept.items()}
        write_budget(best)
        budget = best
    broken = over(found, budget)
    if not args.check:
        print("\n".join(table(found, budget)))
    if args.hops:
        frames = hops()
        print("\n".join(f"  {file}:{line} {name}" for file, line, name in frames))
        print(f"to backward(): {len(frames)} calls, {len({file for file, _, _ in frames})} files")
    print("\n".join(broken) if broken else "every measure is within its budget")
    return bool(args.check and broken)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        probe(sys.argv[2:])
    sys.exit(main())
