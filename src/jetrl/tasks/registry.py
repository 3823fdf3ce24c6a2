"""From a task's name in the settings to the task itself.

get_task("arithmetic", digits=2)              a built-in
get_task("reasoning_gym:chain_sum", seed=7)   any reasoning-gym data set
get_task("my_task.py:MyTask", path="data/")   a class in a file of yours
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import traceback
import typing
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl.errors import UserError
from jetrl.settings import TaskSettings
from jetrl.tasks.base import Task
from jetrl.tasks.messages import check_options, describe_error, nearest
from jetrl.types import Prompt

BUILT_IN = {
    "arithmetic": ("jetrl.tasks.arithmetic", "Arithmetic"),
    "dataset": ("jetrl.tasks.dataset", "Dataset"),
    "gsm8k": ("jetrl.tasks.gsm8k", "Gsm8k"),
    "mix": ("jetrl.tasks.mix", "Mix"),
}
_MODULES = "jetrl_user_task_"  # the user's files in sys.modules
_GIVEN: dict[str, bytes] = {}


def get_task(name: str, *, path: str | Path | None = None, **options: Any) -> Task:
    """The task called `name`, built with `options`.

    Args:
        name: a built-in name, `reasoning_gym:NAME`, or `FILE.py:CLASS`.
        path: data file or folder, handed to tasks that read one.
        options: keyword arguments of the task (`[task.options]` in a recipe).

    Raises:
        UserError: no such task (the nearest name is offered), an option the task does not have, a
            file that does not import or holds no such class (with file and line), a package that is
            not installed, data that is missing.
    """
    if path is not None:
        options["path"] = str(path)
    if name.startswith("reasoning_gym:"):
        module = importlib.import_module("jetrl.tasks.reasoning")
        return module.ReasoningGym(name.removeprefix("reasoning_gym:"), **options)
    file, colon, class_name = name.rpartition(":")
    if name.endswith(".py") or (colon and file.endswith(".py")):
        if not colon or name.endswith(".py"):
            raise UserError(f"task {name}: add the class, as in {name}:MyTask")
        return _build(_load_class(Path(file), class_name), name, options)
    if name not in BUILT_IN:
        raise UserError(
            f"unknown task {name!r}{nearest(name, list(BUILT_IN))} "
            "(also possible: reasoning_gym:NAME, file.py:Class)"
        )
    module_name, class_name = BUILT_IN[name]
    return _build(getattr(importlib.import_module(module_name), class_name), name, options)


def build_task(settings: TaskSettings) -> Task:
    """The task that the settings of a run describe.

    Raises:
        UserError: as `get_task`.
    """
    options: dict[str, Any] = dict(settings.options)
    return get_task(settings.name, path=settings.path, **options)


def read_prompts(task: Task, split: str) -> list[Prompt]:
    """All prompts of a split.

    Raises:
        UserError: what the task itself raises of this kind; `prompts` raised something else (with
            file and line), or gave something that is no Prompt.
    """
    try:
        given = task.prompts(split)
        prompts = None if given is None else list(given)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"task {task.label}: prompts({split!r}) raised {describe_error(error)}"
        ) from error
    if prompts is None:
        raise UserError(f"task {task.label}: prompts({split!r}) returned nothing: add the return")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise UserError(
                f"task {task.label}: item {number} of prompts({split!r}) is no Prompt but "
                f"{str(prompt)[:60]!r}; write Prompt(id=..., text=...), from jetrl.types"
            )
    return prompts


def _build(cls: type[Task], name: str, options: dict[str, Any]) -> Task:
    parameters = inspect.signature(cls).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options([p.name for p in parameters if p.kind is not p.VAR_POSITIONAL], options, name)
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in options:
            key = "task.path" if parameter.name == "path" else f"task.options.{parameter.name}"
            raise UserError(f"task {name} needs {key}; docs/tasks.md says what it is")
    try:
        return cls(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"task {name}: {cls.__name__}({_arguments(options)}) raised {describe_error(error)}"
        ) from error


def _arguments(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def load_function(file: Path, name: str) -> Callable[..., Any]:
    """A function of a file of the user's.

    Raises:
        UserError: no such file, one that does not import (with its line), no such function in it.
    """
    module = _load_module(file, str(file))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"{file}: no function {name!r}{nearest(name, known)}")
    return typing.cast(Callable[..., Any], function)


def loaded_sources() -> dict[str, bytes]:
    """What the user's files that this process has loaded read when they were, by path."""
    return {
        str(module.__file__): vars(module)["__jetrl_source__"]
        for name, module in sys.modules.items()
        if name.startswith(_MODULES) and "__jetrl_source__" in vars(module)
    }


def use_sources(sources: Mapping[str, bytes]) -> None:
    """From here on these files read so, whatever has become of them: a process that is started in
    the middle of a run scores as the others do."""
    _GIVEN.update(sources)


def _load_class(file: Path, class_name: str) -> type[Task]:
    module = _load_module(file, f"task file {file}")
    cls = getattr(module, class_name, None)
    if cls is None:
        tasks = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Task) and value is not Task
        ]
        raise UserError(f"task file {file}: no class {class_name!r}{nearest(class_name, tasks)}")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        line = _definition_line(cls)
        raise UserError(
            f"{file}{line}: {class_name} is not a Task; write `class {class_name}(Task):` "
            "with `from jetrl.tasks import Task`"
        )
    return cls


def _definition_line(value: object) -> str:
    try:
        return f", line {inspect.getsourcelines(value)[1]}"  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


class _Source(importlib.abc.ExecutionLoader):
    """Runs what a file read."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source)


def _read_source(file: Path, named: str) -> bytes:
    if str(file) in _GIVEN:
        return _GIVEN[str(file)]
    if not file.is_file():
        raise UserError(f"{named}: no such file (paths start at the working folder)")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{named}: {error.strerror}") from error


def _load_module(file: Path, named: str) -> ModuleType:
    """Run the file as a module of its own; its folder is importable, as for `python FILE`. named:
    what it is called where it cannot be read."""
    file = file.resolve()
    source = _read_source(file, named)
    module_name = f"{_MODULES}{file.stem}_{zlib.crc32(str(file).encode()):x}"
    loaded = sys.modules.get(module_name)
    if loaded is not None and getattr(loaded, "__jetrl_source__", None) == source:
        return loaded
    loader = _Source(str(file), source)
    spec = importlib.util.spec_from_file_location(module_name, file, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    vars(module)["__jetrl_source__"] = source
    sys.modules[module_name] = module  # so that its classes can be pickled
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError(f"task file {_import_line(error, file)}") from error
    return module


def _import_line(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    where = f"{file}, line {lines[-1]}" if lines else str(file)
    return f"{where}: does not import: {type(error).__name__}: {error}"
