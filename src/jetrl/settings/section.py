"""Base class of the settings sections, and number types with ranges."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jetrl.errors import UserError
from jetrl.files import Step

# Below 2**63, the limit of tensors, seeds and counters.
Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Mass = Annotated[float, Field(gt=0.0, le=1.0)]
Quantile = Annotated[float, Field(gt=0.5, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Text = Annotated[str, Field(min_length=1)]
# Durations that timers and timedeltas can represent (up to 30 years), and list lengths.
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Many = Annotated[int, Field(ge=1, le=2**20)]
# Limits shared with the readers of run files (runs/schemas.py), so that no run writes a file they
# reject.
Steps = Step
ReportSamples = Annotated[int, Field(ge=0, le=10**6)]
MOST_LAYERS = 1024
LayerCount = Annotated[int, Field(ge=0, le=MOST_LAYERS)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


ONE_OR_MORE = BeforeValidator(_as_tuple)
"""List setting that also accepts a single value (`trackers.names = "wandb"`) or none."""

COMMAS = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
"""List setting of names that also accepts `wandb,tensorboard`."""


class Section(BaseModel):
    """Base class of settings sections: immutable, and rejects unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise UserError(
            f"settings are immutable, cannot set {name} = {value!r:.60}; create new ones: "
            f"jetrl.load_config(settings, ['SECTION.{name}=...'])"
        )


def without_none(value: Any) -> Any:
    """Return a table without its None values, recursively: TOML has no null."""
    if isinstance(value, dict):
        return {str(key): without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        if any(item is None for item in value):
            raise ValueError("a list must not contain null")
        return [without_none(item) for item in value]
    return value
