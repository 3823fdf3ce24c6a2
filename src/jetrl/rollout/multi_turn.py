"""Completions of several turns: a sequence stops, an environment replies, the sequence continues.

The caller's environment is asked when a turn ends, and its replies are read between two steps while
other sequences run. Draws do not depend on when a reply comes. A message goes through the chat
template, from the end of the model's own text (models/chat.py); other replies are plain text.
"""

from __future__ import annotations

from collections import defaultdict

from jetrl.models.chat import ReplyError, decode, encode_reply
from jetrl.models.policy import Policy
from jetrl.rollout.options import Environment, EnvironmentReply
from jetrl.rollout.scheduler import ScheduledStep, Scheduler
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import Completion, Reply, Turn


class MultiTurn:
    """The turns of all sequences of one call."""

    def __init__(self, policy: Policy, environment: Environment, scheduler: Scheduler) -> None:
        assert policy.tokenizer is not None, "an environment needs a tokenizer"
        self._tokenizer = policy.tokenizer
        self._as_text = policy.plain_text != "none"
        self._places = policy.config.place_tokens
        self._environment = environment
        self._scheduler = scheduler
        self._turns: defaultdict[int, list[Turn]] = defaultdict(list)
        # Why a sequence has no reply, and whether there was one without tokens.
        self._failures: dict[int, tuple[str, bool]] = {}
        self._asked: set[int] = set()
        # Replies to sequences that still have draws pending past the end of their turn.
        self._early: list[EnvironmentReply] = []

    def ask(self, step: ScheduledStep) -> None:
        """Send the turns that ended with a step's draws to the environment."""
        for index in step.draws:
            sequence = self._scheduler.sequences[index]
            if sequence.awaiting and index not in self._asked:
                self._asked.add(index)
                self._environment.ask(index, tuple(self._turns[index]), self._text(sequence))

    def deliver_replies(self, wait: bool) -> None:
        """Pass ready replies to the scheduler; with `wait`, wait for one if none is pending."""
        replies, self._early = self._early, []
        if self._asked and not (replies and wait):
            replies += self._environment.answers(wait)
        for environment_reply in replies:
            index, reply, failure = environment_reply
            sequence = self._scheduler.sequences[index]
            if sequence.num_pending and not sequence.finished:
                self._early.append(environment_reply)  # Its draws come first.
                continue
            self._asked.discard(index)
            if sequence.finished:  # It was cancelled meanwhile.
                continue
            token_ids: list[int] | None = None
            if failure:
                self._failures[index] = failure, False
            elif reply is not None:
                token_ids = self._encode(sequence, reply)
                text = self._text(sequence)
            # No tokens end the sequence; no room for them cuts it off.
            self._scheduler.reply(index, token_ids)
            if reply is not None and not sequence.finished:
                self._turns[index].append(Turn(text, reply))

    def _encode(self, sequence: RunningSequence, reply: Reply) -> list[int] | None:
        """Return the token ids of a reply; None if the model cannot be given it."""
        # A message continues from the end of the model's own text.
        turn = sequence.generated[sequence.turn_start :]
        where = f"the reply {reply!r:.80}"
        try:
            token_ids = encode_reply(self._tokenizer, reply, turn, where, self._as_text)
            if token_ids and self._places.isdisjoint(token_ids):
                return token_ids
            what = "has the place of an image or a video" if token_ids else "is empty"
            problem = f"the environment's reply {what}"
        except ReplyError as error:
            problem = str(error)
        self._failures[sequence.index] = problem, True
        return None

    def completion(self, sequence: RunningSequence) -> Completion:
        """Return an ended sequence as a completion, whose text is that of both sides."""
        assert sequence.finish_reason is not None, f"sequence {sequence.index} is not finished"
        failure, unusable = self._failures.get(sequence.index, ("", False))
        last = self._text(sequence)
        before = decode(self._tokenizer, sequence.generated[: sequence.turn_start])
        return Completion(
            token_ids=tuple(sequence.generated),
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            text=before + last,
            environment=tuple(sequence.environment),
            turns=(*self._turns[sequence.index], Turn(last)),
            failure=failure,
            unusable_reply=unusable,
        )

    def _text(self, sequence: RunningSequence) -> str:
        """Return the model's text of the current turn, without a stop string."""
        if sequence.text is not None:
            return sequence.text
        return decode(self._tokenizer, sequence.generated[sequence.turn_start :])
