"""Run vLLM on the loads of `jetrl bench rollout`: the same prompts, the same lengths.

    python benchmarks/vllm_rollout.py --quantization fp8
    jetrl bench rollout --shape qwen3-8b --plan unified --load grpo
    jetrl bench rollout --shape qwen3-8b --plan unified --case 64x8192x128

Needs vLLM (0.26.0 was used) beside jetrl, and the GPU for itself: run the two one after the other.
64 prompts x 8 samples, each sample a request with its length as max_tokens and end-of-sequence
ignored; log-probs of the drawn tokens are on; prompts are token ids, so no tokenizer runs. Weights
are random: only the shape counts. Whole-phase tokens/s are of one `generate` call, the tail
included, after a warm-up that compiles and captures what it uses. Then prefill alone: 64 prompts of
8192 tokens, one token drawn after each, to stand beside `jetrl bench rollout --case 64x8192x128`.

vLLM runs as it does by default (its compiler, CUDA graphs, asynchronous scheduling, prefix caching,
its own choice of kernels), but for --max-num-seqs and for what spares it work: no detokenizer, flat
log-probs, and one process, so that no token is sent to another. `fp8` is its online quantization of
the linears; `fp8_per_block` has blocks of 128 x 128 as jetrl has; `none` is BF16. Which kernels it
chose is in its log; what it says of its layers, in the row. Half the bytes of keys and values need
not be faster there on Hopper: try --kv-cache-dtype auto (BF16) as well.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetrl.bench._timing import Row, print_table, write_results
from jetrl.bench.rollout import GRPO_MAX, GRPO_PROMPT, grpo_load, warm_lengths
from jetrl.bench.shapes import SHAPES

ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PREFILL_PROMPTS, PREFILL_PROMPT = 64, 8192


def model_folder(shape: str, folder: str) -> str:
    """Writes the config.json of a named shape; there are no weights beside it."""
    config = {**SHAPES[shape], "torch_dtype": "bfloat16"}
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def generate(llm: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds of one call that draws `lengths` tokens after the prompts.

    Each prompt's samples stand side by side.

    Raises:
        AssertionError: A completion has another length, or no log-probs.
    """
    from vllm import SamplingParams

    requests = [
        {"prompt_token_ids": p} for p in prompts for _ in range(len(lengths) // len(prompts))
    ]
    fixed = {"ignore_eos": True, "logprobs": 0, "flat_logprobs": True, "detokenize": False}
    params = [SamplingParams(temperature=1.0, max_tokens=length, **fixed) for length in lengths]
    began = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    for output, length in zip(outputs, lengths, strict=True):
        drawn = output.outputs[0]
        assert len(drawn.token_ids) == len(drawn.logprobs) == length, (output.request_id, length)
    return seconds


def prefill_load(vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts that share nothing, and one token after each."""
    shape = (PREFILL_PROMPTS, PREFILL_PROMPT)
    return np.random.default_rng(1).integers(0, vocabulary, shape).tolist(), [1] * PREFILL_PROMPTS


def run(
    shape: str,
    quantization: str,
    kv_cache_dtype: str,
    max_num_seqs: int,
    gpu_memory_utilization: float,
) -> list[Row]:
    """Both loads on one vLLM; started_s is its start, compilation and captures included."""
    from vllm import LLM

    vocabulary = SHAPES[shape]["vocab_size"]
    prompts, lengths = grpo_load(vocabulary)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=model_folder(shape, folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            quantization=None if quantization == "none" else quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=GRPO_PROMPT + GRPO_MAX,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=True,
        )
        started = time.perf_counter() - began
        warm = generate(llm, prompts, warm_lengths(len(lengths)))
        print(f"vLLM: started in {started:.1f} s, warmed up in {warm:.1f} s", flush=True)
        config = llm.llm_engine.vllm_config
        engine = {
            "shape": shape,
            "engine": "vLLM",
            "quantization": quantization,
            "started_s": round(started, 1),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
            "async_scheduling": config.scheduler_config.async_scheduling,
        }
        llm.reset_prefix_cache()
        seconds = generate(llm, prompts, lengths)
        grpo = {
            "load": "grpo",
            "sequences": len(lengths),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "tokens_per_s": round(sum(lengths) / seconds),
            "seconds": round(seconds, 2),
        }
        print_table([grpo | engine])  # before anything else can fail
        llm.reset_prefix_cache()
        prompts, lengths = prefill_load(vocabulary)
        seconds = generate(llm, prompts, lengths)
        tokens = PREFILL_PROMPTS * PREFILL_PROMPT
        prefill = {
            "load": "prefill",
            "sequences": PREFILL_PROMPTS,
            "prompt": PREFILL_PROMPT,
            "prefill_tokens_per_s": round(tokens / seconds),
            "seconds": round(seconds, 2),
        }
        print_table([prefill | engine])
        engine["layers"] = sorted(set(re.findall(r"\b(?:quant|backend)=(\w+)", repr(llm))))
        llm.llm_engine.engine_core.shutdown()
    return [grpo | engine, prefill | engine]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument(
        "--quantization",
        choices=["none", "fp8", "fp8_per_block", "fp8_per_channel"],
        default="fp8",
        help="of the linears (default fp8: a scale per weight and one per token)",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=["fp8", "auto"], help="default: fp8, but auto (BF16) for none"
    )
    parser.add_argument("--max-num-seqs", type=int, default=512, help="at once (default 512: all)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--out", default="build/bench/rollout_vllm.json", type=Path, help="JSON file"
    )
    args = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():  # read when vLLM is imported
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("flashinfer") is None:  # vLLM takes it for granted
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    kv = args.kv_cache_dtype or ("auto" if args.quantization == "none" else "fp8")
    rows = run(args.shape, args.quantization, kv, args.max_num_seqs, args.gpu_memory_utilization)
    command = (
        f"python benchmarks/vllm_rollout.py --shape {args.shape} --quantization "
        f"{args.quantization} --kv-cache-dtype {kv} --max-num-seqs {args.max_num_seqs}"
    )
    write_results(args.out, "rollout_vllm", command, rows, vllm=importlib.metadata.version("vllm"))


if __name__ == "__main__":
    main()
