r"""The training phase of a step on one GPU, at the shape of a real model, under several plans.

    jetrl bench train --shape qwen3-8b --prompts 4 --samples 8 --prompt-length 256 \
        --response-length 2048 --profile --out train.json

Each plan runs `Trainer.step` on random tokens. The log-probs that an exact plan's trainer checks
come from its own forward without gradients, which is timed as well (`old_logprobs_s`): other flows
need this pass for old log-probs. `different` compares forwards with and without gradients.

`parts_ms` divides another update by CUDA events: forward (without the output projection), lm_head
(forward and backward), backward (without it), gradient norm, optimizer, requantize, and `rest`.
With --profile one more update runs under torch.profiler: the idle share of the device, and the time
per kernel.

    jetrl bench train --shape qwen3-8b --plan int8 --teacher none --teacher token \
        --teacher vocabulary

`--teacher` distills from a frozen teacher of the same shape (algorithm.name = opd), with teacher.kl
= token or vocabulary. `distillation_ms` divides one more update: the teacher's forward, and the KL
of the vocabulary, that is the logits of both and the loss, forward and backward, `softmaxes` being
its part without products. `kl_share` is the KL's share of that update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.flow import Choices, Flow, policy_of, with_logprobs
from benchmarks.harness import (
    Row,
    add_load_arguments,
    bench_parser,
    command_typed,
    load_of,
    print_table,
    write_results,
)
from benchmarks.loads import Load, flops
from benchmarks.policies import plan_facts, plans_of
from benchmarks.step import add_arguments, choices_of, limit_of
from benchmarks.timing import idle_pieces, mark, milliseconds_between, watched

import jetrl.training.trainer as trainer_module
from jetrl.kernels import logprob_triton
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.training import distillation
from jetrl.types import Sample

_LISTED = 25  # kernels of a profile


def measure(
    policy: Policy, load: Load, choices: Choices, limit: float, profiled: bool, updates: int = 1
) -> Row:
    """Return the row of a plan."""
    flow = Flow(policy, load, choices)
    flow.fit(shared=False)
    samples = flow.synthetic(load.sequences, seed=2)
    old, logprobs = flow.timed("old_logprobs", lambda: flow.old_logprobs(samples))
    given = with_logprobs(samples, logprobs)
    made: list[tuple[float, Any]] = []
    while len(made) < updates:
        given = again(flow, samples) if made else given
        made.append(flow.timed("update", partial(flow.update, given)))
    whole, trained = sorted(made, key=lambda one: one[0])[(updates - 1) // 2]
    metrics, timings = trained.metrics, trained.timings
    passes = whole - timings["optimizer"] - timings["requantize"]
    needed = flops(flow.policy.config, load, choices.adapter_rank > 0)
    row: Row = {
        **plan_facts(policy),
        "teacher": choices.teacher,
        "load": str(load),
        "settings": flow.chosen,
        "training_s": round(whole, 3),
        "training_s_of_updates": [round(seconds, 3) for seconds, _ in made],
        "tokens_per_s": round(load.tokens / whole),
        "passes_tokens_per_s": round(load.tokens / passes),
        "mfu": round(needed["update"] / whole / limit, 3),
        "passes_mfu": round(needed["update"] / passes / limit, 3),
        "optimizer_ms": round(1e3 * timings["optimizer"], 1),
        "requantize_ms": round(1e3 * timings["requantize"], 1),
        "old_logprobs_s": round(old, 3),
        "old_logprobs_mfu": round(needed["old_logprobs"] / old / limit, 3),
        "peak_gib": flow.peaks,
        "different": int(metrics["mismatch/num_different"]),
        "compared_tokens": int(metrics["mismatch/num_tokens"]),
    }
    if flow.policy.device.type == "cuda":
        row["parts_ms"] = update_times(flow, again(flow, samples))
        if profiled:
            row |= profile(flow.update, again(flow, samples))
    if choices.teacher == "vocabulary":
        row["distillation_ms"] = parts = distillation_times(flow, again(flow, samples))
        row["kl_share"] = round((parts["KL forward"] + parts["KL backward"]) / parts["update"], 4)
    return row


def again(flow: Flow, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the current log-probs of the policy."""
    return with_logprobs(samples, flow.old_logprobs(samples))


