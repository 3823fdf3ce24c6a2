"""The scripts of benchmarks import only names that the package has."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_imports_names_that_exist(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jetrl":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):  # a module of a package, perhaps
                    importlib.import_module(f"{node.module}.{name.name}")
