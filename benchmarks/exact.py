r"""How many sampled tokens have another log-prob in the trainer, case by case, and tokens/s.

    jetrl bench exact --shape qwen3-8b --plan int8 --updated-layers 9 --out exact.json
    jetrl bench exact --shape tiny --device cpu --plan int8 --case 3x4x30 --updated-case 2x4x20

A case is SEQUENCES x SAMPLED TOKENS x LONG, as of `jetrl bench parity`, of random weights. Each is
sampled without drafts, and again with drafts that are right by a chance of 0.6: the completions of
the first call, which the second one must repeat. Then the cases of `--updated-case` run on weights
that AdamW has updated, and with adapters that it has updated; `--updated-layers` is for a model
whose optimizer states have no room next to all of its layers. Bits are compared. tokens_per_s is
that of the whole call, prompts included, without the capture of graphs.

With `--gradients` the trainer's forward is that of a training step, which saves activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from benchmarks.flow import Choices, Flow, policy_of
from benchmarks.harness import (
    Load,
    Row,
    add_shape_arguments,
    begins,
    bench_parser,
    command_typed,
    print_table,
    write_results,
)
from benchmarks.parity import TEMPERATURE, add_plan_argument, plan_words, plans_of, prompts_of
from benchmarks.speculation import KnownDrafts, differences

from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.session.parity import _trainer_logprobs
from jetrl.training.mismatch import different
from jetrl.types import Completion, SamplingParams

CASES = ["1x512x15800", "8x512x15800", "64x768x2000", "256x640x1000"]
UPDATED_CASES = ["64x256x2000"]
_RIGHT = 0.6  # the chance of a drafted token
_WARM_TOKENS = 32  # of each completion of a call before the one that counts
UPDATE = Load(prompts=4, samples=4, prompt_length=64, response_length=192)

Case = tuple[int, int, int]


def case_of(text: str) -> Case:
    sequences, tokens, long = (int(number) for number in text.split("x"))
    return sequences, tokens, long


def draw(
    policy: Policy, case: Case, prompts: list[list[int]], expected: Sequence[Completion] = ()
) -> tuple[list[Completion], float]:
    """Return completions and tokens per second; with `expected` completions as drafts."""
    count, tokens, long = case
    pages = sum(-(-(len(prompt) + tokens) // 64) + 1 for prompt in prompts)
    engine = RolloutEngine(policy, count, pages, max_model_len=max(long, 400) + tokens)
    if expected:
        drafts = KnownDrafts(count, engine.max_model_len, policy.device)
        drafts.know(expected, _RIGHT, policy.config.vocab_size)
        engine.use_drafts(drafts)
    for most in (min(tokens, _WARM_TOKENS), tokens):
        params = SamplingParams(max_tokens=most, temperature=TEMPERATURE, seed=1, ignore_eos=True)
        completions = engine.generate(prompts, params)
    stats = engine.stats
    engine.free_cache()
    return completions, stats.tokens_drawn / (stats.seconds - stats.capture_s)


def rows_of(policy: Policy, case: Case, gradients: bool) -> Iterator[Row]:
    """Yield the rows of a case without drafts and with them."""
    prompts = prompts_of(policy, case)
    plain: list[Completion] = []
    for right in (None, _RIGHT):
        begins(f"{case}, drafts right by {right}")
        found, rate = draw(policy, case, prompts, plain)
        release()
        plain = plain or found
        pairs = [(p, list(c.token_ids)) for p, c in zip(prompts, found, strict=True)]
        trainer = np.concatenate(_trainer_logprobs(policy, pairs, TEMPERATURE, gradients))
        sampler = np.concatenate([np.array(c.logprobs, dtype=np.float32) for c in found])
        yield {
            "sequences": case[0],
            "longest_context": case[1] + case[2],
            "drafts_right": right,
            "tokens": len(sampler),
            "different": int(different(trainer, sampler).sum()),
            "changed_by_drafts": sum(differences(found, plain)),
            "tokens_per_s": round(rate),
        }
        del trainer
        release()


def update(policy: Policy, choices: Choices) -> int:
    """Make updates by AdamW, and return their number."""
    begins("updates")
    flow = Flow(policy, UPDATE, choices)
    flow.fit()
    for master in policy.master_weights().values():
        master.grad = None
    return flow.trainer.optimizer.num_updates


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench exact`."""
    parser = bench_parser("exact", __doc__)
    add_shape_arguments(parser)
    add_plan_argument(parser)
    parser.add_argument("--case", action="append", help=f"repeatable; default: {' '.join(CASES)}")
    parser.add_argument(
        "--updated-case", action="append", help=f"repeatable; default: {' '.join(UPDATED_CASES)}"
    )
    parser.add_argument("--updated-layers", type=int, help="default: those of --layers")
    parser.add_argument("--adapter-rank", type=int, default=32, metavar="R", help="default 32")
    parser.add_argument("--gradients", action="store_true", help="the trainer saves activations")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out")
    parser.add_argument("--out", default="build/bench/exact.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    command, rows = command_typed("jetrl bench exact", argv), list[Row]()
    updated = args.updated_case or UPDATED_CASES
    fewer = args.updated_layers or args.layers
    arms = [(0, False, args.layers, args.case or CASES), (0, True, fewer, updated)]
    arms.append((args.adapter_rank, True, args.layers, updated))
    for plan in plans_of(args):
        for rank, updates, layers, cases in arms:
            choices = Choices(
                *(args.shape, args.device, layers, 1e-4, 4 * UPDATE.length, None),
                {"optimizer_states": "compact"},
                adapter_rank=rank,
                drafts_right=_RIGHT,
            )
            policy = policy_of(plan, choices)
            model = {"shape": args.shape, "plan": plan_words(policy.plan)}
            model |= {"layers": policy.config.num_layers, "adapter_rank": rank}
            model["updates"] = update(policy, choices) if updates else 0
            release()
            for case in map(case_of, cases):
                for row in rows_of(policy, case, args.gradients):
                    rows.append({**model, **row})
                    print_table(rows[-1:])
                    write_results(args.out, "exact", command, rows)
            del policy
            release()
    print_table(rows)
    counts = (sum(row[key] for row in rows) for key in ("different", "tokens"))
    print("{} of {} tokens differ".format(*counts), flush=True)


if __name__ == "__main__":
    main()
