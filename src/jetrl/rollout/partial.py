"""Partial rollouts: a call that ends before its longest completions do, and one that goes on with
them.

The tail of a rollout is a few long sequences on an idle GPU. A call that has more prompts than it
needs ends when enough are complete; the rest is cut off, and the next call goes on with it under
the weights of then. Its old tokens are run through those weights again, so what is drawn from there
on is exactly of the present policy; the old tokens keep the log-probs of the policy that drew them,
and `versions` says which that was.

    out = engine.generate(prompts, params, partial=Partial(enough=32, version=step))
    left = engine.unfinished        # {index in out: Unfinished}
    out = engine.generate(more, params, partial=Partial(32, [[left[5], left[6]]], step + 1))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetrl.rollout.sequence import RunningSequence
from jetrl.types import Completion, Unfinished


@dataclass(frozen=True)
class Partial:
    """enough: groups (prompts with all their samples) that end the call once they are complete.
    resume: what to go on with, by groups; their completions come before those of the prompts.
    version: of the policy, recorded for what is drawn."""

    enough: int
    resume: Sequence[Sequence[Unfinished]] = ()
    version: int = 0

    @property
    def num_resumed(self) -> int:
        """Sequences that go on."""
        return sum(len(members) for members in self.resume)


def versions_of(sequence: RunningSequence, version: int) -> tuple[int, ...]:
    """The policy version of each token; () where all are of `version` and the sequence is done."""
    if sequence.finished and not sequence.versions:
        return ()
    new = len(sequence.generated) - len(sequence.versions)
    return (*sequence.versions, *[version] * new)


def left_over(
    sequences: Sequence[RunningSequence], completions: Sequence[Completion]
) -> dict[int, Unfinished]:
    """What a call left, by the index of the completion."""
    return {
        sequence.index: Unfinished(sequence.prompt, sequence.key, completion)
        for sequence, completion in zip(sequences, completions, strict=True)
        if not sequence.finished
    }
