"""The source of tokens behind the endpoint: the thread that steps the rollout engine.

The app awaits `TokenSource.submit`, and does not know whose weights draw. Requests join and leave
between two steps:

    submit ─▶ added ─▶ engine thread: add, cancel, step ─▶ pieces, to the event loop ─▶ submit

`EngineSource.start` answers in a thread of its own, for a policy that does not change. A training
calls `answer` between two updates, in its own thread: requests that come later are held for the
next call, so all tokens of a request are drawn by one version of the weights.

A draw depends only on (seed, key, position), and a key on the prompt, the sample's number and the
session. So an answer does not depend on who else asks, or when.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from jetrl.errors import UserError
from jetrl.models import chat
from jetrl.models.policy import Policy
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.inputs import encode_prompts, make_groups
from jetrl.rollout.options import GenerateOptions
from jetrl.rollout.sequence import RunningSequence, sequence_keys
from jetrl.types import FinishReason, Prompt, PromptInputs, SamplingParams

logger = logging.getLogger(__name__)

EPISODES = "/episodes/"
"""The beginning of an episode's path, before its secret name; sessions of episodes are its path."""
_STOPPING = "the server is stopping"
_POLL_S = 0.1


@dataclass(frozen=True)
class Request:
    """Prompts to complete params.n times each; choice p * n + s is sample s of prompt p.

    `session` names a rollout. The same request in another session gets other random numbers.
    """

    prompts: tuple[PromptInputs, ...]
    params: SamplingParams
    session: str = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass(frozen=True)
class Piece:
    """New tokens of a choice; the last piece of a choice has a `finish_reason` and the whole text.

    `version` is that of the weights that drew the tokens.
    """

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish_reason: FinishReason | None = None
    text: str = ""


class SourceBusy(Exception):  # noqa: N818  (the state of the source)
    """The queue has no room for the request; try again later."""


class SourceFailed(Exception):  # noqa: N818
    """The request was dropped, and the message says why."""


class UnknownEpisode(UserError):  # noqa: N818  (one of the answers of the API)
    """The episode has ended, or never was."""


