"""Run vLLM on the loads of `jetrl bench rollout`: the same prompts, the same lengths.

    python -m benchmarks.vllm_rollout --load grpo --quantization fp8
    jetrl bench rollout --shape qwen3-8b --plan int8 --load grpo
    jetrl bench rollout --shape qwen3-8b --plan int8 --case 64x8192x128

    python -m benchmarks.vllm_rollout --load tail --quantization fp8 --quantization fp8_per_block \
        --quantization fp8+ngram --quantization fp8+known
    jetrl bench speculation --shape qwen3-8b --load tail --right 0.6

Needs vLLM (0.26.0 was used) beside jetrl, and the GPU for itself: run the two one after the other.
Each sample is a request with its length as max_tokens and end-of-sequence ignored; log-probs of the
drawn tokens are on; prompts are token ids, so no tokenizer runs. Weights are random: only the shape
counts. Whole-phase tokens/s are of one `generate` call, the tail included, after a warm-up that
compiles and captures what it uses. With `grpo` comes prefill alone: 64 prompts of 8192 tokens, one
token drawn after each, to stand beside `jetrl bench rollout --case 64x8192x128`.

vLLM runs as it does by default (its compiler, CUDA graphs, asynchronous scheduling, prefix caching,
its own choice of kernels), but for --max-num-seqs and for what spares it work: no detokenizer, flat
log-probs, and one process, so that no token is sent to another. `fp8` is its online quantization of
the linears; `fp8_per_block` has blocks of 128 x 128 as jetrl has; `none` is BF16. Which kernels it
chose is in its log; what it says of its layers, in the row. Half the bytes of keys and values need
not be faster there on Hopper: try --kv-cache-dtype auto (BF16) as well. Blocks may be multiplied by
DeepGEMM or FlashInfer, which compile for minutes; by CUTLASS with VLLM_USE_DEEP_GEMM=0 and
VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0. Uninstall sgl-deep-gemm, which vLLM takes for its own.

After a `+` stands how vLLM speculates. `ngram` looks the last tokens up in the text before them, on
the CPU, and `ngram_gpu` on the GPU. Random weights repeat next to nothing, so their rows say what
looking up costs where it finds nothing; they say nothing of text that repeats. `known` stands for
text that does: every sequence has drafts at no cost, and vLLM's rejection sampler takes each token
of a draft with a chance of 0.6 if it took those before it, whatever the model says. These are the
odds of `jetrl bench speculation --right 0.6`, though there the tokens are the model's own.

Several --quantization start side by side on one GPU, each in a process with memory for this load
alone, and are timed in turn when all have started. An engine that waits for its turn does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.harness import (
    TAILED,
    Row,
    command_typed,
    copy_bandwidth,
    print_table,
    write_results,
)
from benchmarks.in_turn import in_turn
from benchmarks.shapes import SHAPES
from benchmarks.vllm_engine import DRAFTS, LINEARS, Setup, measure, set_environment


def quantization_and_drafts(text: str) -> tuple[str, str]:
    """Return the format of the linears and the way to speculate of FORMAT or FORMAT+DRAFTS."""
    quantization, _, drafts = text.partition("+")
    if quantization not in LINEARS or drafts not in ("", *DRAFTS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(LINEARS)}, with +{', +'.join(DRAFTS)} or nothing"
        )
    return quantization, drafts or "off"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each engine, and write the rows so far after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--load", choices=TAILED, default="grpo", help="default: grpo")
    parser.add_argument(
        "--quantization",
        type=quantization_and_drafts,
        action="append",
        metavar="FORMAT[+DRAFTS]",
        help=f"repeatable; {', '.join(LINEARS)}; + {', '.join(DRAFTS)} (default: fp8)",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=["fp8", "auto"], help="default: fp8, but auto (BF16) for none"
    )
    parser.add_argument("--max-num-seqs", type=int, help="at once (default: all)")
    parser.add_argument("--start-limit", type=float, default=600, help="seconds (default 600)")
    parser.add_argument(
        "--out", default="build/bench/rollout_vllm.json", type=Path, help="JSON file"
    )
    args = parser.parse_args(argv)
    set_environment()
    engines = args.quantization or [("fp8", "off")]
    command = command_typed("python -m benchmarks.vllm_rollout", argv)
    jobs = {}
    for quantization, drafts in engines:
        kv = args.kv_cache_dtype or ("auto" if quantization == "none" else "fp8")
        setup = Setup(
            args.shape, args.load, quantization, drafts, kv, args.max_num_seqs, len(engines)
        )
        jobs[setup.name] = setup
    copy_bandwidth()  # which the results have, measured while memory is free
    torch.cuda.empty_cache()
    rows: list[Row] = []
    vllm = importlib.metadata.version("vllm")
    logs = args.out.parent / "vllm-logs"
    turns = in_turn(measure, jobs, logs, args.start_limit)
    with contextlib.closing(turns) as results:
        for _, row in results:
            rows.append(row)
            print_table([row])
            write_results(args.out, "rollout_vllm", command, rows, vllm=vllm)


if __name__ == "__main__":
    main()
