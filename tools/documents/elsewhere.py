"""The tables of docs/coming-from.md, made from elsewhere.txt; the prose is left alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jetrl.settings.messages import elsewhere


def _row(*cells: Iterable[str] | str) -> str:
    texts = [c if isinstance(c, str) else ", ".join(f"`{word}`" for word in c) for c in cells]
    return f"| {' | '.join(texts)} |\n"


def with_names(text: str) -> str:
    """Return the document with both tables as elsewhere.txt has them."""
    systems = ("TRL, unsloth", "verl", "prime-rl")
    tables = {
        "Settings": _row("jetrl", *systems, "what differs") + "| --- " * 5 + "|\n",
        "Without a counterpart": _row(*systems, "why") + "| --- " * 4 + "|\n",
    }
    for row in elsewhere():
        head = "Settings" if row.here else "Without a counterpart"
        cells = (*([row.here] if row.here else []), row.trl, row.verl, row.prime_rl, row.words)
        tables[head] += _row(*cells)
    for head, table in tables.items():
        found = re.search(rf"\n## {head}\n[^|#]*((?:\|.*\n)+)", text)
        assert found is not None, "the document has both headings"
        text = text[: found.start(1)] + table + text[found.end(1) :]
    return text
