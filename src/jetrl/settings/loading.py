"""Load settings from TOML recipes and dotted overrides (`train.lr=2e-6`), and write them as TOML.

Sections and keys are in `jetrl.settings.sections`. Errors name the recipe and line, or the
override; for an unknown key they suggest the closest known key.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ValidationError

from jetrl.errors import UserError, nearest
from jetrl.settings.messages import Origins, Tree, explain, origin, toml_key, toml_value
from jetrl.settings.sections import Settings, SftSettings

__all__ = ["Settings", "describe", "find_recipe", "load_config", "packaged_recipes", "to_toml"]

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
SHORT = {"model": "path", "task": "name", "trackers": "names"}  # `task=gsm8k` is `task.name=gsm8k`
_NO_TOML = (ValueError, RecursionError)  # also on 5,000-digit numbers, 1,000 nested brackets


def load_config(
    recipe: str | Path | Settings | None = None,
    overrides: Sequence[str] = (),
    sections: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings of a TOML recipe plus `key=value` overrides; the last override wins.

    Values of text settings are taken verbatim, others are parsed as TOML (`1e-6`, `true`, `["a"]`);
    `none` unsets a setting. `task=NAME` is short for `task.name=NAME`, `model=PATH` for
    `model.path=PATH`, `trackers=wandb` for `trackers.names=["wandb"]`. Overriding the recipe's task
    discards its whole [task] section; overriding model.path discards its model.config and
    tokenizer, with a warning. Relative paths are relative to the working directory.

    Args:
        recipe: TOML file or name of a packaged recipe (`demo`), also the default of run.name;
            Settings to modify; or None for no recipe.
        overrides: Settings as `section.key=value`.
        sections: Settings as `{"train": {"lr": 2e-6}}` or `{"train.lr": 2e-6}`; overrides take
            precedence.

    Raises:
        UserError: The recipe is unknown or not valid TOML, a key is unknown, or a value has the
            wrong type, is out of range or conflicts with another setting.
    """
    tree: Tree = {}
    origins: Origins = {}
    names = ["the overrides"] if overrides else []
    if isinstance(recipe, Settings):
        tree = recipe.model_dump(mode="json", exclude_unset=True)
    elif recipe is not None:
        path = find_recipe(recipe)
        tree, names = _read_toml(path, origins), [str(path), *names]
    origins[""] = " and ".join(names) or "the settings"
    arguments = _nested(sections or {})
    task = arguments.get("task")
    if name := task.get("name") if isinstance(task, Mapping) else task:
        _replace_task(tree, name)
    for section, given in arguments.items():
        tree[section] = _merged(tree.get(section), given)
        keys = [f"{section}.{key}" for key in given] if isinstance(given, Mapping) else [section]
        origins.update(dict.fromkeys(keys, f"argument {section}"))
    for section in SHORT.keys() & tree.keys():
        if not isinstance(tree[section], dict):  # trackers = "wandb" at top level
            tree[section] = {SHORT[section]: tree[section]}
    _set_aside(tree, overrides)
    for override in overrides:
        _apply_override(tree, override, origins)
    _move_old_names(tree, origins)
    _check_tree(tree, Settings, (), origins)
    if isinstance(recipe, str | Path):
        tree.setdefault("run", {}).setdefault("name", path.stem)
    try:
        # Convert NumPy and torch scalars and arrays to Python values.
        text = json.dumps(tree, default=lambda v: getattr(v, "tolist", lambda: str(v))())
        return Settings.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(explain(error, Settings, origins)) from None


def named(settings: Settings) -> Settings:
    """Return settings with run.name set; by default MODEL-TASK."""
    task, run = settings.task, settings.run
    if run.name:
        return settings
    source = Path(task.path).stem if task.name == "dataset" and task.path else task.name
    words = Path(settings.model.path or "").name, Path(re.split("[/:]", source)[-1]).stem
    run = run.model_copy(update={"name": "-".join(filter(None, words)).lower()})
    return settings.model_copy(update={"run": run})


