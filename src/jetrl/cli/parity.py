"""Sample completions, and compare sampler and trainer log-probs bit by bit.

For example:

    jetrl parity models/tiny --plan unified            0 tokens differ
    jetrl parity models/tiny --plan mixed              a mismatch, as in most systems
    jetrl parity models/tiny --plan unified --locate   names the first operation that differs

Exit code 1 if log-probs differ under an exact plan (int8, integer, unified, jet, nvfp4, fp4).
"""

from __future__ import annotations

import argparse
import dataclasses

from jetrl.cli.arguments import add_model_arguments, print_json, sampling_params, table
from jetrl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--prompts", type=int, default=8, help="number of random prompts, of mixed lengths")
    add("--samples", type=int, default=2, help="completions per prompt")
    add("--max-tokens", type=int, default=64, help="tokens per completion")
    add("--temperature", type=float, default=1.0, help="sampling temperature")
    add("--seed", type=int, default=0, help="seed of prompts and sampling")
    add("--locate", action="store_true", help="name the first operation that differs, if any")
    add("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    for name in ("prompts", "samples", "max_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    sampling_params(temperature=args.temperature, seed=args.seed)

    from jetrl.cli.opening import open_policy
    from jetrl.session.parity import located, measure

    policy = open_policy(args.model, args.plan, args.device)
    room = policy.config.max_position_embeddings
    if args.max_tokens > room - 2:
        raise UserError(f"--max-tokens {args.max_tokens}: the model's context is {room} tokens")
    sizes = {"num_prompts": args.prompts, "samples": args.samples, "max_tokens": args.max_tokens}
    result = measure(policy, **sizes, temperature=args.temperature, seed=args.seed)
    facts = dataclasses.asdict(result)
    pair = facts.pop("first_different")
    facts = {"plan": policy.plan.name, "exact_plan": policy.plan.exact, **facts}
    if args.locate:
        facts["located"] = "nothing differs"
        if pair is not None:
            prompt, completion = pair
            facts["located"] = located(policy, prompt, completion, args.temperature)
    if args.json:
        print_json(facts)
    else:
        print(_as_text(facts))
    return 1 if policy.plan.exact and result.different else 0


def _as_text(facts: dict[str, object]) -> str:
    promise = "exact" if facts["exact_plan"] else "not exact"
    rows = [
        ("plan", f"{facts['plan']} ({promise})"),
        ("tokens compared", f"{facts['tokens']}"),
        ("tokens different", f"{facts['different']}"),
        ("mean |log-prob difference|", f"{facts['mean_abs']:.6g} nats"),
        ("max |log-prob difference|", f"{facts['max_abs']:.6g} nats"),
        ("K3 KL", f"{facts['k3_kl']:.6g} nats"),
        ("token_mult_prob_error", f"{facts['token_mult_prob_error']:.6g}"),
    ]
    if "located" in facts:
        rows.append(("located", str(facts["located"])))
    return table(rows)
