"""The section `[draft_head]`: a network that guesses tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jetrl.settings.section import Positive, PositiveFloat, Section

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
