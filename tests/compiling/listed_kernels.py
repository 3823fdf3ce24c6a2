"""Print the kernels that launches of many sizes ask for and that are not compiled ahead.

    python tests/compiling/listed_kernels.py '{"shape": "qwen3-8b", "plan": "unified"}'

It is a program of its own, since a stand-in for a GPU changes the whole process, and answers in
JSON.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from jetrl.compiling import launches
from jetrl.compiling.stand_in_hopper import Kernel, stand_in
from jetrl.kernels.sampling import sample
from jetrl.models.adapter import LoRA
from jetrl.models.families import ModelConfig
from jetrl.models.policy import Policy
from jetrl.models.shapes import SHAPES
from jetrl.precision import PrecisionPlan
from jetrl.precision.hopper import gemm
from jetrl.rollout.decode import MAX_REPEATS
from jetrl.rollout.decode_forward import DecodeBuffers, ForwardSize, GraphForwards
from jetrl.rollout.draft_widths import Width, choices
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.paged_attention import Span
from jetrl.rollout.speculation import Speculation

CUDA = launches.CUDA
ROUNDS = 8


def micro_batch(policy: Policy, rng: random.Random) -> None:
    first = rng.randint(1, 3000)
    end = first + rng.choice([1, 2, 15, 16, 64, 500, 4096, 9000])
    count = min(end - 1, rng.choice([1, 7, 16, 900]))
    chosen = [t for t in sorted(rng.sample(range(1, end), count)) if t != first] or [end - 1]
    ends, recomputed = torch.tensor([0, first, end]), rng.random() < 0.5
    launches._forward_and_backward(policy, ends, torch.tensor(chosen), recomputed, None)


def prompts(policy: Policy, rng: random.Random) -> None:
    cache = PagedCache(policy.config, policy.plan, rng.randint(100, 3000), 64, CUDA)
    spans: list[Span] = []
    rows = 0
    for _ in range(rng.choice([1, 2, 9])):
        start = 64 * rng.randint(0, 200) if rng.random() < 0.4 else 0
        length = rng.choice([1, 5, 16, 64, 200, 1024])
        spans.append(Span(rows, start, length, list(range(-(-(start + length) // 64)))))
        rows += length
    tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
    hidden = policy.rollout_forward(tokens, tokens, cache.key_values(spans, ends=True))
    logits = policy.rollout_logits(hidden[: rng.choice([1, 2, 3, 4, 8, 16, 64])])
    ones = torch.ones(len(logits), device=CUDA)
    whole = torch.ones(len(logits), dtype=torch.int64, device=CUDA)
    sample(logits, whole, ones, ones, whole, rng.random() < 0.5)


def decode(policy: Policy, rng: random.Random, slots: int, rows: int, drafts: bool) -> None:
    forwards = object.__new__(GraphForwards)
    forwards._policy, forwards.page_size, forwards._speculation = policy, 64, None
    verified = None
    if drafts:
        longest = rng.randint(100, 9000)
        forwards._speculation = Speculation("auto", slots, longest, CUDA)
        most, several = rng.choice(choices(rows))
        verified = Width(most, several, True)
    forwards._cache = PagedCache(policy.config, policy.plan, rng.randint(100, 3000), 64, CUDA)
    width = -(-policy.config.max_position_embeddings // 64)
    forwards._buffers = DecodeBuffers.empty(slots, MAX_REPEATS, width, CUDA, drafts)
    longest = rng.choice([1024, 2048, 8192, 32768])
    forwards.forward(ForwardSize(rows, min(longest, 64 * width), rng.random() < 0.5, verified))


def main(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    gemm.deep_gemm_installed = lambda: True
    config, plan = (
        ModelConfig.from_hf(SHAPES[request["shape"]]),
        PrecisionPlan.preset(request["plan"]),
    )
    lora = LoRA(request["rank"], 32.0) if "rank" in request else None
    slots = request.get("max_batch_size", 256)
    work = launches.Work(
        config,
        plan.replace(base=request.get("base", plan.base)),
        lora,
        slots,
        multiprocessors=132,
        speculation=request.get("speculation", False),
    )
    found: list[Kernel] = []
    products: set[tuple[int, int, int]] = set()
    rng = random.Random(0)
    others, missing = 0, []
    with stand_in(work.multiprocessors, found.append, lambda *size: products.add(size)):
        launches.go_through(work)
        multiplied = len(products)
        listed = len(found)
        policy = launches.stand_in_policy(work)
        rounds = [(prompts, ()), (micro_batch, ())] * ROUNDS
        for drafts in (False, True)[: 1 + work.speculation]:
            rounds += [(decode, (slots, rows, drafts)) for rows in launches.graph_rows(slots)]
        for launched, sizes in rounds:
            before = len(found)
            launched(policy, rng, *sizes)
            others += 1
            missing += [f"{launched.__name__} {sizes}: {kernel.key}" for kernel in found[before:]]
    return {"listed": listed, "others": others, "missing": missing, "products": multiplied}


# The stand-in's tensors are on `cuda` to jetrl's own code.
__name__, name = "jetrl.listed_kernels", __name__
if name == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
