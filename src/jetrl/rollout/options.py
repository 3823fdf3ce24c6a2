"""The rarer arguments of `RolloutEngine.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetrl.errors import UserError
from jetrl.rollout.multi_turn import Environment
from jetrl.rollout.partial import Partial
from jetrl.types import Completion

FinishedCallback = Callable[[int, Completion], None]


@dataclass(frozen=True)
class GenerateOptions:
    """Requests to one call of `generate` beyond n completions of each prompt.

        engine.generate(prompts, params, options=GenerateOptions(max_tokens=[3, 1, 9, 2]))

    Attributes:
        environment: Replies when a sequence stops, for as many turns as the environment allows; the
            replies are part of the completion, and max_tokens counts their tokens.
        max_tokens: A limit for each completion, in their order, in place of params.max_tokens.
        partial: Completions to continue, and the number of complete prompts that ends the call;
            completions that are cut off have finish_reason "cancelled", and `engine.unfinished`
            holds what continuing them takes.
        keys: The keys of the completions' random numbers, n for each prompt, where the call has
            some of the prompts of a longer list; by default those of `sequence.sequence_keys`.
        finished: Called with the index of each completion that ends and the completion, while
            others are still drawn; called again with the same values where the call starts over.

    Raises:
        UserError: A partial rollout has an environment or limits of its own.
    """

    environment: Environment | None = None
    max_tokens: Sequence[int] | None = None
    partial: Partial | None = None
    keys: Sequence[Sequence[int]] | None = None
    finished: FinishedCallback | None = None

    def __post_init__(self) -> None:
        limited = self.environment is not None or self.max_tokens is not None
        if self.partial is not None and limited:
            raise UserError("a partial rollout takes neither an environment nor limits of its own")

    @property
    def max_turns(self) -> int:
        """The most turns of a completion; 1 without an environment."""
        return 1 if self.environment is None else self.environment.max_turns
