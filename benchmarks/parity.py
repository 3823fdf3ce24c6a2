r"""Parity at the shape of a real model, with random weights that give peaked distributions.

    jetrl bench parity --shape qwen3-8b --plan unified --plan jet \
        --load 512x400x4096 --load 4x64x32000 --load 1x64x100 --out parity.json

A load is SEQUENCES x SAMPLED TOKENS x LONG: prompts of 1 to 400 tokens, and one in eight (the last
one of fewer) of LONG. They are sampled in one batch, the trainer's forward runs over all of them in
others, and every token is compared.

`--proof` first times what a run proves at its start, on two layers, twice: the first time kernels
that are in no cache are compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import (
    add_shape_arguments,
    begins,
    bench_parser,
    command_typed,
    write_results,
)
from benchmarks.shapes import SHAPES

from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.precision import PrecisionPlan
from jetrl.session.compiling import compiled_ahead
from jetrl.session.parity import check_policy, failures, located, measure
from jetrl.settings.loading import load_config
from jetrl.settings.presets import DEFAULT_PRESET
from jetrl.settings.sections import RolloutSettings

TEMPERATURE = 0.6
ALPHA = 32.0  # of adapters


def plan_of(words: str) -> PrecisionPlan:
    """Return the plan of a preset and its options, such as `int8 kv=bf16 grad_output=e4m3`."""
    preset, *options = words.split()
    keys = [f"precision.{word}" for word in (f"preset={preset}", *options)]
    keys += ["adapter.kind=lora"] if "base=nvfp4" in options else []  # which needs an adapter
    return PrecisionPlan.from_settings(load_config(None, keys).precision)


def options_of(plan: PrecisionPlan) -> dict[str, str]:
    """Return the fields of a plan that are not its preset's, as a setting's text."""
    preset, given = vars(PrecisionPlan.preset(plan.name)), vars(plan)
    names = (field.name for field in dataclasses.fields(plan))
    return {name: str(given[name]).lower() for name in names if given[name] != preset[name]}


def plan_words(plan: PrecisionPlan) -> str:
    """Return the words that `plan_of` reads."""
    return " ".join([plan.name, *(f"{key}={value}" for key, value in options_of(plan).items())])


def add_plan_argument(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add --plan, whose values `plans_of` returns.

    Args:
        others: Plans that are measured before the default plan, unless some are named.
    """
    plans = (*others, DEFAULT_PRESET)
    parser.add_argument(
        "--plan",
        action="append",
        help="a preset and options of [precision], as 'int8 kv=bf16', or 'unified base=nvfp4' with "
        f"--adapter-rank; repeatable; default: {', '.join(plans)}",
    )
    parser.set_defaults(plans=plans)


def plans_of(args: argparse.Namespace) -> Sequence[str]:
    """Return the words of the plans that the arguments of `add_plan_argument` give."""
    return [plan_words(plan_of(words)) for words in args.plan or args.plans]


def make_policy(
    shape: str,
    plan: str,
    device: str,
    layers: int | None,
    adapter_rank: int = 0,
    speculation: bool = False,
) -> Policy:
    """Return a policy with random weights, whose logits have a standard deviation of about 2.

    Args:
        device: "cuda" or "cpu".
        plan: A preset and its options, as of `plan_of`.
        layers: Decoder layers; None: the shape's own.
        adapter_rank: The rank of adapters on a frozen base, whose B is random too; 0: all
            parameters are trained.
    """
    config = dict(SHAPES[shape])
    if layers is not None:
        config["num_hidden_layers"] = layers
    config["initializer_range"] = float(2.0 / np.sqrt(config["hidden_size"]))
    chosen = plan_of(plan)
    shape_of = ModelConfig.from_hf(config)
    adapter = Adapter.new(shape_of, LoRA(adapter_rank, ALPHA), seed=0) if adapter_rank else None
    source = ModelSource.from_seed(shape_of, 0, adapter=adapter)
    rollout = RolloutSettings(speculation="auto" if speculation else "off")
    with compiled_ahead(source, chosen, device, rollout):
        policy = Policy(source, chosen, device)
        begins("the weights are made; waiting for kernels that are compiled beside them")
    if adapter is None:
        return policy
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, master in policy.master_weights().items():
            if name.endswith("lora_B"):
                master.normal_(0.0, 0.02, generator=generator)
    policy.requantize()
    return policy


def prove(policy: Policy) -> dict[str, Any]:
    """Return the seconds of the proof at a run's start, and the checks that failed."""
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        checks = check_policy(policy)
        seconds.append(round(time.perf_counter() - began, 2))
    return {
        "plan": plan_words(policy.plan),
        "proof_s": seconds,
        "checks": len(checks),
        "broken": failures(checks),
    }


def prompts_of(policy: Policy, load: tuple[int, int, int]) -> list[list[int]]:
    """Return the random prompts of a load (sequences, sampled tokens, long), as token ids."""
    batch, _, long = load
    generator = np.random.default_rng(0)
    every = min(8, batch)
    lengths = [
        long if i % every == every - 1 else int(generator.integers(1, 400)) for i in range(batch)
    ]
    return [generator.integers(0, policy.config.vocab_size, n).tolist() for n in lengths]


def run(policy: Policy, load: tuple[int, int, int]) -> dict[str, Any]:
    """Return the row of one load (sequences, sampled tokens, long) on one policy."""
    batch, tokens, long = load
    prompts = prompts_of(policy, load)
    began = time.perf_counter()
    result = measure(
        policy,
        prompts=prompts,
        samples=1,
        max_tokens=tokens,
        temperature=TEMPERATURE,
        max_batch_size=512,
    )
    location = None
    if result.first_different is not None:
        location = located(policy, *result.first_different, TEMPERATURE)
    facts = dataclasses.asdict(result)
    del facts["first_different"]
    return {
        "plan": plan_words(policy.plan),
        "layers": policy.config.num_layers,
        "sequences": batch,
        "longest_context": long + tokens,
        **facts,
        "located": location,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench parity`."""
    parser = bench_parser("parity", __doc__)
    add_shape_arguments(parser)
    add_plan_argument(parser)
    parser.add_argument("--load", action="append", help="repeatable; default: 128x128x4096")
    parser.add_argument("--proof", action="store_true", help="time the proof at a run's start")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append({"shape": args.shape, **row})
        print(json.dumps(rows[-1]), flush=True)

    for plan in plans_of(args):
        policy = make_policy(args.shape, plan, args.device, args.layers)
        if args.proof:
            add(prove(policy))
        for load in args.load or ["128x128x4096"]:
            batch, tokens, long = (int(number) for number in load.split("x"))
            add(run(policy, (batch, tokens, long)))
        del policy
    if args.out is not None:
        write_results(args.out, "parity", command_typed("jetrl bench parity", argv), rows)


if __name__ == "__main__":
    main()
