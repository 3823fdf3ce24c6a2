"""The scripts of benchmarks import only names that the package has."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


def test_scripts_import_names_that_exist() -> None:
    trees = [ast.parse(script.read_text(encoding="utf-8")) for script in SCRIPTS]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jetrl":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):  # a module of a package, perhaps
                    importlib.import_module(f"{node.module}.{name.name}")
