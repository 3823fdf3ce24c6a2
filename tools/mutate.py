#!/usr/bin/env python3
"""Change one operator, number or condition at a time, and see whether a test notices.

    python tools/mutate.py                         every mutant of every target (hours of one core)
    python tools/mutate.py --every 5 --out FILE    every fifth mutant; write the survivors to FILE
    python tools/mutate.py --only packing          the mutants of one file
    python tools/mutate.py --jobs 12               twelve at a time
    python tools/mutate.py --only packing --at 231 the mutants of one line

A mutant is the abstract syntax tree of a source file with one node changed. Each runs in a process
that is forked after the imports of torch and transformers, so that it costs the time of its tests.
Only the tests of its file run, up to the first failure. Texts, annotations, assertions and what
only words an error are left alone. Survivors of the last run, with the reason for each, are in
tests/mutants.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401  (imported once, before the first fork)
import transformers  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
OBJECTIVES = ["training/test_objectives.py", "training/test_formulas.py"]
TRAINER = ["training/test_trainer.py", "training/test_memory.py"]
SCHEDULER = ("scheduler", "add_and_cancel", "partial", "engine")
TARGETS = {
    "training/packing": ["training/test_packing.py", "training/test_stems.py", *TRAINER],
    "training/advantages": ["training/test_advantages.py", "training/test_formulas.py"],
    "training/objectives": OBJECTIVES,
    "training/micro_batches": ["training/test_micro_batches.py", *TRAINER, OBJECTIVES[0]],
    "rollout/pages": [f"rollout/test_{name}.py" for name in ("pages", *SCHEDULER)],
    "rollout/scheduler": [f"rollout/test_{name}.py" for name in SCHEDULER],
}
SPARE_S = 20.0  # seconds that a mutant may take beyond three times the unchanged tests

SWAPPED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
NAMES |= {"any": "all", "all": "any"}
# What only words an error, checks a type, or is read by nobody at run time.
LEFT_ALONE = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """A changed source file: its line, the change in words, and its tree."""

    line: int
    change: str
    tree: ast.Module


def changes_of(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Yield each change of a node: in words, and as a function that makes it in a copy."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            swapped = SWAPPED[type(operator)]
            yield _words(operator, swapped), lambda n: n.ops.__setitem__(0, swapped())
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in SWAPPED:
            swapped = SWAPPED[type(operator)]
            yield _words(operator, swapped), lambda n: setattr(n, "op", swapped())
        case ast.BoolOp(op=operator):
            swapped = SWAPPED[type(operator)]
            yield _words(operator, swapped), lambda n: setattr(n, "op", swapped())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "drop the sign or not", lambda n: setattr(n, "op", ast.UAdd())
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", lambda n: setattr(n, "value", not value)
        case ast.Constant(value=int(value) | float(value)):
            yield f"{value} -> {value + 1}", lambda n: setattr(n, "value", value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            negated = ast.UnaryOp(ast.Not(), test)
            yield "negate the condition", lambda n: setattr(n, "test", copy.deepcopy(negated))
        case ast.comprehension(ifs=[_, *_]):
            yield "drop the filter", lambda n: n.ifs.clear()
        case ast.Name(id=name) if name in NAMES:
            yield f"{name} -> {NAMES[name]}", lambda n: setattr(n, "id", NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield f"{name} -> {NAMES[name]}", lambda n: setattr(n, "attr", NAMES[name])
        case ast.Expr(value=ast.Call()):
            yield "drop the call", lambda n: setattr(n, "value", ast.Constant(None))


def _words(old: ast.AST, new: type) -> str:
    return f"{type(old).__name__} -> {new.__name__}"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, always in the same order, without what is left alone."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not isinstance(child, LEFT_ALONE) and not docstring:
                yield from _nodes(child)


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a source file, in the order of its nodes."""
    tree, line = ast.parse(source), 0
    for number, node in enumerate(_nodes(tree)):
        line = getattr(node, "lineno", line)
        for change, make in changes_of(node):
            changed = copy.deepcopy(tree)
            make(next(n for k, n in enumerate(_nodes(changed)) if k == number))
            yield Mutant(line, change, ast.fix_missing_locations(changed))


class Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a tree in place of its file."""

    def __init__(self, name: str, tree: ast.Module, path: Path) -> None:
        self._name, self._tree, self._path = name, tree, path

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path))

    def exec_module(self, module: object) -> None:
        module.__file__ = str(self._path)  # type: ignore[attr-defined]
        exec(compile(self._tree, str(self._path), "exec"), vars(module))

    def get_source(self, fullname: str) -> str:
        return self._path.read_text(encoding="utf-8")


def start(target: str, tree: ast.Module, scratch: Path) -> int:
    """Fork a process that runs a target's tests with a tree in place of its source file."""
    path = ROOT / "src" / "jetrl" / f"{target}.py"
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            os.setpgid(0, 0)
            sys.meta_path.insert(0, Changed(f"jetrl.{target.replace('/', '.')}", tree, path))
            options = [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--basetemp={scratch / str(os.getpid())}",
            ]
            words = [*options, *(f"tests/{name}" for name in TARGETS[target])]
            os._exit(int(pytest.main(words) != 0))
        os._exit(1)
    return child


def outcomes(
    target: str, trees: Sequence[ast.Module], limit_s: float, jobs: int
) -> Iterator[tuple[int, str]]:
    """Yield the index of each tree and "survived", "killed" or "hung", `jobs` trees at a time."""
    waiting = list(enumerate(trees))[::-1]
    running: dict[int, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, tree = waiting.pop()
                child = start(target, tree, Path(scratch))
                running[child] = (index, time.monotonic() + limit_s)
            for child, (index, ends) in list(running.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if not done and time.monotonic() < ends:
                    continue
                found = "killed" if status else "survived"
                if not done:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    found = "hung"
                del running[child]
                yield index, found
            time.sleep(0.02)


def run(target: str, args: argparse.Namespace) -> list[str]:
    """Run the mutants of a target, and return a table row for each that survives."""
    source = (ROOT / "src" / "jetrl" / f"{target}.py").read_text(encoding="utf-8")
    began = time.monotonic()
    unchanged = [ast.parse(source)] * args.jobs  # as slow as the mutants will be
    if any(found != "survived" for _, found in outcomes(target, unchanged, 600.0, args.jobs)):
        raise SystemExit(f"{target}: its tests fail without any change")
    limit_s = 3 * (time.monotonic() - began) + SPARE_S
    chosen = [m for k, m in enumerate(mutants(source)) if k % args.every == 0]
    chosen = [m for m in chosen if args.at is None or m.line == args.at]
    lines, rows, counts = source.splitlines(), {}, {"survived": 0, "killed": 0, "hung": 0}
    for index, found in outcomes(target, [m.tree for m in chosen], limit_s, args.jobs):
        counts[found] += 1
        if found == "survived":
            mutant = chosen[index]
            text = lines[mutant.line - 1].strip().replace("|", "\\|")
            rows[index] = f"| `{target}.py` | {mutant.line} | {mutant.change} | `{text}` | |"
            print(rows[index], flush=True)
    print(f"{target}: {counts}, {time.monotonic() - began:.0f} s", flush=True)
    return [rows[index] for index in sorted(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="a part of a target's name")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth mutant")
    parser.add_argument("--at", type=int, metavar="LINE", help="only mutants of this line")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run N mutants at a time")
    parser.add_argument("--out", type=Path, help="file for the table of survivors")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    rows = [
        row
        for target in TARGETS
        if not args.only or args.only in target
        for row in run(target, args)
    ]
    if args.out:
        args.out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return int(bool(rows))


if __name__ == "__main__":
    raise SystemExit(main())
