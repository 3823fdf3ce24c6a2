"""No circle between modules, and no import by a string but of commands that a user chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from module_graph import ModuleGraph, read_graph

SOURCE = Path(__file__).parents[2] / "src" / "jetrl"


@pytest.fixture(scope="module")
def graph() -> ModuleGraph:
    return read_graph(SOURCE)


def test_no_circle_joins_modules(graph: ModuleGraph) -> None:
    assert graph.circles() == [], "a circle: move what both sides need below them"


def test_no_module_is_imported_by_a_string(graph: ModuleGraph) -> None:
    """Type checkers and the layer test read statements."""
    named = [place for place in graph.strings if place.kind == "named"]
    assert named == []
    computed = {place.module for place in graph.strings if place.kind == "computed"}
    assert computed == {"jetrl.cli.main"}
