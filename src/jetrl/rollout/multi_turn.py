"""Turns: what happens when a sequence stops and an environment says how it goes on.

The environment is somebody else's (a task, in worker processes) and may take its time: it is asked
when a turn ends, and its answers are taken in between two forwards, while the other sequences run.
What is drawn does not depend on when an answer comes, since a draw depends on its sequence alone.

A reply becomes tokens here. To a text prompt's it is appended as it is; a message goes through the
chat template, so that the tokens are those of the conversation as the template would write it, from
the end of what the model wrote (models/chat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jetrl.models.chat import decode, encode_reply
from jetrl.models.policy import Policy
from jetrl.rollout.scheduler import ScheduledStep, Scheduler
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import Completion, Reply, Turn


class Answer(NamedTuple):
    """What an environment says to the turn of a sequence. reply: None ends the sequence. failure:
    why there is no reply, where the environment broke down; "" else."""

    sequence: int
    reply: Reply | None
    failure: str = ""


class Environment(Protocol):
    """What answers when a turn ends. Sequences are called by their index in the call of `generate`:
    sample s of prompt p is p * n + s. max_turns: turns of a completion at most, 1 or more."""

    max_turns: int

    def ask(self, sequence: int, turns: Sequence[Turn], completion: str) -> None:
        """Begin to find out what follows `completion`, after the turns before it."""

    def answers(self, wait: bool) -> list[Answer]:
        """The answers that are there, at least one of them with `wait`."""

    def close(self) -> None:
        """Drop what was asked and not answered; called when the call ends, however it does."""


class MultiTurn:
    """The turns of all sequences of one call.

    Raises:
        AssertionError: a policy without a tokenizer: an environment reads text.
    """

    def __init__(self, policy: Policy, environment: Environment, scheduler: Scheduler) -> None:
        assert policy.tokenizer is not None, "an environment needs a tokenizer"
        self._tokenizer = policy.tokenizer
        self._environment = environment
        self._scheduler = scheduler
        self._turns: dict[int, list[Turn]] = {}
        self._failures: dict[int, str] = {}
        self._asked: set[int] = set()
        self._early: list[Answer] = []  # of sequences with draws pending past their turn's end

    def ask(self, step: ScheduledStep) -> None:
        """Hands the turns that ended with a step's draws to the environment."""
        for index in step.draws:
            sequence = self._scheduler.sequences[index]
            if sequence.awaiting and index not in self._asked:
                self._asked.add(index)
                turns = self._turns.setdefault(index, [])
                self._environment.ask(index, tuple(turns), self._text(sequence))

    def take_in(self, wait: bool) -> None:
        """Gives the scheduler the answers that are there; with `wait`, which is for when no draws
        are pending, at least one."""
        answers, self._early = self._early, []
        if self._asked and not (answers and wait):
            answers += self._environment.answers(wait)
        for answer in answers:
            index, reply, failure = answer
            sequence = self._scheduler.sequences[index]
            if sequence.num_pending:
                self._early.append(answer)
                continue
            self._asked.discard(index)
            token_ids: list[int] | None = None
            if failure:
                self._failures[index] = failure
            elif reply is not None:
                said = sequence.generated[sequence.turn_start :]
                token_ids = encode_reply(self._tokenizer, reply, said, f"the reply {reply!r:.80}")
                text = self._text(sequence)
                if not token_ids:
                    token_ids = None
                    self._failures[index] = "the environment's reply is empty"
            self._scheduler.reply(index, token_ids)
            if reply is not None and not sequence.finished:
                self._turns[index].append(Turn(text, reply))

    def completion(self, sequence: RunningSequence) -> Completion:
        """A finished sequence as a completion; its text is all that was written, by both sides."""
        assert sequence.finish_reason is not None, f"sequence {sequence.index} is not finished"
        last = self._text(sequence)
        before = decode(self._tokenizer, sequence.generated[: sequence.turn_start])
        return Completion(
            token_ids=tuple(sequence.generated),
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            text=before + last,
            environment=tuple(sequence.environment),
            turns=(*self._turns.get(sequence.index, ()), Turn(last)),
            failure=self._failures.get(sequence.index, ""),
        )

    def _text(self, sequence: RunningSequence) -> str:
        """What the model wrote in the present turn, without a stop string."""
        if sequence.text is not None:
            return sequence.text
        return decode(self._tokenizer, sequence.generated[sequence.turn_start :])
