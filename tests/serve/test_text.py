"""Streams of text, which later tokens do not change, and the tool calls in answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import pytest
from tests.rollout.test_stopping import decode_fallback
from tests.serve.conftest import Server, serving
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jetrl.models import chat
from jetrl.models.policy import Policy
from jetrl.models.tokenizer import token_bytes
from jetrl.serve.replies import _event
from jetrl.serve.source import Piece, Request
from jetrl.serve.text import TextStream, tool_calls
from jetrl.types import Prompt, PromptInputs

CALL = '<tool_call>\n{"name": "warmth", "arguments": {"place": "Zürich"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "warmth", "parameters": {}}}]


def test_pieces_hold_back_what_may_change() -> None:
    def decode(token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    data = list("ä<b>€ end</st".encode())
    stream = TextStream(decode, stop=("</stop>", "<bold>"))
    pieces = [stream.add([byte]) for byte in data]
    assert pieces == ["", "ä", "", "", "<b>", "", "", "€", " ", "e", "n", "d", "", "", "", ""]
    assert stream.finish("ä<b>€ end</st") == "</st"
    cut = TextStream(decode, stop=("</stop>",))
    assert [cut.add([byte]) for byte in b"a</stop"] == ["a", *[""] * 6]
    assert cut.finish("a") == ""
    broken = TextStream(decode)
    assert [broken.add([byte]) for byte in (0x80, 0x81, 0x41)] == ["", "", "\ufffd\ufffdA"]
    spaced = TextStream(lambda token_ids: "".join([" a", "", " b"][i] for i in token_ids)[1:])
    assert [spaced.add([token]) for token in (0, 1, 2)] == ["a", "", " b"]


def test_a_run_of_bytes_is_held_back_until_it_ends() -> None:
    """A byte that is not UTF-8 also changes the text of the whole characters before it."""

    def pieces(data: bytes) -> list[str]:
        stream = TextStream(decode_fallback, is_byte=lambda token: token >= 0x80)
        return [*(stream.add([byte]) for byte in data), stream.finish(decode_fallback(data))]

    assert pieces("aéb".encode()) == ["a", "", "", "éb", ""]
    assert pieces("aé".encode() + b"\xe2") == ["a", "", "", "", "\ufffd" * 3]
    special = TextStream(
        lambda tokens: decode_fallback(bytes(t for t in tokens if t)), is_byte=lambda t: t >= 0x80
    )
    told = [special.add([token]) for token in (*"aé".encode(), 0, 0xE2)]
    assert [*told, special.finish("a" + "\ufffd" * 3)] == ["a", "", "", "", "", "\ufffd" * 3]
    long = "漢" * 100  # more bytes than are held back
    assert "".join(pieces(long.encode())) == long


@pytest.mark.parametrize(
    ("text", "before", "names"),
    [
        ("no call", "no call", []),
        (f"let me see {CALL}\n{CALL}", "let me see ", ["warmth", "warmth"]),
        ('<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
        *[
            (text, text, [])
            for text in (
                f"{CALL}<tool_call>cut off",
                "<tool_call>not json</tool_call>",
                '<tool_call>{"arguments": {}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
                "<tool_call>[]</tool_call>",
                '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
                "<tool_call>" + "[" * 10**5 + "</tool_call>",
            )
        ],
    ],
    ids=lambda value: str(value)[:30],
)
def test_tool_calls(text: str, before: str, names: list[str]) -> None:
    found, calls = tool_calls(text)
    assert (found, [call.name for call in calls]) == (before, names)


class Script:
    """A source that says one text, which shows that the app needs no engine."""

    max_model_len, max_choices, version, alive = 256, 8, 3, True

    def __init__(self, policy: Policy, text: str) -> None:
        self.tokenizer, self.text = policy.tokenizer, text

    def blind(self, session: str) -> None:
        return None

    def required(self, session: str) -> None:
        return None

    def encode(self, prompts: Sequence[Any], session: str) -> tuple[PromptInputs, ...]:
        assert all(isinstance(prompt, Prompt) for prompt in prompts)
        return tuple(chat.encode_prompt(self.tokenizer, prompt) for prompt in prompts)

    async def submit(self, request: Request) -> AsyncGenerator[list[Piece], None]:
        assert self.tokenizer is not None
        token_ids = self.tokenizer.encode(self.text)
        for token_id in token_ids[:-1]:
            yield [Piece(0, (token_id,), (-1.0,), version=3)]
            await asyncio.sleep(0)
        yield [Piece(0, (token_ids[-1],), (-1.0,), 3, "stop", self.text)]


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_and_offsets_of_tokens_in_a_character(policy: Policy, stream: bool) -> None:
    text = "é: 日本🙂\ufffd the words"
    body = {"max_tokens": 99, "stream": stream}
    with serving(Script(policy, text)) as server:

        def ask(path: str, key: str, asked: dict[str, Any]) -> list[Any]:
            reply = server.post(path, {**body, **asked}).text
            lines = (
                [x[6:] for x in reply.split("\n\n") if x[:7] == "data: {"] if stream else [reply]
            )
            found = [choice.get("logprobs") for x in lines for choice in json.loads(x)["choices"]]
            return [each for logprobs in found if logprobs for each in logprobs[key]]

        asked = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
        drawn = [bytes(x["bytes"]) for x in ask("/v1/chat/completions", "content", asked)]
        offsets = ask("/v1/completions", "text_offset", {"prompt": "Hi", "logprobs": 1})
    assert b"".join(drawn) == text.encode()
    before = [b"".join(drawn[:index]) for index in range(len(drawn))]
    assert offsets == [len(data.decode(errors="ignore")) for data in before]
    assert {len(data) for data in drawn} > {1}
    assert len(set(offsets)) < len(offsets)


def test_bytes_of_tokens_that_files_name_by_their_bytes() -> None:
    pieces = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "a": 3, "\ufffd": 4, "\u2581a": 5, "<0x20>": 6}
    library = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*parts, decoders.Strip(" ", left=1, right=0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library)
    found = [token_bytes(tokenizer, token_id) for token_id in range(7)]
    assert found == [b"<unk>", b"\xe2", b"\x82", b"a", b"\xef\xbf\xbd", b" a", b" "]


@pytest.fixture(params=[f"I look. {CALL}", f"{CALL}\n{CALL}", "I look. <tool_call>broken", "Hm <t"])
def scripted(request: pytest.FixtureRequest, policy: Policy) -> Iterator[tuple[Server, str]]:
    with serving(Script(policy, request.param)) as server:
        yield server, request.param


def test_tool_calls_of_answers(scripted: tuple[Server, str]) -> None:
    server, text = scripted
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "How warm?"}]}
    complete = server.openai.chat.completions.create
    plain = complete(**body).choices[0]
    assert (plain.message.content, plain.finish_reason) == (text, "stop")
    assert not plain.message.tool_calls
    choice = complete(**body, tools=TOOLS).choices[0]
    before, calls = tool_calls(text)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert (choice.message.content or "") == before
    found = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert found == [(call.name, call.arguments) for call in calls]
    said, streamed, reason = "", [], None
    for chunk in complete(**body, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        said += delta.content or ""
        streamed += [
            (c.index, c.function.name, c.function.arguments) for c in delta.tool_calls or []
        ]
        reason = chunk.choices[0].finish_reason or reason
    assert (said, reason) == (before, choice.finish_reason)
    assert streamed == [(i, call.name, call.arguments) for i, call in enumerate(calls)]
    assert all(json.loads(call.arguments) == {"place": "Zürich"} for call in calls)


def test_an_agent_answers_with_a_tools_result(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "warmth", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "21"},
    ]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 2}
    assert server.json("/v1/chat/completions", body)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("text", ["\u2028", "\x85", "\x0b\x1c"])
def test_an_event_is_one_line_however_a_client_divides_lines(text: str) -> None:
    data, *rest = _event({"text": text}).splitlines()
    assert json.loads(data.removeprefix("data: ")) == {"text": text}
    assert rest == [""]
