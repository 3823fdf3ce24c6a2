"""The measures of the sources, on texts whose measures are known."""

from __future__ import annotations

import ast

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
    found = {"files": 3.0, comments: 4.0, "entries": 1.0}
    assert house.over(found, {"files": 3, comments: 4, "entries": 1}) == []
    broken = house.over(found, {"files": 2, comments: 5})
    assert [line.split(":")[0] for line in broken] == ["files", comments, "entries"]
