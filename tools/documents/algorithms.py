"""The table of algorithms in docs/algorithms.md, made from their records; the prose stays."""

from __future__ import annotations

from jetrl.settings.algorithms import ALGORITHMS, Algorithm

_HEAD = "| `algorithm.name` |"


def rows() -> list[str]:
    """A line of the table for each algorithm."""
    return [_row(name, record) for name, record in ALGORITHMS.items()]


def with_table(text: str) -> str:
    """Return the document with its table made from the sources."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(_HEAD)) + 2
    end = start
    while lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[:start], *rows(), *lines[end:]]) + "\n"


def _row(name: str, record: Algorithm) -> str:
    options = ", ".join(
        f"`{key}` = {_value(value)}"
        for key, value in record.options.items()
        if key not in ("clip_high", "dual_clip") or value is not None  # else it is clip, or off
    )
    cells = [
        f"`{name}`",
        record.title,
        f"`{record.advantages}`",
        f"`{record.loss}`",
        f"`{record.aggregation}`",
        options,
        f"{record.kl_estimator} in the {record.kl_in}",
        record.paper,
    ]
    return f"| {' | '.join(cells)} |"


def _value(value: float | bool | None) -> str:
    if value is None:
        return "a fifth of `rollout.max_tokens`"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
