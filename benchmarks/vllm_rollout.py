"""Run vLLM on the loads of `jetrl bench rollout`: the same prompts, the same lengths.

    python -m benchmarks.vllm_rollout --load grpo --quantization fp8
    jetrl bench rollout --shape qwen3-8b --plan int8 --load grpo
    jetrl bench rollout --shape qwen3-8b --plan int8 --case 64x8192x128

    python -m benchmarks.vllm_rollout --load tail --quantization fp8+ngram
    jetrl bench speculation --shape qwen3-8b --load tail --right 0.6

Needs vLLM (0.26.0 was used) in addition to jetrl, and the GPU for itself: run the two one after the
other. Each sample is a request with its length as max_tokens and end-of-sequence ignored. Log-probs
of the drawn tokens are on. Prompts are token ids, so no tokenizer runs. Weights are random: only
the shape counts. Throughput is that of one `generate` call, the tail included, after a warm-up that
compiles kernels and captures graphs. The load `grpo` also measures prefill: 64 prompts of 8192
tokens and one token each, comparable with `jetrl bench rollout --case 64x8192x128`.

vLLM runs with its defaults (compiler, CUDA graphs, asynchronous scheduling, prefix caching, its own
choice of kernels), except for --max-num-seqs and for settings that save it work: no detokenizer,
flat log-probs, and one process. `fp8` is its online quantization of the linears; `fp8_per_block`
has blocks of 128 x 128, as jetrl; `none` is BF16. Its log names the kernels, and the row names its
layers. An FP8 KV cache is not always faster there on Hopper: try --kv-cache-dtype auto (BF16) too.
DeepGEMM or FlashInfer may multiply the blocks, which compile for minutes; CUTLASS does with
VLLM_USE_DEEP_GEMM=0 and VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0. Uninstall sgl-deep-gemm, which vLLM
takes for its own.

After a `+` comes the speculation. `ngram` looks up the last tokens in the text before them, on the
CPU, and `ngram_gpu` on the GPU. Random weights hardly repeat text, so these rows give the price of
look-ups that find nothing. `known` stands for text that repeats: every sequence gets drafts at no
cost, and vLLM's rejection sampler accepts a draft token with probability 0.6 if it accepted those
before it, the odds of `jetrl bench speculation --right 0.6`.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import Row, command_typed, print_table, write_results
from benchmarks.loads import TAILED, tailed_load
from benchmarks.rollout import warm_lengths
from benchmarks.shapes import SHAPES
from benchmarks.timing import copy_bandwidth

PREFILL_PROMPTS, PREFILL_PROMPT = 64, 8192
LINEARS = ("none", "fp8", "fp8_per_block", "fp8_per_channel")
DRAFT_TOKENS, RIGHT = 3, 0.6  # of a draft; the chance of each token of `known` drafts
LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # the tokens that are looked up
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", **LOOK_UP},
    "ngram_gpu": {"method": "ngram_gpu", **LOOK_UP},
    "known": {
        "method": "custom_class",
        "model": "benchmarks.vllm_rollout.Drafts",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [RIGHT**n for n in range(1, DRAFT_TOKENS + 1)],
    },
}


class Drafts:
    """Drafts at no cost for every sequence, of meaningless tokens, in vLLM's interface."""

    def __init__(self, vllm_config: Any) -> None:
        self._tokens = vllm_config.speculative_config.num_speculative_tokens

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each sequence that drew a token; the arguments are vLLM's."""
        return [drawn[-1:] * self._tokens for drawn in sampled_token_ids]


@dataclass(frozen=True)
class Setup:
    """The settings of vLLM and its load.

    Attributes:
        shape: The name of the model's shape.
        drafts: A name of `DRAFTS`, or "off".
        max_num_seqs: The maximum number of sequences at once; None: all.
    """

    shape: str
    load: str
    quantization: str
    drafts: str
    kv_cache_dtype: str
    max_num_seqs: int | None


