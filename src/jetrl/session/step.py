"""The record of a training step, which grows from verb to verb of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jetrl.rewards.sampling import EncodedPrompt, Scoring
from jetrl.types import Completion, Sample


@dataclass(frozen=True)
class Step:
    """A training step: its prompts, completions, samples and metrics so far.

    Each verb of the loop returns a new record in which more fields are filled.

    Attributes:
        number: The number of the step, from 1; 0 stands for the model before the first step.
        round: The round of sampling that the record is of, from 1. Once dynamic sampling is done,
            the number of rounds that the step took.
        completions: The completions of the round, `rollout.samples_per_prompt` of each prompt.
        scoring: The scores of these completions, begun while others were drawn; None before
            sampling.
        rollout_tokens: The number of tokens drawn in all rounds.
    """

    number: int
    round: int = 1
    prompts: Sequence[EncodedPrompt] = ()
    completions: Sequence[Completion] = ()
    scoring: Scoring | None = None
    samples: Sequence[Sample] = ()
    drawn_samples: Sequence[Sample] = ()
    rollout_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
