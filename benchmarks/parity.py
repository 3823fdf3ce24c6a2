r"""Parity at the shape of a real model, with random weights that give peaked distributions.

    jetrl bench parity --shape qwen3-8b --plan unified --plan jet \
        --load 512x400x4096 --load 4x64x32000 --load 1x64x100 --out parity.json

A load is SEQUENCES x SAMPLED TOKENS x LONG: prompts have 1 to 400 tokens, and every eighth one (or
the last of fewer) has LONG. The sampler runs them in one batch, the trainer in others, and every
token is compared.

`--updates N` first runs N updates, on sampled tokens with random rewards. With `--adapter-rank R`
adapters on a frozen base are compared, which begin with random A and B, not zero. `--proof` first
times the check at the start of a run twice; the first time includes compilation of kernels that are
not cached. The JSON is written after each row.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness import (
    add_adapter_argument,
    add_shape_arguments,
    bench_parser,
    command_typed,
    write_results,
)
from benchmarks.loads import Load, make_samples, random_rewards
from benchmarks.policies import add_plan_argument, make_policy, plan_facts, plans_of

from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.session.parity import check_policy, failures, located, measure
from jetrl.settings.loading import load_config
from jetrl.training.trainer import Trainer
from jetrl.types import SamplingParams

TEMPERATURE = 0.6
UPDATED = Load(8, 4, prompt_length=64, response_length=64)  # of each update


def prove(policy: Policy) -> dict[str, Any]:
    """Return the seconds of the check at the start of a run, and its failures."""
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        checks = check_policy(policy)
        seconds.append(round(time.perf_counter() - began, 2))
    return {
        **plan_facts(policy),
        "proof_s": seconds,
        "checks": len(checks),
        "broken": failures(checks),
    }


def update(policy: Policy, count: int) -> dict[str, Any]:
    """Run updates on sampled tokens; return their number and the last gradient norm."""
    words = [f"loop.steps={count}", "train.lr=1e-4", "train.optimizer_states=compact"]
    words += ["train.tokens_per_micro_batch=4096", f"rollout.max_tokens={UPDATED.response_length}"]
    trainer = Trainer(policy, load_config(None, words))
    engine = RolloutEngine(policy, max_batch_size=UPDATED.sequences)
    norm = 0.0
    for seed in range(count):
        prompts = UPDATED.random_prompts(policy.config.vocab_size, seed)
        params = SamplingParams(
            n=UPDATED.samples, max_tokens=UPDATED.response_length, ignore_eos=True, seed=seed
        )
        completions = engine.generate(prompts, params)
        engine.free_cache()
        samples = make_samples(prompts, completions, random_rewards(len(completions), seed))
        norm = trainer.step(samples).metrics["policy/grad_norm"]
    for master in policy.master_weights().values():
        master.grad = None
    return {**plan_facts(policy), "updates": count, "last_grad_norm": norm}


def prompts_of(policy: Policy, load: tuple[int, int, int]) -> list[list[int]]:
    """Return the random prompts of a load (sequences, sampled tokens, long), as token ids."""
    batch, _, long = load
    generator = np.random.default_rng(0)
    every = min(8, batch)
    lengths = [
        long if i % every == every - 1 else int(generator.integers(1, 400)) for i in range(batch)
    ]
    return [generator.integers(0, policy.config.vocab_size, n).tolist() for n in lengths]


def compared(policy: Policy, load: tuple[int, int, int], locate: bool) -> dict[str, Any]:
    """Return the numbers of `jetrl parity` of one load (sequences, sampled tokens, long).

    Args:
        locate: Also name the first operation that differs.
    """
    began = time.perf_counter()
    result = measure(
        policy,
        prompts=prompts_of(policy, load),
        samples=1,
        max_tokens=load[1],
        temperature=TEMPERATURE,
        max_batch_size=512,
    )
    facts, first = dataclasses.asdict(result), result.first_different
    del facts["first_different"]
    if locate:
        facts["located"] = None if first is None else located(policy, *first, TEMPERATURE)
    return {**facts, "seconds": round(time.perf_counter() - began, 1)}


def run(policy: Policy, load: tuple[int, int, int]) -> dict[str, Any]:
    """Return the row of one load on one policy."""
    batch, tokens, _ = load
    return {
        **plan_facts(policy),
        "layers": policy.config.num_layers,
        "sequences": batch,
        "longest_context": max(map(len, prompts_of(policy, load))) + tokens,
        **compared(policy, load, locate=True),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench parity`."""
    parser = bench_parser("parity", __doc__)
    add_shape_arguments(parser)
    add_plan_argument(parser)
    add_adapter_argument(parser)
    parser.add_argument("--load", action="append", help="repeatable; default: 128x128x4096")
    parser.add_argument("--updates", type=int, default=0, help="before the loads; default: 0")
    parser.add_argument("--proof", action="store_true", help="time the proof at a run's start")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append({"shape": args.shape, "adapter_rank": args.adapter_rank, **row})
        print(json.dumps(rows[-1]), flush=True)
        if args.out is not None:
            write_results(args.out, "parity", command_typed("jetrl bench parity", argv), rows)

    for plan in plans_of(args):
        policy = make_policy(args.shape, plan, args.device, args.layers, args.adapter_rank)
        if args.proof:
            add(prove(policy))
        if args.updates:
            add(update(policy, args.updates))
        for load in args.load or ["128x128x4096"]:
            batch, tokens, long = (int(number) for number in load.split("x"))
            add(run(policy, (batch, tokens, long)))
        del policy
        release()
