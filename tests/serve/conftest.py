"""A served tiny policy with byte tokens and a chat template that reads tools."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from openai import OpenAI
from tests.training.shared import config

from jetrl.models.policy import Policy
from jetrl.models.tiny import train_bpe_tokenizer
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.engine import RolloutEngine
from jetrl.serve.app import Limits, make_app
from jetrl.serve.replies import Served
from jetrl.serve.source import EngineSource, TokenSource

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests without a seed get the same ones in each run of a test, but never one twice."""
    numbers = itertools.count(1)
    monkeypatch.setattr(secrets, "randbits", lambda _: next(numbers))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the words of a text")
    tokenizer = train_bpe_tokenizer([text], 264)
    tokenizer.chat_template = TEMPLATE
    raw = config(
        vocab_size=264,
        num_hidden_layers=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=2,
    )
    return Policy.from_config(raw, PrecisionPlan.preset("int8"), seed=0, tokenizer=tokenizer)


OPEN = Limits()


class Server:
    """A server in a thread, with clients for it."""

    def __init__(self, source: Any, port: int) -> None:
        self.source = source
        self.url = f"http://127.0.0.1:{port}"
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)
        self.http = httpx2.Client(base_url=self.url, timeout=600)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        named["Content-Type"] = "application/json"
        return self.http.post(path, content=json.dumps(body), headers=named)

    def json(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        reply = self.post(path, body, **headers)
        assert reply.status_code == 200, reply.text
        return reply.json()


@contextlib.contextmanager
def serving(source: TokenSource, limits: Limits = OPEN) -> Iterator[Server]:
    app = make_app(source, Served("tiny", source.tokenizer, "test"), limits, episodes=True)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield Server(source, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def answering(
    policy: Policy, max_choices: int = 128, limits: Limits = OPEN, **sizes: int
) -> Iterator[Server]:
    engine = RolloutEngine(policy, **{"max_batch_size": 8, **sizes})
    source = EngineSource(engine, policy, max_choices, version=7)
    source.start()
    try:
        with serving(source, limits) as server:
            yield server
    finally:
        source.close()


Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def serve(policy: Policy) -> Serve:
    """Return a context of a server of the policy: max_choices, limits, and sizes of its engine."""
    return partial(answering, policy)


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture(scope="session")
def model_directory(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny"
    policy.save_pretrained(out)
    return out
