"""Answers are those of `RolloutEngine.generate`, whole and streamed, whoever else asks."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import httpx2
import openai
import pytest
from tests.reliability import soak_serve
from tests.serve.conftest import Serve, Server

from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.serve.source import EngineSource
from jetrl.types import Completion, Prompt, SamplingParams

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
SAMPLING = {"n": 3, "max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 2**40 + 5}


def generated(policy: Policy, prompt: Any, **params: Any) -> list[Completion]:
    return RolloutEngine(policy).generate([prompt], SamplingParams(**params))


def test_a_chat_is_what_generate_draws(policy: Policy, server: Server) -> None:
    expected = generated(policy, Prompt("x", messages=MESSAGES), **SAMPLING)
    answer: Any = server.openai.chat.completions.create(
        model="tiny",
        messages=list(MESSAGES),  # type: ignore[arg-type]
        logprobs=True,
        extra_body={"return_token_ids": True},
        **SAMPLING,  # type: ignore[arg-type]
    )
    assert [c.index for c in answer.choices] == [0, 1, 2]
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert tuple(choice.token_ids) == completion.token_ids
        assert choice.message.content == completion.text
        assert choice.finish_reason == completion.finish_reason
        assert tuple(x.logprob for x in choice.logprobs.content) == completion.logprobs
        if "\ufffd" not in completion.text:
            said = "".join(x.token for x in choice.logprobs.content)
            assert said.replace("<|im_end|>", "") == completion.text
    counts = answer.usage.completion_tokens, answer.usage.prompt_tokens
    assert counts == (sum(len(c.token_ids) for c in expected), len(answer.prompt_token_ids))
    assert answer.weight_version == 7
    assert answer.system_fingerprint == "test-7"


def test_completions_of_several_prompts(policy: Policy, server: Server) -> None:
    stop = sorted({c.text[3] for c in generated(policy, "a word", **SAMPLING) if len(c.text) > 3})
    params = SamplingParams(stop=tuple(stop[:1]), stop_token_ids=(70,), **SAMPLING)  # type: ignore[arg-type]
    prompts = ["a word", "of", "a word"]
    expected = RolloutEngine(policy).generate(prompts, params)
    body = {**SAMPLING, "prompt": prompts, "stop": stop[0], "stop_token_ids": [70], "logprobs": 0}
    answer = server.json("/v1/completions", {**body, "return_token_ids": True})
    for choice, completion in zip(answer["choices"], expected, strict=True):
        assert tuple(choice["token_ids"]) == completion.token_ids
        assert choice["text"] == completion.text
        assert choice["finish_reason"] == completion.finish_reason
        assert tuple(choice["logprobs"]["token_logprobs"]) == completion.logprobs
    assert any(c.finish_reason == "stop" for c in expected)
    first = answer["choices"][0]["prompt_token_ids"]
    assert first == server.json("/tokenize", {"prompt": "a word"})["tokens"]
    again = server.json("/v1/completions", {**body, "prompt": first, "return_token_ids": True})
    assert [c["token_ids"] for c in again["choices"]] == [list(c.token_ids) for c in expected[:3]]


def test_token_ids_in_and_out(policy: Policy, server: Server) -> None:
    """The shape that `renderers` 0.1.12 reads, with what `verifiers` 0.4.0 sends."""
    body = {
        "model": "tiny",
        "token_ids": [5, 6, 7],
        "sampling_params": {
            **SAMPLING,
            "stop_token_ids": [2],
            "logprobs": 1,
            "skip_special_tokens": False,
            "routed_experts_prompt_start": 0,
        },
        "cache_salt": "4",
    }
    answer = server.json("/inference/v1/generate", body)
    expected = generated(policy, [5, 6, 7], stop_token_ids=(2,), **SAMPLING)
    for choice, completion in zip(answer["choices"], expected, strict=True):
        assert tuple(choice["token_ids"]) == completion.token_ids
        content = choice["logprobs"]["content"]
        assert tuple(entry["logprob"] for entry in content) == completion.logprobs
        assert [entry["token"] for entry in content] == [
            f"token_id:{token}" for token in completion.token_ids
        ]
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["request_id"]


@pytest.mark.parametrize("stop", [[], ["e", "\n"]], ids=str)
@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_is_the_whole_answer(server: Server, chat: bool, stop: list[str]) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": list(MESSAGES)} if chat else {"prompt": "of", "logprobs": 1}
    body = {**SAMPLING, "max_tokens": 60, "temperature": 1.5, **asked, "stop": stop}
    body |= {"return_token_ids": True, **({"logprobs": True} if chat else {})}
    whole = server.json(path, body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    texts, ids, logprobs = (dict.fromkeys(range(3), x) for x in ("", (), ()))
    ends = {}
    with server.http.stream("POST", path, json=body | options) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks.pop()["usage"] == whole["usage"]
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        index = choice["index"]
        texts[index] += choice["delta"].get("content", "") if chat else choice["text"]
        ids[index] += tuple(choice.get("token_ids", ()))
        found = choice.get("logprobs") or {"content": [], "token_logprobs": []}
        logprobs[index] += tuple(
            [x["logprob"] for x in found["content"]] if chat else found["token_logprobs"]
        )
        assert index not in ends, "a chunk after the last one"
        if choice.get("finish_reason"):
            ends[index] = choice["finish_reason"]
    for choice in whole["choices"]:
        index, found = choice["index"], choice["logprobs"]
        text = choice["message"]["content"] if chat else choice["text"]
        drawn = [x["logprob"] for x in found["content"]] if chat else found["token_logprobs"]
        assert texts[index] == text
        assert ids[index] == tuple(choice["token_ids"])
        assert logprobs[index] == tuple(drawn)
        assert ends[index] == choice["finish_reason"]
    first = chunks[0] if chat else chunks[0]["choices"][0]
    start = whole if chat else whole["choices"][0]
    assert first["prompt_token_ids"] == start["prompt_token_ids"]


def test_seeds_and_sessions_pick_the_random_numbers(server: Server) -> None:
    def drawn(seed: int | None = None, **headers: str) -> tuple[list[int], int]:
        body = {"token_ids": [9, 8], "sampling_params": {"max_tokens": 8, "seed": seed}}
        answer = server.json("/inference/v1/generate", body, **headers)
        return answer["choices"][0]["token_ids"], answer["seed"]

    unnamed, seed = drawn()
    assert drawn() != (unnamed, seed)
    assert drawn(seed) == (unnamed, seed), "the seed of the answer repeats it"
    one, other = drawn(X_Session_ID="one"), drawn(X_Session_ID="other")
    assert one != other
    assert drawn(X_Session_ID="one") == one
    assert drawn(3, X_Session_ID="one") != drawn(3)
    assert (
        server.post("/v1/completions", {"prompt": "a"}, X_Session_ID="x" * 300).status_code == 400
    )


def test_64_clients_of_whom_some_leave() -> None:
    """`soak_serve.py` asks 10,000 times: each gets what it would get alone, and nothing remains."""
    facts = soak_serve.soak(soak_serve.tiny_policy(), requests=160)
    counts = [facts[name] for name in ("answered", "answers_left", "streams_left")]
    assert counts == [158, 1, 1]
    assert facts["compared_requests"] == 158
    assert [name for name in soak_serve.MUST_BE_ZERO if facts[name]] == []


def test_the_soak_counts_lost_requests_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request fails in the server, and another one gets an answer without choices."""
    made, numbers = soak_serve.make_app, itertools.count()

    def make_app(*given: Any) -> Any:
        app = made(*given)

        async def planted(scope: Any, receive: Any, send: Any) -> None:
            number = next(numbers) if scope["type"] == "http" else -1
            if number == 7:
                raise RuntimeError("planted")
            if number != 11:
                return await app(scope, receive, send)
            empty = b'{"choices": []}'
            headers = [(b"content-type", b"application/json"), (b"content-length", b"15")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            return await send({"type": "http.response.body", "body": empty})

        return planted

    monkeypatch.setattr(soak_serve, "make_app", make_app)
    facts = soak_serve.soak(soak_serve.tiny_policy(), requests=48) | {"growth_mib": 0.0}
    assert (facts["lost"], facts["answered"], facts["compared_requests"]) == (2, 46, 46)
    assert soak_serve.broken(facts) == ["lost"]
    monkeypatch.setattr(soak_serve, "soak", lambda *_: facts)
    monkeypatch.setattr(sys, "argv", ["soak_serve.py"])
    assert soak_serve.main() == 1
    facts["lost"] = 0
    assert soak_serve.main() == 0


def test_a_client_that_leaves_frees_its_pages(serve: Serve, wait_until: Any) -> None:
    with serve(max_batch_size=1) as server:
        source = server.source
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "n": 64}
        for stream in (True, False):
            before = source.engine.stats
            if stream:
                with server.http.stream(
                    "POST", "/v1/completions", json={**body, "stream": True}
                ) as reply:
                    next(reply.iter_lines())
            else:
                with pytest.raises(httpx2.ReadTimeout):
                    server.http.post("/v1/completions", json=body, timeout=0.2)
            wait_until(lambda: source.num_choices == 0 and not source.engine.sequences)
            wait_until(lambda before=before: source.engine.stats is not before)
            assert source.engine.pages_in_use == 0
            assert 0 < source.engine.stats.tokens_drawn < 64 * 200