def _nested(sections: Mapping[str, Any]) -> Tree:
    """Return sections with dotted keys such as `{"train.lr": 2e-6}` expanded."""
    tree: Tree = {}
    for key, value in sections.items():
        *outer, last = str(key).split(".")
        for name in (last, *reversed(outer)):
            value = {name: value}
        tree = _merged(tree, value)
    return tree


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, Mapping):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def packaged_recipes() -> list[str]:
    """Return the names of all packaged recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe, given its path or the name of a packaged recipe."""
    path = Path(recipe)
    if path.suffix in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        raise UserError(f"recipe {path}: a data file, not a TOML file; use task={path}")
    if path.is_file():
        return path
    name = str(recipe).removesuffix(".toml")
    if (RECIPES / f"{name}.toml").is_file() and "/" not in name:
        return RECIPES / f"{name}.toml"
    if (path / "config.toml").is_file():
        raise UserError(
            f"recipe {path}: a run directory; to resume it: jetrl train run.name={path.name} "
            "--resume"
        )
    if path.is_dir():
        raise UserError(f"recipe {path}: a folder, not a TOML file")
    if ".py:" in str(recipe):
        raise UserError(f"recipe {recipe}: not a TOML file; for a task, use task={recipe}")
    hint = nearest(path.stem, [*packaged_recipes(), *map(str, Path().glob("*.toml"))])
    raise UserError(f"recipe {recipe}: no such file or packaged recipe{hint}")


def _read_toml(path: Path, origins: Origins) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {path}: not UTF-8 text ({error.reason})") from None
    except _NO_TOML as error:
        raise UserError(f"recipe {path}: not valid TOML: {error}") from None
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.\-]+)\s*\]", line):
            section = header[1]
            origins.setdefault(section, f"{path}, line {number}")
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            origins.setdefault(f"{section}.{key[1]}".lstrip("."), f"{path}, line {number}")
    return tree


def _set_aside(tree: Tree, overrides: Sequence[str]) -> None:
    """Drop the recipe's task, model or length settings that an override replaces."""
    words = [(key.strip(), text.strip()) for key, _, text in (o.partition("=") for o in overrides)]
    given = {f"{key}.{SHORT[key]}" if key in SHORT else key: text for key, text in words}
    lengths = [key for key in ("loop.steps", "loop.epochs") if given.get(key, "none") != "none"]
    if len(lengths) == 2:
        raise UserError("loop.steps and loop.epochs: give one of them")
    if lengths and isinstance(loop := tree.get("loop"), dict):
        tree["loop"] = {k: v for k, v in loop.items() if k not in ("steps", "epochs")}
    if "task.name" in given:
        _replace_task(tree, _parse_value(given["task.name"], is_text=True))
    model = tree.get("model")
    if given.get("model.path", "none") == "none" or not isinstance(model, dict):
        return
    if "config" not in model or any(key.startswith("model.config") for key in given):
        return
    dropped = [key for key in ("config", "tokenizer") if key in model]
    tree["model"] = {key: value for key, value in model.items() if key not in dropped}
    names = " and ".join(f"model.{key}" for key in dropped)
    _warn_once(f"model.path={given['model.path']} replaces the recipe's {names}")


def _replace_task(tree: Tree, name: Any) -> None:
    """Drop the recipe's [task] section and its [sft] keys of another task, if the task changes."""
    task, sft = tree.get("task"), tree.get("sft", {})
    if not isinstance(task, dict) or name == task.get("name"):
        return
    unread = sft.keys() & SftSettings.unread_by(name == "text") if isinstance(sft, dict) else ()
    dropped = [f"task.{key}" for key in task if key != "name"]
    dropped += [f"sft.{key}" for key in sft if key in unread]
    if dropped:
        keys = " and ".join(dropped)
        _warn_once(f"task.name={name}: the recipe's {keys} are for another task and ignored")
    tree["task"] = {}
    if unread:
        tree["sft"] = {key: value for key, value in sft.items() if key not in unread}


@functools.cache  # so that a resume, which loads twice, warns once
def _warn_once(text: str) -> None:
    logger.warning(text)


def _apply_override(tree: Tree, override: str, origins: Origins) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise UserError(f"override {override!r}: write it as section.key=value")
    if key in SHORT:
        key = f"{key}.{SHORT[key]}"
    elif key in Settings.model_fields:
        section_model = typing.cast(type[BaseModel], Settings.model_fields[key].annotation)
        raise UserError(
            f"override {override!r}: {key} is a section; name a key, such as "
            f"{key}.{next(iter(section_model.model_fields))}"
        )
    for replaced in [other for other in origins if other.startswith(f"{key}.")]:
        del origins[replaced]
    origins[key] = f"override {override!r}"
    *sections, last = key.split(".")
    value = _parse_value(text, is_text=_annotation(key) in (str, str | None))
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"override {override!r}: {section} is not a section")
    tree[last] = value


