"""Write the weights of a model or a run as a Hugging Face directory.

For example:

    jetrl export runs/demo models/demo                      BF16, as transformers and vLLM read it
    jetrl export models/qwen3-8b models/q-fp8 --dtype fp8   block-scaled FP8 (e4m3, 128 x 128)
"""

from __future__ import annotations

import argparse

from jetrl.cli.arguments import DEVICES, add_trust_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face directory, a run directory or a checkpoint"
    )
    parser.add_argument("out", metavar="OUT", help="the directory to write")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32", "fp8"), default="bfloat16", help="of the weights"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is at OUT")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to compute")
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.opening import open_policy

    policy = open_policy(args.model, None, args.device, fallback_plan="fp32")
    policy.save_pretrained(args.out, dtype=args.dtype, overwrite=args.overwrite)
    print(f"wrote {args.out} ({args.dtype})")
    return 0
