"""Write the weights of a model or a run as a Hugging Face directory.

For example:

    jetrl export runs/demo models/demo                      BF16, as transformers and vLLM read it
    jetrl export models/qwen3-8b models/q-fp8 --dtype fp8   block-scaled FP8 (e4m3, 128 x 128)
    jetrl export runs/lora adapters/mine                    of a run with an adapter: PEFT's files
    jetrl export runs/lora models/mine --merge              a whole model, with the adapter merged
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jetrl.cli.arguments import DEVICES, add_trust_argument
from jetrl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl.models.policy import Policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face directory, an adapter's, a run directory or a checkpoint",
    )
    parser.add_argument("out", metavar="OUT", help="the directory to write")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32", "fp8"), default="bfloat16", help="of the weights"
    )
    parser.add_argument(
        "--merge", action="store_true", help="write a whole model, with the adapter merged into it"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is at OUT")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to compute")
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.opening import open_policy

    policy = open_policy(args.model, None, args.device, fallback_plan="fp32")
    if args.merge:
        if policy.lora is None:
            raise UserError(f"--merge: {args.model} has no adapter to merge; leave --merge out")
        _merge(args, policy)
        return 0
    if policy.lora is not None and args.dtype != "bfloat16":
        raise UserError(
            f"--dtype {args.dtype} is of a whole model's weights, and {args.model} has an adapter, "
            "which is written in float32: add --merge for a whole model"
        )
    policy.save_pretrained(args.out, dtype=args.dtype, overwrite=args.overwrite)
    print(f"wrote {args.out} ({args.dtype if policy.lora is None else 'an adapter, float32'})")
    return 0


def _merge(args: argparse.Namespace, policy: Policy) -> None:
    """Write the base with the adapter merged into its weights, and print what rounding leaves."""
    from jetrl.models import hf
    from jetrl.models.merging import MergedWeights, merging_losses

    assert policy.lora is not None, "a policy with an adapter"
    config, masters = policy.config, policy.master_weights()
    with _base_weights(args, policy) as base:
        merged = MergedWeights(config, policy.lora, base, masters, policy.device)
        losses = merging_losses(base, merged)
        hf.save_model(
            args.out,
            config,
            merged,
            args.dtype,
            tokenizer=policy.tokenizer,
            generation_config=policy.generation_config or None,
            scales=policy.plan.scales,
            overwrite=args.overwrite,
        )
    print(f"wrote {args.out} ({args.dtype}, the adapter merged)")
    for format, loss in losses.items():
        name = {"bfloat16": "BF16", "fp8": "FP8"}[format]
        print(
            f"measured: merged into {name}, what is left of the adapter's change is off by "
            f"{loss.error:.0%} of its size, and {loss.changed:.1%} of the stored numbers change"
        )
    if not losses:
        print("the adapter changes nothing yet: the merged model is the base")


@contextlib.contextmanager
def _base_weights(args: argparse.Namespace, policy: Policy) -> Iterator[Mapping[str, Tensor]]:
    """Yield the weights of the base of a policy with an adapter, read or made when asked for."""
    from pathlib import Path

    from jetrl.cli.opening import find_model
    from jetrl.models import hf
    from jetrl.models.tiny import RandomWeights
    from jetrl.settings.loading import load_config

    if policy.base_path is not None:
        with hf.open_weights(policy.base_path, policy.config, policy.device) as weights:
            yield weights
        return
    run = find_model(Path(args.model)).run
    assert run is not None, "a base of random weights is made by the seed of a run"
    seed = load_config(run / "config.toml").run.seed
    yield RandomWeights(policy.config, seed, policy.device)
