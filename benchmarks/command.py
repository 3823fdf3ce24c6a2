"""Measure speed on a Hopper GPU (kernels, a layer, sampling, training, a step), and parity.

For example:

    jetrl bench attention --out attention.json
    jetrl bench layer --shape qwen3-8b
    jetrl bench step --shape qwen3-8b --response-length 2048
    jetrl bench parity --shape qwen3-8b --plan unified --load 512x400x4096

Each prints a table and writes JSON with device, versions, date and commit; `jetrl bench NAME
--help` has its own arguments. Results of one H200 are in benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib

from jetrl.distributed.world import launched_size, started_by_torchrun
from jetrl.errors import UserError

HANDS_WORDS_ON = True
RUNS_ON_RANKS = True
ON_RANKS = ("step",)  # what several processes measure together
OPERATIONS = ("attention", "head", "layer", "norm", "products")
FLOWS = (
    *("experts", "frozen", "graphs", "mismatch", "parity"),
    *("rollout", "serve", "speculation", "step", "train"),
)
GPU_ALONE = ("rollout",)  # the others take --device cpu, to try them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=sorted((*FLOWS, *OPERATIONS)), help="what is measured")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="of the benchmark, as --out FILE"
    )


def run(args: argparse.Namespace) -> int:
    if launched_size() > 1 and args.name not in ON_RANKS:
        raise UserError(f"jetrl bench {args.name} is one process: start it without torchrun")
    try:
        from benchmarks import operations  # torch comes with it, which --help does not need

        benchmark = importlib.import_module(f"benchmarks.{args.name}")
    except ModuleNotFoundError:  # Triton, which comes with a torch for GPUs
        _require_gpu()
        raise
    words = " ".join(args.arguments).replace("=", " ")
    on_cpu = args.name not in GPU_ALONE and "--device cpu" in words
    if not on_cpu and not {"-h", "--help"} & set(args.arguments):
        _require_gpu()
    with contextlib.ExitStack() as stack:
        if started_by_torchrun():
            from jetrl.session.ranks import joined_on

            stack.enter_context(joined_on("cpu" if on_cpu else "cuda"))
        if args.name in OPERATIONS:
            operations.main(args.name, args.arguments)
        else:
            benchmark.main(args.arguments)
    return 0


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "jetrl bench needs an NVIDIA Hopper GPU (H100, H200) and a torch built for CUDA; here "
            "torch sees none"
        )
    from jetrl.precision.backend import backend_for

    backend_for(torch.device("cuda"))
