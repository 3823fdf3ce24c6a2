"""The ASGI app: routes, the key, limits of size, and errors as clients know them.

| status | when |
| --- | --- |
| 400 | a field is unknown, not supported or wrong; the message names it |
| 401 | the key is missing or wrong |
| 404 | the model is not served, the episode has ended, or there is no such path |
| 413, 415 | the body is too large, or is not JSON by its Content-Type |
| 429 | as many completions run and wait as the server takes |
| 503 | the server is stopping, or the engine failed and dropped its requests |
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from jetrl.errors import UserError
from jetrl.rollout.inputs import PromptTooLong
from jetrl.serve import requests
from jetrl.serve.replies import Reply, Served
from jetrl.serve.requests import Wanted
from jetrl.serve.source import (
    EPISODES,
    Piece,
    SourceBusy,
    SourceFailed,
    TokenSource,
    UnknownEpisode,
)
from jetrl.serve.text import no_number

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
_MOST_SESSION = 256
Result = TypeVar("Result")
Endpoint = Callable[[HttpRequest], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """The key, sizes and hosts of requests that are taken.

    Attributes:
        api_key: The key that clients send; "" for none.
        max_body: Maximum bytes of a body.
        hosts: Host names in requests, against DNS rebinding; () for any.
    """

    api_key: str = ""
    max_body: int = 8 * 2**20
    hosts: tuple[str, ...] = ()


def make_app(
    source: TokenSource, served: Served, limits: Limits, episodes: bool = False
) -> Starlette:
    """Return the app that answers from a source; `episodes` adds a base URL for each episode."""
    api = _Api(source, served, limits)
    hosts = [Middleware(TrustedHostMiddleware, allowed_hosts=limits.hosts)] if limits.hosts else []
    routes: list[BaseRoute] = [
        Route("/v1/models", api.guarded(api.models)),
        Route("/tokenize", api.guarded(api.tokenize), methods=["POST"]),
        api.drawing("/v1/chat/completions", requests.ChatFields, requests.chat),
        api.drawing("/v1/completions", requests.CompletionFields, requests.completion),
        api.drawing("/inference/v1/generate", requests.GenerateFields, requests.generate),
    ]
    if episodes:
        routes.append(Mount(f"{EPISODES}{{episode}}", routes=[*routes]))
    return Starlette(
        routes=[Route("/health", api.health), *routes],
        middleware=hosts,
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )


class _Api:
    """The endpoints over one source."""

    def __init__(self, source: TokenSource, served: Served, limits: Limits) -> None:
        self._source, self._served, self._limits = source, served, limits
        self._created = int(time.time())

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that asks for the key and answers errors of a request."""

        async def answer(http: HttpRequest) -> Response:
            try:
                self._check_key(http)
                return await endpoint(http)
            except requests.UnknownModel as error:
                return _error(404, str(error), "model_not_found")
            except UnknownEpisode as error:
                return _error(404, str(error), "episode_not_found")
            except PromptTooLong as error:
                return _error(400, str(error), "context_length_exceeded")
            except UserError as error:
                return _error(400, str(error))
            except ClientDisconnect:
                return Response(status_code=499)  # which nobody reads
            except SourceBusy as error:
                return _error(429, f"{error}; try again later", headers={"Retry-After": "1"})
            except SourceFailed as error:
                return _error(503, str(error))

        return answer

    async def health(self, http: HttpRequest) -> Response:
        """Answer 200 while the source draws tokens."""
        return JSONResponse({"status": "ok"}) if self._source.alive else _error(503, "stopped")

    async def models(self, http: HttpRequest) -> Response:
        """List the one model that is served."""
        card = {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jetrl",
            "max_model_len": self._source.max_model_len,
            "weight_version": self._source.version,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, http: HttpRequest) -> Response:
        """Answer with the token ids of a text or of messages."""
        body = await self._body(http)
        is_chat = isinstance(body, dict) and "messages" in body
        kind: type[requests.TextFields | requests.MessagesFields]
        kind = requests.MessagesFields if is_chat else requests.TextFields
        fields = requests.fields_of(kind, body, self._served.name)
        ids = await asyncio.to_thread(requests.token_ids_of, fields, self._source, _session(http))
        counts = {"count": len(ids), "max_model_len": self._source.max_model_len}
        return JSONResponse(counts | {"tokens": ids})

    def drawing(
        self,
        path: str,
        kind: type[requests.FieldsType],
        form: Callable[[requests.FieldsType, TokenSource, str], Wanted],
    ) -> Route:
        """Return the route of requests that draw tokens: `form` reads the fields of their bodies.

        They are answered whole or as a stream; a client that leaves cancels its request.
        """

        async def answer(http: HttpRequest) -> Response:
            fields = requests.fields_of(kind, await self._body(http), self._served.name)
            # Templates and long texts take a while, during which others are answered.
            wanted = await asyncio.to_thread(form, fields, self._source, _session(http))
            pieces = self._source.submit(wanted.request)
            reply = Reply(wanted, self._served)
            if not wanted.stream:
                async with aclosing(pieces):
                    return JSONResponse(await _while_connected(http, reply.whole(pieces)))
            # What is refused is refused before the stream begins.
            first = await _while_connected(http, anext(pieces))
            return _Events(reply.events(_with_first(first, pieces)), pieces)

        return Route(path, self.guarded(answer), methods=["POST"])

    def _check_key(self, http: HttpRequest) -> None:
        # The path of an episode is as secret as a key.
        if not self._limits.api_key or "episode" in http.path_params:
            return
        scheme, _, key = http.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(key.strip().encode(), self._limits.api_key.encode())
        if scheme.lower() != "bearer" or not same:
            raise HTTPException(401, "the key is missing or wrong: send Authorization: Bearer KEY")

    async def _body(self, http: HttpRequest) -> Any:
        """Return the JSON of a request's body."""
        # A web page can send other types to a local server unasked, but not this one.
        if http.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send the header Content-Type: application/json")
        most = self._limits.max_body
        text = bytearray()
        async for part in http.stream():
            text += part
            if len(text) > most:
                raise HTTPException(413, f"the body is larger than {most:,} bytes")
        try:
            return json.loads(text, parse_constant=no_number)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the body is not JSON: {error}") from None


