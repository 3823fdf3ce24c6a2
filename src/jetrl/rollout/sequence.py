"""The state of one sequence during sampling; without torch.

The cache holds keys and values of the first `num_computed` tokens, in `pages`. The forward of a
token gives the logits of the next one, so a finished sequence of T tokens has used T - 1 slots.

    prompt [5, 6, 7], page_size 2                         pages      num_computed  generated
    after the prefill                                     [4, 0]     3             []
    after the first draw                                  [4, 0]     3             [8]
    after one decode step                                 [4, 0]     4             [8, 9]
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jetrl.errors import NonFiniteError
from jetrl.rollout.stopping import StopRules, TextWatch
from jetrl.types import FinishReason, PromptInputs, SamplingParams


class NonFiniteLogits(NonFiniteError):  # noqa: N818  (an end of a run, as its base)
    """The logits of a sequence, with `token_ids` so far, have no finite softmax."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.token_ids: tuple[int, ...] = ()
        super().__init__(
            "sampling met logits that are not finite: go back to an earlier checkpoint, with a "
            "lower train.lr"
        )


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A sample of one prompt.

    With an environment (rules.max_turns > 1) a stop ends a turn: the sequence is `awaiting`, keeps
    its pages, and continues or ends with `reply`.

    Attributes:
        index: Number among all sequences that run together; lower ones are older and go first.
        key: Random-number key (`sequence_keys`).
        generated: Tokens after the prompt, drawn or from the environment.
        logprobs: Per generated token; 0 for tokens from the environment.
        pages: Page ids in order of position.
        num_computed: Cached tokens after all scheduled forwards; a lower bound with drafts.
        num_pending: Scheduled draws not yet read, one per forward; a lower bound with drafts.
        num_extra: Maximum additional draws of pending forwards that verify drafts.
        text: Text of the turn before a stop string; None if there was none.
        environment: Spans of `generated` from the environment.
        turn_start: Start of the current turn in `generated`.
        versions: Policy versions of tokens drawn by earlier calls.
    """

    index: int
    prompt: PromptInputs
    key: int
    rules: StopRules
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_extra: int = 0
    finish_reason: FinishReason | None = None
    text: str | None = None
    awaiting: bool = False
    environment: list[tuple[int, int]] = field(default_factory=list)
    turn_start: int = 0
    versions: tuple[int, ...] = ()
    params: SamplingParams = SamplingParams()  # noqa: RUF009  (frozen)
    _watch: TextWatch | None = None

    def __post_init__(self) -> None:
        self._watch = self.rules.text_watch()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of cached tokens; also the last possible token's position."""
        return len(self.prompt) + self.rules.max_tokens - 1

    @property
    def started(self) -> bool:
        """True once the first token is drawn."""
        return bool(self.generated)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def draws_left(self) -> int:
        """Remaining tokens to schedule, not counting pending draws; at least 0."""
        return max(0, self.rules.max_tokens - len(self.generated) - self.num_pending)

    def most_written(self, forwards: int, width: int) -> int:
        """Return the maximum number of positions that pending and new forwards write."""
        most = self.num_extra + forwards * width
        return max(forwards, min(most, self.max_cached_tokens - self.num_computed))

    def versions_with(self, version: int) -> tuple[int, ...]:
        """Return the policy version per token; () if finished and drawn by one version."""
        if self.finish_reason != "cancelled" and not self.versions:
            return ()
        return (*self.versions, *[version] * (len(self.generated) - len(self.versions)))

    def tokens(self, start: int, length: int) -> list[int]:
        split = len(self.prompt)
        stop = start + length
        assert 0 <= start < stop <= self.num_tokens, f"tokens {start}:{stop} of {self.num_tokens}"
        return [
            *self.prompt.token_ids[start:stop],
            *self.generated[max(0, start - split) : max(0, stop - split)],
        ]

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> int:
        """Add drawn tokens up to the end of the sequence or turn; return their number."""
        if self.rules.none_ends(token_ids, len(self.generated)) and (
            self._watch is None or self._watch.pass_over(self.generated, token_ids)
        ):
            # Fast path: no draw ends the sequence.
            assert len(token_ids) == len(logprobs), f"{len(logprobs)} log-probs of {token_ids}"
            self.generated += token_ids
            self.logprobs += logprobs
            return len(token_ids)
        for count, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            if token_id < 0:
                raise NonFiniteLogits(self.index)
            self.append(token_id, logprob)
            if self.finished or self.awaiting:
                return count
        return len(token_ids)

    def append(self, token_id: int, logprob: float) -> None:
        """Add a drawn token, and apply the stop rules."""
        assert not self.finished, f"sequence {self.index} is finished"
        assert not self.awaiting, f"sequence {self.index} waits for its environment"
        self.generated.append(token_id)
        self.logprobs.append(logprob)
        if self._watch is not None:
            self.text = self._watch.update(self.generated)
        # A stop ends only the turn if the environment may still reply.
        reason = self.rules.reason_to_stop(
            token_id, len(self.generated), stop_string=self.text is not None
        )
        if reason == "stop" and len(self.environment) + 1 < self.rules.max_turns:
            self.awaiting = True
        else:
            self.finish_reason = reason

    def reply(self, token_ids: Sequence[int] | None) -> None:
        """Add the reply of the environment to an ended turn; None ends the sequence.

        If the reply leaves no room for another token, it is dropped and the sequence is truncated.
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
            # Forwards scheduled ahead may have computed keys past the end of the turn.
            self.num_computed = min(self.num_computed, self.num_tokens - 1)
            start = len(self.generated)
            self.generated += token_ids
            self.logprobs += [0.0] * len(token_ids)
            self.turn_start = len(self.generated)
            self.environment.append((start, self.turn_start))
            self.text = None
            self._watch = self.rules.text_watch(self.turn_start)


def sequence_keys(prompts: Sequence[PromptInputs], n: int) -> list[list[int]]:
    """Return the random-number keys of n samples per prompt, 63-bit integers.

    A key hashes the key of the prompt, the number of equal prompts before it, and the sample
    number, so draws do not depend on other prompts or their order.
    """
    occurrences: Counter[bytes] = Counter()
    keys = []
    for prompt in prompts:
        key = prompt.key()
        keys.append([_key(key, occurrences[key], sample) for sample in range(n)])
        occurrences[key] += 1
    return keys


def resumed_key(key: int, num_tokens: int) -> int:
    """Return the key of a sequence continued after `num_tokens`, distinct from new samples."""
    return _key(key.to_bytes(8, "little"), num_tokens, 0)


def _key(content: bytes, occurrence: int, sample: int) -> int:
    source = content + occurrence.to_bytes(8, "little") + sample.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(source, digest_size=8).digest(), "little") >> 1
