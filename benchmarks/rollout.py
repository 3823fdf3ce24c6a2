r"""The rollout engine on one GPU, at the shape of a real model with random weights.

    jetrl bench rollout --shape qwen3-8b --plan unified --plan bf16 \
        --case 256x128x512 --case 64x8192x128 --out rollout.json
    jetrl bench rollout --shape qwen3-8b --load grpo
    jetrl bench rollout --shape qwen3-8b --adapter-rank 32 --case 8x128x256 \
        --plan bf16 --plan unified --plan "unified base=nvfp4" --plan "int8 kv=bf16"

A case is SEQUENCES x PROMPT TOKENS x RESPONSE TOKENS, with different prompts, end-of-sequence
ignored and log-probs on. `decode_ms` is the median time from one decode step to the next, host
included. Its floor is the time to read the weights (of experts, those that the tokens can choose)
and the KV cache at the mean context, at the measured copy bandwidth. The log-probs of the first
sequences are compared bitwise with the trainer's. With `--rounds`, a row is that of the median
round. `--profile` adds the time per kernel of decode.

The load `grpo` has 64 prompts of 256 tokens with 8 samples each and a long tail: log-normal lengths
(sigma 0.8 of the logarithm, mean 1500, at most 8192). `tail` has 16 prompts and half the lengths,
the same as in `jetrl bench speculation`. Before the timing, every size of batch and context runs
once, so that all graphs are captured; the row has their number and seconds.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import (
    Row,
    add_adapter_argument,
    add_shape_arguments,
    bench_parser,
    command_typed,
    print_table,
    write_results,
)
from benchmarks.loads import TAILED, tailed_load
from benchmarks.policies import add_plan_argument, make_policy, plan_facts, plans_of
from benchmarks.timing import copy_bandwidth

from jetrl.memory.device import peak_bytes, reset_peak
from jetrl.memory.out_of_memory import release
from jetrl.models.attention import kv_bytes_per_token
from jetrl.models.experts import blocks_of
from jetrl.models.policy import Policy
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import operand_tensors
from jetrl.rollout.decode import padded_batch, padded_context
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions, Progress
from jetrl.types import Completion, SamplingParams

CHECKED_TOKENS = 20_000  # of the exactness check, prompts included
_WARM_TOKENS = 2**16  # of prompts that are all run before the timing
# Of a warm-up: tokens that one more number of running sequences lasts, at least the forwards of a
# decode step; and the most sequences that end at once.
_WINDOW, _TOGETHER = 8, 64
_AHEAD = 64  # Tokens by which the context of a launched decode step may be ahead of the ends known.


def weight_bytes(policy: Policy, tokens: int) -> int:
    """Return the bytes of weights that a decode forward reads: those of linears and lm_head.

    Of experts, as many are counted as that many tokens can choose.
    """
    shares: dict[Linear, float] = {}
    for block in blocks_of(policy.decoder):
        share = min(1.0, tokens * block.shape.rule.num_chosen / block.shape.num_experts)
        shares |= {block.gate_up: share, block.down: share}
    total = 0.0
    for module in policy.decoder.modules():
        if isinstance(module, Linear):
            tensors = operand_tensors(module.operand("rollout"))
            total += shares.get(module, 1.0) * sum(t.nbytes for t in tensors)
    return round(total)


class _Watch:
    """A progress callback that records the time of each scheduler step, and profiles some."""

    def __init__(self, profiled: int = 0) -> None:
        self.records: list[tuple[float, Progress]] = []
        self._profiled = profiled
        self.profiler: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._profiled and progress.tokens >= 4 * progress.sequences_total:
            if self.profiler is None:
                self.profiler = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CUDA]
                )
                self.profiler.start()
                self._first = progress.tokens
            elif progress.tokens - self._first >= self._profiled * progress.sequences_total:
                torch.cuda.synchronize()
                self.profiler.stop()
                self._profiled = 0
        self.records.append((time.perf_counter(), progress))

    def seconds_per_step(self, full: int) -> float:
        """Return the median seconds of a decode forward of `full` sequences."""
        times = []
        for (before, a), (after, b) in zip(self.records, self.records[1:], strict=False):
            forwards, rest = divmod(b.tokens - a.tokens, full)
            if forwards > 0 and rest == 0:
                times += [(after - before) / forwards] * forwards
        return statistics.median(times[len(times) // 10 :])


def run_case(policy: Policy, sizes: Sequence[int], profiled: bool) -> Row:
    """Return the row of one case, timed after a short warm-up of the same sizes.

    The warm-up uses only two prompts if all are too long.

    Args:
        sizes: Sequences, prompt tokens and response tokens.
    """
    batch, prompt, response = sizes
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, policy.config.vocab_size, (batch, prompt)).tolist()
    pages = batch * -(-(prompt + response) // 64)  # of the timed call, so that its graphs are warm
    engine = RolloutEngine(policy, max_batch_size=batch, num_pages=pages)
    params = SamplingParams(max_tokens=response, ignore_eos=True, seed=1)
    short = SamplingParams(max_tokens=min(response, 40), ignore_eos=True, seed=1)
    all_at_once = batch * prompt <= _WARM_TOKENS
    warm = _Watch(24 if profiled and all_at_once else 0)
    began = time.perf_counter()
    engine.generate(prompts if all_at_once else prompts[:2], short, progress=warm)
    first = time.perf_counter() - began
    graphs, capture_s = engine.stats.graphs, engine.stats.capture_s
    reset_peak()
    watch = _Watch()
    completions = engine.generate(prompts, params, progress=watch)
    stats = engine.stats
    step = watch.seconds_per_step(batch)
    context = prompt + response / 2
    floor = weight_bytes(policy, batch)
    floor += int(batch * context * kv_bytes_per_token(policy.config, policy.plan.on("rollout")))
    row: Row = {
        **plan_facts(policy),
        "kv": policy.plan.kv,
        "base": policy.plan.base,
        "sequences": batch,
        "prompt": prompt,
        "response": response,
        "decode_ms": round(step * 1e3, 3),
        "floor_ms": round(floor / copy_bandwidth() * 1e3, 3),
        "share_of_floor": round(floor / copy_bandwidth() / step, 3),
        "decode_tokens_per_s": round(batch / step),
        "tokens_per_s": round(stats.tokens_drawn / stats.seconds),
        "prefill_tokens_per_s": round(stats.tokens_prefilled / stats.prefill_s),
        "idle_share": round(stats.device_idle_s / stats.seconds, 4),
        "peak_gib": round(peak_bytes() / 2**30, 1),
        "first_call_s": round(first, 1),
        "graphs": graphs + stats.graphs,
        "capture_s": round(capture_s + stats.capture_s, 2),
        "seconds": round(stats.seconds, 2),
        **check(policy, prompts, completions),
    }
    if warm.profiler is not None:
        row["profile"] = profile_rows(warm.profiler)
    return row


def warm_lengths(count: int) -> list[int]:
    """Return the tokens of each sequence of a warm-up, the longest first.

    Every size of graph runs for a decode step; the last one has a single sequence.
    """
    running = {1, *range(_TOGETHER, count, _TOGETHER), *map(padded_batch, range(1, count + 1))}
    return [_WINDOW * sum(min(n, count) > index for n in running) for index in range(count)]


def capture_largest(engine: RolloutEngine, count: int, longest: int) -> tuple[int, float]:
    """Capture the graph of all sequences at the longest context; return 1 (or 0) and the seconds.

    It is the graph with the largest memory, and its cache has all the pages that sequences can use.
    """
    few = min(_WINDOW, longest - 1)
    params = SamplingParams(n=count, max_tokens=few, ignore_eos=True, seed=1)
    engine.generate([[1] * (longest - few)], params)
    return engine.stats.graphs, engine.stats.capture_s


def capture_graphs(
    engine: RolloutEngine,
    count: int,
    shortest: int,
    longest: int,
    totals: Sequence[int] | None = None,
) -> tuple[int, float]:
    """Capture every graph that sequences need; return the number of graphs and the seconds.

    Each size of context gets a call, the longest first, since a call that needs more pages makes a
    new cache without graphs. If sequences of different lengths all run together, few of them reach
    the longer contexts, which then need only graphs of small batches.

    Args:
        totals: The final tokens of each sequence, prompt included, if all run together; None:
            capture every batch size at every context.
    """
    graphs, seconds = (0, 0.0) if totals is None else capture_largest(engine, count, longest)
    size, first = padded_context(longest), padded_context(shortest + 1)
    end = longest
    while size >= first:
        together = count
        if totals is not None and size > first:
            together = sum(total > size // 2 - _AHEAD for total in totals)
        lengths = warm_lengths(max(1, together))
        shortest_of_size = 1 if size == padded_context(1) else size // 2 + 1
        prompt = max(shortest_of_size, end - lengths[0])
        params = SamplingParams(n=len(lengths), max_tokens=lengths[0], ignore_eos=True, seed=1)
        engine.generate([[1] * prompt], params, options=GenerateOptions(max_tokens=lengths))
        graphs += engine.stats.graphs
        seconds += engine.stats.capture_s
        size //= 2
        end = size
    return graphs, seconds


def run_tailed(policy: Policy, name: str) -> Row:
    """Return the row of a load with a tail."""
    load, prompts, max_tokens = tailed_load(name, policy.config.vocab_size)
    lengths, count = np.array(max_tokens), len(max_tokens)
    engine = RolloutEngine(policy, max_batch_size=count)
    params = SamplingParams(load.samples, load.response_length, ignore_eos=True, seed=1)
    graphs, capture_s = capture_graphs(engine, count, load.prompt_length, load.length)
    reset_peak()
    completions = engine.generate(prompts, params, options=GenerateOptions(max_tokens=max_tokens))
    stats, peak = engine.stats, peak_bytes()
    engine.free_cache()  # it has all the memory that the check needs
    per_token = kv_bytes_per_token(policy.config, policy.plan.on("rollout"))
    running = np.sort(lengths)[::-1]
    steps = int(running[0])
    alive = np.searchsorted(-running, -np.arange(1, steps + 1), side="right")
    kv = float((lengths * (lengths + 1) / 2 + lengths * load.prompt_length).sum()) * per_token
    read = functools.cache(functools.partial(weight_bytes, policy))
    floor = (sum(map(read, alive.tolist())) + kv) / copy_bandwidth()
    owners = [prompts[i // load.samples] for i in range(count)]
    return {
        **plan_facts(policy),
        "kv": policy.plan.kv,
        "base": policy.plan.base,
        "load": name,
        "sequences": count,
        "tokens": stats.tokens_drawn,
        "mean_length": round(float(lengths.mean())),
        "longest": steps,
        "mean_running": round(float(alive.mean()), 1),
        "tokens_per_s": round(stats.tokens_drawn / stats.seconds),
        "seconds": round(stats.seconds, 2),
        "floor_s": round(floor, 2),
        "share_of_floor": round(floor / stats.seconds, 3),
        "idle_share": round(stats.device_idle_s / stats.seconds, 4),
        "preemptions": stats.preemptions,
        "graphs": graphs,
        "capture_s": round(capture_s, 2),
        "graphs_captured_late": stats.graphs,
        "peak_gib": round(peak / 2**30, 1),
        **check(policy, owners, completions),
    }


@torch.no_grad()
def check(policy: Policy, prompts: Sequence[list[int]], completions: Sequence[Completion]) -> Row:
    """Count tokens of the first completions whose log-probs differ from the trainer's."""
    forwarded = compared = different = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        size = len(prompt) + len(completion.token_ids)
        if forwarded and forwarded + size > CHECKED_TOKENS:
            break
        (trainer,) = policy.logprobs([[*prompt, *completion.token_ids]])
        ours = torch.tensor(completion.logprobs)
        theirs = trainer[len(prompt) - 1 :].cpu()
        different += int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
        forwarded += size
        compared += len(ours)
    return {"checked_tokens": compared, "different": different if policy.plan.exact else "-"}