class _Events(StreamingResponse):
    """A stream of events that closes its source at the end, however it ends."""

    def __init__(self, events: AsyncIterator[str], pieces: AsyncGenerator[Any, None]) -> None:
        super().__init__(_with_errors(events), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()


async def _with_first(
    first: list[Piece], pieces: AsyncIterator[list[Piece]]
) -> AsyncIterator[list[Piece]]:
    yield first
    async for piece in pieces:
        yield piece


async def _with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield events; an error in the middle is the last one."""
    try:
        async for event in events:
            yield event
    except SourceFailed as error:
        yield f"data: {json.dumps(_error_body(503, str(error)))}\n\n"


async def _while_connected(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """Return the result of work, which is cancelled if the client leaves before."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        left.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _session(http: HttpRequest) -> str:
    if "episode" in http.path_params:
        return EPISODES + str(http.path_params["episode"])
    session = http.headers.get(SESSION_HEADER, "")
    if session.startswith(EPISODES):
        raise UserError(f"{SESSION_HEADER}: {EPISODES} begins the path of an episode")
    if len(session) > _MOST_SESSION:
        raise UserError(f"{SESSION_HEADER}: longer than {_MOST_SESSION} characters")
    return session


def _error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    message = message.encode("utf-8", "backslashreplace").decode()  # a field may quote anything
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


def _error(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(_error_body(status, message, code), status, headers)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, headers=dict(error.headers or {}))


async def _bug(http: HttpRequest, error: Exception) -> Response:
    logger.error("%s %s failed", http.method, http.url.path, exc_info=error)
    return _error(500, "the server failed on this request; its log has the traceback")