def set_environment() -> None:
    """Set the variables that vLLM reads on import, unless they are set: one process, no reports."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if importlib.util.find_spec("flashinfer") is None:  # vLLM takes it for granted
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def model_folder(shape: str, folder: str) -> str:
    """Write the config.json of a named shape, without weights; return the folder."""
    config = {**SHAPES[shape], "torch_dtype": "bfloat16"}
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def generate(llm: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds of one call that draws `lengths` tokens after the prompts.

    Each prompt's samples stand side by side.
    """
    from vllm import SamplingParams

    requests = [
        {"prompt_token_ids": p} for p in prompts for _ in range(len(lengths) // len(prompts))
    ]
    fixed = {"ignore_eos": True, "logprobs": 0, "flat_logprobs": True, "detokenize": False}
    params = [SamplingParams(temperature=1.0, max_tokens=length, **fixed) for length in lengths]
    llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    for output, length in zip(outputs, lengths, strict=True):
        drawn = output.outputs[0]
        assert len(drawn.token_ids) == len(drawn.logprobs) == length, (output.request_id, length)
    return seconds


def prefill_load(vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts that share nothing, and one token after each."""
    shape = (PREFILL_PROMPTS, PREFILL_PROMPT)
    return np.random.default_rng(1).integers(0, vocabulary, shape).tolist(), [1] * PREFILL_PROMPTS


def settings(setup: Setup) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` but for the model."""
    shape = SHAPES[setup.shape]
    load, _, lengths = tailed_load(setup.load, shape["vocab_size"])
    found: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "quantization": None if setup.quantization == "none" else setup.quantization,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "max_model_len": load.length,
        "max_num_seqs": setup.max_num_seqs or len(lengths),
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
    }
    if setup.drafts != "off":
        found["speculative_config"] = {
            "num_speculative_tokens": DRAFT_TOKENS,
            **DRAFTS[setup.drafts],
        }
    return found


def measure(setup: Setup) -> Iterator[Row]:
    """Start vLLM, then yield the row of the load, and with `grpo` that of prefill.

    `started_s` of a row includes compilation and the capture of graphs.
    """
    from vllm import LLM

    vocabulary = SHAPES[setup.shape]["vocab_size"]
    load, prompts, lengths = tailed_load(setup.load, vocabulary)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(model=model_folder(setup.shape, folder), **settings(setup))
        started = time.perf_counter() - began
        generate(llm, prompts, warm_lengths(len(lengths)))
        steps = _counted_steps(llm.llm_engine)
        generate(llm, prompts, warm_lengths(len(lengths)))
        config = llm.llm_engine.vllm_config
        engine = {
            "shape": setup.shape,
            "engine": "vLLM",
            "quantization": setup.quantization,
            "speculation": setup.drafts,
            "draft_tokens": 0 if setup.drafts == "off" else DRAFT_TOKENS,
            "started_s": round(started, 1),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "model_runner": 2 if config.use_v2_model_runner else 1,
            "layers": sorted(set(re.findall(r"\b(?:quant|backend)=(\w+)", repr(llm)))),
        }
        steps.clear()
        seconds = generate(llm, prompts, lengths)
        yield {
            "load": setup.load,
            "sequences": len(lengths),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "tokens_per_s": round(sum(lengths) / seconds),
            "seconds": round(seconds, 2),
            "engine_steps": len(steps),
            **engine,
        }
        if load.length > PREFILL_PROMPT:
            seconds = generate(llm, *prefill_load(vocabulary))
            tokens = PREFILL_PROMPTS * PREFILL_PROMPT
            yield {
                "load": "prefill",
                "sequences": PREFILL_PROMPTS,
                "prompt": PREFILL_PROMPT,
                "prefill_tokens_per_s": round(tokens / seconds),
                "seconds": round(seconds, 2),
                **engine,
            }
        llm.llm_engine.engine_core.shutdown()


def _counted_steps(engine: Any) -> list[None]:
    """Return a list that grows by one with each step that vLLM's engine makes from now on."""
    steps: list[None] = []
    step = engine.step

    def counted() -> Any:
        steps.append(None)
        return step()

    engine.step = counted
    return steps


def quantization_and_drafts(text: str) -> tuple[str, str]:
    """Return the format of the linears and the speculation of FORMAT or FORMAT+DRAFTS."""
    quantization, _, drafts = text.partition("+")
    if quantization not in LINEARS or drafts not in ("", *DRAFTS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(LINEARS)}, with +{', +'.join(DRAFTS)} or nothing"
        )
    return quantization, drafts or "off"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure vLLM, and write the rows so far after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--load", choices=TAILED, default="grpo", help="default: grpo")
    parser.add_argument(
        "--quantization",
        type=quantization_and_drafts,
        default=("fp8", "off"),
        metavar="FORMAT[+DRAFTS]",
        help=f"{', '.join(LINEARS)}; + {', '.join(DRAFTS)} (default: fp8)",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=["fp8", "auto"], help="default: fp8, but auto (BF16) for none"
    )
    parser.add_argument("--max-num-seqs", type=int, help="at once (default: all)")
    parser.add_argument(
        "--out", default="build/bench/rollout_vllm.json", type=Path, help="JSON file"
    )
    args = parser.parse_args(argv)
    set_environment()
    quantization, drafts = args.quantization
    kv = args.kv_cache_dtype or ("auto" if quantization == "none" else "fp8")
    setup = Setup(args.shape, args.load, quantization, drafts, kv, args.max_num_seqs)
    command = command_typed("python -m benchmarks.vllm_rollout", argv)
    copy_bandwidth()  # for the results file; measured now, while memory is free
    torch.cuda.empty_cache()
    version = importlib.metadata.version("vllm")
    rows: list[Row] = []
    for row in measure(setup):
        rows.append(row)
        print_table([row])
        write_results(args.out, "rollout_vllm", command, rows, vllm=version)


if __name__ == "__main__":
    main()