class TokenSource(Protocol):
    """Interface of a policy that draws tokens for requests."""

    max_model_len: int
    max_choices: int

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    @property
    def version(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def encode(
        self, prompts: Sequence[Sequence[int] | Prompt], session: str = ""
    ) -> tuple[PromptInputs, ...]:
        """Return the inputs of prompts, in any thread.

        Raises UserError if one has no room for an answer.
        """

    def required(self, session: str) -> SamplingParams | None:
        """Return the parameters that a session's requests have; None if they may choose."""

    def blind(self, session: str) -> str | None:
        """Return why messages of a session have no images; None if they may have some."""

    def submit(self, request: Request) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces of all choices as they are drawn; closing it cancels the request.

        Raises SourceBusy before the first piece, SourceFailed, and UserError for sequences that do
        not fit.
        """


@dataclass(eq=False)
class _Running:
    """A request in the engine: `numbers` has the choice of each unfinished sequence."""

    request: Request
    pieces: asyncio.Queue[list[Piece] | Exception]
    loop: asyncio.AbstractEventLoop
    numbers: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False

    def put(self, item: list[Piece] | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, item)


class EngineSource:
    """A `TokenSource` of one policy.

    Args:
        max_choices: Completions that run or wait at once; a request beyond them is refused.

    Attributes:
        engine: Used only by the thread while that runs.
    """

    def __init__(
        self, engine: RolloutEngine, policy: Policy, max_choices: int, version: int = 0
    ) -> None:
        self.engine, self.policy = engine, policy
        # Of its own, since encoding changes a tokenizer's state while the thread decodes with it.
        self._encoder = copy.deepcopy(policy.tokenizer)
        self._encoding = threading.Lock()
        self.max_model_len, self.max_choices = engine.max_model_len, max_choices
        self.version = version
        self.num_choices = 0  # of all requests that have not ended; used by the event loop only
        self._changed = threading.Condition()
        self._arrived: list[_Running] = []
        self._next: list[_Running] = []  # taken, but not alike to those that run
        self._left: list[_Running] = []
        self._running: list[_Running] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer requests in a thread, until `close`."""
        self._thread = threading.Thread(target=self._serve, name="jetrl-serve", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.policy.tokenizer

    @property
    def alive(self) -> bool:
        return not self._closing

    def required(self, session: str) -> SamplingParams | None:
        return None

    def blind(self, session: str) -> str | None:
        return "this model reads text only" if self.policy.tower is None else None

    def encode(
        self, prompts: Sequence[Sequence[int] | Prompt], session: str = ""
    ) -> tuple[PromptInputs, ...]:
        policy = self.policy
        with self._encoding:
            encoded = [
                chat.encode_prompt(
                    self._encoder, prompt, plain_text=policy.plain_text, tower=policy.tower
                )
                if isinstance(prompt, Prompt)
                else prompt
                for prompt in prompts
            ]
        return tuple(encode_prompts(policy, encoded, self.max_model_len, None))

    async def submit(self, request: Request) -> AsyncGenerator[list[Piece], None]:
        if not self.alive:
            raise SourceFailed(_STOPPING)
        if self.num_choices + request.num_choices > self.max_choices:
            raise SourceBusy(f"{self.num_choices} of {self.max_choices} completions run or wait")
        running = _Running(request, asyncio.Queue(), asyncio.get_running_loop())
        self._notify(running)
        self.num_choices += request.num_choices
        left = request.num_choices
        try:
            while left:
                item = await running.pieces.get()
                if isinstance(item, Exception):
                    left = 0
                    raise item
                left -= sum(piece.finish_reason is not None for piece in item)
                yield item
        finally:
            self.num_choices -= request.num_choices
            if left:
                self._notify(running, left=True)

    def answer(self, busy: Callable[[], bool]) -> None:
        """Answer requests in this thread while `busy()`, then let those that run end.

        `busy` is called after each step and at least every tenth of a second. If it or the engine
        raises, the requests that run get the error, and this raises it.
        """
        assert self._thread is None, "a thread answers already"
        try:
            self._step_while(busy)
        except BaseException as error:
            self._fail(self._running, _failure(error))
            self._running = []
            raise
        finally:
            self._end()

    def wake(self) -> None:
        """Let `answer` call its `busy` now."""
        with self._changed:
            self._changed.notify()

    @property
    def num_held(self) -> int:
        """Requests that wait for the next `answer`."""
        return len(self._next) + len(self._arrived)

    def close(self) -> None:
        """Stop answering; requests that still run or wait are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._fail([*self._running, *self._next, *self._arrived], SourceFailed(_STOPPING))

    def _notify(self, running: _Running, left: bool = False) -> None:
        """Hand a request to the thread, or take it back; does nothing once the thread has ended."""
        with self._changed:
            (self._left if left else self._arrived).append(running)
            self._changed.notify()
            if self._closing and not left:
                raise SourceFailed(_STOPPING)

    def _serve(self) -> None:
        """Run the thread; no request waits for it after its end, whatever ended it."""
        reason = SourceFailed(_STOPPING)
        try:
            self._step_while(None)
        except Exception as error:  # of this file
            self._report(error)
            reason = _failure(error)
        with self._changed:
            self._closing = True
        self._fail([*self._running, *self._next, *self._arrived], reason)
        self._end()

    def _step_while(self, busy: Callable[[], bool] | None) -> None:
        """Step the engine while requests run, and wait while there are none.

        Ends when the source closes, or once `busy` has returned False and no request runs. With
        drafts, a request whose distribution differs waits for those before it to end.
        """
        while True:
            admits = busy is None or busy()
            if not (admits or self._running or self._next):
                return
            with self._changed:
                taken = self._running or self._next
                if admits and not (self._arrived or self._left or taken or self._closing):
                    self._changed.wait(None if busy is None else _POLL_S)
                if self._closing:
                    return
                arrived: list[_Running] = []
                if admits:
                    arrived, self._arrived = self._arrived, []
                left, self._left = self._left, []
            for running in left:
                self._cancel(running)
            self._next += arrived
            while self._next and self._joins(self._next[0]):
                self._add(self._next.pop(0))
            if self._running:
                self._step(raises=busy is not None)
            if not self._running:
                self._end()

    def _joins(self, running: _Running) -> bool:
        return not self._running or self.engine.takes(running.request.params)

    def _add(self, running: _Running) -> None:
        """Give a request to the engine; between two calls, all of its pages are reserved."""
        if running.cancelled:
            return
        request, policy = running.request, self.policy
        try:
            if not self._running:
                self._end()
                self.engine.reserve()
            keys = sequence_keys(request.prompts, request.params.n)
            if request.session:
                keys = [[derive_seed(request.session, key) for key in row] for row in keys]
            groups = make_groups(
                policy,
                request.prompts,
                request.params,
                self.max_model_len,
                options=GenerateOptions(keys=keys),
                first=len(self.engine.sequences),
            )
            for group in groups:
                self.engine.add(group)
                for sequence in group:
                    running.numbers[sequence.index] = len(running.sent)
                    running.sent[sequence.index] = 0
        except Exception as error:  # of this request only; a UserError is the client's
            self._drop(running)
            self._report(error)
            running.put(error if isinstance(error, ValueError) else _failure(error))
        else:
            self._running.append(running)

    def _step(self, raises: bool) -> None:
        """Run a step and send what it drew."""
        try:
            self.engine.step()
        except Exception as error:  # the engine has dropped all sequences
            if raises:
                raise
            self._report(error)
            self._fail(self._running, _failure(error))
            self._running = []
            return
        for running in list(self._running):
            pieces = [
                piece
                for index in list(running.numbers)
                if (piece := self._piece(running, self.engine.sequences[index])) is not None
            ]
            if pieces:
                running.put(pieces)
            if not running.numbers:
                self._running.remove(running)

    def _piece(self, running: _Running, sequence: RunningSequence) -> Piece | None:
        """Return what a sequence has drawn since the last piece, and forget it when it ended."""
        index, sent = sequence.index, running.sent[sequence.index]
        drawn, ended = len(sequence.generated), sequence.finish_reason is not None
        if drawn == sent and not ended:
            return None
        text = sequence.text
        if ended and text is None and self.tokenizer is not None:
            text = chat.decode(self.tokenizer, sequence.generated)
        piece = Piece(
            choice=running.numbers[index],
            token_ids=tuple(sequence.generated[sent:]),
            logprobs=tuple(sequence.logprobs[sent:]),
            version=self.version,
            finish_reason=sequence.finish_reason,
            text=(text or "") if ended else "",
        )
        running.sent[index] = drawn
        if ended:
            del running.numbers[index]
            self.engine.forget(index)
        return piece

    def _cancel(self, running: _Running) -> None:
        """Drop a request whose client has left."""
        running.cancelled = True
        if running in self._next:
            self._next.remove(running)
        if running in self._running:
            self._running.remove(running)
            self._drop(running)

    def _drop(self, running: _Running) -> None:
        for index in running.numbers:
            self.engine.cancel(index)
            self.engine.forget(index)
        running.numbers.clear()

    def _end(self) -> None:
        """Close the engine's call, which frees what it keeps per sequence."""
        if self.engine.sequences:
            self.engine.finish()

    def _fail(self, requests: Sequence[_Running], error: Exception) -> None:
        for running in requests:
            running.put(error)

    def _report(self, error: Exception) -> None:
        if not isinstance(error, ValueError):
            logger.error("requests dropped: %s", error, exc_info=error)


def _failure(error: BaseException) -> SourceFailed:
    return SourceFailed(f"the engine dropped its requests: {type(error).__name__}: {error}")
