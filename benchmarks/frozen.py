r"""The pass of a frozen reference model under several plans, and the KL term that comes of it.

    jetrl bench frozen --shape qwen3-8b --plan bf16 --plan int8 --plan unified --out frozen.json

The policy has adapters with random A and B, the reference is its base. The policy under the first
plan samples the load; the reference then computes log-probs of all sampled tokens, as before an
update. Both have random weights: seconds and GiB are those of real ones, log-probs need not be.

`weights_gib` are the reference's weights, `pass_gib` what its pass allocates on top, at most (null
on a CPU). `mean_abs_logprob_change` is the mean |difference| of the reference's log-probs to those
under the first plan. `kl` is the KL term (k3) of policy and reference under the same plan, as runs
have it; `kl_of_first` that of the policy under the first plan, whose samples they are.
`kl_change_percent` and `kl_of_first_change_percent` compare with the first plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.harness import (
    Row,
    add_adapter_argument,
    add_load_arguments,
    add_shape_arguments,
    begins,
    bench_parser,
    command_typed,
    load_of,
    print_table,
    write_results,
)
from benchmarks.loads import Load
from benchmarks.policies import add_plan_argument, make_policy, plan_words, plans_of
from benchmarks.timing import seconds_eager
from torch import Tensor

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import release
from jetrl.models.layer import RMSNorm
from jetrl.models.policy import Policy
from jetrl.precision.linear import Linear
from jetrl.rollout.engine import RolloutEngine
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.objectives import k3
from jetrl.training.packing import pack_examples
from jetrl.types import Batch, Example, SamplingParams

GIB = 2**30


def sampled(policy: Policy, load: Load, tokens_at_once: int) -> list[Batch]:
    """Return the packed batches of a load that the policy samples, at temperature 1."""
    prompts = load.random_prompts(policy.config.vocab_size, 0)
    params = SamplingParams(n=load.samples, max_tokens=load.response_length, ignore_eos=True)
    engine = RolloutEngine(policy, max_batch_size=load.sequences)
    completions = engine.generate(prompts, params)
    engine.free_cache()
    examples = [
        Example(prompts[i // load.samples], list(completion.token_ids))
        for i, completion in enumerate(completions)
    ]
    return pack_examples(examples, tokens_at_once)


@torch.no_grad()
def logprobs(policy: Policy, batches: Sequence[Batch]) -> Tensor:
    """Return the log-probs of all sampled tokens, float32 [N]."""
    return torch.cat([batch_logprobs(policy, batch)[0] for batch in batches])


def weight_bytes(policy: Policy) -> int:
    """Return the bytes of the weights that a forward reads."""
    weights = [policy.decoder.embedding]
    weights += [m.quantized for m in policy.decoder.modules() if isinstance(m, (Linear, RMSNorm))]
    return sum({id(t): t.nbytes for weight in weights for t in weight.tensors()}.values())


def pass_bytes(policy: Policy, batches: Sequence[Batch]) -> int | None:
    """Return the most bytes that a pass allocates in addition; None on a CPU."""
    if policy.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs(policy, batches)
    return torch.cuda.max_memory_allocated() - before


def kl_term(policy: Tensor, reference: Tensor) -> float:
    """Return the mean k3 of log-probs [N], in nats per token."""
    return float(k3(policy, reference).double().mean())


def change_percent(value: float, base: float) -> float | None:
    """Return the change in percent; None of nothing."""
    return round(100 * (value / base - 1), 2) if base else None


def measure(
    policy: Policy, batches: Sequence[Batch], rounds: int
) -> tuple[Row, tuple[Tensor, Tensor]]:
    """Return what a reference's pass takes, and the log-probs of policy and reference."""
    reference = policy.base()
    seconds = seconds_eager(lambda: logprobs(reference, batches), rounds)
    bytes_on_top = pass_bytes(reference, batches)
    known = (logprobs(policy, batches), logprobs(reference, batches))
    tokens = sum(batch.num_computed_tokens for batch in batches)
    return {
        "plan": plan_words(policy.plan),
        "tokens": tokens,
        "sampled_tokens": len(known[0]),
        "seconds": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds),
        "weights_gib": round(weight_bytes(reference) / GIB, 3),
        "pass_gib": None if bytes_on_top is None else round(bytes_on_top / GIB, 3),
    }, known


def compare(plans: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """Return the row of each plan; changes are those to the first."""
    rows: list[Row] = []
    batches: list[Batch] = []
    first: tuple[Tensor, Tensor] | None = None
    for plan in plans:
        policy = make_policy(args.shape, plan, args.device, args.layers, args.adapter_rank)
        if not batches:
            begins("sampling")
            batches = sampled(policy, load_of(args), args.tokens_per_micro_batch)
        begins(f"the reference under {plan}")
        row, known = measure(policy, batches, args.rounds)
        del policy
        release()
        first = first or known
        kl, kl_of_first = kl_term(known[0], known[1]), kl_term(first[0], known[1])
        at_first = rows[0]["kl"] if rows else kl
        changes = {
            "mean_abs_logprob_change": float((known[1] - first[1]).double().abs().mean()),
            "kl": kl,
            "kl_of_first": kl_of_first,
            "kl_change_percent": change_percent(kl, at_first),
            "kl_of_first_change_percent": change_percent(kl_of_first, at_first),
        }
        rows.append({"shape": args.shape, "adapter_rank": args.adapter_rank, **row, **changes})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench frozen`."""
    parser = bench_parser("frozen", __doc__)
    add_shape_arguments(parser)
    add_plan_argument(parser, "bf16", "unified")
    add_load_arguments(parser, prompts=8, samples=8)
    add_adapter_argument(parser)
    parser.set_defaults(adapter_rank=32, response_length=1024)
    for name, default in (("tokens-per-micro-batch", 16384), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out, nothing is written")
    parser.add_argument("--out", default="build/bench/frozen.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    if args.adapter_rank < 1:
        raise UserError("--adapter-rank must be at least 1: the policy is its adapters on a base")
    rows = compare(plans_of(args), args)
    print_table(rows)
    if args.device == "cuda":
        write_results(args.out, "frozen", command_typed("jetrl bench frozen", argv), rows)


if __name__ == "__main__":
    main()
