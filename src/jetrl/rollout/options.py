"""Arguments and results of `RolloutEngine.generate`; without torch.

Partial rollouts: the tail of a rollout is a few long sequences on an idle GPU. A call with more
prompts than it needs ends when enough are complete. The next call continues the others under its
own weights: their old tokens are prefilled again, so new tokens are exactly the current policy's.
Old tokens keep the log-probs of the policy that drew them, and `versions` names that policy.

    first = GenerateOptions(partial=Partial(enough=32, version=step))
    out = engine.generate(prompts, params, options=first)
    left = engine.unfinished        # {index in out: Unfinished}
    second = GenerateOptions(partial=Partial(32, [[left[5], left[6]]], step + 1))
    out = engine.generate(more, params, options=second)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jetrl.errors import UserError
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import Completion, Reply, Turn, Unfinished


@dataclass(frozen=True)
class Progress:
    """The progress of a call, given to its callback after every scheduled step.

        Progress(3, 16, tokens=210, tokens_per_s=840.0, pages_in_use=9, pages_total=32,
                 seconds=0.25, eta_s=0.9)

    Attributes:
        eta_s: Estimated seconds left, from how often sequences ended so far and from max_tokens;
            None while unknown.
    """

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
    """The worth of the drafts of one call of `generate`.

        SpeculationStats(sequence_forwards=400, tokens=900, drafted=(90, 700, 0, 0),
                         accepted=(30, 470, 0, 0), decode_s=1.2, verify_s=1.1)

    Attributes:
        sequence_forwards: Forwards of decode that sequences took part in, each of which drew at
            least one token.
        drafted: Tokens of drafts that were verified, by source (`draft_state.SOURCES`).
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
        """Tokens that a sequence draws in a forward, 1 without drafts."""
        return self.tokens / self.sequence_forwards if self.sequence_forwards else 1.0

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """Return the sums of the counts of two groups of calls."""
        return SpeculationStats(
            self.sequence_forwards + other.sequence_forwards,
            self.tokens + other.tokens,
            tuple(a + b for a, b in zip(self.drafted, other.drafted, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
            self.decode_s + other.decode_s,
            self.verify_s + other.verify_s,
        )


@dataclass(frozen=True)
class RolloutStats:
    """The counts of one call of `generate`.

    Attributes:
        tokens_prefilled: Tokens run through the model to fill the cache for a prompt, and again
            after a pre-emption; a prompt counts once for all its samples.
        tokens_decoded: Tokens run one at a time, each to draw the next.
        prefill_s: Seconds of forwards over prompts and of their draws.
        device_idle_s: Seconds that a GPU had nothing to do between two steps.
        capture_s: Seconds that capturing took, compilation of kernels included.
        speculation: The worth of drafts; None where decode verifies none.
    """

    prompts: int = 0
    sequences: int = 0
    tokens_drawn: int = 0
    tokens_prefilled: int = 0
    tokens_decoded: int = 0
    preemptions: int = 0
    forwards: int = 0
    peak_pages: int = 0
    pages_total: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0
    device_idle_s: float = 0.0
    graphs: int = 0
    capture_s: float = 0.0
    speculation: SpeculationStats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Drawn tokens a second."""
        return self.tokens_drawn / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Partial:
    """The bounds of one partial rollout.

    Attributes:
        enough: The number of groups (prompts with all their samples) that ends the call once they
            are complete.
        version: The policy's version, recorded for the tokens that the call draws.
    """

    enough: int
    resume: Sequence[Sequence[Unfinished]] = ()
    version: int = 0

    @property
    def num_resumed(self) -> int:
        """The number of sequences that are continued."""
        return sum(len(members) for members in self.resume)


def versions_of(sequence: RunningSequence, version: int) -> tuple[int, ...]:
    """Return each token's policy version; () of a finished sequence that only `version` drew."""
    if sequence.finish_reason != "cancelled" and not sequence.versions:
        return ()
    new = len(sequence.generated) - len(sequence.versions)
    return (*sequence.versions, *[version] * new)


def unfinished_completions(
    sequences: Sequence[RunningSequence], completions: Sequence[Completion]
) -> dict[int, Unfinished]:
    """Return the completions that a call cut off, by their index."""
    return {
        sequence.index: Unfinished(sequence.prompt, sequence.key, completion)
        for sequence, completion in zip(sequences, completions, strict=True)
        if sequence.finish_reason == "cancelled"
    }


class EnvironmentReply(NamedTuple):
    """An environment's reply to the turn of a sequence.

    Attributes:
        sequence: The index of the sequence in the call of `generate`.
        reply: The text or message; None ends the sequence.
        failure: The reason why there is no reply, where the environment broke down; otherwise "".
    """

    sequence: int
    reply: Reply | None
    failure: str = ""


class Environment(Protocol):
    """The interface of an environment, which replies when a turn ends.

    Sequences are named by their index in the call of `generate`: sample s of prompt p is p * n + s.

    Attributes:
        max_turns: The most turns of a completion, at least 1.
    """

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
