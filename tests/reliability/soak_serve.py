"""The soak of the endpoint: thousands of requests, of which some break off, and what remains.

    python tests/reliability/soak_serve.py --requests 10000 --out build/soak_serve.json
    python tests/reliability/soak_serve.py --requests 100000 --longest 2

64 clients ask at once: text or token ids, whole or as a stream, of one or two choices. Every other
request repeats one of 200, the rest are new. One in a hundred closes the connection before the end.
All answers to a repeated request have to be the same, and those of `RolloutEngine.generate`; so do
those to one in a hundred of the new ones. A request without an answer, or with one that has not the
choices and tokens it asked for, is lost: it is counted, and the soak continues. Afterwards no page,
slot or place in the queue is held, no request is lost, and memory has not grown.
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
from benchmarks.harness import command_typed, write_results

from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.engine import RolloutEngine
from jetrl.serve.app import Limits, make_app
from jetrl.serve.replies import Served
from jetrl.serve.source import EngineSource
from jetrl.types import SamplingParams

CLIENTS, KINDS, ONE_LEAVES_OF, ONE_CHECKED_OF = 64, 200, 100, 100
MAX_GROWTH_MIB = 8.0  # over the last two thirds of the requests
IDLE_WITHIN_S = 60
MUST_BE_ZERO = (
    "lost",
    "requests_with_another_answer",
    "pages_left",
    "sequences_left",
    "choices_left",
    "tasks_left",
)
Asked = tuple[str, dict[str, Any]]


def tiny_policy() -> Policy:
    """Return a policy of one layer with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny(Path(folder) / "tiny", num_layers=1)
        return Policy.from_pretrained(path, plan=PrecisionPlan.preset("int8"), device="cpu")


def asked(number: int, longest: int) -> Asked:
    """Return the path and body of a request, whose answer has at most `longest` tokens."""
    rng = random.Random(number)
    prompt = [rng.randrange(3, 90) for _ in range(rng.randrange(1, 100))]
    more = {"max_tokens": rng.randint(1, longest), "n": rng.randrange(1, 3), "seed": number}
    more["temperature"] = rng.choice([0.0, 0.7, 1.0])
    if number % 3 == 0:
        return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": more}
    stream = number % 3 == 1
    return "/v1/completions", {"prompt": prompt, "return_token_ids": True, "stream": stream, **more}


