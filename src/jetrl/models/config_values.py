"""Reading the values of a config.json, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl.errors import UserError


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1.

    Args:
        config: The object that holds the key.
        key: The key.
        default: The value where the key is absent; None where it must be there.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} = {value!r}: a whole number of at least 1 is expected")
    return value


def positive(
    config: Mapping[str, Any], key: str, where: str = "config.json", default: float | None = None
) -> float:
    """Return a number above 0.

    Args:
        config: The object that holds the key.
        key: The key.
        where: The place to name in an error.
        default: The value where the key is absent; None where it must be there.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{where}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{where}: {key} = {value!r}: a number above 0 is expected")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Return true or false; false where the key is absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"config.json: {key} = {value!r}: true or false is expected")
    return bool(value)
