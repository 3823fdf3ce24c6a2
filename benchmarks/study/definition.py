"""The definition of a study: what a study file (TOML) holds, read and checked.

    [study]           name, question, seeds, where its files go
    [settings]        settings that all runs have in common, and the recipe below them
    [grid.AXIS.NAME]  the values of an axis, each a table of settings
    [arms.NAME]       the settings that make an arm; label, dose, twin and kill_after are its own
    [start]           supervised training whose weights all arms of a grid point begin from
    [eval]            how the final weights of every run are evaluated
    [collapse]        the rule by which a run counts as collapsed

The same tree of tables is kept in the results file, so that a report can be made from that alone.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.study.sections import (
    Arm,
    CollapseSection,
    EvalSection,
    Layer,
    StartSection,
    StudySection,
    Tables,
)
from pydantic import ValidationError

from jetrl.errors import UserError
from jetrl.files import read_text, shown_value
from jetrl.settings.section import Section

S = TypeVar("S", bound=Section)
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Definition:
    """The definition of a study.

    Attributes:
        source: The file that it was read from.
        tree: The tables of the file as they are.
        study: The section [study].
        eval: The section [eval].
        collapse: The section [collapse].
        start: The section [start]; None: runs begin as their settings say.
        arms: The own keys of each arm, by name, in the order of the file.
        recipe: The recipe below all settings; None: the defaults.
        common: The settings of all runs.
        grid: The values of each axis, by the names of axis and value.
        arm_settings: The settings of each arm, by name.
        start_settings: The settings of the supervised training that differ from the runs'.
        lines: The lines of the file, by dotted key.
    """

    source: Path
    tree: dict[str, Any]
    study: StudySection
    eval: EvalSection
    collapse: CollapseSection
    start: StartSection | None
    arms: dict[str, Arm]
    recipe: str | None
    common: Layer
    grid: dict[str, dict[str, Layer]]
    arm_settings: dict[str, Layer]
    start_settings: Layer
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The arm that the others are compared with."""
        return self.study.reference or next(iter(self.arms))

    @property
    def out(self) -> Path:
        """The folder of the runs."""
        return Path(self.study.out or f"studies/{self.study.name}")

    @property
    def results_file(self) -> Path:
        """The file of the results."""
        return Path(self.study.results) if self.study.results else self.out / "results.json"

    @property
    def evaluates_training_set(self) -> bool:
        """True if the settings of all runs let them be evaluated on the training prompts."""
        task = self.common.get("task")
        return isinstance(task, dict) and task.get("eval_split") == "train"

    def label(self, arm: str) -> str:
        """Return the name of an arm in plots and tables."""
        return self.arms[arm].label or arm

    def place(self, key: str) -> str:
        """Return where a dotted key of the file stands, for messages."""
        return _place(self.source, self.lines, key)


def read_definition(path: Path) -> Definition:
    """Return the definition that a study file holds.

    Raises:
        UserError: There is no such file, it is not TOML, or a key is unknown, missing or wrong; the
            message names the line.
    """
    try:
        text = read_text(path)
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"study {path}: no such file") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"study {path}: not valid TOML: {error}") from None
    return definition_of(tree, path, _lines_of(text))


def definition_of(
    tree: dict[str, Any], source: Path, lines: Mapping[str, int] | None = None
) -> Definition:
    """Return the definition that the tables of a study file make.

    Args:
        tree: The tables.
        source: The file that they were read from, for messages.
        lines: The lines of the file by dotted key, for messages.

    Raises:
        UserError: A key is unknown, missing or wrong.
    """
    lines = lines or {}
    tables = _checked(Tables, tree, "", source, lines)
    if not tables.arms:
        raise UserError(f"{source}: no [arms.NAME]: at least one arm is expected")
    common = dict(tables.settings)
    recipe = common.pop("recipe", None)
    if not isinstance(recipe, str | None):
        raise UserError(f"{_place(source, lines, 'settings.recipe')}: settings.recipe is no text")
    arms, arm_settings = {}, {}
    for name, table in tables.arms.items():
        arms[name], arm_settings[name] = _split(Arm, table, f"arms.{name}", source, lines)
    start: StartSection | None = None
    start_settings: Layer = {}
    if tables.start is not None:
        start, start_settings = _split(StartSection, tables.start, "start", source, lines)
    reference = tables.study.reference
    if reference is not None and reference not in arms:
        raise UserError(
            f"{_place(source, lines, 'study.reference')}: study.reference = {reference}: no such "
            f"arm; arms: {', '.join(arms)}"
        )
    for axis, values in tables.grid.items():
        if not values:
            raise UserError(f"{_place(source, lines, f'grid.{axis}')}: grid.{axis} has no values")
    sizes = [len(tables.study.seeds), len(arms), *(len(v) for v in tables.grid.values())]
    if math.prod(sizes) > MOST_RUNS:
        raise UserError(f"{source}: {math.prod(sizes):,} runs; a study has at most {MOST_RUNS:,}")
    return Definition(
        source,
        tree,
        tables.study,
        tables.eval,
        tables.collapse,
        start,
        arms,
        recipe,
        common,
        tables.grid,
        arm_settings,
        start_settings,
        lines,
    )


def _split(
    kind: type[S], table: Layer, path: str, source: Path, lines: Mapping[str, int]
) -> tuple[S, Layer]:
    """Return the own keys of a table, read, and its settings, which are tables."""
    settings = {key: value for key, value in table.items() if isinstance(value, dict)}
    own = {key: value for key, value in table.items() if key not in settings}
    return _checked(kind, own, path, source, lines), settings


def _checked(kind: type[S], tree: Layer, path: str, source: Path, lines: Mapping[str, int]) -> S:
    """Return a table as its schema has it.

    Raises:
        UserError: A key is unknown, missing or wrong; the message names it and its line.
    """
    try:
        return kind.model_validate(tree, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        # A misspelt key is unknown, and often missing as well: the first says more.
        first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        steps = [str(step) for step in first["loc"] if step != "[key]"]
        key = ".".join([path, *steps]).strip(".")
        where = _place(source, lines, key)
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if first["type"] == "missing":
            raise UserError(f"{source}: {key} is missing") from None
        if first["type"] == "extra_forbidden":
            raise UserError(f"{where}: unknown key {key}; {_hint(kind, steps)}") from None
        shown = shown_value(first["input"])
        raise UserError(f"{where}: {key} = {shown}: {message}") from None


def _hint(kind: type[Section], steps: list[str]) -> str:
    """Return words about the known keys beside an unknown one, the nearest if one is like it."""
    for step in steps[:-1]:
        inner = kind.model_fields[step].annotation if step in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            break
        kind = inner
    near = difflib.get_close_matches(steps[-1], kind.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(kind.model_fields)}"


def _place(source: Path, lines: Mapping[str, int], key: str) -> str:
    """Return the file and the line of a key, or of the nearest table around it."""
    for prefix in _prefixes(key):
        if prefix in lines:
            return f"{source}, line {lines[prefix]}"
    return str(source)


def _prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key and its tables, from the longest: a.b.c, a.b, a."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _lines_of(text: str) -> dict[str, int]:
    """Return the line on which each dotted key of a TOML text first stands."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = re.sub(r"[\s\"']", "", header[1])
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.+\"'-]+)\s*=", line):
            plain = re.sub(r"[\"']", "", key[1])
            lines.setdefault(f"{table}.{plain}".lstrip("."), number)
    return lines
