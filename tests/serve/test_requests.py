"""Fields that are refused are named, and keys, sizes and hosts are checked."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.serve.conftest import Serve, Server

from jetrl.serve.app import Limits

ASKED = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_token": 3}, "max_token: no such field; did you mean max_tokens?"),
        ({"\ud800": 3}, "the body: "),
        ({"prompt": "\ud800"}, "half of a character"),
        ({"echo": True}, "echo: only false is supported, not True"),
        ({"presence_penalty": 0.5}, "presence_penalty: only 0 is supported, not 0.5"),
        ({"top_logprobs": False}, "top_logprobs: only 0 is supported"),
        ({"temperature": "1"}, "temperature = '1'"),
        ({"temperature": -1}, "temperature must be 0 or from"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"n": True}, "n = True"),
        ({"seed": -1}, "seed must be in"),
        ({"logprobs": 5}, "logprobs = 5"),
        ({"prompt": [5, 999]}, "token id 999 is outside the vocabulary"),
        ({"prompt": []}, "prompt: from 1 to 256 prompts, not 0"),
        ({"prompt": 3}, "prompt: give a text"),
        ({"prompt": [5] * 256}, "256 tokens: no room for an answer in a context of 256"),
        ({"stop": ["a"] * 65}, "stop: give a text, or a list of at most 64 texts"),
        (
            {"prompt": ["a"] * 50, "n": 3},
            "n = 3 for each of 50 prompts: this server draws 128 at most",
        ),
        ({"stop_token_ids": [999]}, "stop_token_ids: token id 999"),
        ({"stream_options": {"usage": True}}, "stream_options.usage: no such field"),
        ({"n": 500}, "n = 500: this server draws 128 at most"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_field_is_named(
    server: Server, more: dict[str, Any], words: str, stream: bool
) -> None:
    reply = server.post("/v1/completions", {"prompt": "a", "stream": stream, **more})
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {}, "messages: this field is required"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "needs a role and a content"),
        ("/v1/chat/completions", {"messages": ASKED, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": ASKED, "response_format": {}}, "response_format"),
        (
            "/v1/chat/completions",
            {"messages": ASKED, "max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens and max_completion_tokens differ",
        ),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"min_tokens": 3}},
            "sampling_params.min_tokens: only 0 is supported, not 3",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"min_p": 1.0}},
            "min_p must be in [0, 1), not 1.0",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"max_token": 1}},
            "sampling_params.max_token: no such field; did you mean max_tokens?",
        ),
        ("/tokenize", {"prompt": "a", "messages": ASKED}, "prompt: no such field"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_bodies(server: Server, path: str, body: dict[str, Any], words: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize("text", ["[1", "NaN", '{"prompt": NaN}', "[" * 10**5, "", "\xff", "3"])
def test_what_is_not_json(server: Server, text: str) -> None:
    kind = {"Content-Type": "application/json"}
    reply = server.http.post("/v1/completions", content=text.encode("latin-1"), headers=kind)
    assert reply.status_code == 400
    assert "the body" in reply.json()["error"]["message"]


def test_values_that_ask_for_nothing_and_labels(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "suffix": None, "best_of": 1}
    assert server.json("/v1/completions", {**body, "presence_penalty": 0.0, "model": "tiny"})


def test_models_and_tokens(server: Server) -> None:
    (card,) = server.openai.models.list().data
    found = card.model_dump()
    assert (found["id"], found["max_model_len"], found["weight_version"]) == ("tiny", 256, 7)
    assert server.http.get("/health").status_code == 200
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; there is: tiny"):
        server.openai.completions.create(model="gpt", prompt="a")
    tokens = server.json("/tokenize", {"messages": ASKED})
    assert tokens["count"] == len(tokens["tokens"]) > 5


def test_keys_sizes_and_hosts(serve: Serve) -> None:
    limits = Limits(api_key="secret", max_body=1000, hosts=("127.0.0.1",))
    with serve(limits=limits) as server:
        with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
            server.openai.models.list()
        key = {"Authorization": "Bearer secret"}
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/v1/models", headers={**key, "Host": "evil.org"}).status_code == 400
        known = OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        assert known.completions.create(model="tiny", prompt="a").choices
        reply = server.post("/v1/completions", {"prompt": "a" * 1000}, **key)
        assert reply.status_code == 413
        reply = server.http.post("/v1/completions", content=b"{}", headers=key)
        assert reply.status_code == 415
        assert server.http.get("/v1/completions", headers=key).status_code == 405
