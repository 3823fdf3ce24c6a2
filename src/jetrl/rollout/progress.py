"""Counts of a rollout, while it runs and when it has ended; without torch."""

from __future__ import annotations

from dataclasses import dataclass


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
