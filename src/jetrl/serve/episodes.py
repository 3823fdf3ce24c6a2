"""Episodes: what somebody's own harness asked a policy for, and the tokens that it got.

A harness sends whole conversations. The policy is trained on the tokens that it drew, so what it
said is never encoded again: if the text of a conversation begins with that of an earlier call of
the episode, prompt and answer, then its prompt is the tokens of that call and those of the rest.

    call 1   prompt a b c                           drew d e
    call 2   the text of call 1 and more            prompt a b c d e f g    drew h
    call 3   the template left out a thought of e   prompt a b c x f g      drew y z

`segments` joins the calls that continue each other: here [a b c] d e (f g) h, where the
environment wrote f g, and [a b c x f g] y z. A segment ends where the template, or the harness,
rewrites what was said before.

The random numbers of a call are those of its episode, its prompt, and the number of calls of the
episode with the same prompt before it. So they depend neither on other episodes nor on time. A call
that is broken off does not count: if it is asked again, it gets the same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from jetrl.errors import UserError
from jetrl.models import chat
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.stopping import Decode
from jetrl.serve.source import EPISODES, EngineSource, Piece, Request, SourceFailed, UnknownEpisode
from jetrl.types import (
    Completion,
    FinishReason,
    PlainText,
    Prompt,
    PromptInputs,
    SamplingParams,
    Turn,
)

_ENDED = "this episode has ended"


@dataclass(eq=False)
class Call:
    """A request of an episode, and what was drawn for it.

    Attributes:
        prompt: Token ids of the prompt.
        occurrence: Number among the calls of the episode with the same prompt.
        asked: Text of the prompt, with special tokens; None if it was given as token ids.
        finish_reason: None while tokens are drawn.
        text: The answer without special tokens.
    """

    prompt: tuple[int, ...]
    occurrence: int = 0
    asked: str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    text: str = ""

    @property
    def all_ids(self) -> tuple[int, ...]:
        return self.prompt + self.token_ids

    def take(self, piece: Piece) -> None:
        """Add drawn tokens."""
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason, self.text = piece.finish_reason, piece.text


@dataclass(eq=False)
class Episode:
    """An episode that runs: `key` names its random numbers, and `calls` are not broken off."""

    key: str
    params: SamplingParams
    calls: list[Call] = field(default_factory=list)
    # Texts of prompts that were encoded and not asked for yet.
    asked: dict[tuple[int, ...], str] = field(default_factory=dict)
    num_broken: int = 0
    ended: bool = False


class EpisodeSource(EngineSource):
    """An `EngineSource` that also records the calls of episodes, in the thread of a training."""

    def __init__(self, engine: RolloutEngine, policy: Policy, max_choices: int) -> None:
        super().__init__(engine, policy, max_choices)
        self._episodes: dict[str, Episode] = {}

    def open_episode(self, session: str, episode: Episode) -> None:
        """Record the calls of a session, a path below EPISODES, from now on."""
        assert session.startswith(EPISODES), session
        self._episodes[session] = episode

    def close_episode(self, session: str) -> Episode:
        """Return an episode; its later calls are refused, and those that run are dropped."""
        episode = self._episodes.pop(session)
        episode.ended = True
        return episode

    def required(self, session: str) -> SamplingParams | None:
        episode = self._episode(session)
        return None if episode is None else episode.params

    def blind(self, session: str) -> str | None:
        if self._episode(session) is not None:
            return "episodes of a training are text only"
        return super().blind(session)

    def encode(
        self, prompts: Sequence[Sequence[int] | Prompt], session: str = ""
    ) -> tuple[PromptInputs, ...]:
        episode = self._episode(session)
        if episode is None:
            return super().encode(prompts)
        ids = [
            self._continued(episode, prompt) if isinstance(prompt, Prompt) else tuple(prompt)
            for prompt in prompts
        ]
        return super().encode(ids)

    async def submit(self, request: Request) -> AsyncGenerator[list[Piece], None]:
        episode = self._episode(request.session)
        if episode is None:
            async with aclosing(super().submit(request)) as pieces:
                async for several in pieces:
                    yield several
            return
        if request.num_choices != 1:
            raise UserError(
                f"n: {request.num_choices} completions in one request of an episode; ask for each "
                "by itself"
            )
        prompt = request.prompts[0].token_ids
        taken = {call.occurrence for call in episode.calls if call.prompt == prompt}
        occurrence = next(i for i in itertools.count() if i not in taken)
        call = Call(prompt, occurrence, episode.asked.get(prompt))
        episode.calls.append(call)
        keyed = replace(request, session=f"{episode.key} {occurrence}")
        try:
            async with aclosing(super().submit(keyed)) as pieces:
                async for several in pieces:
                    if episode.ended:
                        raise SourceFailed(_ENDED)
                    for piece in several:
                        call.take(piece)
                    yield several
        finally:
            if call.finish_reason is None:
                episode.calls.remove(call)
                episode.num_broken += 1

    def _episode(self, session: str) -> Episode | None:
        """Return the episode of a session; None if the session is of none."""
        if not session.startswith(EPISODES):
            return None
        episode = self._episodes.get(session)
        if episode is None:
            raise UnknownEpisode(_ENDED)
        return episode

    def _continued(self, episode: Episode, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, those of an earlier call first if it continues one."""
        tokenizer, where = self._encoder, f"prompt {prompt.id!r}"
        if tokenizer is None:
            raise UserError(f"{where}: the model has no tokenizer")
        as_text, is_chat = self.policy.plain_text, prompt.messages is not None
        names: dict[str, str] = {}
        with self._encoding:
            if is_chat:
                # What a harness says is an environment's reply: it writes no special tokens.
                hidden: PlainText = "none" if as_text == "none" else "all"
                text, names = chat.render_prompt(tokenizer, prompt, plain_text=hidden)
            else:
                text = prompt.text or ""
            # The longest earlier call; equal ones in an order of their own, not of time.
            done = [call for call in episode.calls if call.finish_reason and call.asked is not None]
            for call in sorted(done, key=lambda call: (-len(call.all_ids), call.all_ids)):
                drawn = tokenizer.decode([*call.token_ids], clean_up_tokenization_spaces=False)
                rest = rest_of(f"{call.asked}{drawn}", text, any_space=is_chat)
                if rest is not None:
                    before, begins = call.all_ids, False
                    break
            else:
                before, rest, begins = (), text, not is_chat
            hides = not is_chat and as_text == "all"
            more: list[int] = []
            if rest:
                more = chat.encode_text(
                    tokenizer, rest, where, begin=begins, as_text=hides, names=names, before=before
                )
        ids = (*before, *more)
        episode.asked[ids] = text
        return ids


