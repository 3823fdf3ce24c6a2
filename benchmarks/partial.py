r"""Partial rollouts beside whole ones: the effect of `rollout.oversample` on a load with a tail.

    jetrl bench partial --shape qwen3-8b --layers 9 --oversample 0 --oversample 0.25 \
        --out partial.json

Each step draws prompts of 256 random tokens with 8 samples each and hands over as many complete
ones, as a run does. Completions end by chance: as many stop ids as give one end in --mean tokens
under a uniform choice, or at 8192 tokens; so their lengths are about geometric, and a step has a
tail. Random weights; they stay the same, which changes no work: what is carried over is prefilled
again all the same. Log-probs on. The first step captures the graphs of decode and fills the stock:
the rate is that of the steps after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.harness import (
    Load,
    Row,
    add_shape_arguments,
    bench_parser,
    command_typed,
    print_table,
    write_results,
)
from benchmarks.parity import make_policy

from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import load_config
from jetrl.types import Completion, Prompt, PromptInputs, SamplingParams

_LOAD = Load(64, 8, 256, 8192, 1500)  # as `jetrl bench rollout --load grpo`


def run(policy: Policy, share: float, steps: int, prompts_per_step: int, mean: int) -> list[Row]:
    """Return a row for each step and one for all but the first."""
    generator = np.random.default_rng(0)
    vocabulary = policy.config.vocab_size
    stops = generator.choice(vocabulary, round(vocabulary / mean), replace=False).tolist()
    words = [f"rollout.prompts_per_step={prompts_per_step}", f"rollout.oversample={share}"]
    encoded = [
        EncodedPrompt(Prompt(str(i), text=""), PromptInputs(tuple(ids)))
        for i, ids in enumerate(
            generator.integers(
                0, vocabulary, (3 * steps * prompts_per_step, _LOAD.prompt_length)
            ).tolist()
        )
    ]
    partial_rollouts = PartialRollouts(
        load_config("demo", words), policy, encoded, 1, dynamic_sampling=False
    )
    sequences = _LOAD.samples * (prompts_per_step + math.ceil(share * prompts_per_step))
    engine = RolloutEngine(policy, max_batch_size=sequences)
    params = SamplingParams(
        n=_LOAD.samples,
        max_tokens=_LOAD.response_length,
        ignore_eos=True,
        stop_token_ids=tuple(stops),
        seed=1,
    )
    rows: list[Row] = []
    at = 0
    for step in range(1, steps + 1):
        count = prompts_per_step + partial_rollouts.start_step()
        drawn, at = encoded[at : at + count], at + count
        began = time.perf_counter()
        if partial_rollouts.on:
            groups = partial_rollouts.sample(engine, drawn, params, step, lambda progress: None)
            _, completions = partial_rollouts.choose(groups, step)
        else:
            completions = engine.generate([p.inputs for p in drawn], params)
        rows.append(_row(share, step, time.perf_counter() - began, completions, engine))
    later = rows[1:]
    seconds = sum(row["seconds"] for row in later)
    tokens = sum(row["tokens"] for row in later)
    rows.append(
        {
            "oversample": share,
            "step": f"2 to {steps}",
            "seconds": round(seconds, 2),
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds),
        }
    )
    return rows


def _row(
    share: float,
    step: int,
    seconds: float,
    completions: Sequence[Completion],
    engine: RolloutEngine,
) -> Row:
    lengths = [len(completion.token_ids) for completion in completions]
    return {
        "oversample": share,
        "step": step,
        "seconds": round(seconds, 2),
        "tokens": sum(lengths),  # of the completions that are handed over
        "tokens_per_s": round(sum(lengths) / seconds),
        "drawn": engine.stats.tokens_drawn,
        "prefilled": engine.stats.tokens_prefilled,
        "mean_length": round(float(np.mean(lengths))),
        "longest": max(lengths),
        "capture_s": round(engine.stats.capture_s, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench partial`."""
    parser = bench_parser("partial", __doc__)
    add_shape_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, help="2 or more (default 3)")
    parser.add_argument("--prompts", type=int, default=64, help="a step (default 64)")
    parser.add_argument(
        "--mean",
        type=int,
        default=_LOAD.mean_length,
        help=f"length in tokens (default {_LOAD.mean_length})",
    )
    parser.add_argument(
        "--oversample", type=float, action="append", help="repeatable; default: 0 and 0.25"
    )
    parser.add_argument("--out", default="build/bench/partial.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: 2 or more, since the first is not counted")
    shares = args.oversample or [0.0, 0.25]
    policy = make_policy(args.shape, "unified", "cuda", args.layers)
    rows: list[Row] = []
    for share in shares:
        share_rows = run(policy, share, args.steps, args.prompts, args.mean)
        print_table(share_rows)
        model = {"shape": args.shape, "layers": policy.config.num_layers}
        rows += [{**model, **row} for row in share_rows]
    write_results(args.out, "partial", command_typed("jetrl bench partial", argv), rows)


if __name__ == "__main__":
    main()
