"""Checks of a tokenizer's files before a library reads them.

A tokenizer's normalizers rewrite a text one after another, and each may write more than it read:
thirty that double a letter make a gigabyte of it. How much longer a text can get follows from the
file, so that is where it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.files import read_json, shown_value

MOST_GROWTH = 256  # times: what the normalizers of a tokenizer may lengthen a text by
_MOST_BYTES = 2**28  # of tokenizer.json; those of the largest vocabularies have 40 MiB
_MOST_STAGES = 1000


def check_tokenizer_files(directory: Path) -> None:
    """Check the files of a tokenizer's directory.

    Raises:
        UserError: Something in the directory is no file that could be read; tokenizer.json is
            damaged, or describes a tokenizer that makes texts far longer.
    """
    for entry in sorted(directory.iterdir()):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise UserError(f"{entry}: not a regular file (a pipe or a device)")
    file = directory / "tokenizer.json"
    if not file.exists():
        return
    try:
        contents = read_json(file, _MOST_BYTES)
    except UserError as error:
        raise UserError(f"{directory}: the tokenizer does not load: {error}") from None
    if not isinstance(contents, dict):
        raise UserError(f"{file}: a JSON object is expected")
    for key, inside in (("normalizer", "normalizers"), ("decoder", "decoders")):
        try:
            growth = _growth(contents.get(key), inside)
        except (TypeError, KeyError, AttributeError):
            value = shown_value(contents.get(key))
            raise UserError(f"{file}: {key} = {value}: not a tokenizer's") from None
        if growth > MOST_GROWTH:
            raise UserError(
                f"{file}: {key}: it can make a text {MOST_GROWTH} times as long and more, which no "
                "tokenizer needs"
            )


def _growth(part: Any, inside: str) -> float:
    """Return how many times as long a normalizer or decoder can make a text, an upper bound.

    Args:
        part: The JSON of the normalizer or decoder.
        inside: The key of a sequence's stages.

    Raises:
        TypeError, KeyError, AttributeError: The JSON is none of a tokenizer's.
    """
    growth = 1.0
    for number, stage in enumerate(_stages(part, inside)):
        if stage["type"] == "Replace":
            content, pattern = stage["content"], stage["pattern"]
            if "String" in pattern:
                growth *= max(1.0, len(content) / max(1, len(pattern["String"])))
            else:  # a pattern may match between any two characters
                growth *= 1.0 + len(content)
        elif stage["type"] == "Prepend":
            growth += len(stage["prepend"])
        if growth > MOST_GROWTH or number > _MOST_STAGES:
            return float("inf")
    return growth


def _stages(part: Any, inside: str) -> Iterator[dict[str, Any]]:
    """Yield the stages of a normalizer or decoder, those of sequences within sequences too."""
    left = [part] if part is not None else []
    while left:
        stage = left.pop(0)
        if not isinstance(stage.get("type"), str):
            raise TypeError("a stage without a type")
        if stage["type"] == "Sequence":
            left = [*stage[inside], *left]
        else:
            yield stage
