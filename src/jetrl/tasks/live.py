"""Functions, classes and examples of the running Python program, named `python:NAME` in settings.

Only that program can access them: scoring runs in its process, without the limits of workers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jetrl.errors import UserError

PREFIX = "python:"
_objects: dict[str, Any] = {}


def name_of(thing: Any, name: str = "") -> str:
    """Return an object's settings name: `file.py:NAME` if workers can import it, else with PREFIX.

    Importable objects are at the top level of a file that is neither the main program nor part of a
    package. A later object with the same name replaces an earlier one.
    """
    own_name = getattr(thing, "__qualname__", type(thing).__qualname__)
    name = name or own_name
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "")
    own = module is None or module.__name__ == "__main__" or "." in module.__name__
    if not own and file.suffix == ".py" and getattr(module, own_name, None) is thing:
        return f"{file}:{own_name}"
    _objects[f"{PREFIX}{name}"] = thing
    return f"{PREFIX}{name}"


def live(name: str, key: str) -> Any:
    """Return the object that a setting names with PREFIX; raise UserError in another program."""
    if name not in _objects:
        what = f"{key} = {name}: an object of the Python program that began the run"
        raise UserError(f"{what}; start or resume it there, or put it into a file (mine.py:NAME)")
    return _objects[name]
