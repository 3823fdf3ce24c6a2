"""Error messages for invalid settings: each names the source and the fix.

For an unknown key, hints suggest a similar name, or the equivalent of a TRL, unsloth, verl or
prime-rl setting. The table of their names is elsewhere.txt, also the source of docs/coming-from.md.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

Tree = dict[str, Any]
"""Settings by section and name, as a TOML file has them."""
Origins = dict[str, str]
"""Where each setting was set, by dotted key; the key "" stands for all settings."""


def origin(key: str, origins: Origins) -> str:
    """Return where a key was set, else its section, else a key inside it."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):  # a.b.c, a.b, a
        if (prefix := ".".join(parts[:end])) in origins:
            return origins[prefix]
    inside = [where for other, where in origins.items() if other.startswith(f"{key}.")]
    return inside[-1] if inside else origins[""]


def explain(error: ValidationError, settings: type[BaseModel], origins: Origins) -> str:
    """Return one line per invalid setting; alternatives of a union are joined by `or`."""
    messages: dict[str, list[str]] = {}
    heads: dict[str, str] = {}
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:2])
        message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if item["type"] == "extra_forbidden":
            for path in _leaves(tuple(map(str, item["loc"])), item["input"]):
                full = ".".join(path)
                heads[full] = f"{origin(full, origins)}: unknown setting {full}; "
                messages[full] = [hint(path, settings)]
            continue
        if item["type"] == "missing":
            message = "has too few values"
        if item["type"] == "value_error":
            heads[key] = f"{origin(key, origins) if '.' in key else origins['']}: "
        else:
            value = "none" if item["input"] is None else item["input"]
            heads[key] = f"{origin(key, origins)}: {key} = {toml_value(value)}: "
        if message not in messages.setdefault(key, []):
            messages[key].append(message)
    return "\n".join(f"{heads[key]}{' or '.join(texts)}" for key, texts in messages.items())


def _leaves(path: tuple[str, ...], value: object) -> Iterator[tuple[str, ...]]:
    if not isinstance(value, Mapping) or not value:
        yield path
        return
    for key, item in value.items():
        yield from _leaves((*path, str(key)), item)


class Elsewhere(NamedTuple):
    """A line of elsewhere.txt: settings here, and their names in other libraries.

    `here` lists settings or a flag, or is empty if there is no equivalent. `words` explains the
    difference or the reason.
    """

    here: tuple[str, ...]
    trl: tuple[str, ...]
    verl: tuple[str, ...]
    prime_rl: tuple[str, ...]
    words: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.trl, *self.verl, *self.prime_rl)

    def __str__(self) -> str:
        if not self.here:
            return f"jetrl has no such setting: {self.words}"
        return f"here it is {' and '.join(self.here)}" + (f" ({self.words})" if self.words else "")


@functools.cache
def elsewhere() -> list[Elsewhere]:
    """Return all lines of elsewhere.txt."""
    text = Path(__file__).with_name("elsewhere.txt").read_text(encoding="utf-8")
    rows = []
    for line in text.splitlines():
        if not line.startswith("#"):
            *cells, words = line.split("|")
            here, trl, verl, prime_rl = (tuple(cell.split()) for cell in cells)
            rows.append(Elsewhere(here, trl, verl, prime_rl, words.strip()))
    return rows


@functools.cache
def _named() -> dict[str, Elsewhere]:
    return {name: row for row in elsewhere() for name in row.names}


def hint(path: Sequence[str], settings: type[BaseModel]) -> str:
    """Return a suggestion for an unknown key, given as its parts."""
    keys: dict[str, list[str]] = {}  # full names by last part
    for section, field in settings.model_fields.items():
        for key in typing.cast(type[BaseModel], field.annotation).model_fields:
            keys.setdefault(key, []).append(f"{section}.{key}")
    last, in_section = path[-1], path[0] in settings.model_fields and len(path) == 2
    same = f"did you mean {' or '.join(keys[last])}?" if last in keys else ""
    if same and len(path) == 1:
        return same
    if rows := _of_last_parts(path) or _around(path) or ([] if in_section else _similar_path(path)):
        return "; or ".join(map(str, rows[:3]))
    if near := difflib.get_close_matches(".".join(path), keys.get(last, ()), n=1, cutoff=0.75):
        return f"did you mean {near[0]}?"
    if same:
        return same
    ours = [key for key, fulls in keys.items() if in_section and f"{path[0]}.{key}" in fulls]
    if near := difflib.get_close_matches(last, ours, n=1, cutoff=0.6):
        return f"did you mean {path[0]}.{near[0]}?"
    if path[0] == "task" and in_section:
        return f"options of the task are task.options.NAME, as in task.options.{last}"
    theirs = {name.split(".")[-1]: row for name, row in _named().items()}
    sections = [] if len(path) > 1 else list(settings.model_fields)
    for near_one in difflib.get_close_matches(last, [*keys, *theirs, *sections], n=1, cutoff=0.7):
        if near_one in keys:
            return f"did you mean {' or '.join(keys[near_one])}?"
        if near_one in sections:
            return f"did you mean {near_one}?"
        asked = "" if near_one == last else f"did you mean {near_one}? "
        return f"{asked}{theirs[near_one]}"
    if in_section:
        return f"known in {path[0]}: {', '.join(ours)}"
    return f"known sections: {', '.join(settings.model_fields)}"


def _of_last_parts(path: Sequence[str]) -> list[Elsewhere]:
    """Return rows whose names share the most trailing parts with a path, at least two or all."""
    for count in range(len(path), 0, -1):
        end = f".{'.'.join(path[-count:])}"
        rows = [
            row
            for name, row in _named().items()
            if f".{name}".endswith(end) and (count > 1 or count == len(path) or f".{name}" == end)
        ]
        if rows:
            return list(dict.fromkeys(rows))
    return []


def _around(path: Sequence[str]) -> list[Elsewhere]:
    """Return the row of a wildcard name such as `slurm.*` that covers a path."""
    inside = f".{'.'.join(path)}."
    names = [name for name in _named() if name.endswith(".*") and f".{name[:-1]}" in inside]
    return [_named()[max(names, key=len)]] if names else []


def _similar_path(path: Sequence[str]) -> list[Elsewhere]:
    for start in range(len(path) - 1):
        if near := difflib.get_close_matches(".".join(path[start:]), _named(), n=1, cutoff=0.85):
            return [_named()[near[0]]]
    return []


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """Return a value as written after `key =` in TOML."""
    if isinstance(value, dict):
        inside = ", ".join(f"{toml_key(str(k))} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # TOML basic strings accept JSON escapes, but no surrogates and no raw DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
