"""The sentence about settings of a recipe that a resumed run does not use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from jetrl.settings.loading import Settings

_MOST_CHARACTERS, _MOST_OF_A_VALUE = 800, 40
_FIRST = ("task.name", "model.path")  # say most about another recipe
_PLACE = ("run.name", "run.dir")  # say which run, and not what it does


def unused_of_recipe(recipe: str, given: Settings, own: Settings, config: Path) -> str:
    """Return a sentence about the settings of a recipe that a resumed run does not use, or ""."""
    from jetrl.runs.directory import settings_that_differ
    from jetrl.runs.format import clip, visible
    from jetrl.settings.loading import toml_value

    def word(value: Any) -> str:
        return "unset" if value is None else clip(toml_value(value), _MOST_OF_A_VALUE)

    recipes, runs = (settings.model_dump(mode="json") for settings in (given, own))
    differing = settings_that_differ(recipes, runs)
    keys = [key for key in differing if key not in _PLACE]
    unused = [
        f"{key} = {word(differing[key][0])} (the run: {word(differing[key][1])})"
        for key in sorted(keys, key=lambda key: key not in _FIRST)
    ]
    if not unused:
        return ""
    shown = visible(clip(", ".join(unused), _MOST_CHARACTERS))
    return (
        f"--resume goes on with the run's own settings, {config}; what {recipe} gives otherwise is "
        f"not used: {shown}. To change a setting of the run, write it as KEY=VALUE"
    )
