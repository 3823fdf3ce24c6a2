"""The measures of the sources, on texts whose measures are known."""

from __future__ import annotations

import ast

import pytest

import house

TEXT = '''"""A module.

Its essay.
"""

import os  # a comment next to code is code

# A comment.
X = """a string
# that is not a docstring
"""


def f():
    """Return nothing."""
    # Another comment.
    ...
'''


def test_every_line_is_of_one_kind() -> None:
    found = {kind: len(lines) for kind, lines in house.kinds(TEXT, ast.parse(TEXT)).items()}
    assert found == {"code": 6, "docstring": 5, "comment": 2}


def test_a_rare_feature_is_counted_outside_its_own_files() -> None:
    line = "if critic:\n    pass\n"
    files = {"training/critic.py": line, "training/trainer.py": line, "settings/sections.py": line}
    assert house.rare_places(files, r"critic", r"critic") == 1


def test_a_measure_over_its_budget_fails() -> None:
    comments = next(iter(house.AT_LEAST))
    found = {"files with is_cuda": 3.0, comments: 4.0, "entries": 1.0, "source lines": 9.0}
    assert house.over(found, {"files with is_cuda": 3, comments: 4, "entries": 1}) == []
    broken = house.over(found, {"files with is_cuda": 2, comments: 5})
    assert [line.split(":")[0] for line in broken] == ["files with is_cuda", comments, "entries"]


def test_sizes_have_a_slack_of_three_percent() -> None:
    budget = {"AST nodes": 1000.0}
    assert house.over({"AST nodes": 1030.0}, budget) == []
    assert len(house.over({"AST nodes": 1031.0}, budget)) == 1


def test_docstrings_are_no_nodes_and_line_breaks_make_none() -> None:
    flat = "def f(a):\n    return g(a, b)\n"
    told = 'def f(\n    a,\n):\n    """Say it."""\n    return g(\n        a,\n        b,\n    )\n'
    nodes = [[type(n) for n in house.program(ast.parse(text))] for text in (flat, told)]
    assert nodes[0] == nodes[1]


@pytest.mark.parametrize(
    "call, spreads",
    [
        ("f(*given, 3)", True),
        ("kernel[grid](x, *sizes)", True),
        ("A(*(a, b), c=1)", True),
        ("zip(*rows)", False),
        ("f(given, 3)", False),
        ("f(**given)", False),
    ],
)
def test_a_tuple_that_is_spread_over_parameters_is_counted(call: str, spreads: bool) -> None:
    expression = ast.parse(call, mode="eval").body
    assert house.spreads_a_tuple(expression) == spreads