def token_ids(reply: httpx2.Response, body: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of all choices of an answer, whole or streamed.

    Raises LostError for an answer that is none to the request's body.
    """
    if reply.status_code != 200:
        raise LostError(f"status {reply.status_code}: {reply.text:.200}")
    if reply.headers["Content-Type"] == "application/json":
        bodies = [reply.json()]
    else:
        lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        bodies = [json.loads(line.removeprefix("data: ")) for line in lines]
    ids: dict[int, list[int]] = {}
    for choice in [choice for body in bodies for choice in body["choices"]]:
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    params, counts = body.get("sampling_params", body), [len(tokens) for tokens in ids.values()]
    if sorted(ids) != list(range(params["n"])):
        raise LostError(f"choices {sorted(ids)}, asked for {params['n']}")
    if not all(1 <= count <= params["max_tokens"] for count in counts):
        raise LostError(f"choices of {counts} tokens, asked for 1 to {params['max_tokens']}")
    return tuple(tuple(ids[index]) for index in sorted(ids))


class LostError(Exception):
    """A request has no answer, or a wrong one."""


class Soak:
    """The clients, and what they were answered."""

    def __init__(self, url: str, requests: int, longest: int) -> None:
        self._url, self._longest = url, longest
        self._left = iter(range(requests))
        self._looked_at = max(1, requests // 1000)
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
            try:
                self.counts[await self._request(client, number)] += 1
            except Exception as error:  # whatever went wrong: the request is lost, the rest go on
                print(f"request {number} is lost: {error!r}", file=sys.stderr)
            if number % self._looked_at == 0:
                self.held.append((number, memory_mib()))

    async def _request(self, client: httpx2.AsyncClient, number: int) -> str:
        """Make a request; return how it ended, or raise if it is lost."""
        if number % ONE_LEAVES_OF == ONE_LEAVES_OF // 2:
            return await self._leave(client, stream=number % (2 * ONE_LEAVES_OF) < ONE_LEAVES_OF)
        kind = number if number // KINDS % 2 else number % KINDS
        path, body = asked(kind, self._longest)
        answer = token_ids(await client.post(path, json=body), body)
        if kind < KINDS or kind % ONE_CHECKED_OF == 1:
            self.answers.setdefault(kind, set()).add(answer)
        return "answered"

    async def _leave(self, client: httpx2.AsyncClient, stream: bool) -> str:
        """Ask for a long answer, and close the connection before its end."""
        body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": stream}
        if stream:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise LostError(f"status {reply.status_code}")
                await anext(reply.aiter_lines())
            return "streams left"
        with contextlib.suppress(httpx2.ReadTimeout):
            await client.post("/v1/completions", json=body, timeout=0.1)
            raise LostError("500 tokens in 0.1 s: nothing was broken off")
        return "answers left"


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


def mib_at(held: list[tuple[float, float]]) -> dict[str, float]:
    """Return the memory after each tenth of the requests."""
    tenth = -(-len(held) // 10)
    return {str(number): round(mib, 1) for number, mib in (held[0], *held[tenth - 1 :: tenth])}


def different(policy: Policy, answers: dict[int, set[Any]], longest: int) -> int:
    """Return how many of the requests had more than one answer, or another one than alone."""
    engine, wrong = RolloutEngine(policy, max_batch_size=2), 0
    for kind, found in answers.items():
        _, body = asked(kind, longest)
        sampling = body.get("sampling_params", body)
        names = ("n", "max_tokens", "seed", "temperature")
        params = SamplingParams(**{name: sampling[name] for name in names})
        prompt = body.get("token_ids") or body["prompt"]
        alone = tuple(c.token_ids for c in engine.generate([prompt], params))
        wrong += found != {alone}
    return wrong


def wait_until_idle(source: EngineSource) -> None:
    deadline = time.monotonic() + IDLE_WITHIN_S
    while (source.num_choices or source.engine.sequences) and time.monotonic() < deadline:
        time.sleep(0.01)


def soak(policy: Policy, requests: int, longest: int = 12) -> dict[str, Any]:
    """Return what the requests left behind."""
    engine = RolloutEngine(policy, max_batch_size=32, num_pages=120, max_model_len=1024)
    source = EngineSource(engine, policy, max_choices=2 * CLIENTS)
    source.start()
    app = make_app(source, Served("tiny", source.tokenizer, "soak"), Limits())
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    run = Soak(f"http://127.0.0.1:{listening.getsockname()[1]}", requests, longest)
    began = time.perf_counter()
    asyncio.run(run.run())
    seconds = time.perf_counter() - began
    wait_until_idle(source)
    facts = {
        "requests": requests,
        "clients": CLIENTS,
        "longest_answer": longest,
        **{name.replace(" ", "_"): count for name, count in sorted(run.counts.items())},
        "lost": requests - run.counts.total(),
        "compared_requests": len(run.answers),
        "requests_with_another_answer": different(policy, run.answers, longest),
        "pages_left": engine.pages_in_use,
        "sequences_left": len(engine.sequences),
        "choices_left": source.num_choices,
        "tasks_left": len(server.server_state.tasks),
        "growth_mib": round(growth_mib(run.held), 2),
        "memory_mib_at": mib_at(run.held),
        "memory_mib": round(memory_mib(), 1),
        "seconds": round(seconds, 1),
        "requests_per_s": round(requests / seconds, 1),
    }
    server.should_exit = True
    thread.join()
    source.close()
    return facts


def broken(facts: dict[str, Any]) -> list[str]:
    """Return the names of the facts that are not as they should be."""
    grown = ["growth_mib"] * (facts["growth_mib"] > MAX_GROWTH_MIB)
    return [*(name for name in MUST_BE_ZERO if facts[name]), *grown]


def main() -> int:
    """Run the soak, and return 1 if something was lost, left or differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--longest", type=int, default=12, help="most tokens of an answer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts = soak(tiny_policy(), args.requests, args.longest)
    print(json.dumps(facts, indent=1))
    if args.out is not None:
        command = command_typed("python tests/reliability/soak_serve.py", None)
        write_results(args.out, "soak_serve", command, [facts])
    names = broken(facts)
    if names:
        print(f"not as it should be: {', '.join(names)}", file=sys.stderr)
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main())
