"""Rules a reviewer would otherwise have to watch for, each failing with file and line."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "jetrl"
FILES = sorted(SOURCE.rglob("*.py"))
QUANTIZER = SOURCE / "precision" / "quantize.py"

CASTS = ("to", "type", "tensor", "as_tensor", "_to_copy")
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 150
ONE_SCREEN = 120


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def quantizer_constants(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text where the FP8 range or its floor is spelt out, or a value cast to FP8.

    Naming the type, to hold codes or to recognize them, is not a cast.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=448 as value) | ast.Constant(value=448.0 as value):
                yield node.lineno, f"{value:g}"
            case ast.Constant(value=float(value)) if value == 2.0**-100:
                yield node.lineno, "2**-100"
            case ast.BinOp(op=ast.Pow()):
                if re.fullmatch(r"2(\.0)? \*\* \(?-100\)?", ast.unparse(node)):
                    yield node.lineno, "2**-100"
            case ast.Call() if ast.unparse(node.func).split(".")[-1] in CASTS:
                for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    if "float8" in ast.unparse(argument):
                        yield node.lineno, f"cast to {ast.unparse(argument)}"


def test_there_is_one_quantizer_whose_names_the_others_use() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {what}"
        for path in FILES
        if path != QUANTIZER
        for line, what in quantizer_constants(tree_of(path))
    ]
    assert found == []


def test_the_quantizer_is_where_it_is_looked_for() -> None:
    seen = {what for _, what in quantizer_constants(tree_of(QUANTIZER))}
    assert {"448", "2**-100"} <= seen


@pytest.mark.parametrize(
    "text, found",
    [
        ("x = y / 448", [(1, "448")]),
        ("x = 448.0", [(1, "448")]),
        ("floor = 2.0**-100", [(1, "2**-100")]),
        ("q = x.to(t.float8_e4m3fn)", [(1, "cast to t.float8_e4m3fn")]),
        ("q = t.tensor(x, dtype=t.float8)", [(1, "cast to t.float8")]),
        ("c = t.empty(n, dtype=t.float8)\nok = x.dtype == t.float8", []),
    ],
)
def test_a_second_quantizer_is_seen(text: str, found: list) -> None:
    assert list(quantizer_constants(ast.parse(text))) == found


def test_files_functions_and_the_loop_are_short() -> None:
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    functions = {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {path: size for path, size in files.items() if size > MAX_FILE_LINES} == {}
    assert {name: size for name, size in functions.items() if size > MAX_FUNCTION_LINES} == {}
    assert files[SOURCE / "loop.py"] <= ONE_SCREEN


def test_processes_speak_in_one_place_only() -> None:
    """The rest of the code knows `world()` and the collectives, and not who moves the bytes."""
    users = {path for path in FILES if "torch.distributed" in path.read_text("utf-8")}
    assert {path.parent for path in users} == {SOURCE / "distributed"}


# Spelt in two halves, so that this file does not hold what it looks for.
MACHINE_PATHS = ["/" + part for part in ("root/", "work/", "Users/", "opt/", "mnt/", "data1/")] + [
    "file:" + "//",
    "C:" + "\\",
]
MERGE_MARKS = tuple(7 * mark + " " for mark in "<>")
TEXTS = (".md", ".py", ".toml", ".txt", ".json", "")


def committed_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_committed_file_names_a_path_of_some_machine_or_is_half_merged() -> None:
    found = []
    for path in committed_files():
        if not path.is_file() or path.is_symlink() or path.suffix in (".jsonl", ".png"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            at = [line.find(part) for part in MACHINE_PATHS]
            named = any(
                i == 0 or (i > 0 and not (line[i - 1].isalnum() or line[i - 1] in "._-}"))
                for i in at
            )
            if named or (line.startswith(MERGE_MARKS) and path.suffix in TEXTS):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_generated_folders_are_not_committed() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in committed_files()}
    assert not folders & {"runs", "models", "build", "dist", ".venv"}


def test_a_script_runs_after_all_of_its_functions() -> None:
    """A function below `main()` is not there yet when the file is run as a module."""
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        starts = [i for i, node in enumerate(body) if "__main__" in ast.unparse(node)[:40]]
        assert not starts or starts[-1] == len(body) - 1, f"{path}: code after the call of main()"
