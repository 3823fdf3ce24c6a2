"""Classes, functions and examples from a user's Python file or running Python program.

Settings name those of a file `my_task.py:MyTask`. Sources are cached, so that scoring workers
started later in a run use the same source. Objects of the running program are named `python:NAME`.
Only that program can access them: scoring runs in its process, without the limits of workers.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
import traceback
import typing
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl.errors import UserError, nearest
from jetrl.tasks.base import Task
from jetrl.untrusted import USERS_ERRORS, check_trusted

loaded: dict[str, bytes] = {}  # sources of imported files, by path
fixed: dict[str, bytes] = {}  # sources that override files on disk

PREFIX = "python:"
_objects: dict[str, Any] = {}  # of the running program


def load_task_class(file: Path, class_name: str) -> type[Task]:
    """Return a task class from a user's file."""
    module = _load_module(file, f"task file {file}")
    cls = getattr(module, class_name, None)
    if cls is None:
        classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        tasks = [key for key, value in classes.items() if issubclass(value, Task)]
        raise UserError(f"task file {file}: no class {class_name!r}{nearest(class_name, tasks)}")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise UserError(
            f"{file}: {class_name} is not a Task; write `class {class_name}(Task):` with `from "
            "jetrl.tasks import Task`"
        )
    return cls


def load_function(file: Path, name: str) -> Callable[..., Any]:
    """Return a function from a user's file."""
    module = _load_module(file, str(file))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"{file}: no function {name!r}{nearest(name, known)}")
    return typing.cast(Callable[..., Any], function)


class _Source(importlib.abc.ExecutionLoader):
    """Module loader for in-memory source."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source)


def _load_module(file: Path, label: str) -> ModuleType:
    """Run a file as a module; its folder is importable, as with `python FILE`."""
    check_trusted(file)
    file = file.resolve()
    try:
        source = fixed[str(file)] if str(file) in fixed else file.read_bytes()
    except OSError as error:
        raise UserError(f"{label}: {error.strerror} (paths start at the working folder)") from error
    module_name = f"jetrl_user_task_{file.stem}_{zlib.crc32(str(file).encode()):x}"
    if module_name in sys.modules and loaded.get(str(file)) == source:
        return sys.modules[module_name]
    loader = _Source(str(file), source)
    spec = importlib.util.spec_from_file_location(module_name, file, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # so that classes can be pickled
    loaded[str(file)] = source
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        loader.exec_module(module)
    except USERS_ERRORS as error:
        del sys.modules[module_name]
        del loaded[str(file)]
        raise UserError(f"task file {_import_failure(error, file)}") from error
    return module


def _import_failure(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    where = f"{file}, line {lines[-1]}" if lines else str(file)
    return f"{where}: does not import: {type(error).__name__}: {error}"


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
        raise UserError(
            f"{key} = {name}: an object of the Python program that began the run; start or resume "
            "it there, or put it into a file (mine.py:NAME)"
        )
    return _objects[name]