def test_a_full_queue_and_a_failing_engine(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(max_choices=4) as server:
        body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
        too_many = server.post("/v1/completions", {**body, "n": 3, "prompt": ["a", "b"]})
        assert too_many.status_code == 400, "it fits no queue"
        server.source.num_choices = 3  # as if they ran
        full = server.post("/v1/completions", {**body, "n": 2})
        assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
        server.source.num_choices = 0
        step = RolloutEngine.step

        def failing(engine: RolloutEngine) -> list[int]:
            monkeypatch.setattr(RolloutEngine, "step", step)
            with engine._dropped_on_error():
                raise RuntimeError("a planted failure")

        monkeypatch.setattr(RolloutEngine, "step", failing)
        with pytest.raises(openai.InternalServerError, match="a planted failure"):
            server.openai.completions.create(model="tiny", prompt="a")
        assert server.json("/v1/completions", body)["usage"]["completion_tokens"] == 4
        server.source.close()
        assert server.http.get("/health").status_code == 503
        assert server.post("/v1/completions", body).status_code == 503
    monkeypatch.setattr(EngineSource, "_piece", lambda *_: 1 / 0)
    with serve() as server:  # the thread itself fails
        assert "ZeroDivisionError" in server.post("/v1/completions", body).text
        assert server.http.get("/health").status_code == 503
        assert server.post("/v1/completions", body).status_code == 503
