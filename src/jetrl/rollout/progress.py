"""What a rollout says of itself: while it runs, and when it is done. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Given to the progress callback after every step: a forward, or some of decode in a row.

    tokens: drawn so far. seconds: since the start. eta_s: seconds left, None while unknown; from
    how often a sequence has ended so far, and what max_tokens allows at most.

        Progress(3, 16, tokens=210, tokens_per_s=840.0, pages_in_use=9, pages_total=32,
                 seconds=0.25, eta_s=0.9)
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
class RolloutStats:
    """Counts of one call of `generate`.

    tokens_drawn: of all completions. tokens_prefilled: run through the model to fill the cache for
    a prompt, and again after a pre-emption; a prompt counts once for all its samples.
    tokens_decoded: run one at a time, each to draw the next. preemptions: sequences that lost
    their pages for a time. forwards: calls of the model. peak_pages: most pages in use, of
    pages_total. seconds: of wall time; prefill_s: of these, in forwards over prompts and their
    draws. device_idle_s: a GPU's, from the end of a step to the start of the next.
    graphs: CUDA graphs of decode that the call captured; capture_s: seconds of that, compilation of
    kernels included.
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

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_drawn / self.seconds if self.seconds > 0 else 0.0
