"""The bodies of answers, whole or as a stream of events, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from jetrl.models import chat
from jetrl.models.tokenizer import byte_of, token_bytes, token_text
from jetrl.serve.requests import Wanted
from jetrl.serve.source import Piece
from jetrl.serve.text import TOOL_CALL, TextStream, ToolCall, tool_calls
from jetrl.types import Json

_KINDS = {
    "chat": ("chatcmpl-", "chat.completion"),
    "completion": ("cmpl-", "text_completion"),
    "generate": ("generate-", "generate"),
}


@dataclass(frozen=True)
class Served:
    """A served model: its name, its tokenizer, and the fingerprint of engine and plan."""

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: str


@dataclass
class _Choice:
    """A choice as far as it has been drawn."""

    text: TextStream
    by_token: TextStream  # one token at a time, for the offset of each
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class Reply:
    """The answer to a request, built from the pieces of its choices."""

    def __init__(self, wanted: Wanted, served: Served) -> None:
        prefix, self._object = _KINDS[wanted.api]
        self._wanted, self._served = wanted, served
        self._id, self._created = prefix + secrets.token_hex(12), int(time.time())
        self._version = 0
        stop, until = wanted.request.params.stop, TOOL_CALL if wanted.tools else ""
        self._choices = [
            _Choice(
                TextStream(self._decode, stop, until, is_byte=self._is_byte),
                TextStream(self._decode),
            )
            for _ in range(wanted.request.num_choices)
        ]

    async def whole(self, pieces: AsyncIterator[list[Piece]]) -> Json:
        """Return the body of the answer once all choices have ended."""
        ends: dict[int, Piece] = {}
        async for several in pieces:
            for piece in several:
                self._take(piece)
                if piece.finish_reason is not None:
                    ends[piece.choice] = piece
        choices = [self._whole_choice(index, ends[index]) for index in sorted(ends)]
        prompts = self._wanted.request.prompts
        body = self._head(self._object) | {"choices": choices, "usage": self._usage()}
        if self._wanted.token_ids and self._wanted.api != "completion":
            body["prompt_token_ids"] = list(prompts[0].token_ids)
        if self._wanted.api == "generate":
            body["request_id"] = self._id
        return body

    async def events(self, pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[str]:
        """Yield the events of a stream, the last one `[DONE]`."""
        if self._wanted.api == "chat":
            yield _event(self._opening())
        async for several in pieces:
            for piece in several:
                self._take(piece)
                if (chunk := self._chunk(piece)) is not None:
                    yield _event(chunk)
        if self._wanted.usage:
            yield _event(self._chunk_head() | {"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _take(self, piece: Piece) -> None:
        choice = self._choices[piece.choice]
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs
        self._version = piece.version

    def _head(self, kind: str) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "system_fingerprint": f"{self._served.fingerprint}-{self._version}",
            "weight_version": self._version,
            "seed": self._wanted.request.params.seed,
        }

    def _chunk_head(self) -> Json:
        return self._head(self._object + (".chunk" if self._wanted.api == "chat" else ""))

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._wanted.request.prompts))
        drawn = sum(len(choice.token_ids) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def _whole_choice(self, index: int, end: Piece) -> Json:
        choice, wanted = self._choices[index], self._wanted
        body: Json = {"index": index, "finish_reason": end.finish_reason}
        if wanted.api == "generate":
            body["token_ids"] = choice.token_ids
        elif wanted.api == "completion":
            body |= {"text": end.text, **self._ids(index, choice.token_ids)}
        else:
            text, choice.calls = self._answer(end.text)
            content = text if text.strip() or not choice.calls else None
            message: Json = {"role": "assistant", "content": content}
            if choice.calls:
                message["tool_calls"] = self._written(index)
                body["finish_reason"] = _reason(end)
            body |= {"message": message, **self._ids(index, choice.token_ids)}
        body["logprobs"] = self._logprobs(choice, choice.token_ids, choice.logprobs)
        return body

    def _opening(self) -> Json:
        """Return the first chunk of a chat, with the role of each choice."""
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta} for i in range(len(self._choices))]
        body = self._chunk_head() | {"choices": choices}
        if self._wanted.token_ids:
            body["prompt_token_ids"] = list(self._wanted.request.prompts[0].token_ids)
        return body

    def _chunk(self, piece: Piece) -> Json | None:
        """Return the chunk of new tokens; None if they have nothing to send yet."""
        choice, wanted = self._choices[piece.choice], self._wanted
        reason: str | None = piece.finish_reason
        if reason is None:
            text = choice.text.add(piece.token_ids)
        else:  # the last tokens may have completed a stop string, which is not part of the text
            whole, choice.calls = self._answer(piece.text)
            text = choice.text.finish(whole)
        if not (text or reason or wanted.logprobs or wanted.token_ids):
            return None
        body: Json = {"index": piece.choice, "finish_reason": reason}
        if wanted.api == "completion":
            body |= {"text": text, **self._ids(piece.choice, piece.token_ids)}
        else:
            delta: Json = {"content": text} if text else {}
            if choice.calls:
                calls = enumerate(self._written(piece.choice))
                delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
                body["finish_reason"] = _reason(piece)
            body |= {"delta": delta, **self._ids(piece.choice, piece.token_ids)}
        body["logprobs"] = self._logprobs(choice, piece.token_ids, piece.logprobs)
        return self._chunk_head() | {"choices": [body]}

    def _answer(self, text: str) -> tuple[str, list[ToolCall]]:
        return tool_calls(text) if self._wanted.tools else (text, [])

    def _written(self, index: int) -> list[Json]:
        """Return the tool calls of a choice; their ids come from the answer's."""
        return [
            {
                "id": f"call_{self._id.rpartition('-')[2]}_{index}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(self._choices[index].calls)
        ]

    def _ids(self, index: int, token_ids: Sequence[int]) -> Json:
        """Return the token ids of a choice, if they are wanted."""
        if not self._wanted.token_ids:
            return {}
        ids: Json = {"token_ids": list(token_ids)}
        is_first = len(token_ids) == len(self._choices[index].token_ids)
        if self._wanted.api == "completion" and is_first:
            request = self._wanted.request
            ids["prompt_token_ids"] = list(request.prompts[index // request.params.n].token_ids)
        return ids

    def _logprobs(
        self, choice: _Choice, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Json | None:
        """Return the log-probs of drawn tokens in the API's shape, if they are wanted."""
        if not self._wanted.logprobs:
            return None
        tokens = [self._token(token_id) for token_id in token_ids]
        if self._wanted.api == "completion":
            return {
                "tokens": tokens,
                "token_logprobs": list(logprobs),
                "top_logprobs": None,
                "text_offset": [choice.by_token.place(token_id) for token_id in token_ids],
            }
        content = [
            {"token": token, "logprob": logprob, "bytes": self._bytes(token_id), "top_logprobs": []}
            for token_id, token, logprob in zip(token_ids, tokens, logprobs, strict=True)
        ]
        return {"content": content}

    def _token(self, token_id: int) -> str:
        """Return a token as text, special ones too."""
        tokenizer = self._served.tokenizer
        if self._wanted.tokens_as_ids or tokenizer is None:
            return f"token_id:{token_id}"
        return token_text(tokenizer, token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        tokenizer = self._served.tokenizer
        if self._wanted.tokens_as_ids or tokenizer is None:
            return None
        found = token_bytes(tokenizer, token_id)
        return None if found is None else list(found)

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self._served.tokenizer
        return "" if tokenizer is None else chat.decode(tokenizer, token_ids)

    def _is_byte(self, token_id: int) -> bool:
        tokenizer = self._served.tokenizer
        return tokenizer is not None and byte_of(tokenizer, token_id) is not None


def _reason(end: Piece) -> str | None:
    """Return the finish reason of an answer with tool calls."""
    return "tool_calls" if end.finish_reason == "stop" else end.finish_reason


def _event(body: Json) -> str:
    # In ASCII: the iter_lines of httpx divides text at U+2028 and U+0085, too.
    return f"data: {json.dumps(body)}\n\n"
