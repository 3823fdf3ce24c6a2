"""The soak of the endpoint: thousands of requests, of which some break off, and what remains.

    python tests/reliability/soak_serve.py --requests 10000 --out build/soak_serve.json

64 clients ask at once for one of 200 answers: text or token ids, whole or as a stream, of one or
two choices. One in a hundred closes the connection before the end. All answers to one request
have to be the same, and those of `RolloutEngine.generate`; afterwards no page, slot or place in the
queue is held, and memory has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import uvicorn
from benchmarks.harness import write_results

from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.engine import RolloutEngine
from jetrl.serve.app import Limits, make_app
from jetrl.serve.replies import Served
from jetrl.serve.source import EngineSource
from jetrl.types import SamplingParams

CLIENTS, KINDS, ONE_LEAVES_OF = 64, 200, 100
MAX_GROWTH_MIB = 8.0  # over the last two thirds of the requests
MUST_BE_ZERO = ("requests_with_another_answer", "pages_left", "choices_left", "tasks_left")
Asked = tuple[str, dict[str, Any]]


def tiny_policy() -> Policy:
    """Return a policy of one layer with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny(Path(folder) / "tiny", num_layers=1)
        return Policy.from_pretrained(path, plan=PrecisionPlan.preset("int8"), device="cpu")


def asked(number: int) -> Asked:
    """Return the path and body of a request; the first number of a prompt tells it apart."""
    rng = random.Random(number)
    prompt = [rng.randrange(3, 90) for _ in range(rng.randrange(1, 100))]
    more = {"max_tokens": rng.randrange(1, 13), "n": rng.randrange(1, 3), "seed": number}
    more["temperature"] = rng.choice([0.0, 0.7, 1.0])
    if number % 3 == 0:
        return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": more}
    stream = number % 3 == 1
    return "/v1/completions", {"prompt": prompt, "return_token_ids": True, "stream": stream, **more}


def token_ids(reply: httpx2.Response) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of all choices of an answer, whole or streamed."""
    if reply.headers["Content-Type"] == "application/json":
        bodies = [reply.json()]
    else:
        lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        bodies = [json.loads(line.removeprefix("data: ")) for line in lines]
    ids: dict[int, list[int]] = {}
    for choice in [choice for body in bodies for choice in body["choices"]]:
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    return tuple(tuple(ids[index]) for index in sorted(ids))


class Soak:
    """The clients, and what they were answered."""

    def __init__(self, url: str, requests: int) -> None:
        self._url = url
        self._left = iter(range(requests))
        self.answers: dict[int, set[Any]] = {}
        self.counts: Counter[str] = Counter()
        self.held: list[tuple[float, float]] = []  # request, MiB of memory

    async def run(self) -> None:
        """Run all clients to the end."""
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self._url, timeout=600, limits=limits) as client:
            await asyncio.gather(*(self._client(client) for _ in range(CLIENTS)))

    async def _client(self, client: httpx2.AsyncClient) -> None:
        for number in self._left:
            if number % ONE_LEAVES_OF == ONE_LEAVES_OF // 2:
                await self._leave(client, stream=number % (2 * ONE_LEAVES_OF) < ONE_LEAVES_OF)
                continue
            kind = number % KINDS
            path, body = asked(kind)
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            self.answers.setdefault(kind, set()).add(token_ids(reply))
            self.counts["answered"] += 1
            if number % 10 == 0:
                self.held.append((number, memory_mib()))

    async def _leave(self, client: httpx2.AsyncClient, stream: bool) -> None:
        """Ask for a long answer, and close the connection before its end."""
        body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": stream}
        if stream:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                await anext(reply.aiter_lines())
        else:
            with contextlib.suppress(httpx2.ReadTimeout):
                await client.post("/v1/completions", json=body, timeout=0.1)
                raise AssertionError("500 tokens in 0.1 s: nothing was broken off")
        self.counts["streams left" if stream else "answers left"] += 1


def memory_mib() -> float:
    """Return the resident size of this process, server and clients, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth_mib(held: list[tuple[float, float]]) -> float:
    """Return the growth over the last two thirds of the requests, by the slope of a line."""
    requests, sizes = np.array(held).T
    later = requests > requests[-1] / 3
    slope = np.polyfit(requests[later], sizes[later], 1)[0]
    return float(slope * requests[-1] * 2 / 3)


def different(policy: Policy, answers: dict[int, set[Any]]) -> int:
    """Return how many of the requests had more than one answer, or another one than alone."""
    engine, wrong = RolloutEngine(policy, max_batch_size=2), 0
    for kind, found in answers.items():
        _, body = asked(kind)
        sampling = body.get("sampling_params", body)
        names = ("n", "max_tokens", "seed", "temperature")
        params = SamplingParams(**{name: sampling[name] for name in names})
        prompt = body.get("token_ids") or body["prompt"]
        alone = tuple(c.token_ids for c in engine.generate([prompt], params))
        wrong += found != {alone}
    return wrong


def wait_until_idle(source: EngineSource) -> None:
    while source.num_choices or source.engine.sequences:
        time.sleep(0.01)


def soak(policy: Policy, requests: int) -> dict[str, Any]:
    """Return what the requests left behind."""
    engine = RolloutEngine(policy, max_batch_size=32, num_pages=120, max_model_len=1024)
    source = EngineSource(engine, policy, max_choices=2 * CLIENTS)
    source.start()
    app = make_app(source, Served("tiny", source.tokenizer, "soak"), Limits())
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    run = Soak(f"http://127.0.0.1:{listening.getsockname()[1]}", requests)
    began = time.perf_counter()
    asyncio.run(run.run())
    seconds = time.perf_counter() - began
    wait_until_idle(source)
    facts = {
        "requests": requests,
        "clients": CLIENTS,
        **{name.replace(" ", "_"): count for name, count in sorted(run.counts.items())},
        "different_requests": len(run.answers),
        "requests_with_another_answer": different(policy, run.answers),
        "pages_left": engine.pages_in_use,
        "choices_left": source.num_choices,
        "tasks_left": len(server.server_state.tasks),
        "growth_mib": round(growth_mib(run.held), 2),
        "memory_mib": round(memory_mib(), 1),
        "seconds": round(seconds, 1),
    }
    server.should_exit = True
    thread.join()
    source.close()
    return facts


def main() -> int:
    """Run the soak, and return 1 if something was left or differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts = soak(tiny_policy(), args.requests)
    print(json.dumps(facts, indent=1))
    if args.out is not None:
        command = f"python tests/reliability/soak_serve.py --requests {args.requests}"
        write_results(args.out, "soak_serve", command, [facts])
    return int(any(facts[name] for name in MUST_BE_ZERO) or facts["growth_mib"] > MAX_GROWTH_MIB)


if __name__ == "__main__":
    sys.exit(main())
