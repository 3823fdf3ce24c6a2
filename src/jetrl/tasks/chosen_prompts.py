"""The option `only` of tasks that make up their prompts: a file names the training prompts to use.

The file has JSON lines with an `id` each; `benchmarks/study/perfectible.py` writes such files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jetrl.errors import UserError


def only_these(ids: Sequence[str], file: Path, label: str) -> list[str]:
    """Return those ids of training prompts that a file names, in the order of the task.

    Args:
        ids: The ids of all training prompts, in their usual order.
        file: A file of JSON lines with an `id` each.

    Raises:
        UserError: The file does not read, or names a prompt that is not there.
    """
    chosen = set(_read_ids(file))
    unknown = sorted(chosen.difference(ids))
    if unknown:
        raise UserError(
            f"{file}: no training prompt {unknown[0]!r} ({len(unknown)} such); were these ids "
            f"drawn with other options of task {label}?"
        )
    return [one for one in ids if one in chosen]


def _read_ids(file: Path) -> list[str]:
    """Return the `id` of every line of a file of JSON lines."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"task.options.only = {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason})") from None
    ids: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            raise UserError(f'{file}, line {number}: no object with an "id" that is a text')
        ids.append(row["id"])
    if not ids:
        raise UserError(f"{file}: no lines; each is an object with the id of a prompt")
    return ids
