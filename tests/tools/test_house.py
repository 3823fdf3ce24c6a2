"""The measures of the sources, on texts whose measures are known."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import house

TEXT = '''"""A module.

Its essay.
"""

import os  # a comment beside code is code

# A comment.
X = """a string
# that is no docstring
"""


def f():
    """Return nothing."""
    # Another comment.
    ...
'''


def source(text: str, name: str = "x.py") -> house.Source:
    return house.Source(name, text, ast.parse(text))


def test_every_line_is_of_one_kind() -> None:
    assert source(TEXT).lines() == house.Lines(code=6, docstring=5, comment=2, blank=4)
    assert source(TEXT).lines().all == len(TEXT.splitlines())
    assert source(TEXT).lines().comment_share() == "25.0% (2 of 8)"
    assert source(TEXT).longest_function() == (4, "x.py f")


@pytest.mark.parametrize(
    "name, text, kernel",
    [
        ("kernels/norm.py", "", True),
        ("precision/hopper/gemm.py", "", True),
        ("models/layer.py", "@triton.jit\ndef f(): ...", True),
        ("models/layer.py", "@triton.jit(debug=True)\ndef f(): ...", True),
        ("models/layer.py", "@cache\ndef f(): ...", False),
    ],
)
def test_kernels_are_known_by_folder_and_by_decorator(name: str, text: str, kernel: bool) -> None:
    assert source(text, name).is_kernel() == kernel


def test_docstrings_of_modules_classes_and_functions_are_counted() -> None:
    assert house.docstring_first_lines([source(TEXT)]) == ["A module.", "Return nothing."]


def test_the_table_has_a_row_for_each_measure() -> None:
    now = {key: f"<{key}>" for key in house.MEASURES}
    rows = house.table({"hops": "11 calls, 6 files"}, now).splitlines()
    assert len(rows) == 2 + len(house.MEASURES)
    assert len({len(row) for row in rows}) == 1
    cells = [cell.strip() for cell in rows[-1].strip("|").split("|")]
    assert cells == [
        "from the command to backward()",
        "11 calls, 6 files",
        "<hops>",
        "6 calls, 4 files",
    ]


def test_the_readme_is_counted_to_its_list_of_documents(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# x\n\nwords\n\n## Documents\n[a](a.md)\n")
    assert house.readme_lines(tmp_path) == 4
