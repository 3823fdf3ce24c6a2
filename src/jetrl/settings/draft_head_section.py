"""The section `[draft_head]`, a network that guesses tokens, and what is verified by default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jetrl.settings.section import Positive, PositiveFloat, Section

Speculation = Literal["off", "text", "head", "auto"]
MOST_TOKENS = 7  # of a draft: a forward verifies 8 tokens of a sequence
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]


class DraftHeadSettings(Section):
    """The draft head, which RL trains with rollout.speculation = head or auto (docs/rollout.md)."""

    tokens: Tokens = Field(3, description="tokens that it guesses, one after the other")
    lr: PositiveFloat = Field(5e-4, description="learning rate of its AdamW")
    share: PositiveShare = Field(
        0.2, description="share of the tokens of a step's first update that it learns from"
    )
    most_tokens: Positive = Field(16384, description="tokens of a step that it learns from at most")
    tokens_per_update: Positive = Field(1024, description="tokens of one of its updates")


def verified_drafts(
    asked: Speculation | None, exact: bool, device: str, oversample: float
) -> Speculation:
    """Return which drafts a run verifies: those of text where it is faster, where none are asked.

    None are by default where the run would not repeat itself. `auto` decides by time how many rows
    a forward has: on that depend the draws of a plan that promises no bits, and which completions
    are cut off where more prompts are on their way than a step needs.

    Args:
        asked: The setting rollout.speculation; None: it is not set, and no draft head is trained.
        exact: Whether the plan promises that sampler and trainer agree.
        device: "cpu", or a GPU.
        oversample: The setting rollout.oversample.
    """
    return asked or ("auto" if exact and device != "cpu" and not oversample else "off")
