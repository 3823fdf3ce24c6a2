"""The schema of the states that a run's parts keep in a checkpoint: `extra` in state.json.

A part that registers with `session.checkpoints` has its schema here, under the name that it
registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, model_validator

from jetrl.files import Count, Finite, Seed, Step, Stored, checked
from jetrl.types import FinishReason

RandomKey = Annotated[int, Field(ge=0, lt=2**64)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Ratio = Annotated[float, Field(gt=0, lt=2**53, allow_inf_nan=False)]
Tried = Annotated[float, Field(ge=0, lt=2**53, allow_inf_nan=False)]
PassRate = Annotated[list[Tried], Field(min_length=2, max_length=2)]
# JSON has lists in place of tuples, so a tuple is not strict; what is in it is.
Member = Annotated[
    tuple[RandomKey, list[Count], list[Finite], FinishReason, str, list[Step]], Field(strict=False)
]
WaitingGroup = Annotated[tuple[str, list[Member]], Field(strict=False)]


class GuardState(Stored):
    """The state of a guard against updates that are not finite (`training.guard`)."""

    in_a_row: Count


class ClipState(Stored):
    """The state of the calibration of clip bounds (`training.extras.calibration`).

    Attributes:
        high: The upper bound of a ratio.
    """

    steps: Count
    low: Ratio
    high: Ratio


class MicroBatchState(Stored):
    """The size of micro-batches (`training.micro_batches.MicroBatchSize`).

    Attributes:
        tokens: The tokens that a micro-batch may have.
        setting: The setting train.tokens_per_micro_batch that the size began with.
    """

    tokens: Positive
    setting: Positive


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
RolloutSizes = Annotated[list[Positive | None], Field(min_length=3, max_length=3)]


class RolloutSizesState(Stored):
    """The sizes of a rollout's work (`rollout.sizes`)."""

    asked: RolloutSizes
    now: RolloutSizes

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if None in self.now[:2]:
            raise ValueError("now has null in place of a size")
        return self


class States(Stored):
    """The states of a run's parts, by the name that each part registers.

    Attributes:
        data: The digest of the prompts; none of a version that kept no such digest.
        prompts: The pass rates of prompts, [solved, tried] by prompt id.
    """

    data: Digest | None = None
    prompts: dict[str, PassRate] = Field(default_factory=dict)
    partial_rollouts: list[WaitingGroup] = Field(default_factory=list, alias="partial rollouts")
    micro_batches: MicroBatchState | None = None
    rollout_sizes: RolloutSizesState | None = None
    guard: GuardState | None = None
    sft_guard: GuardState | None = None
    critic_guard: GuardState | None = None
    clip: ClipState | None = None


class Extra(Stored):
    """The contents of `extra` in state.json.

    Attributes:
        metrics: The metrics of the step; none of a supervised update.
    """

    states: States
    metrics: dict[str, float] = Field(default_factory=dict)
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        for _, members in self.states.partial_rollouts:
            for _, token_ids, logprobs, _, _, versions in members:
                if len(token_ids) != len(logprobs) or len(versions) not in (0, len(token_ids)):
                    raise ValueError("states.partial rollouts has log-probs of other tokens")
        return self


NAMES = frozenset(field.alias or name for name, field in States.model_fields.items())
"""The names that a part may register under."""
_EXTRA = TypeAdapter(Extra)


def check_extra(extra: Mapping[str, Any], where: str) -> None:
    """Check what a run's parts kept in a checkpoint.

    Args:
        extra: The contents of `extra` in state.json.

    Raises:
        UserError: A part's state is nothing that the part writes.
    """
    checked(_EXTRA, extra, f"{where}: extra")
