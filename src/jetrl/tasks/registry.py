"""From a task's name in the settings to the task itself.

get_task("arithmetic", digits=2)              a built-in
get_task("mix", tasks=[...])                  several tasks, mixed by weight
get_task("reasoning_gym:chain_sum", seed=7)   any reasoning-gym data set
get_task("my_task.py:MyTask", path="data/")   a class in a file of yours
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jetrl.settings import TaskSettings
from jetrl.tasks.base import Task
from jetrl.tasks.mix import Mix
from jetrl.tasks.single import build, get_single_task


def get_task(name: str, *, path: str | Path | None = None, **options: Any) -> Task:
    """Return the task of a name, built with its options.

    Args:
        name: A built-in name, `reasoning_gym:NAME`, or `FILE.py:CLASS`.
        path: Data file or folder, handed to tasks that read one.
        options: Keyword arguments of the task (`[task.options]` in a recipe).

    Raises:
        UserError: There is no such task (the nearest name is offered), the task does not have an
            option, a file does not import or holds no such class (with file and line), a package is
            not installed, or data is missing.
    """
    if path is not None:
        options["path"] = str(path)
    if name == Mix.name:
        return build(Mix, name, options)
    return get_single_task(name, options)


def build_task(settings: TaskSettings) -> Task:
    """Return the task that the settings of a run describe; raises `UserError` as `get_task`."""
    return get_task(settings.name, path=settings.path, **settings.options)