def update_times(flow: Flow, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the milliseconds of an update's stages."""
    head = logprob_triton._HeadLogprobs
    optimizer = flow.trainer.optimizer
    functions = [
        (trainer_module, "batch_logprobs", "forward", False),
        (torch.Tensor, "backward", "backward", False),
        (head, "forward", "lm_head forward", True),
        (head, "backward", "lm_head backward", True),
        (optimizer, "gradient_norm", "gradient norm", False),
        (optimizer, "apply", "optimizer", False),
        (flow.policy, "requantize", "requantize", False),
    ]
    log: list[tuple[str, Any, Any]] = []
    torch.cuda.synchronize()
    start = mark()
    with watched(functions, log):
        flow.update(samples)
    end = mark()
    times: dict[str, float] = defaultdict(float)
    for name, a, b in log:
        times[name] += milliseconds_between(a, b)
    times["forward"] -= times["lm_head forward"]
    times["backward"] -= times["lm_head backward"]
    times["rest"] = milliseconds_between(start, end) - sum(times.values())
    return {name: round(ms, 1) for name, ms in times.items()}


def distillation_times(flow: Flow, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the milliseconds of the parts of an update that learns from a teacher's vocabulary."""
    hidden_ready: list[Any] = []  # the end of the KL's backward, which comes first
    vocabulary_kl = distillation.Distillation._vocabulary_kl

    def watched_kl(self: Any, student: Policy, hidden: torch.Tensor, *others: Any) -> Any:
        hidden.register_hook(lambda _: hidden_ready.append(mark()))
        return vocabulary_kl(self, student, hidden, *others)

    functions = [
        (distillation, "hidden_states", "teacher forward", False),
        (distillation, "reverse_kl", "softmaxes", False),
        (distillation.Distillation, "_vocabulary_kl", "KL forward", False),
        (torch.Tensor, "backward", "backward", False),
        (flow, "update", "update", False),
    ]
    log: list[tuple[str, Any, Any]] = []
    patched = mock.patch.object(distillation.Distillation, "_vocabulary_kl", watched_kl)
    with patched, watched(functions, log):
        flow.update(samples)
    times: dict[str, float] = defaultdict(float)
    for name, start, end in log:
        times[name] += milliseconds_between(start, end)
    starts = [start for name, start, _ in log if name == "backward"]
    for start, ready in zip(starts, hidden_ready, strict=True):
        times["KL backward"] += milliseconds_between(start, ready)
    return {name: round(ms, 1) for name, ms in times.items()}


def profile(update: Callable[[Sequence[Sample]], object], samples: Sequence[Sample]) -> Row:
    """Return the idle share of the device in an update, and the time per kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        update(samples)
        torch.cuda.synchronize()
    spans, times, counts = [], Counter[str](), Counter[str]()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            times[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    total = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "idle_share": round(sum(idle_pieces(spans)) / total, 4),
        "launches": len(spans),
        "kernels": [
            {
                "kernel": name[:80],
                "ms": round(time / 1e3, 1),
                "share": round(time / total, 4),
                "launches": counts[name],
            }
            for name, time in times.most_common(_LISTED)
        ],
    }


def compare(row: Row, base: Row) -> Row:
    """Return the speed-ups of a plan over `base`, and its peak memory relative to it."""
    peaks = base["peak_gib"]
    return {
        "training": round(base["training_s"] / row["training_s"], 3),
        "passes": round(row["passes_tokens_per_s"] / base["passes_tokens_per_s"], 3),
        "old_logprobs": round(base["old_logprobs_s"] / row["old_logprobs_s"], 3),
        "training_with_old_logprobs": round(
            (base["training_s"] + base["old_logprobs_s"]) / row["training_s"], 3
        ),
        "peak_memory": {n: round(g / peaks[n], 3) for n, g in row["peak_gib"].items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench train`."""
    parser = bench_parser("train", __doc__)
    add_arguments(parser)
    add_load_arguments(parser, prompts=8, samples=8)
    parser.add_argument("--profile", action="store_true", help="idle share, and time by kernel")
    parser.add_argument(
        "--teacher",
        action="append",
        choices=("none", "token", "vocabulary"),
        help="distill from a teacher, by this KL; repeatable",
    )
    parser.add_argument("--updates", type=int, default=1, help="the row is the median's; default 1")
    parser.add_argument("--out", default="build/bench/train.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    load, choices, plans = load_of(args), choices_of(args), plans_of(args)
    limit = limit_of(args.device)
    rows: list[Row] = []
    for plan in plans:
        policy = policy_of(plan, choices)
        for kl in args.teacher or ("none",):
            of_teacher = replace(choices, teacher="" if kl == "none" else kl)
            row = measure(policy, load, of_teacher, limit, args.profile, args.updates)
            release()
            if rows and rows[0]["plan"] == "bf16":
                row["times_bf16"] = compare(row, rows[0])
            rows.append({"shape": args.shape, **row})
            if args.device == "cuda":
                facts = {"bf16_matrix_teraflops": round(limit / 1e12, 1)}
                command = command_typed("jetrl bench train", argv)
                write_results(args.out, "train", command, rows, **facts)
            print_table(row.pop("kernels", []) or [])
            for name in ("settings", "parts_ms", "distillation_ms", "times_bf16"):
                if name in row:
                    print(f"{plan} {name}: {row.pop(name)}")
            print_table([row])
        del policy
        release()


if __name__ == "__main__":
    main()
