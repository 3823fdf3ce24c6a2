r"""vLLM's server under the load of `jetrl bench serve`: the same clients, prompts and lengths.

    jetrl bench serve --shape qwen3-8b
    python -m benchmarks.vllm_serve --shape qwen3-8b --quantization none --quantization fp8

Needs vLLM in addition to jetrl, and the GPU for itself: run the two one after the other. Each row
starts a server with vLLM's defaults, at most as many sequences at once as there are clients, and
dummy weights of the shape; only the shape counts. There is no tokenizer, so tokens are returned as
ids and no text is decoded. Log-probs of the drawn tokens are on. Requests have no seed, since vLLM
draws seeded ones one by one. `--program` starts another server of the same interface, with the
folder of the model as its last argument: a trial without vLLM.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Row, begins, command_typed, print_table, write_results
from benchmarks.serve import Asked, add_load_arguments, ask
from benchmarks.shapes import SHAPES
from benchmarks.vllm_rollout import LINEARS, model_folder, set_environment

_START_LIMIT = 600.0  # seconds in which a server has to start


def arguments(quantization: str, clients: int, longest: int) -> list[str]:
    """Return the arguments of `vllm serve`, but for model and port."""
    words = ["--load-format", "dummy", "--skip-tokenizer-init", "--generation-config", "vllm"]
    words += ["--max-num-seqs", str(clients), "--max-model-len", str(longest)]
    if quantization != "none":
        words += ["--quantization", quantization]
    return words


@contextmanager
def server(command: Sequence[str], log: Path) -> Iterator[int]:
    """Start a server with `--port`, wait until it answers, and end it; yields the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with open(log, "w") as file:
        words = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        _wait_for(process, port, log)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    limit = time.monotonic() + _START_LIMIT
    while time.monotonic() < limit and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    process.kill()
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")


def measure(port: int, asked: Asked, clients: int, rounds: int) -> Iterator[Row]:
    """Yield the rows of whole answers and of streams, after a round of each that warms up."""
    for way in ("whole", "stream"):
        taken: list[float] = []
        latencies: list[float] = []
        for number in range(rounds + 1):
            begins(f"{clients} clients, {way}, round {number} of {rounds}")
            seconds, answers, latencies = ask(port, asked, clients, way == "stream")
            taken.append(seconds)
            for (ids, logprobs), length in zip(answers, asked.lengths, strict=True):
                assert len(ids) == len(logprobs) == length, f"{len(ids)} tokens of {length}"
        tokens = sum(asked.lengths)
        yield {
            "clients": clients,
            "answers": way,
            "requests": len(asked.prompts),
            "tokens": tokens,
            "tokens_per_s": round(tokens / statistics.median(taken[1:])),
            "median_latency_s": round(statistics.median(latencies), 3),
            "s_of_rounds": [round(s, 3) for s in taken[1:]],
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure vLLM's server, and write the rows so far after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--quantization", action="append", choices=LINEARS, help="default fp8")
    add_load_arguments(parser)
    parser.add_argument("--program", type=shlex.split, help="a command line, in place of vLLM's")
    parser.add_argument("--out", default="build/bench/serve_vllm.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    set_environment()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    command = command_typed("python -m benchmarks.vllm_serve", argv)
    version = "none" if args.program else importlib.metadata.version("vllm")
    longest = args.prompt_length + args.response_length
    rows: list[Row] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for quantization in args.quantization or ["fp8"]:
        for clients in args.clients or (64, 256):
            asked = Asked.random(
                SHAPES[args.shape]["vocab_size"],
                clients * args.each,
                args.prompt_length,
                args.response_length,
                return_tokens_as_token_ids=True,
            )
            with tempfile.TemporaryDirectory() as folder:
                model = model_folder(args.shape, folder)
                words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
                words += arguments(quantization, clients, longest)
                if args.program:
                    words = [*args.program, model]
                begins(f"the server, {quantization}")
                began = time.perf_counter()
                with server(words, args.out.with_suffix(".log")) as port:
                    started = round(time.perf_counter() - began, 1)
                    for row in measure(port, asked, clients, args.rounds):
                        facts = {"shape": args.shape, "quantization": quantization}
                        rows.append({**facts, "started_s": started, **row})
                        print_table(rows[-1:])
                        write_results(args.out, "serve_vllm", command, rows, vllm=version)


if __name__ == "__main__":
    main()
