r"""`jetrl serve` next to `RolloutEngine.generate`: the same load, and the same tokens.

    jetrl bench serve --shape qwen3-8b --clients 64 --clients 256 --out serve.json
    jetrl bench serve --model build/smollm2 --clients 64

Each client has a connection of its own and asks for one completion after the other; 64 clients
share a process. `generate` gets the same prompts at once and draws as many sequences together as
there are clients. Answers have half to all of --response-length tokens, end-of-sequence ignored and
log-probs on. Both are timed in turn, after a round that warms up; a row has the medians.

`of_generate` is the server's rate relative to that of `generate`. `different` counts answers that
have other tokens or log-probs. Streams send each step's tokens as they are drawn. Random weights
(--shape) have no tokenizer, so no text is decoded; --model has one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness import (
    Row,
    add_shape_arguments,
    begins,
    bench_parser,
    command_typed,
    print_table,
    write_results,
)
from benchmarks.policies import add_plan_argument, make_policy, plan_facts, plan_of, plans_of
from benchmarks.rollout import capture_graphs

from benchmarks import serve_clients
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions
from jetrl.serve.app import Limits, make_app
from jetrl.serve.replies import Served
from jetrl.serve.server import ServerThread, listen
from jetrl.serve.source import EngineSource
from jetrl.types import SamplingParams

_PER_PROCESS = 64  # clients
_SEED = 1
Answer = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Asked:
    """Prompts, the tokens of each answer, and fields of the requests besides."""

    prompts: list[list[int]]
    lengths: list[int]
    fields: dict[str, Any]

    @classmethod
    def random(
        cls, vocabulary: int, count: int, prompt: int, response: int, **fields: Any
    ) -> Asked:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, vocabulary, (count, prompt)).tolist()
        shortest = -(-response // 2)
        lengths = rng.integers(shortest, response, count, endpoint=True).tolist()
        return cls(prompts, lengths, fields)

    def bodies(self, stream: bool) -> list[str]:
        """Return the bodies of requests."""
        common = {"ignore_eos": True, "logprobs": 0, "return_token_ids": True, "stream": stream}
        common |= self.fields
        return [
            json.dumps({"prompt": prompt, "max_tokens": length, **common})
            for prompt, length in zip(self.prompts, self.lengths, strict=True)
        ]


def ask(port: int, asked: Asked, clients: int, stream: bool) -> tuple[float, Any, list[float]]:
    """Return the seconds until the last answer, all answers in order, and seconds per answer."""
    bodies, count = list(enumerate(asked.bodies(stream))), -(-clients // _PER_PROCESS)
    processes = []
    for i in range(count):
        share = {"clients": len(range(i, clients, count)), "bodies": bodies[i::count]}
        process = subprocess.Popen(
            [sys.executable, serve_clients.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        _write(process, json.dumps({"port": port, "stream": stream, **share}))
    for process in processes:
        _read(process)
    for process in processes:
        _write(process, "begin")
    spent = [json.loads(_read(process)) for process in processes]
    for process in processes:
        process.communicate()
    answers = sorted(answer for one in spent for answer in one["answers"])
    seconds = max(one["ended"] for one in spent) - min(one["began"] for one in spent)
    drawn = [(ids, logprobs) for _, ids, logprobs, _ in answers]
    if len(drawn) < len(bodies):
        raise RuntimeError(f"{len(bodies) - len(drawn)} requests have no answer")
    return seconds, drawn, [taken for *_, taken in answers]


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def generate(engine: RolloutEngine, asked: Asked) -> tuple[float, list[Answer]]:
    """Return the seconds and the answers of a call of `generate`."""
    params = SamplingParams(max_tokens=max(asked.lengths), ignore_eos=True, seed=_SEED)
    began = time.perf_counter()
    completions = engine.generate(
        asked.prompts, params, options=GenerateOptions(max_tokens=asked.lengths)
    )
    seconds = time.perf_counter() - began
    return seconds, [(list(c.token_ids), list(c.logprobs)) for c in completions]


def measure(policy: Policy, clients: int, args: argparse.Namespace) -> list[Row]:
    """Return the rows of whole answers and of streams for a number of clients."""
    longest = args.prompt_length + args.response_length
    asked = Asked.random(
        policy.config.vocab_size,
        clients * args.each,
        args.prompt_length,
        args.response_length,
        seed=_SEED,
    )
    engine = RolloutEngine(
        policy,
        max_batch_size=clients,
        num_pages=clients * -(-longest // 64) + 1,
        max_model_len=longest,
    )
    if policy.device.type == "cuda":
        begins("all graphs of decode")
        capture_graphs(engine, clients, args.prompt_length, longest)
    taken: dict[str, list[float]] = {"generate": [], "whole": [], "stream": []}
    latencies: dict[str, list[float]] = {}
    different: dict[str, int] = {}
    idle: dict[str, float] = {}
    for number in range(args.rounds + 1):
        begins(f"{clients} clients, round {number} of {args.rounds}")
        seconds, expected = generate(engine, asked)
        taken["generate"].append(seconds)
        for way in ("whole", "stream"):
            seconds, answers, latencies[way] = served(engine, asked, clients, way == "stream")
            taken[way].append(seconds)
            different[way] = sum(a != b for a, b in zip(answers, expected, strict=True))
            idle[way] = engine.stats.device_idle_s / engine.stats.seconds
    engine.free_cache()
    tokens = sum(asked.lengths)
    medians = {way: statistics.median(times[1:]) for way, times in taken.items()}
    return [
        {
            **plan_facts(policy),
            "clients": clients,
            "answers": way,
            "requests": len(asked.prompts),
            "tokens": tokens,
            "generate_tokens_per_s": round(tokens / medians["generate"]),
            "tokens_per_s": round(tokens / medians[way]),
            "of_generate": round(medians["generate"] / medians[way], 3),
            "different": different[way],
            "median_latency_s": round(statistics.median(latencies[way]), 3),
            "idle_share": round(idle[way], 4),
            "generate_s_of_rounds": [round(s, 3) for s in taken["generate"][1:]],
            "s_of_rounds": [round(s, 3) for s in taken[way][1:]],
        }
        for way in ("whole", "stream")
    ]


def served(
    engine: RolloutEngine, asked: Asked, clients: int, stream: bool
) -> tuple[float, Any, list[float]]:
    """Ask a server over the engine, which ends with it; see `ask`."""
    with serving(engine, clients) as port:
        return ask(port, asked, clients, stream)


@contextmanager
def serving(engine: RolloutEngine, clients: int) -> Iterator[int]:
    """Serve the engine; yields the port."""
    listening = listen("127.0.0.1", 0, "the benchmark")
    source = EngineSource(engine, engine.policy, max_choices=2 * clients)
    source.start()
    server = ServerThread(make_app(source, Served("m", source.tokenizer, ""), Limits()), listening)
    try:
        yield listening.getsockname()[1]
    finally:
        server.close()
        source.close()


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the load, which `benchmarks.vllm_serve` shares."""
    for name, default, words in (
        ("prompt-length", 256, "tokens"),
        ("response-length", 256, "tokens, at most"),
        ("each", 4, "requests per client"),
        ("rounds", 3, "timed"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words}; {default}")
    parser.add_argument("--clients", type=int, action="append", help="repeatable; default 64, 256")


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench serve`."""
    parser = bench_parser("serve", __doc__)
    add_shape_arguments(parser)
    parser.add_argument("--model", help="a model's directory, in place of --shape")
    add_plan_argument(parser)
    add_load_arguments(parser)
    parser.add_argument("--device", default="cuda", help="cpu: to try it out, nothing is written")
    parser.add_argument("--out", default="build/bench/serve.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for plan in plans_of(args):
        begins(f"weights and kernels of the plan {plan}")
        if args.model is None:
            policy = make_policy(args.shape, plan, args.device, args.layers)
        else:
            policy = Policy.from_pretrained(args.model, plan_of(plan), args.device)
        for clients in args.clients or (64, 256):
            rows += [
                {"model": args.model or args.shape, **row} for row in measure(policy, clients, args)
            ]
            print_table(rows[-2:])
            if args.device == "cuda":
                command = command_typed("jetrl bench serve", argv)
                write_results(args.out, "serve", command, rows)
        del policy
        release()


if __name__ == "__main__":
    main()
