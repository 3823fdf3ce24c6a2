"""Scores completions in worker processes that can be killed.

A task's score is other people's code on a model's text: a symbolic comparison that never ends, a
regular expression that explodes, a segmentation fault in a parser. None of it may stop a run. So
each worker is a fresh interpreter (no fork, no torch, no re-import of the main program); an item
that hangs or kills its worker scores 0 with a text that says why, its worker is replaced, and the
other items go on. Items go out in chunks and replies come back one by one, so the parent knows
which item a dead worker was at.

Results come in the order of the items and depend on the task alone, not on the number of workers.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jetrl.errors import UserError
from jetrl.tasks.messages import describe_error
from jetrl.tasks.process import WorkerProcess
from jetrl.tasks.registry import get_task
from jetrl.tasks.wire import Reply
from jetrl.tasks.worker import Setup, score_safely
from jetrl.types import Prompt, Score

logger = logging.getLogger(__name__)

MAX_CHUNK = 32


@dataclass(frozen=True)
class ScoredText:
    """A completion's score. `failure` says why there is no verdict (then the reward is 0); it is ""
    when the task gave one."""

    score: Score
    failure: str = ""


class Scorer:
    """Scores (prompt, completion) pairs with a task, in processes that can be killed.

    Args:
        name, path, options: the task, as for `get_task`.
        workers: number of processes; 0 scores in this process, without any protection from a score
            that hangs or crashes (a way to debug a task: prints and breakpoints work).
        timeout_s: seconds that one score may take.
        memory_mib: memory that one score may take beyond what a worker has when its task is built;
            0: no limit.
        max_lost_s: seconds a worker that one call of `score` may lose to scores that hang or crash,
            and to starting workers again. Past it, what has no verdict yet gets none: a batch of
            nothing but hanging scores cannot hold a step up for hours.

    On start the task's `self_test` cases are scored, so that a checker that does not work is an
    error now and not a run without reward.

    Use it from one thread, and as a context manager or with `close()`.

    Raises:
        UserError: the task cannot be built, or fails its self-test.
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
    ) -> None:
        if workers < 0 or not (0 < timeout_s < math.inf) or memory_mib < 0 or max_lost_s < 0:
            raise UserError(
                f"task.workers = {workers}, task.timeout_s = {timeout_s}, task.memory_mib = "
                f"{memory_mib}, task.max_lost_s = {max_lost_s}: out of range"
            )
        self._max_lost_s = max_lost_s
        folder = None if path is None else str(path)
        self._setup = Setup(name, folder, dict(options or {}), float(timeout_s), memory_mib)
        self._task = get_task(name, path=folder, **self._setup.options)
        self._workers = [WorkerProcess(self._setup) for _ in range(workers)]
        try:
            self._self_test()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. A later `score` starts new ones."""
        for worker in self._workers:
            worker.hang_up()
        deadline = time.monotonic() + 1.0
        for worker in self._workers:
            worker.stop(deadline)

    def score(self, items: Sequence[tuple[Prompt, str]]) -> list[ScoredText]:
        """The scores of (prompt, completion) pairs, in their order.

        Never blocks on one, and loses at most about `max_lost_s` to those that hang or crash.

        Raises:
            UserError: a prompt that cannot be pickled, or a worker that cannot be started again.
        """
        if not self._workers:
            return [_scored(score_safely(self._task, *item)) for item in items]
        try:
            return self._score_in_workers([self._pickled(*item) for item in items])
        except BaseException:  # Ctrl-C and errors: no worker may be left with half a chunk
            for worker in self._workers:
                if worker.jobs:
                    worker.stop()
            raise

    def _score_in_workers(self, payloads: list[bytes]) -> list[ScoredText]:
        results: dict[int, ScoredText] = {}
        pending = deque(range(len(payloads)))
        lost_s = 0.0
        while len(results) < len(payloads):
            if lost_s > self._max_lost_s * len(self._workers):
                return self._without_the_rest(results, len(payloads), lost_s)
            for worker in self._workers:
                if not worker.running:
                    worker.start()
                if worker.ready and not worker.jobs and pending:
                    size = min(MAX_CHUNK, math.ceil(len(pending) / (2 * len(self._workers))))
                    chunk = [pending.popleft() for _ in range(size)]
                    worker.assign(chunk, [payloads[index] for index in chunk])
                pending.extendleft(reversed(worker.take_back()))
            watched = [w for w in self._workers if w.running and (w.jobs or not w.ready)]
            if not watched:
                continue
            patience = min(worker.deadline for worker in watched) - time.monotonic()
            channels = [channel for worker in watched for channel in worker.channels]
            wait(channels, timeout=max(0.0, patience))
            for worker in watched:
                for index, reply in worker.receive():
                    results[index] = _scored(reply)
                lost_s += worker.take_lost_s()
                pending.extendleft(reversed(worker.take_back()))
        return [results[index] for index in range(len(payloads))]

    def _without_the_rest(
        self, results: dict[int, ScoredText], total: int, lost_s: float
    ) -> list[ScoredText]:
        """The verdicts there are; a failure for each that there is not."""
        for worker in self._workers:
            if worker.jobs:
                worker.stop()
        last = next((r.failure for r in reversed(results.values()) if r.failure), "")
        logger.warning(
            "%d of %d completions get no verdict: scores that hung or crashed took %.0f s, the "
            "last of them: %s",
            *(total - len(results), total, lost_s, last),
        )
        rest = ScoredText(
            Score(0.0),
            f"not judged: others of the batch hung or crashed for {lost_s:.0f} s "
            f"(task.max_lost_s = {self._max_lost_s:g} s a worker); one of them: {last}",
        )
        return [results.get(index, rest) for index in range(total)]

    def _pickled(self, prompt: Prompt, completion: str) -> bytes:
        try:
            return pickle.dumps((prompt, completion))
        except Exception as error:
            raise UserError(
                f"task {self._task.label}, prompt {prompt.id!r}: its metadata cannot be sent to a "
                f"scoring worker ({describe_error(error)}); use plain data there, or task.workers=0"
            ) from error

    def _self_test(self) -> None:
        label = self._task.label
        try:
            cases = list(self._task.self_test())
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"task {label}: its prompts fail: {describe_error(error)}") from error
        scored = self.score([(prompt, completion) for prompt, completion, _ in cases])
        for (prompt, completion, expected), result in zip(cases, scored, strict=True):
            what = f"completion {completion[:60]!r} of prompt {prompt.id!r}"
            if result.failure:
                raise UserError(f"task {label} cannot score {what}: {result.failure}")
            if expected is not None and result.score.reward != expected:
                raise UserError(
                    f"task {label} gives {what} a reward of {result.score.reward}, not the "
                    f"{expected} it is known to be worth: its checker does not work here"
                )


def _scored(reply: Reply) -> ScoredText:
    return ScoredText(Score(reply.reward, reply.parts), reply.failure)