def rest_of(before: str, text: str, any_space: bool) -> str | None:
    """Return what follows `before` in a text; None if the text does not begin with it.

    With `any_space`, white space may differ: templates strip and indent what they are given.
    """
    if text.startswith(before):
        return text[len(before) :]
    if not any_space:
        return None
    i = j = _num_common(before, text)
    while True:
        start, end = i, j
        while i < len(before) and before[i].isspace():
            i += 1
        if i == len(before):
            break
        while j < len(text) and text[j].isspace():
            j += 1
        if j == len(text) or before[i] != text[j]:
            return None
        i, j = i + 1, j + 1
    # White space at the end of `before` stands for the same in the text.
    return text[end + _num_common(before[start:], text[end:]) :]


def _num_common(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(frozen=True)
class Segment:
    """A prompt of an episode and its completion, in which the environment wrote some spans."""

    inputs: PromptInputs
    completion: Completion


def segments(calls: Sequence[Call], reply_text: Decode) -> list[Segment]:
    """Return the calls of an episode as segments, in an order that does not depend on time.

    A call continues the longest segment that its prompt begins with.
    """
    chains: list[list[Call]] = []
    for call in sorted(calls, key=lambda call: (len(call.prompt), call.prompt, call.occurrence)):
        begun = [chain for chain in chains if call.prompt[: len(ids := chain[-1].all_ids)] == ids]
        if begun:
            max(begun, key=lambda chain: len(chain[-1].all_ids)).append(call)
        else:
            chains.append([call])
    return [_segment(chain, reply_text) for chain in chains]


def _segment(chain: Sequence[Call], reply_text: Decode) -> Segment:
    first, last = chain[0], chain[-1]
    token_ids, logprobs = first.token_ids, first.logprobs
    environment: list[tuple[int, int]] = []
    turns: list[Turn] = []
    texts: list[str] = []
    for call, following in itertools.pairwise(chain):
        reply = following.prompt[len(call.all_ids) :]
        if reply:
            environment.append((len(token_ids), len(token_ids) + len(reply)))
        replied = reply_text(list(reply))
        turns.append(Turn(call.text, replied))
        texts += (call.text, replied)
        token_ids += reply + following.token_ids
        logprobs += (0.0,) * len(reply) + following.logprobs
    turns.append(Turn(last.text))
    assert last.finish_reason is not None, "a call that was broken off"
    completion = Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        text="".join((*texts, last.text)),
        environment=tuple(environment),
        turns=tuple(turns),
    )
    return Segment(PromptInputs(first.prompt), completion)
