"""One sequence while it is being sampled. No torch.

A sequence is a prompt and the tokens drawn for it so far. The cache holds the keys and values of
its first `num_computed` tokens, in `pages`. The forward of the token at position p gives the
logits that the token at position p + 1 is drawn from, so the last token drawn is never put into
the cache: a finished sequence of T tokens used T - 1 slots.

    prompt [5, 6, 7], page_size 2                         pages      num_computed  generated
    after the prefill of the prompt                       [4, 0]     3             []
    after the draw of its first token                     [4, 0]     3             [8]
    after one decode step                                 [4, 0]     4             [8, 9]
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jetrl.errors import NonFiniteError
from jetrl.rollout.stopping import StopRules, TextWatch
from jetrl.types import FinishReason


class NonFiniteLogits(NonFiniteError):  # noqa: N818  (an end of a run, as its base)
    """Logits without a finite softmax. sequence: its index in the call of `generate`. token_ids:
    the sequence so far, once it is known."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.token_ids: tuple[int, ...] = ()
        super().__init__(
            "sampling met logits that are not finite: the weights have diverged or the checkpoint "
            "is damaged; go back to an earlier one, with a lower train.lr"
        )


@dataclass(eq=False, slots=True)
class RunningSequence:
    """State of one sample of one prompt.

    index: place among all sequences of the call; lower is older, and older goes first. prompt:
    token ids, at least one. key: of its random numbers, see `sequence_keys`. rules: when it ends.
    generated, logprobs: same length. pages: page ids in order of position. num_computed: tokens
    whose keys and values are in those pages, or will be when the forwards scheduled so far have
    run. num_pending: tokens that these forwards draw and that are not known here yet. text: what a
    stop string left of the turn, else None.

    With an environment (rules.max_turns > 1) a stop ends a turn and not yet the sequence: it is
    `awaiting` until `reply` says how it goes on. The environment's tokens stand in `generated`
    among the drawn ones, with log-prob 0; environment: their spans there. turn_start: where the
    present turn begins there. Its pages stay its own all the while.

    One that an earlier call cut off begins with the tokens that it had; versions: of the policies
    that drew these.
    """

    index: int
    prompt: tuple[int, ...]
    key: int
    rules: StopRules
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    finish_reason: FinishReason | None = None
    text: str | None = None
    awaiting: bool = False
    environment: list[tuple[int, int]] = field(default_factory=list)
    turn_start: int = 0
    versions: tuple[int, ...] = ()
    _watch: TextWatch | None = None

    def __post_init__(self) -> None:
        assert self.prompt, "a sequence has at least one prompt token"
        assert self.rules.max_tokens >= 1, f"max_tokens {self.rules.max_tokens}"
        self._watch = self.rules.text_watch()

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and drawn."""
        return len(self.prompt) + len(self.generated)

    @property
    def max_cached_tokens(self) -> int:
        """Slots of the cache that it can come to use."""
        return len(self.prompt) + self.rules.max_tokens - 1

    @property
    def started(self) -> bool:
        """Whether its first token is drawn."""
        return bool(self.generated)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def draws_left(self) -> int:
        """Tokens that it can still draw, beside those pending."""
        return self.rules.max_tokens - len(self.generated) - self.num_pending

    def tokens(self, start: int, length: int) -> list[int]:
        """Token ids at positions start to start + length."""
        split = len(self.prompt)
        stop = start + length
        assert 0 <= start < stop <= self.num_tokens, f"tokens {start}:{stop} of {self.num_tokens}"
        return [
            *self.prompt[start:stop],
            *self.generated[max(0, start - split) : max(0, stop - split)],
        ]

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> int:
        """Adds drawn tokens up to the one that it, or its turn, ends with, and leaves the rest.

        Returns:
            How many were added: all of them unless it ended.

        Raises:
            NonFiniteLogits: an id below 0, which stands for logits that are not finite, comes
                before the end.
        """
        for count, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            if token_id < 0:
                raise NonFiniteLogits(self.index)
            self.append(token_id, logprob)
            if self.finished or self.awaiting:
                return count
        return len(token_ids)

    def append(self, token_id: int, logprob: float) -> None:
        """Adds a drawn token and decides whether the sequence, or its turn, ends with it."""
        assert not self.finished, f"sequence {self.index} is finished"
        assert not self.awaiting, f"sequence {self.index} waits for its environment"
        self.generated.append(token_id)
        self.logprobs.append(logprob)
        if self._watch is not None:
            turn = self.generated[self.turn_start :] if self.turn_start else self.generated
            self.text = self._watch.update(turn)
        if token_id in self.rules.token_ids or self.text is not None:
            if len(self.environment) + 1 < self.rules.max_turns:
                self.awaiting = True
            else:
                self.finish_reason = "stop"
        elif len(self.generated) == self.rules.max_tokens:
            self.finish_reason = "length"

    def reply(self, token_ids: Sequence[int] | None) -> None:
        """Takes in what the environment said to the turn that ended; None ends the sequence.

        A reply after which no token could be drawn is left out, and the sequence is cut off there.
        """
        assert self.awaiting, f"sequence {self.index} asked for no reply"
        assert not self.num_pending, f"sequence {self.index} has {self.num_pending} draws pending"
        assert token_ids is None or len(token_ids), "a reply of no tokens"
        self.awaiting = False
        if token_ids is None:
            self.finish_reason = "stop"
        elif len(self.generated) + len(token_ids) >= self.rules.max_tokens:
            self.finish_reason = "length"
        else:
            # What forwards scheduled ahead computed past the turn's end is not of this sequence.
            self.num_computed = min(self.num_computed, self.num_tokens - 1)
            start = len(self.generated)
            self.generated += token_ids
            self.logprobs += [0.0] * len(token_ids)
            self.turn_start = len(self.generated)
            self.environment.append((start, self.turn_start))
            self.text = None
            self._watch = self.rules.text_watch()


def sequence_keys(prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """The random keys of n samples for each prompt, 63-bit integers.

    A key is made of the prompt's tokens, of how many equal prompts came before it in this call, and
    of the sample's number: what is drawn for a prompt does not depend on what else is in the call
    or on the order of the prompts.
    """
    seen: Counter[bytes] = Counter()
    keys = []
    for prompt in prompts:
        content = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=32).digest()
        keys.append([_key(content, seen[content], sample) for sample in range(n)])
        seen[content] += 1
    return keys


def resumed_key(key: int, num_tokens: int) -> int:
    """The key of a sequence that is gone on with after `num_tokens`: its draws are not those that a
    fresh sample of its prompt gets at the same place."""
    return _key(key.to_bytes(8, "little"), num_tokens, 0)


def _key(content: bytes, occurrence: int, sample: int) -> int:
    source = content + occurrence.to_bytes(8, "little") + sample.to_bytes(8, "little")
    digest = hashlib.blake2b(source, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
