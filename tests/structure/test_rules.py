"""Rules a reviewer would otherwise have to watch for, each failing with file and line."""

from __future__ import annotations

import ast
import functools
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


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def quantizer_constants(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text where the FP8 range or its floor is spelt out, or a value cast to FP8.

    Naming the type, to hold codes or to recognize them, is not a cast.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            if node.value == 448:
                yield node.lineno, "448"
            elif node.value == 2.0**-100:
                yield node.lineno, "2**-100"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            if ast.unparse(node) in ("2 ** (-100)", "2.0 ** (-100)", "2 ** -100", "2.0 ** -100"):
                yield node.lineno, "2**-100"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in CASTS:
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if "float8" in ast.unparse(argument):
                    yield node.lineno, f"cast to {ast.unparse(argument)}"


def test_there_is_one_quantizer() -> None:
    found = [
        f"{name_of(path)}:{line}: {what}"
        for path in FILES
        if path != QUANTIZER
        for line, what in quantizer_constants(tree_of(path))
    ]
    assert found == [], "only precision/quantize.py spells these out: use its names"


def test_the_quantizer_is_where_it_is_looked_for() -> None:
    seen = {what for _, what in quantizer_constants(tree_of(QUANTIZER))}
    assert {"448", "2**-100"} <= seen


def functions_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            yield lines, f"{name_of(path)}:{node.lineno} {node.name}"


def longest(sizes: list[tuple[int, str]], title: str) -> str:
    lines = [f"{size:5}  {where}" for size, where in sorted(sizes, reverse=True)[:5]]
    return "\n".join([title, *lines])


def test_files_are_short() -> None:
    sizes = [(len(path.read_text(encoding="utf-8").splitlines()), name_of(path)) for path in FILES]
    report = longest(sizes, "longest files:")
    print(report)
    assert max(sizes)[0] <= MAX_FILE_LINES, report


def test_functions_are_short() -> None:
    sizes = [item for path in FILES for item in functions_of(path)]
    report = longest(sizes, "longest functions (aim 60):")
    print(report)
    assert max(sizes)[0] <= MAX_FUNCTION_LINES, report


def test_the_loop_fits_on_one_screen() -> None:
    lines = (SOURCE / "loop.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= ONE_SCREEN


def swallowed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the kind of a bare except, and of a broad one that ignores the error."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield node.lineno, "bare except"
        broad = node.type is not None and ast.unparse(node.type) in ("Exception", "BaseException")
        silent = all(
            isinstance(item, ast.Pass | ast.Continue)
            or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
            for item in node.body
        )
        if broad and silent:
            yield node.lineno, "error swallowed"


def test_no_error_is_swallowed() -> None:
    found = [
        f"{name_of(path)}:{line}: {what}"
        for path in FILES
        for line, what in swallowed(tree_of(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text, what",
    [
        ("try:\n    f()\nexcept:\n    g()", "bare except"),
        ("try:\n    f()\nexcept Exception:\n    pass", "error swallowed"),
    ],
)
def test_the_check_sees_a_swallowed_error(text: str, what: str) -> None:
    assert list(swallowed(ast.parse(text))) == [(3, what)]


@pytest.mark.parametrize(
    "text, what",
    [
        ("x = y / 448", "448"),
        ("x = 448.0", "448"),
        ("floor = 2.0**-100", "2**-100"),
        ("q = x.to(torch.float8_e4m3fn)", "cast to torch.float8_e4m3fn"),
        ("q = torch.tensor(x, dtype=torch.float8_e5m2)", "cast to torch.float8_e5m2"),
    ],
)
def test_the_check_sees_a_second_quantizer(text: str, what: str) -> None:
    assert list(quantizer_constants(ast.parse(text))) == [(1, what)]


def test_processes_speak_in_one_place_alone() -> None:
    """The rest of the code knows `world()` and the collectives, and not who moves the bytes."""
    elsewhere = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if path.parent != SOURCE / "distributed" and "torch.distributed" in path.read_text("utf-8")
    ]
    assert elsewhere == []


def test_naming_an_fp8_type_is_not_a_cast() -> None:
    text = "codes = torch.empty(n, dtype=torch.float8_e4m3fn)\nok = x.dtype == torch.float8_e4m3fn"
    assert list(quantizer_constants(ast.parse(text))) == []


# Spelt in two halves, so that this file does not hold what it looks for.
MACHINE_PATHS = ["/" + part for part in ("root/", "work/", "Users/", "opt/", "mnt/", "data1/")] + [
    "file:" + "//",
    "C:" + "\\",
]


def committed_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_committed_file_names_a_path_of_some_machine() -> None:
    found = []
    for path in committed_files():
        if not path.is_file() or path.is_symlink() or path.suffix in (".jsonl", ".png"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            for part in MACHINE_PATHS:
                at = line.find(part)
                if at >= 0 and (at == 0 or not (line[at - 1].isalnum() or line[at - 1] in "._-}")):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_generated_folders_are_not_committed() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in committed_files()}
    assert not folders & {"runs", "models", "build", "dist", ".venv"}


def test_no_merge_was_left_undone() -> None:
    marks = tuple(7 * mark + " " for mark in "<>")  # not spelt out here
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in committed_files()
        if path.is_file() and path.suffix in (".md", ".py", ".toml", ".txt", ".json", "")
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
        )
        if line.startswith(marks)
    ]
    assert found == []
