"""Scoring of completions in killable worker processes.

Scoring runs third-party code on model output: symbolic comparisons may not terminate, regular
expressions may blow up, parsers may segfault. None of this may stop a run, so each worker is a
fresh interpreter; an item that hangs or kills its worker scores 0 with a reason, the worker is
replaced, and other items continue. Workers reply per item, so the item of a dead worker is known.
Results depend only on the task, not on the number of workers.

Reward functions that get all completions of a step (`Task.reward_calls`) are one item per call. If
a call hangs or fails, all of its completions are left without a score.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.settings.sections import TaskSettings
from jetrl.tasks import user_files
from jetrl.tasks.base import Answer, RewardCall, TrainerState, describe_error, naming_errors
from jetrl.tasks.registry import get_task, with_path
from jetrl.tasks.rewards import added
from jetrl.tasks.sandbox.process import WorkerProcess
from jetrl.tasks.sandbox.wire import MAX_LINE, MAX_OF_CALL, WorkerReply
from jetrl.tasks.sandbox.worker import CallItem, Item, WorkerSetup, score_safely
from jetrl.types import Prompt, Reply, Score, Turn
from jetrl.untrusted import exits_raised

logger = logging.getLogger(__name__)

MAX_CHUNK = 32


@dataclass(frozen=True)
class ScoredText:
    """Score of a completion; after a failure the reward is 0 and `failure` is the reason.

    `readable`: prompt and completion in human-readable notation, or "". `extra`: notes of reward
    functions on the completion.
    """

    score: Score
    failure: str = ""
    readable: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BegunCall:
    """A pending reward call: its ticket and the indices of its completions."""

    call: RewardCall
    ticket: int
    members: Sequence[int]


@dataclass(frozen=True)
class StepAnswer:
    """Answer to a ticket of `ask`: a reply (None ends the completion) or a `failure`."""

    ticket: int
    reply: Reply | None
    failure: str = ""


def _without_images(item: Item | CallItem) -> Item | CallItem:
    """Return what a worker scores without images, which no score reads."""
    if isinstance(item, Item):
        return replace(item, prompt=replace(item.prompt, images=()))
    answers = [replace(each, prompt=replace(each.prompt, images=())) for each in item.answers]
    return replace(item, answers=tuple(answers))


class Scorer:
    """Computes a task's scores and turns in killable processes.

    At startup, the task's `self_test` cases are scored, so that a broken verifier is an error at
    once instead of a run without rewards. Use a scorer from one thread, as a context manager or
    with `close()`.

    Args:
        name: The task's name, as for `get_task`.
        workers: Number of processes; 0 scores in this process, without any protection from a score
            that hangs or crashes (to debug a task: prints and breakpoints work).
        timeout_s: CPU-time limit per score in seconds; the wall-clock limit is 10x.
        memory_mib: MiB that one score may take beyond those of a worker with its task; 0: no limit.
        max_lost_s: Seconds per worker that one step may lose to scores and turns that hang or
            crash. After that, completions without a score get none until the next `begin_step`.
        group: Completions of a prompt in the self-test, for reward functions that compare them.

    Raises:
        UserError: The task cannot be built, or fails its self-test.
    """

    def __init__(
        self,
        name: str,
        path: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
        max_lost_s: float = 120.0,
        group: int = 1,
    ) -> None:
        self.state = TrainerState()  # passed to reward functions
        self._max_lost_s = max_lost_s
        self._last_failure = self._given_up = ""
        words = with_path(options or {}, path)
        self._task = get_task(name, **words)
        setup = WorkerSetup(name, words, timeout_s, memory_mib, dict(user_files.loaded))
        self._pending: deque[int] = deque()  # tickets of unassigned items
        self._workers = [WorkerProcess(setup, self._pending) for _ in range(workers)]
        self._tickets = itertools.count()
        self._payloads: dict[int, bytes] = {}  # pickled unanswered items
        self._replies: dict[int, WorkerReply] = {}  # replies not collected yet
        self._sizes: dict[int, int] = {}  # completions per unanswered call
        self._turns: set[int] = set()  # tickets of unanswered turns
        try:
            self._self_test(group)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_settings(cls, task: TaskSettings, group: int = 1) -> Self:
        """Return a run's scorer; local ranks share the workers, with at least one each."""
        return cls(
            task.name,
            task.path,
            task.options,
            workers=world().share_of_machine(task.workers),
            timeout_s=task.timeout_s,
            memory_mib=task.memory_mib,
            max_lost_s=task.max_lost_s,
            group=group,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later `score` restarts them."""
        for worker in self._workers:
            worker.hang_up()
        deadline = time.monotonic() + 1.0
        for worker in self._workers:
            worker.stop(deadline)

    def score(self, items: Sequence[tuple[Prompt, str | tuple[Turn, ...]]]) -> list[ScoredText]:
        """Return the scores of (prompt, completion text or turns) pairs, in order.

        Raises UserError if a prompt cannot be pickled, RunStopped if a worker cannot be restarted.
        """
        self.begin_step()
        calls = self.begin_calls([Answer(prompt, completion) for prompt, completion in items])
        scores = self.finish([self.begin(prompt, completion) for prompt, completion in items])
        return self.finish_calls(calls, scores)

    @property
    def has_workers(self) -> bool:
        """Return True if workers score in the background; otherwise `begin` scores immediately."""
        return bool(self._workers)

    def begin_step(self) -> None:
        """Reset the lost-time budget of a step."""
        self._given_up = ""
        for worker in self._workers:
            worker.lost_s = 0.0

    def begin(self, prompt: Prompt, completion: str | tuple[Turn, ...]) -> int:
        """Start scoring a completion; return a ticket for `finish`."""
        with self._dropping_on_error():
            return self._submit(Item(prompt, completion))

    def begin_calls(self, answers: Sequence[Answer]) -> list[BegunCall]:
        """Start the calls of reward functions that get all completions of a step at once.

        `answers` are whole groups; finish with `finish_calls`.
        """
        calls = []
        for call in self._task.reward_calls:
            members = [i for i, a in enumerate(answers) if call.task in ("", a.prompt.task)]
            if not members:
                continue
            item = CallItem(call, tuple(answers[i] for i in members), self.state)
            with self._dropping_on_error():
                calls.append(BegunCall(call, self._submit(item), members))
        return calls

    def finish_calls(
        self, calls: Sequence[BegunCall], scores: Sequence[ScoredText]
    ) -> list[ScoredText]:
        """Wait for calls; return the scores of their completions with the rewards added."""
        self._wait([begun.ticket for begun in calls])
        scored = list(scores)
        for begun in calls:
            self._sizes.pop(begun.ticket, None)
            reply, count = self._replies.pop(begun.ticket), len(begun.members)
            failure = re.sub("^score ", f"{begun.call} ", reply.failure)
            lists = [len(reply.rewards.get(name, ())) for name in begun.call.names]
            lists += map(len, reply.extra.values())
            if not failure and {*lists} != {count}:
                failure = f"{begun.call} made its worker send what is no answer"
            if failure:
                more = "; task.timeout_s is its limit" if " took longer than " in failure else ""
                failure += f" (one call for {count} completions{more})"
            for place, i in enumerate(begun.members):
                scored[i] = _with_call(scored[i], begun.call, reply, place, failure)
        return scored

    def attend(self) -> None:
        """Keep workers busy, without blocking."""
        with self._dropping_on_error():
            if self._payloads:
                self._pump(wait_for_one=False)

    def finish(self, tickets: Sequence[int]) -> list[ScoredText]:
        """Wait for the scores of tickets; return them in order."""
        self._wait(tickets)
        replies = [self._replies.pop(ticket) for ticket in tickets]
        return [ScoredText(Score(r.reward, r.parts), r.failure, r.readable) for r in replies]

    def _wait(self, tickets: Sequence[int]) -> None:
        with self._dropping_on_error():
            while not self._payloads.keys().isdisjoint(tickets):
                self._pump(wait_for_one=True)

    def ask(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> int:
        """Request the task's reply to a turn (`Task.step`); return a ticket."""
        ticket = self._submit(Item(prompt, (*turns, Turn(completion)), step=True))
        self._turns.add(ticket)
        return ticket

    def answers(self, wait_for_one: bool) -> list[StepAnswer]:
        """Return the answers so far; with `wait_for_one`, wait for at least one if pending."""
        with self._dropping_on_error():
            if self._payloads:
                self._pump(wait_for_one=False)
            while wait_for_one and self._turns and self._turns.isdisjoint(self._replies):
                self._pump(wait_for_one=True)
        answered = [ticket for ticket in self._replies if ticket in self._turns]
        self._turns.difference_update(answered)
        due = [(ticket, self._replies.pop(ticket)) for ticket in answered]
        return [StepAnswer(t, r.step_reply, re.sub("^score ", "step ", r.failure)) for t, r in due]

    def drop(self) -> None:
        """Cancel all pending completions and turns; end the workers that run one."""
        self._forget({*self._payloads, *self._replies})

    @contextlib.contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        """Cancel everything on an error or Ctrl-C, so that no worker keeps half a chunk."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop_turns(self) -> None:
        """Cancel pending turns and stop the workers that run them."""
        self._forget(set(self._turns))

    def _forget(self, tickets: set[int]) -> None:
        for worker in self._workers:
            if not tickets.isdisjoint(worker.jobs):
                worker.give_back()
                worker.stop()
        kept = [ticket for ticket in self._pending if ticket not in tickets]
        self._pending.clear()
        self._pending.extend(kept)
        for ticket in tickets:
            self._payloads.pop(ticket, None)
            self._replies.pop(ticket, None)
            self._sizes.pop(ticket, None)
        self._turns -= tickets

    def _submit(self, item: Item | CallItem) -> int:
        ticket = next(self._tickets)
        if self._given_up:
            self._replies[ticket] = WorkerReply(failure=self._given_up)
        elif self._workers:
            self._payloads[ticket] = self._pickled(item)
            if isinstance(item, CallItem):
                self._sizes[ticket] = len(item.answers)
            # Prioritize turns, which block a sequence, and calls, which take long, over single
            # scores.
            first = isinstance(item, CallItem) or item.step
            (self._pending.appendleft if first else self._pending.append)(ticket)
        else:
            with exits_raised():
                self._replies[ticket] = score_safely(self._task, item)
        return ticket

    def _pump(self, wait_for_one: bool) -> None:
        """Assign pending items and read replies; with `wait_for_one`, wait for one first."""
        pending = self._pending
        # Give each idle worker a chunk.
        num_free = sum(worker.running and not worker.jobs for worker in self._workers)
        for worker in self._workers:
            if not worker.running and num_free < len(pending):  # not more than needed
                worker.start()
                num_free += 1
            if worker.running and worker.ready and not worker.jobs and pending:
                size = min(MAX_CHUNK, math.ceil(len(pending) / (2 * len(self._workers))))
                chunk = [pending.popleft() for _ in range(size)]
                most = MAX_LINE + MAX_OF_CALL * max(self._sizes.get(t, 0) for t in chunk)
                worker.assign(chunk, [self._payloads[ticket] for ticket in chunk], most)
        # Wait until a worker writes something or the first deadline passes.
        watched = [w for w in self._workers if w.running and (w.jobs or not w.ready)]
        if wait_for_one and watched:
            patience = min(worker.deadline for worker in watched) - time.monotonic()
            channels = [channel for worker in watched for channel in worker.channels]
            wait(channels, timeout=max(0.0, patience))
        # Read the replies, and the items of workers that ended.
        for worker in watched:
            for ticket, reply in worker.receive():
                self._replies[ticket] = reply
                self._last_failure = reply.failure or self._last_failure
                del self._payloads[ticket]
        lost_s = sum(worker.lost_s for worker in self._workers)
        if self._payloads and lost_s > self._max_lost_s * len(self._workers):
            self._give_up_the_rest(lost_s)

    def _give_up_the_rest(self, lost_s: float) -> None:
        """Mark all unanswered items as failures."""
        for worker in self._workers:
            if worker.jobs:
                worker.stop()
        last = self._last_failure
        logger.warning(
            "%d of %d completions get no score: scores that hung or crashed took %.0f s, the "
            "last of them: %s",
            *(len(self._payloads), len(self._payloads) + len(self._replies), lost_s, last),
        )
        self._given_up = (
            f"not scored: others of the batch hung or crashed for {lost_s:.0f} s "
            f"(task.max_lost_s = {self._max_lost_s:g} s a worker); one of them: {last}"
        )
        for ticket in self._payloads:
            self._replies[ticket] = WorkerReply(failure=self._given_up)
        self._payloads.clear()
        self._pending.clear()

    def _pickled(self, item: Item | CallItem) -> bytes:
        try:
            return pickle.dumps(_without_images(item))
        except Exception as error:
            prompt = item.answers[0].prompt if isinstance(item, CallItem) else item.prompt
            raise UserError(
                f"task {self._task.label}, prompt {prompt.id!r}: its metadata cannot be sent to a "
                f"scoring worker ({describe_error(error)}); use plain data there, or "
                "task.workers=0"
            ) from error

    def _self_test(self, group: int) -> None:
        label = self._task.label
        with naming_errors(f"task {label}: its prompts fail:"):
            cases = list(self._task.self_test())
        if self._task.max_turns > 1:
            self._test_steps([(prompt, completion) for prompt, completion, _ in cases])
        if self._task.reward_calls:  # these need whole groups
            cases = [case for case in cases for _ in range(group)]
        scored = self.score([(prompt, completion) for prompt, completion, _ in cases])
        for (prompt, completion, expected), result in zip(cases, scored, strict=True):
            what = f"completion {completion[:60]!r} of prompt {prompt.id!r}"
            if result.failure:
                raise UserError(f"task {label} cannot score {what}: {result.failure}")
            if expected is not None and result.score.reward != expected:
                raise UserError(
                    f"task {label} gives {what} a reward of {result.score.reward} instead of "
                    f"{expected}: its checker fails here"
                )

    def _test_steps(self, cases: Sequence[tuple[Prompt, str]]) -> None:
        prompts = {self.ask(prompt, (), completion): prompt for prompt, completion in cases}
        while prompts:
            for answer in self.answers(wait_for_one=True):
                prompt = prompts.pop(answer.ticket)
                if answer.failure:
                    raise UserError(
                        f"task {self._task.label} cannot answer a turn of prompt {prompt.id!r}: "
                        f"{answer.failure}"
                    )


def _with_call(
    scored: ScoredText, call: RewardCall, reply: WorkerReply, place: int, failure: str
) -> ScoredText:
    """Return a completion's score plus the rewards of a call at index `place`."""
    if scored.failure:
        return scored
    if failure:
        return ScoredText(Score(0.0), failure, scored.readable)
    rewards = {name: values[place] for name, values in reply.rewards.items()}
    score = added(scored.score, call, rewards)
    score = replace(score, parts={**score.parts, **reply.parts})
    extra = {name: values[place] for name, values in reply.extra.items()}
    return replace(scored, score=score, extra={**scored.extra, **extra})
