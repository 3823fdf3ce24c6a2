"""The docstring linter: every rule reports what it forbids and leaves alone what it allows."""

from __future__ import annotations

import pytest

import docstrings


def rules_of(text: str) -> list[str]:
    return [rule for _, rule, _ in docstrings.violations(text, in_source=True)]


@pytest.mark.parametrize(
    "first, rule",
    [
        ("Return the pages that a sequence holds.", ""),
        ("x [T, K] @ w [K, N] -> y [T, N].", ""),
        ("Thatch the roof.", ""),
        ("Run in a process of its own.", ""),
        ("What the sampler keeps.", "fragment"),
        ("Whether pages are free.", "fragment"),
        ("Its pages.", "fragment"),
        ("Return the length of it.", "pronoun"),
        ("Free the pages likewise.", "pronoun"),
    ],
)
def test_first_lines(first: str, rule: str) -> None:
    assert rules_of(f'"""{first}\n\nWhat follows may lean on the first line.\n"""\n') == [
        rule
    ] * bool(rule)


@pytest.mark.parametrize(
    "entry, rule",
    [
        ("x: The tensor.", "repeats"),
        ("x: The tensor of\n            the call.", ""),
        ("x: float32 [T, K].", ""),
        ("x: None for no mask.", ""),
        ("y: The rows of each page, in order.", "unknown"),
    ],
)
def test_entries(entry: str, rule: str) -> None:
    text = f'def f(x):\n    """Do a thing.\n\n    Args:\n        {entry}\n    """\n'
    assert rules_of(text) == [rule] * bool(rule)
