"""Arguments and results of `RolloutEngine.generate`; without torch.

Partial rollouts: a call with more prompts than it needs ends when enough are complete. The next
call continues the others under its own weights: old tokens are prefilled again and keep the
log-probs of the policy that drew them (`versions`); new tokens are exactly the current policy's.

    first = GenerateOptions(partial=Partial(enough=32, version=step))
    out = engine.generate(prompts, params, options=first)
    left = engine.unfinished        # {index in out: Unfinished}
    second = GenerateOptions(partial=Partial(32, [[left[5], left[6]]], step + 1))
    out = engine.generate(more, params, options=second)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jetrl.errors import UserError
from jetrl.types import Completion, Reply, Turn, Unfinished


@dataclass(frozen=True)
class Progress:
    """The progress of a call after a step; `eta_s` is the estimated seconds left."""

    sequences_done: int
    sequences_total: int
    tokens: int
    tokens_per_s: float
    pages_in_use: int
    pages_total: int
    seconds: float
    eta_s: float | None


@dataclass(frozen=True)
class SpeculationStats:
    """The worth of the drafts of one or more calls.

    Attributes:
        sequence_forwards: Forwards of decode times their sequences; each draws at least one token.
        drafted: Verified draft tokens, by source (`decode_state.SOURCES`).
        verify_s: Seconds of decode that verified drafts.
    """

    sequence_forwards: int
    tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    decode_s: float
    verify_s: float

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per sequence and forward, 1 without drafts."""
        return self.tokens / self.sequence_forwards if self.sequence_forwards else 1.0

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        def by_source(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip(a, b, strict=True))

        return SpeculationStats(
            sequence_forwards=self.sequence_forwards + other.sequence_forwards,
            tokens=self.tokens + other.tokens,
            drafted=by_source(self.drafted, other.drafted),
            accepted=by_source(self.accepted, other.accepted),
            decode_s=self.decode_s + other.decode_s,
            verify_s=self.verify_s + other.verify_s,
        )


@dataclass
class RolloutStats:
    """The counts of one call of `generate`, added up while it runs.

    Attributes:
        tokens_prefilled: Tokens run to fill the cache, again after a pre-emption; a prompt counts
            once for all its samples.
        prefill_s: Seconds of forwards over prompts and of their draws.
        device_idle_s: Seconds that a GPU had nothing to do between two steps.
        capture_s: Seconds of capturing graphs, compilation of kernels included.
        speculation: None without drafts.
    """

    sequences: int = 0
    tokens_drawn: int = 0
    tokens_prefilled: int = 0
    preemptions: int = 0
    forwards: int = 0
    pages_total: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0
    device_idle_s: float = 0.0
    graphs: int = 0
    capture_s: float = 0.0
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class Partial:
    """The bounds of one partial rollout.

    `enough` complete prompts (with all their samples) end the call. The policy's `version` is
    recorded for the tokens that the call draws.
    """

    enough: int
    resume: Sequence[Sequence[Unfinished]] = ()
    version: int = 0


class EnvironmentReply(NamedTuple):
    """A reply to the turn of a sequence; None ends it.

    `failure` says why a broken environment has no reply; otherwise it is "".
    """

    sequence: int
    reply: Reply | None
    failure: str = ""


class Environment(Protocol):
    """The interface of an environment; sample s of prompt p is sequence p * n + s."""

    max_turns: int

    def ask(self, sequence: int, turns: Sequence[Turn], completion: str) -> None:
        """Begin to compute the reply to a turn."""

    def answers(self, wait: bool) -> list[EnvironmentReply]:
        """Return the replies that are ready; with `wait`, wait for at least one."""

    def close(self) -> None:
        """Drop all turns without a reply; called at the end of every call of `generate`."""


FinishedCallback = Callable[[int, Completion], None]


@dataclass(frozen=True)
class GenerateOptions:
    """Requests to `generate` beyond n completions per prompt.

        engine.generate(prompts, params, options=GenerateOptions(max_tokens=[3, 1, 9, 2]))

    Attributes:
        environment: Replies when a sequence stops; replies count toward max_tokens.
        max_tokens: A limit per completion, in their order, instead of params.max_tokens.
        partial: Completions to continue, and the complete prompts that end the call. Completions
            that are cut off have finish_reason "cancelled" and stand in `engine.unfinished`.
        keys: The random keys of the completions, n per prompt; None: `sequence.sequence_keys`.
        finished: Called with index and completion when one ends, while others are still drawn, and
            again with the same values if the call starts over.

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
    def bounds(self) -> Partial:
        return self.partial or Partial(sys.maxsize)

    @property
    def max_turns(self) -> int:
        return 1 if self.environment is None else self.environment.max_turns
