"""The tables of docs/settings.md, made from `jetrl.settings`; the prose is left alone."""

from __future__ import annotations

import re

from jetrl.errors import UserError
from jetrl.settings.loading import describe
from jetrl.settings.sections import Settings

HEAD = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"


def table(section: str) -> str:
    """The Markdown table of a section's keys."""
    rows = []
    for key, kind, default, words in describe():
        if key.startswith(f"{section}."):
            name, escaped = key.split(".")[1], kind.replace("|", "\\|")
            rows.append(f"| `{name}` | {escaped} | `{default}` | {words} |\n")
    return HEAD + "".join(rows)


def with_tables(text: str) -> str:
    """The document with the table of each section as `jetrl.settings` has it.

    Raises:
        UserError: a section without a heading and a table in the document.
    """
    for section in Settings.model_fields:
        found = re.search(rf"(\n## `{section}`\n[^|#]*)((?:\|.*\n)+)", text)
        if found is None:
            raise UserError(f"docs/settings.md: no heading '## `{section}`' with a table below it")
        text = text[: found.start(2)] + table(section) + text[found.end(2) :]
    return text
