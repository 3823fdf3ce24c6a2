"""Partial rollouts: calls of `generate` that end before their longest completions do.

The tail of a rollout is a few long sequences on an idle GPU. A call that has more prompts than it
needs ends when enough are complete; the others are cut off, and the next call continues them under
its own weights. Their old tokens are run through those weights again, so the tokens drawn from then
on are exactly the present policy's; old tokens keep the log-probs of the policy that drew them, and
`versions` names that policy.

    first = GenerateOptions(partial=Partial(enough=32, version=step))
    out = engine.generate(prompts, params, options=first)
    left = engine.unfinished        # {index in out: Unfinished}
    second = GenerateOptions(partial=Partial(32, [[left[5], left[6]]], step + 1))
    out = engine.generate(more, params, options=second)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetrl.rollout.sequence import RunningSequence
from jetrl.types import Completion, Unfinished


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
    if sequence.finished and not sequence.versions:
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
        if not sequence.finished
    }
