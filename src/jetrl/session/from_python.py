"""Settings of a Python program: maps functions, rows and tasks to setting values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.settings.loading import Settings, load_config, named
from jetrl.tasks import Task
from jetrl.tasks.user_files import PREFIX, name_of
from jetrl.types import Json

logger = logging.getLogger(__name__)


def settings_of(
    settings: Settings | str | Path | None = None,
    *,
    model: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    rewards: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None = (),
    reward_weights: Sequence[float] | None = None,
    task: str | Mapping[str, Any] | type[Task] | Task | None = None,
    **sections: Any,
) -> Settings:
    """Return the settings of `jetrl.train`: a recipe or the defaults, plus the arguments.

    A reward function or task at top level of another file is referenced by that file and runs in
    worker processes under the limits of [task]. Any other is called in this process, without
    limits.

    `data` becomes task.path; all its columns reach the rewards, which are functions
    (tasks/rewards.py) or names of verifiers. Raises UserError for an unknown or wrong argument or
    setting.
    """
    if not isinstance(settings, Settings | str | Path | None):
        raise UserError(
            f"settings: not {type(settings).__name__}; give a recipe's path or a Settings, or "
            "model= and so on"
        )
    columns = data.values() if isinstance(data, Mapping) else ()
    if any(isinstance(column, Sized) and not isinstance(column, str) for column in columns):
        raise UserError("data: a table of splits or columns; give the rows of one split, as dicts")
    names = _names(() if rewards is None else rewards)
    own = _task_section(task, data, names, reward_weights)
    if names and not {"name", "path"} & own.keys() and settings is None:
        raise UserError("rewards: there is nothing to score; add data= (rows or a file)")
    # A model name is an override, which replaces a recipe's model.config.
    overrides = [f"model.path={model}"] if isinstance(model, str | Path) else []
    if not isinstance(model, str | Path | Mapping | None):
        raise UserError(f"model: not {type(model).__name__}; give its directory or hub name")
    # Sections given as arguments, merged with these settings.
    tables = {"model": model, "data": data}
    given = sections | {key: table for key, table in tables.items() if isinstance(table, Mapping)}
    if own:
        given["task"] = own
    return named(load_config(settings, overrides, given))


def _task_section(task: Any, data: Any, names: list[str], weights: Sequence[float] | None) -> Json:
    """Return the [task] section of a task, its rows and its reward functions."""
    # `task` may be a section, a name, or an object, which gets a name.
    own: Json = {}
    if isinstance(task, Mapping):
        own = dict(task)
    elif isinstance(task, str):
        own = {"name": task}
    elif isinstance(task, Task) or (isinstance(task, type) and issubclass(task, Task)):
        own = {"name": name_of(task)}
    elif task is not None:
        raise UserError(f"task: {task!r:.60} is not a Task; give its name, class or instance")
    # Rows use the task `dataset`, unless another is given.
    if data is not None and not isinstance(data, Mapping):
        own = {"name": "dataset", "path": _path(data), **own}
    # Reward functions become its checkers; several, or weights, become a list.
    options = own.get("options", {})
    if (names or weights is not None) and isinstance(options, Mapping):
        checker = names[0] if len(names) == 1 and weights is None else names
        factors = {} if weights is None else {"weights": weights}
        own["options"] = {"checker": checker, **factors, **options}
    # Worker processes can only import what is in a file.
    live = [name for name in (str(own.get("name")), *names) if name.startswith(PREFIX)]
    if live:
        own.setdefault("workers", 0)
        shown = ", ".join(name.removeprefix(PREFIX) for name in live)
        logger.warning(
            "%s: called in this process, without task.timeout_s and task.memory_mib, which limit "
            "functions in other files",
            shown,
        )
    return own


def _path(data: Any) -> str:
    """Return task.path of the rows: their path, or the name of an in-memory dataset."""
    if isinstance(data, str | Path):
        return str(data)
    try:
        rows = list(data)
    except TypeError:
        raise UserError(f"data: not {type(data).__name__}; give rows (dicts) or a path") from None
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            hint = "" if isinstance(data, list) else " (of a DataFrame: df.to_dict('records'))"
            raise UserError(f"data, row {number}: {row!r:.60} is not a dict of columns{hint}")
    # Convert NumPy values, as in pandas records, to Python numbers and lists.
    plain = [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in r.items()} for r in rows]
    return name_of(plain, "data")


def _names(rewards: Any) -> list[str]:
    given = [*rewards] if isinstance(rewards, list | tuple) else [rewards]
    for reward in given:
        if not callable(reward) and not isinstance(reward, str):
            raise UserError(
                f"rewards: {reward!r:.60} is not a function; a reward model is "
                "reward={'model_path': ..., 'model': 1.0}"
            )
    # Functions with the same name are numbered.
    labels = [getattr(reward, "__name__", type(reward).__name__) for reward in given]
    return [
        reward
        if isinstance(reward, str)
        else name_of(reward, label if labels.count(label) == 1 else f"{label}-{number}")
        for number, (reward, label) in enumerate(zip(given, labels, strict=True), start=1)
    ]