def median_round(rounds: list[Row]) -> Row:
    """Return the row of the round with the median decode step, and the steps of all rounds."""
    if len(rounds) == 1:
        return rounds[0]
    middle = sorted(rounds, key=lambda row: row["decode_ms"])[(len(rounds) - 1) // 2]
    return {**middle, "decode_ms_of_rounds": [row["decode_ms"] for row in rounds]}


# The kind of a kernel by a part of its name; the first entry that fits counts.
_KINDS = {
    "deep_gemm": "linears, FP8 (DeepGEMM)",
    "rows_gemm_kernel": "linears, FP8 (few rows)",
    "nvfp4_rows_kernel": "linears, NVFP4 (few rows)",
    "widen_kernel": "linears, NVFP4 (widening for many rows)",
    "cutlass": "linears (cuBLAS)",
    "nvjet_sm90_tss": "lm_head, BF16 (cuBLAS)",
    "nvjet": "linears, BF16 (cuBLAS)",
    "combine_kernel": "attention: splits put together",
    "decode_kernel": "attention",
    "_row_kernel": "norms, with quantization",
    "down_rows_kernel": "adapters: product with A",
    "_rows_kernel": "SwiGLU with quantization, and quantization",
    "_int8_kernel": "SwiGLU with quantization, and quantization",
    "rows_kernel": "linears, INT8 (few rows)",
    "_product_kernel": "linears, INT8",
    "_forward_kernel": "QK norm, rotary, keys and values to their pages",
    "forward_kernel": "attention",
    "stage_keys_kernel": "keys and values widened for attention",
    "_down_kernel": "adapters: product with A",
    "_up_kernel": "adapters: product with B",
    "_sample_": "log-probs and draw",
    "_exclude_kernel": "top_k, top_p and min_p",
    "_take_kernel": "what was drawn",
    "_inputs_kernel": "inputs and random bits",
}
_LISTED = 20  # kernels of a profile


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    return next((kind for name, kind in _KINDS.items() if name in kernel), "other")


def profile_rows(profiler: Any) -> list[Row]:
    """Return microseconds and launches per decode forward, by kind (= KIND), then by kernel."""
    times, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in profiler.events():
        if event.device_time > 0:
            for name in (event.name, f"= {kind_of(event.name)}"):
                times[name] += event.device_time
                counts[name] += 1
    total = sum(time for name, time in times.items() if name.startswith("= "))
    names = sorted(times, key=lambda name: -times[name])
    kinds = [name for name in names if name.startswith("= ")]
    kernels = [name for name in names if not name.startswith("= ")]
    forwards = counts["_take_kernel"]  # one launch of it takes the draws of a forward in
    return [
        {
            "kernel": name[:60],
            "us_a_forward": round(times[name] / forwards, 1),
            "share": round(times[name] / total, 3),
            "launches": round(counts[name] / forwards, 2),
            "us_each": round(times[name] / counts[name], 2),
        }
        for name in (*kinds, *kernels[:_LISTED])
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench rollout`."""
    parser = bench_parser("rollout", __doc__)
    add_shape_arguments(parser)
    add_plan_argument(parser)
    add_adapter_argument(parser)
    parser.add_argument(
        "--case", action="append", help="BxPxR, repeatable; default, without a load: 64x128x512"
    )
    parser.add_argument("--load", choices=TAILED, help="lengths with a tail, instead of a case")
    parser.add_argument("--rounds", type=int, default=1, help="of each case (default 1)")
    parser.add_argument("--profile", action="store_true", help="time by kernel, a case at a time")
    parser.add_argument("--out", default="build/bench/rollout.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    cases = args.case or ([] if args.load else ["64x128x512"])
    command = command_typed("jetrl bench rollout", argv)
    plans = plans_of(args)
    rows: list[Row] = []
    copy_bandwidth()  # measured once, while memory is free

    def add(row: Row) -> None:
        rows.append({"shape": args.shape, "adapter_rank": args.adapter_rank, **row})
        print_table([{key: value for key, value in rows[-1].items() if key != "profile"}])
        print_table(row.get("profile", []))
        write_results(args.out, "rollout", command, rows)  # each time: a later case may fail

    for plan in plans:
        policy = make_policy(
            args.shape, plan, "cuda", args.layers, args.adapter_rank, trained=False
        )
        for case in cases:
            sizes = tuple(int(number) for number in case.split("x"))
            add(median_round([run_case(policy, sizes, args.profile) for _ in range(args.rounds)]))
        if args.load:
            add(run_tailed(policy, args.load))
        del policy
        release()


if __name__ == "__main__":
    main()
