"""Linear layers for the GPU tests, what they multiply, and comparisons of results bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from benchmarks.shapes import SHAPES
from small_models import config

from jetrl import Policy
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights
from jetrl.precision import PrecisionPlan
from jetrl.precision.adapter_weight import AdapterShape, AdapterWeight
from jetrl.precision.quantize import QTensor

# (N, K) and the parts of the linears of Qwen3-8B, and of a layer with a part without an adapter
LINEARS = {
    "qkv": (6144, 4096, ((0, 4096), (4096, 1024), (5120, 1024))),
    "o": (4096, 4096, ((0, 4096),)),
    "gate_up": (24576, 4096, ((0, 12288), (12288, 12288))),
    "down": (4096, 12288, ((0, 4096),)),
    "odd": (1152, 896, ((0, 512), (640, 128))),
}


def layers(*names: str) -> list[tuple[int, int]]:
    """Return (N, K) of each linear of the named models."""
    found = set()
    for m in (SHAPES[name] for name in names):
        hidden, inner, size = m["hidden_size"], m["intermediate_size"], m["head_dim"]
        heads, groups = m["num_attention_heads"], m["num_key_value_heads"]
        found |= {((heads + 2 * groups) * size, hidden), (hidden, heads * size)}
        found |= {(2 * inner, hidden), (hidden, inner)}
    return sorted(found)


def random(rows: int, columns: int, seed: int, std: float = 1.0) -> torch.Tensor:
    """Return normal numbers, every tenth row ten times as large."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=g, device="cuda").mul_(std)
    return x.mul_(1 + 9 * (torch.rand(rows, 1, generator=g, device="cuda") > 0.9)).bfloat16()


def weight(rank: int, columns: int, parts: tuple[tuple[int, int], ...], rows: int) -> AdapterWeight:
    shape = AdapterShape(rank, 0.7, rows, columns, parts)
    g = torch.Generator("cuda").manual_seed(rank)
    a, b = (
        torch.nn.Parameter(torch.randn(size, device="cuda", generator=g) / 8)
        for size in (shape.a_shape, shape.b_shape)
    )
    return AdapterWeight("layers.0.qkv", a, b, shape, torch.bfloat16)


def adapted_policy(
    plan: PrecisionPlan | str = "unified",
    family: str = "qwen3",
    device: str = "cuda",
    base: str | None = None,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Policy:
    """A policy whose adapter has become something; `changes` are keys of config.json."""
    shape = ModelConfig.from_hf(config(family, **(changes or {})))
    adapter = Adapter.new(shape, LoRA(12, 24.0, **options), 0)
    plan = PrecisionPlan.preset(plan) if isinstance(plan, str) else plan
    plan = plan if base is None else plan.replace(base=base)
    weights = dict(RandomWeights(shape, 0))  # the same on a CPU and a GPU
    policy = Policy(ModelSource.from_tensors(shape, weights, adapter=adapter), plan, device)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, master in policy.master_weights().items():
            if name.endswith("lora_B"):
                master.add_(torch.randn(master.shape, generator=g).to(device) * 0.05)
    policy.requantize()
    return policy


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the gradients of the log-probs of some sequences."""
    g = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 1000, (n,), generator=g).tolist() for n in (200, 130, 7, 65, 200)]
    torch.cat(policy.logprobs(sequences)).mean().backward()
    masters = policy.master_weights().items()
    return {name: master.grad.cpu() for name, master in masters if master.grad is not None}


def assert_gradients_are_near(ours: Policy, theirs: Policy, share: float) -> None:
    """Compare the gradients of equal weights."""
    found, true = gradients(ours), gradients(theirs)
    assert found.keys() == true.keys()
    for name in true:
        assert (found[name] - true[name]).norm() <= share * true[name].norm(), name


def assert_gradients_are_as_far(ours: Policy, theirs: Policy, exact: Policy) -> None:
    """Compare the errors of gradients of equal weights, where one format moves them far apart."""
    found, other, true = gradients(ours), gradients(theirs), gradients(exact)
    assert found.keys() == other.keys() == true.keys()
    for name in true:
        assert (found[name] - true[name]).norm() <= 1.2 * (other[name] - true[name]).norm(), name


def poison(*like: torch.Tensor) -> None:
    """Fill memory with NaN, where the allocator then puts tensors of the same sizes."""
    held = [torch.full_like(tensor, float("nan")) for tensor in like]
    del held


def assert_same(ours: torch.Tensor | QTensor, true: torch.Tensor | QTensor, case: str = "") -> None:
    """Assert equal numbers, NaN equal to NaN; codes beyond the true ones are zeros."""
    if isinstance(ours, QTensor) and isinstance(true, QTensor):
        rows = true.shape[0]
        assert not ours.codes[rows:].float().any(), f"{case}: padding"
        if ours.codes.stride(1) == 1 and ours.shape[1] % 128 and ours.codes.dtype != torch.int8:
            width = ours.codes.stride(0)
            whole = ours.codes.as_strided((rows, width), (width, 1)).float()
            assert width % 128 == 0, f"{case}: a stride of {width}"
            assert whole[:, ours.shape[1] :].nan_to_num(0.0).count_nonzero() == 0, f"{case}: zeros"
        assert_same(ours.codes[:rows], true.codes, f"{case}: codes")
        assert_same(ours.scales, true.scales, f"{case}: scales")
        return
    assert isinstance(ours, torch.Tensor)
    assert isinstance(true, torch.Tensor)
    torch.testing.assert_close(
        ours.cpu().float(), true.cpu().float(), rtol=0, atol=0, equal_nan=True,
        msg=lambda text: f"{case}: {text}",
    )  # fmt: skip


def assert_replays(
    make: Callable[[], Sequence[torch.Tensor]], expected: Sequence[torch.Tensor], case: Any = ""
) -> None:
    """Assert that a captured graph makes the expected bits, each time that it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = make()
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True)), case
