"""Count the bytes that a run of the plan `integer` allocates on a GPU that is not there.

    python tests/memory/portable_bytes.py

Tensors of torch's `meta` device stand for a GPU's, as in tests/kernels/compile_kernels.py; no
kernel is compiled. Prints JSON: for each case the bytes that were counted, and those of the plan.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "kernels"), str(Path(__file__).parents[2])]

import compile_kernels
import torch
from compile_kernels import META, Driver, empty, policy_of, sources_for_meta, take_torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import driver, jit


class Counted(TorchDispatchMode):
    """Counts the bytes of tensors that were made in the block, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_meta(x)}
        out = function(*args, **(kwargs or {}))
        for x in filter(_is_meta, tree_leaves(out)):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    @property
    def now(self) -> int:
        self.made = {key: kept for key, kept in self.made.items() if not kept[0].expired()}
        return sum(size for _, size in self.made.values())


def _is_meta(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


def peak_of(work: Callable[[], object]) -> int:
    with Counted() as counted:
        work()
    return counted.peak


def micro_batch(
    shape: str, recomputed: bool = False, plan: Any = "integer"
) -> dict[str, tuple[int, int]]:
    """Forward and backward of a packed batch: what forward keeps, and the maximum."""
    from jetrl.memory import activations
    from jetrl.memory.activations import PlannedMicroBatch
    from jetrl.models.packed import ForwardInputs

    policy, lengths = policy_of(shape, plan), [4096] * 4
    config, plan, tokens = policy.config, policy.plan, sum(lengths)
    shape += "" if plan.saved == "off" else " saved"
    ends = torch.tensor([0, *lengths]).cumsum(0)
    inputs = ForwardInputs.packed(torch.zeros(tokens, dtype=torch.int64), ends)
    targets = torch.arange(1, tokens)
    for master in policy.master_weights().values():  # as after another micro-batch
        master.grad = torch.empty_like(master)
    policy.weights.gradients.begin_micro_batch([tokens])
    with Counted() as counted:
        logprobs, _ = policy.train_logprobs(inputs, ends, targets, 1.0, recomputed)
        kept = counted.now
        logprobs.backward(empty(len(targets), dtype=torch.float32))
    batch = PlannedMicroBatch(tokens, max(lengths), several=True)
    wgrad = activations.wgrad_bytes(config, plan, batch, 1, None)
    planned = activations.kept_bytes(config, plan, tokens, recomputed)
    on_top = activations.on_top_bytes(config, plan, batch, recomputed, wgrad, None)
    if recomputed:  # the plan counts the layer that is made again as kept
        return {f"{shape} again: peak": (counted.peak, planned + on_top)}
    kept -= 4 * len(targets) * config.vocab_size  # logits, which the plan counts on top
    return {f"{shape}: kept": (kept, planned), f"{shape}: peak": (counted.peak, planned + on_top)}


def saving_codes(shape: str) -> dict[str, tuple[int, int]]:
    """A micro-batch under `int8 saved=int8`; `int8` differs from its plan by the same amount.

    The plan is Hopper's, whose backward of SwiGLU allocates less.
    """
    from jetrl.precision import PrecisionPlan

    plain = PrecisionPlan.preset("int8")
    coded = micro_batch(shape, plan=plain.replace(saved="int8"))
    more = [counted - planned for counted, planned in micro_batch(shape, plan=plain).values()]
    return {
        what: (counted - beyond, planned)
        for (what, (counted, planned)), beyond in zip(coded.items(), more, strict=True)
    }


def attention(lengths: Sequence[int]) -> dict[str, tuple[int, int]]:
    """The backward of attention alone, whose plan is exact for lengths in whole blocks."""
    from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
    from jetrl.kernels.portable.attention_backward import attention_backward
    from jetrl.models.mixer import AttentionShape
    from jetrl.precision.formats import INT8

    heads, groups, size, tokens = 14, 2, 64, sum(lengths)
    q, statistics = empty(tokens, heads, size), empty(2, tokens, heads, dtype=torch.float32)
    codes = KeyValueCodes.empty(tokens, groups, size, kv_format="int8", device=META)
    tiles = QueryTiles.packed(torch.tensor([0, *lengths]).cumsum(0), META)
    tiles.padded  # noqa: B018 (made once for all layers)
    counted = peak_of(lambda: attention_backward(q, q, codes, q, statistics, tiles))
    given = 2 * heads * size * tokens  # dO
    mixer = AttentionShape(
        num_heads=heads, num_kv_heads=groups, head_dim=size, qkv_bias=False, qk_norm=False
    )
    planned = mixer.backward_bytes(tokens, max(lengths), shared=False, queries=INT8)
    return {f"attention of {len(lengths)} sequences": (counted, planned - given)}


def sampling(shape: str) -> dict[str, tuple[int, int]]:
    """Forwards of decode, with many parts of a context, and of prompts behind long contexts."""
    from jetrl.memory import activations
    from jetrl.models.attention import staged_bytes_per_token
    from jetrl.models.packed import ForwardInputs
    from jetrl.rollout.decode import DecodeBuffers, ForwardSize, GraphForwards
    from jetrl.rollout.kv_cache import PagedCache, Span
    from jetrl.rollout.sampler import Filtering

    policy = policy_of(shape, "integer")
    config, plan = policy.config, policy.plan
    cache = PagedCache(config, plan, 4096, 64, META)
    forwards = object.__new__(GraphForwards)  # no graphs, and no pool of theirs
    forwards.policy, forwards.cache = policy, cache
    forwards.buffers, forwards.speculation = DecodeBuffers.empty(512, 8, 512, META), None
    rows, longest = 256, 32768
    decode = peak_of(lambda: forwards.forward(ForwardSize(rows, longest, Filtering())))
    planned = activations.forward_bytes(config, plan, rows, splits=longest // 1024)
    found = {f"{shape}: decode": (decode, planned + 4 * rows * config.vocab_size)}
    length, count, earlier = 1024, 8, 31 * 1024
    pages = list(range((earlier + length) // 64))
    spans = [Span(i * length, earlier, length, pages) for i in range(count)]
    tokens = torch.zeros(count * length, dtype=torch.int64, device=META)
    inputs = ForwardInputs(tokens, tokens)
    kv = cache.key_values(spans)
    prefill = peak_of(lambda: policy.rollout_forward(inputs, kv))
    contexts = count * (earlier + length)
    planned = activations.forward_bytes(config, plan, count * length, contexts)
    assert contexts * staged_bytes_per_token(config, plan) < planned
    return found | {f"{shape}: prompts": (prefill, planned)}


def main() -> None:
    jit.JITFunction.run = lambda *_, **__: None
    driver.set_active(Driver())
    with tempfile.TemporaryDirectory() as toolkit, sources_for_meta():
        take_torch(Path(toolkit))
        from jetrl.precision.backend import select_backend

        select_backend("triton", defined=True)
        base = compile_kernels.shapes()["qwen3-0.6b"]
        small = {**base, "vocab_size": 4096}
        # Named for what needs the most memory.
        named = {
            "head": base,
            "attention": {**small, "intermediate_size": 512},
            "MLP": {**small, "intermediate_size": 16384},
        }
        compile_kernels.shapes = lambda: named
        found = attention([4096] * 4) | attention([256] * 64) | attention([128])
        for shape in named:
            found |= micro_batch(shape) | sampling(shape)
        found |= micro_batch("attention", recomputed=True)
        select_backend("triton")
        for shape in ("attention", "MLP"):
            found |= saving_codes(shape)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
