"""The base class of the settings' sections, and numbers with a range."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jetrl.errors import UserError
from jetrl.files import Step

# Below 2**63, which is what a tensor, a seed and a counter hold.
Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Mass = Annotated[float, Field(gt=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Text = Annotated[str, Field(min_length=1)]
# Times that timers and timedeltas hold, up to 30 years, and counts that lists of them hold.
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Many = Annotated[int, Field(ge=1, le=2**20)]
# What readers of a run's files take as well (runs/schemas.py), so no run writes what they refuse.
Steps = Step
ReportSamples = Annotated[int, Field(ge=0, le=10**6)]
MOST_LAYERS = 1024
LayerCount = Annotated[int, Field(ge=0, le=MOST_LAYERS)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


ONE_OR_MORE = BeforeValidator(_as_tuple)
"""For a list setting: takes a plain value (`trackers.names = "wandb"`) or none, too."""

COMMAS = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
"""For a list setting of names: takes `wandb,tensorboard`, too."""


class Section(BaseModel):
    """A section of the settings: immutable, and strict about its names."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        instead = f"make others: jetrl.load_config(settings, ['SECTION.{name}=...'])"
        raise UserError(f"settings do not change, so {name} = {value!r:.60} is refused; {instead}")


def without_none(value: Any) -> Any:
    """Return a table without its unset keys, at any depth: TOML has no null."""
    if isinstance(value, dict):
        return {str(key): without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        if any(item is None for item in value):
            raise ValueError("a list must not hold null")
        return [without_none(item) for item in value]
    return value
