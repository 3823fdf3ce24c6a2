"""No circle between modules and no import by a string, but for those that the lists here name.

The lists hold what is left. A new circle or string fails, and so does one of a list that is gone:
take it out, so that it cannot come back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from module_graph import ModuleGraph, read_graph

SOURCE = Path(__file__).parents[2] / "src" / "jetrl"

CIRCLES: set[tuple[str, ...]] = set()

# Module that has the string, and module that the string names.
STRING_IMPORTS: set[tuple[str, str]] = set()

# Modules that a user chooses by name, each imported only when it is asked for.
CHOSEN_BY_NAME = {
    "jetrl.cli.main",  # a command
}


@pytest.fixture(scope="module")
def graph() -> ModuleGraph:
    return read_graph(SOURCE)


def test_no_circle_joins_modules(graph: ModuleGraph) -> None:
    circles = set(graph.circles())
    assert circles - CIRCLES == set(), "a new circle: move what both sides need below them"
    assert CIRCLES - circles == set(), "these circles are gone: take them out of CIRCLES"


def test_no_module_is_imported_by_a_string(graph: ModuleGraph) -> None:
    places = {
        (place.module, target): f"{graph.files[place.module].relative_to(SOURCE)}:{place.line}"
        for place in graph.strings
        if place.kind == "named"
        for target in place.targets or ("no module",)
    }
    new = {where: places[where] for where in set(places) - STRING_IMPORTS}
    assert new == {}, "import it by a statement, which type checkers and the layer test read"
    gone = STRING_IMPORTS - set(places)
    assert gone == set(), "these imports are gone: take them out of STRING_IMPORTS"


def test_only_what_a_user_chooses_is_imported_by_a_computed_name(graph: ModuleGraph) -> None:
    assert {place.module for place in graph.strings if place.kind == "computed"} == CHOSEN_BY_NAME
