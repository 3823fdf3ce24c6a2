r"""Measure the causes of the mismatch between an FP8 sampler and a BF16 trainer.

    jetrl bench mismatch --shape qwen3-8b --load 32x64x1500 --out mismatch.json
    jetrl bench mismatch --shape tiny --device cpu --load 8x24x150

The sampler differs from the trainer in five components: FP8 weights, FP8 activations, FP8 KV cache,
FP8 head, and attention that starts a new partial sum every 256 keys. The next rows remove one
difference each, and then keep only one each. Weights are random, with peaked distributions. Each
row draws its own tokens, and the trainer computes their log-probs. A load is SEQUENCES x SAMPLED
TOKENS x LONG, as in `jetrl bench parity`.

The last rows are presets, and `bf16` with a fixed reduction order, in which no token differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    add_shape_arguments,
    bench_parser,
    command_typed,
    print_table,
    write_results,
)
from benchmarks.parity import compared
from benchmarks.policies import make_policy
from benchmarks.study.deviation import SamplerDeviation

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.precision import PrecisionPlan

_SPLIT = 256  # Keys after which the other attention begins a new sum.
COMPONENTS = ("weights", "activations", "keys and values", "attention", "head")
PRESETS = ("mixed", "alike", "jet", "unified", "bf16")


def _preset(name: str) -> PrecisionPlan:
    """Return a preset with BF16 weights rounded to nearest, as in the recorded results."""
    return PrecisionPlan.preset(name).replace(bf16_rounding="nearest")


def plan_with(components: Sequence[str]) -> PrecisionPlan:
    """Return a plan with a BF16 trainer and a sampler that differs in some components."""
    own = set(components)
    table: dict[str, Any] = {"linears": "bf16"}
    if {"weights", "activations"} <= own:
        table["linears"] = "fp8"
    elif "weights" in own:
        table["linears"] = "fp8_weights"
    elif "activations" in own:
        table["linears"] = "fp8_activations"
    if "keys and values" in own:
        table["kv"] = "fp8"
    if "attention" in own:
        table["attention_split"] = _SPLIT
    if "head" in own:
        table["lm_head"] = "fp8"
    return SamplerDeviation(**table).plan_of(_preset("mixed"))


def plans() -> dict[str, PrecisionPlan]:
    """Return the plan of each row, by the row's name."""
    rows = {"all five in the sampler's form": plan_with(COMPONENTS)}
    for component in COMPONENTS:
        others = [other for other in COMPONENTS if other != component]
        rows[f"{component} in the trainer's form"] = plan_with(others)
    for component in COMPONENTS:
        rows[f"{component} alone in the sampler's form"] = plan_with([component])
    rows |= {f"preset {name}": _preset(name) for name in PRESETS}
    rows["preset bf16, pinned sums"] = _preset("bf16").replace(pinned_sums=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench mismatch`."""
    parser = bench_parser("mismatch", __doc__)
    add_shape_arguments(parser)
    parser.add_argument("--load", type=_load, default="32x64x1500", help="default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)

    # All rows have the same master weights, in the same memory: only their roundings are made anew.
    first = make_policy(args.shape, "bf16", args.device, args.layers)
    config, masters = first.config, {k: v.detach() for k, v in first.master_weights().items()}
    del first
    if max(args.load[2] + args.load[1], 400) > config.max_position_embeddings:
        raise UserError(f"--load: the model's context is {config.max_position_embeddings} tokens")
    rows = []
    source = ModelSource.from_tensors(config, masters)
    for name, plan in plans().items():
        policy = Policy(source, plan, args.device)
        rows.append(
            {"sampler": name, "exact_plan": plan.exact, **compared(policy, args.load, locate=False)}
        )
    print_table([_shown(row) for row in rows])
    if args.out is not None:
        write_results(args.out, "mismatch", command_typed("jetrl bench mismatch", argv), rows)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its numbers rounded for people."""
    return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}


def _load(text: str) -> tuple[int, int, int]:
    """Return the three numbers of a load."""
    try:
        batch, tokens, long = (int(number) for number in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: SEQUENCES x TOKENS x LONG, as 8x24x150"
        ) from None
    if min(batch, tokens, long) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each number at least 1")
    return batch, tokens, long


if __name__ == "__main__":
    main()
