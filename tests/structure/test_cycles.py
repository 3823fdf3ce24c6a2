"""No circle between modules, and no import by a string but of commands and optional packages."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from tests.structure.test_layers import FILES, imports_of, module_of

TREES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imported(tree: ast.Module) -> set[str]:
    """The modules that a module imports, also in functions and for type checkers."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for statement in statements for _, name in imports_of(statement)}
    return {name if name in TREES else name.rpartition(".")[0] for name in names} & TREES.keys()


def test_no_circle_joins_modules() -> None:
    graph = {module: imported(tree) - {module} for module, tree in TREES.items()}
    TopologicalSorter(graph).prepare()  # of a circle: move what both sides need below them
    graph["jetrl.errors"] = {"jetrl.cli.main"}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_no_module_is_imported_by_a_string() -> None:
    """Type checkers and the layer test read statements."""
    computed = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
        if not isinstance(node.args[0], ast.Constant) or "jetrl" in str(node.args[0].value)
    }
    # Packages and a harness that a user names.
    optional = {"jetrl.runs.trackers", "jetrl.tasks.harness.host", "jetrl.tasks.rows"}
    assert computed == {"jetrl", "jetrl.cli.main"} | optional  # public names, commands
