"""Reading the values of a config.json, whose types `config_schema` has checked.

A key that is missing is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl.errors import UserError


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1.

    Args:
        default: The value where the key is absent; None where it must be there.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"config.json: {key} is missing")
    return int(value)


def positive(
    config: Mapping[str, Any], key: str, where: str = "config.json", default: float | None = None
) -> float:
    """Return a number above 0.

    Args:
        default: The value where the key is absent; None where it must be there.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{where}: {key} is missing")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Return true or false; false where the key is absent."""
    return bool(config.get(key))
