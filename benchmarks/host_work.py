"""What the host does with the samples of a step on several GPUs, in microseconds a token.

    python -m benchmarks.host_work --out benchmarks/results/cpu/host_work.json

Each rank takes its own samples apart, and encodes them; it decodes the samples of all ranks, puts
them together, makes a digest of them that ranks compare, and packs them into micro-batches. The
functions are those of a run, on one core, with completions of 2,048 random tokens; the figure of
each is the fastest of several calls. `benchmarks/scaling.py` reads the file.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness import write_results

from jetrl.session.ranks import samples_digest
from jetrl.session.sampling import _packed, _unpacked
from jetrl.training.packing import pack
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score

OWN = ("taken apart", "encoded")
EACH = ("decoded", "put together", "digest", "packed into micro-batches")
PROMPT, RESPONSE, GROUP = 256, 2048, 8


def make_samples(count: int) -> list[Sample]:
    """Return samples with random tokens and log-probs."""
    draws = np.random.default_rng(0)
    logprobs = -draws.random((count, RESPONSE)).astype(np.float32).astype(np.float64)
    return [
        Sample(
            prompt=Prompt(id=str(i // GROUP), text="?"),
            group=i // GROUP,
            inputs=PromptInputs(tuple(draws.integers(0, 150_000, PROMPT).tolist())),
            completion=Completion(
                tuple(draws.integers(0, 150_000, RESPONSE).tolist()),
                tuple(logprobs[i].tolist()),
                "length",
            ),
            score=Score(float(i % 2)),
        )
        for i in range(count)
    ]


def measure(count: int, rounds: int) -> dict[str, float]:
    """Return the microseconds a token of each piece of work."""
    samples = make_samples(count)
    tokens, results = count * (PROMPT + RESPONSE), {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        best, made = float("inf"), None
        for _ in range(rounds):
            began = time.process_time()
            made = work()
            best = min(best, time.process_time() - began)
        results[name] = round(1e6 * best / tokens, 4)
        return made

    own = timed("taken apart", lambda: [_packed(sample) for sample in samples])
    sent = timed("encoded", lambda: pickle.dumps(own))
    received = timed("decoded", lambda: pickle.loads(sent))
    made = timed("put together", lambda: [_unpacked(*parts[1:4]) for parts in received])
    assert made == [sample.completion for sample in samples]
    timed("digest", lambda: samples_digest(samples))
    timed("packed into micro-batches", lambda: pack(samples, 11520))
    return results


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    parts = measure(args.samples, args.rounds)
    command = f"python -m benchmarks.host_work --samples {args.samples} --rounds {args.rounds}"
    content = {
        "device": f"CPU, one core of {os.cpu_count()}, {platform.machine()}",
        "versions": {"python": platform.python_version()},
        "us_a_token": parts,
        "us_of_own_token": round(sum(parts[name] for name in OWN), 4),
        "us_of_each_token": round(sum(parts[name] for name in EACH), 4),
    }
    print(json.dumps(content, indent=1))
    if args.out is not None:
        write_results(args.out, "host_work", command, [], **content)


if __name__ == "__main__":
    main()
