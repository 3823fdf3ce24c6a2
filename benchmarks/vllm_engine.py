"""One vLLM on a load: its settings, its way to speculate, its row (`vllm_rollout.py`)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness import Row, tailed_load
from benchmarks.rollout import warm_lengths
from benchmarks.shapes import SHAPES

PREFILL_PROMPTS, PREFILL_PROMPT = 64, 8192
LINEARS = ("none", "fp8", "fp8_per_block", "fp8_per_channel")
DRAFT_TOKENS, RIGHT = 3, 0.6  # of a draft; the chance of each token of `known` drafts
LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # the tokens that are looked up
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", **LOOK_UP},
    "ngram_gpu": {"method": "ngram_gpu", **LOOK_UP},
    "known": {
        "method": "custom_class",
        "model": "benchmarks.vllm_engine.Drafts",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [RIGHT**n for n in range(1, DRAFT_TOKENS + 1)],
    },
}
_SPARE = 1.25  # times the keys and values that the load holds at most, where memory is shared


class Drafts:
    """Drafts for every sequence at no cost, whose tokens mean nothing, as vLLM asks for them."""

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
    """One vLLM to measure.

    Attributes:
        shape: The name of the model's shape.
        drafts: The name of its way to speculate; "off": none.
        max_num_seqs: The most sequences at once; None: all.
    """

    shape: str
    load: str
    quantization: str
    drafts: str
    kv_cache_dtype: str
    max_num_seqs: int | None
    engines: int

    @property
    def name(self) -> str:
        """The words of --quantization."""
        return self.quantization + ("" if self.drafts == "off" else f"+{self.drafts}")


def set_environment() -> None:
    """Set what vLLM reads when it is imported, unless it is set: one process, no reports."""
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
        "gpu_memory_utilization": 0.9 / setup.engines,
        "enable_prefix_caching": True,
    }
    if setup.drafts != "off":
        found["speculative_config"] = {
            "num_speculative_tokens": DRAFT_TOKENS,
            **DRAFTS[setup.drafts],
        }
    if setup.engines > 1:
        # What is free while others start says nothing of what is left for this one.
        held = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        held *= 2 if setup.kv_cache_dtype == "auto" else 1
        found["kv_cache_memory_bytes"] = int(held * load.most_held * _SPARE)
    return found


def measure(setup: Setup) -> Iterator[Row | None]:
    """Start vLLM and yield None; then yield the row of the load, and with `grpo` of prefill.

    started_s of a row is the start, with compilation and captures, beside the other engines.
    """
    root = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    os.environ["VLLM_CACHE_ROOT"] = f"{root}/{setup.name}"  # two must not write the same files
    from vllm import LLM

    vocabulary = SHAPES[setup.shape]["vocab_size"]
    load, prompts, lengths = tailed_load(setup.load, vocabulary)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(model=model_folder(setup.shape, folder), **settings(setup))
        started = time.perf_counter() - began
        generate(llm, prompts, warm_lengths(len(lengths)))
        yield None
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
            "engines_started_together": setup.engines,
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
