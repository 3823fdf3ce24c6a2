"""Imports go down the layers: a failure names file, line and import.

    cli -> loop -> session -> {serve -> rollout, training, tasks, runs} -> memory -> models
        -> kernels -> precision

and everyone may use types, settings, errors, files, randomness, distributed and untrusted.
rollout and training never import each other; tasks and runs know neither the model nor torch.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jetrl.precision.backend import BACKENDS

SOURCE = Path(__file__).parents[2] / "src" / "jetrl"
FILES = sorted(SOURCE.rglob("*.py"))

BASE = {"types", "errors", "files", "randomness", "settings", "distributed", "untrusted"}
BELOW_ROLLOUT = {"precision", "kernels", "models", "memory"}
PARTS = {"rollout", "training", "tasks", "runs"}
EVERYTHING = BASE | BELOW_ROLLOUT | PARTS | {"session", "loop"}

ALLOWED: dict[str, set[str]] = {
    **{part: set() for part in ("errors", "randomness")},
    **{part: {"errors"} for part in ("files", "untrusted")},
    **{part: {"errors", "files"} for part in ("settings", "distributed")},
    "types": {"errors", "untrusted"},
    **dict.fromkeys(("precision", "tasks", "runs"), BASE),
    "kernels": BASE | {"precision"},
    "models": BASE | {"kernels", "precision"},
    "memory": BASE | {"kernels", "models", "precision"},
    **dict.fromkeys(("rollout", "training"), BASE | BELOW_ROLLOUT),
    "session": (EVERYTHING | {"serve"}) - {"loop"},
    "loop": BASE | {"session"},
    "serve": BASE | BELOW_ROLLOUT | {"rollout"},
    "cli": EVERYTHING | {"serve"},
    "__main__": {"cli"},
    "": EVERYTHING,  # jetrl/__init__.py: public names, resolved on first use
}

# What the kernels may know of the precision package: how numbers are rounded, not which plan.
KERNELS_MAY_IMPORT = tuple(
    f"jetrl.precision.{name}."
    for name in ["angles", "backend", "formats", "gemm", "quantize", "exact", "gradients"]
) + tuple(f"jetrl.precision.{name}." for name in ["triton", *(b.name for b in BACKENDS)])
# Kernels for one kind of card have its name; the rest is for any.
BACKEND = f"({'|'.join({backend.name for backend in BACKENDS} - {'triton'})})"
KERNELS = f"(triton|portable|{BACKEND})"

# What a function may import where it runs: an optional package, and a module that needs one, such
# as a backend's tables, which need triton.
OPTIONAL_PACKAGES = {
    *("cuda", "datasets", "deep_gemm", "reasoning_gym", "tensorboard", "torchao", "trackio"),
    *("serve", "triton", "wandb"),  # serve: its app needs starlette, its server uvicorn
}

WITHOUT_TORCH = [
    *("", "types", "errors", "files", "untrusted", "settings.loading", "cli.main", "tasks", "runs"),
    *("rollout.scheduler", "rollout.pages", "rollout.sequence"),
    *("training.advantages", "training.packing"),
]


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def module_of(path: Path) -> str:
    parts = ["jetrl", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import; `from jetrl import loop` is `jetrl.loop`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


@functools.cache
def tree_of(path: Path, text: str | None) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8") if text is None else text)


def offences(path: Path, text: str | None = None) -> list[str]:
    """The imports of a file that its layer does not have, with their lines."""
    part = part_of(module_of(path))
    found = []
    for line, name in imports_of(tree_of(path, text)):
        if not name.startswith("jetrl."):
            continue
        target = part_of(name)
        wrong = target in ALLOWED and target != part and target not in ALLOWED[part]
        if part == "kernels" and target == "precision":
            wrong = not f"{name}.".startswith(KERNELS_MAY_IMPORT)
        if part not in ("kernels", "precision"):  # which kernels run is for the tables to say
            wrong |= re.search(rf"[._]{KERNELS}\b", name) is not None
        if re.search(r"_triton$|\.triton\.", module_of(path)):  # for any GPU
            wrong |= re.search(rf"[._]{BACKEND}\b", name) is not None
        if wrong:
            found.append(f"{path.relative_to(SOURCE.parent)}:{line}: {part} must not import {name}")
    return found


def test_imports_go_down_the_layers() -> None:
    assert [offence for path in FILES for offence in offences(path)] == []
    assert [path for path in FILES if part_of(module_of(path)) not in ALLOWED] == []


@pytest.mark.parametrize(
    "file, text",
    [
        ("training/x.py", "from jetrl.rollout.engine import RolloutEngine"),
        ("rollout/x.py", "import jetrl.training"),
        ("tasks/x.py", "from jetrl.models.policy import Policy"),
        ("runs/x.py", "def f():\n    from jetrl import training"),
        ("models/x.py", "from jetrl.memory.plan import MemoryPlan"),
        ("kernels/x.py", "from jetrl.precision.plan import PrecisionPlan"),
        ("models/x.py", "from jetrl.kernels.norm_triton import rms_norm_forward"),
        ("precision/x.py", "from jetrl.kernels.norm import rms_norm"),
        ("precision/triton/x.py", "from jetrl.precision.hopper.gemm import fp8_matmul_hopper"),
        ("kernels/x_triton.py", "from jetrl.kernels.swiglu_hopper import swiglu"),
        ("settings/x.py", "from jetrl.types import Prompt"),
        ("memory/x.py", "from jetrl.rollout.sizes import RolloutSizes"),
        ("loop.py", "from jetrl.cli.main import main"),
        ("serve/x.py", "from jetrl.session.session import Session"),
        ("rollout/x.py", "import jetrl.serve"),
    ],
)
def test_the_check_sees_an_offence(file: str, text: str) -> None:
    (found,) = offences(SOURCE / file, text)
    assert f"{file}:{len(text.splitlines())}: " in found


def inside_functions(path: Path, text: str | None = None) -> list[str]:
    """The imports inside functions that are of no optional package or backend's table."""
    return [
        f"{path.relative_to(SOURCE.parent)}:{line}: import of {name} inside {function.name}"
        for function in ast.walk(tree_of(path, text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, name in imports_of(function)
        if not OPTIONAL_PACKAGES & set(name.split(".")) and not is_table(name)
    ]


def is_table(name: str) -> bool:
    """Return True if a name is of a module of tables, or of another that needs a GPU's packages."""
    tables = rf"kernels\.({BACKEND}|portable\.table)|precision\.{KERNELS}\.(operations|defined)"
    return re.fullmatch(rf"jetrl\.({tables}|rollout\.mapped_memory\b.*)", name) is not None


def test_imports_inside_functions_are_for_optional_packages() -> None:
    files = [path for path in FILES if part_of(module_of(path)) != "cli"]
    assert [line for path in files for line in inside_functions(path)] == []


def test_an_import_inside_a_function_is_seen() -> None:
    path = SOURCE / "kernels" / "x.py"
    for name in ("jetrl.kernels.norm import rms_norm", "jetrl.precision.hopper import add"):
        assert len(inside_functions(path, f"def f():\n    from {name}")) == 1
    for name in ("jetrl.kernels import hopper", "jetrl.precision.hopper import operations"):
        assert inside_functions(path, f"def f():\n    from {name}") == []


def test_what_needs_no_torch_imports_none() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(f'jetrl.{name}'.rstrip('.'))\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