def _move_old_names(tree: Tree, origins: Origins) -> None:
    """Move `sampler_deviation.weights_through_bf16`, the name of before, into [precision]."""
    section, key = "sampler_deviation", "weights_through_bf16"
    if not isinstance(tree.get(section), dict):
        return
    old = {name: value for name, value in tree.pop(section).items() if value is not None}
    if key in old:
        tree["precision"] = {key: old.pop(key), **tree.get("precision", {})}
        origins[f"precision.{key}"] = origin(f"{section}.{key}", origins)
    for name in old:
        where = origin(f"{section}.{name}", origins)
        raise UserError(
            f"{where}: {section}.{name} is for studies of a known mismatch: only an arm of a study "
            "file sets it (docs/studies.md)"
        )


def _annotation(key: str) -> Any:
    """Return the type of a setting by its dotted name, or None if the name is unknown."""
    section, _, name = key.partition(".")
    if section not in Settings.model_fields:
        return None
    fields = typing.cast(type[BaseModel], Settings.model_fields[section].annotation).model_fields
    return fields[name].annotation if name in fields else None


def _parse_value(text: str, is_text: bool) -> Any:
    """Return an override's value: None for `none`, parsed TOML if valid, else the text."""
    text = text.strip()
    if text == "none":
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except _NO_TOML:
        return text
    return text if is_text and not isinstance(value, str) else value


def _check_tree(
    tree: Mapping[str, Any], model: type[BaseModel], path: tuple[str, ...], origins: Origins
) -> None:
    for key, value in tree.items():
        full = ".".join((*path, str(key)))
        section = model.model_fields[key].annotation if key in model.model_fields else None
        if isinstance(section, type) and issubclass(section, BaseModel):
            if not isinstance(value, Mapping):
                where = origin(full, origins)
                raise UserError(
                    f"{where}: {full} is a section: write [{full}] above its keys (in Python: "
                    "give a dict)"
                )
            _check_tree(value, section, (*path, key), origins)
        else:
            _reject_unwritable(full, value, origins)


def _reject_unwritable(full: str, value: Any, origins: Origins) -> None:
    """Reject TOML values that JSON cannot represent: dates, NaN and infinity."""
    if isinstance(value, datetime.date | datetime.time):
        raise UserError(f"{origin(full, origins)}: {full} is a date; write it as text, in quotes")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{origin(full, origins)}: {full} = {value}: a finite number is expected")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _reject_unwritable(f"{full}.{key}", item, origins)
    elif isinstance(value, list):
        for item in value:
            _reject_unwritable(full, item, origins)


def to_toml(settings: Settings, *, defaults: bool = True, changed_only: bool = False) -> str:
    """Return the settings as TOML that `load_config` reads back as equal, without unset keys.

    `defaults=False` omits settings that were not set explicitly; `changed_only` omits settings
    equal to their default, so `load_config` may reject its output.
    """
    lines: list[str] = []
    tree = settings.model_dump(
        mode="json", exclude_none=True, exclude_unset=not defaults, exclude_defaults=changed_only
    )
    for name, section in tree.items():
        if not section:  # all keys are unset
            continue
        tables = {key: value for key, value in section.items() if isinstance(value, dict)}
        lines.append(f"[{name}]")
        lines += [f"{key} = {toml_value(v)}" for key, v in section.items() if key not in tables]
        for table, items in tables.items():
            if items:
                lines += ["", f"[{name}.{table}]"]
                lines += [f"{toml_key(key)} = {toml_value(value)}" for key, value in items.items()]
        lines.append("")
    return "\n".join(lines)


def as_override(value: object) -> str:
    """Return a value as written after `section.key=` on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted key, type, default, description) of every setting."""
    for name, section in Settings.model_fields.items():
        section_model = typing.cast(type[BaseModel], section.annotation)
        for key, setting in section_model.model_fields.items():
            default = setting.get_default(call_default_factory=True)
            shown = default if isinstance(default, str) else toml_value(default)
            shown = "unset" if default is None else shown
            kind = _type_name(setting.annotation)
            yield f"{name}.{key}", kind, shown, " ".join((setting.description or "").split())


_TYPE_NAMES: dict[Any, str] = {str: "text", int: "integer", float: "number", dict: "table"}
_TYPE_NAMES[bool] = "true | false"


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(kind) for kind in arguments if kind is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_type_name(arguments[0])}"
        return f"[{', '.join(map(_type_name, arguments))}]"
    return _TYPE_NAMES[origin or annotation]
