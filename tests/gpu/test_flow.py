"""The whole flow on a Hopper GPU: what is sampled is what is trained, and training works."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from linears import assert_gradients_are_as_far, assert_gradients_are_near
from small_models import FAMILIES, config, make_policy

from jetrl import Policy
from jetrl.kernels.attention.backward import attention_backward
from jetrl.kernels.attention.forward import attend_tiles, stage_keys
from jetrl.kernels.attention.layout import KeyValueCodes
from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.models import attention, decoder, dense
from jetrl.models.packed import ForwardInputs
from jetrl.models.source import ModelSource
from jetrl.precision import PrecisionPlan
from jetrl.session.parity import locate, measure, random_prompts, self_check
from jetrl.settings.loading import load_config
from jetrl.training.sft import SftTrainer
from jetrl.types import Example

pytestmark = pytest.mark.gpu


def policy(plan: PrecisionPlan | str, family: str = "qwen3", device: str = "cuda") -> Policy:
    return make_policy(config(family), plan, device)


def test_self_check() -> None:
    assert [(c.operation, c.detail) for c in self_check("cuda") if not c.ok] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["unified", "jet", "int8"])
def test_sampled_logprobs_are_the_trainers(preset: str, family: str) -> None:
    p = policy(preset, family)
    prompts = random_prompts(p, 12, 80, seed=2)
    result = measure(p, prompts=prompts, samples=3, max_tokens=80, temperature=0.8)
    where = locate(p, *result.first_different) if result.first_different else None
    assert (result.different, where) == (0, None)
    assert result.tokens == 12 * 3 * 80


@pytest.mark.parametrize(
    "options",
    [
        {"scales": "pow2"},
        {"kv": "bf16"},
        {"kv": "int8"},
        {"kv": "int8", "scales": "pow2"},
        {"kv": "int8+fp8"},
        {"kv": "fp8+int8"},
        {"first_layers_bf16": 1},
        {"lm_head": "fp8"},
        {"wgrad_input": "1x128"},
        {"grad_output": "e5m2", "last_layers_bf16": 1},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_plan_options_stay_exact(options: dict[str, Any]) -> None:
    plan = PrecisionPlan.preset("unified").replace(**options)
    result = measure(policy(plan), num_prompts=6, samples=2, max_tokens=40)
    assert result.different == 0


@pytest.mark.parametrize(
    "preset, options",
    [
        ("unified", {}),
        ("unified", {"grad_output": "e5m2"}),
        ("unified", {"grad_output": "e5m2", "scales": "pow2"}),
        ("unified", {"grad_output": "bf16"}),
        ("unified", {"wgrad_input": "1x128"}),
        ("unified", {"saved": "int8"}),
        ("int8", {"saved": "int8"}),
        ("jet", {}),
        ("mixed", {}),
        ("bf16", {}),
        *(("int8", {"grad_output": format}) for format in ("int8", "e4m3", "bf16")),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_gradients_follow_the_reference(preset: str, options: dict[str, str], family: str) -> None:
    on_cpu = policy(PrecisionPlan.preset(preset).replace(**options), family, "cpu")
    weights = {name: m.detach().clone() for name, m in on_cpu.master_weights().items()}
    source = ModelSource.from_tensors(on_cpu.config, weights)
    on_gpu = Policy(source, on_cpu.plan, "cuda")
    if preset in ("unified", "jet") and (
        family == "smollm2" or options.get("grad_output") == "e5m2"
    ):
        exact = Policy(source, PrecisionPlan.preset("fp32"))
        assert_gradients_are_as_far(on_gpu, on_cpu, exact)
    else:
        assert_gradients_are_near(on_gpu, on_cpu, 0.25)


def packed(p: Policy, lengths: tuple[int, ...]) -> tuple[ForwardInputs, torch.Tensor, torch.Tensor]:
    """Return the inputs, the `cu_seqlens` and the targets of random sequences."""
    g = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, p.config.vocab_size, (sum(lengths),), generator=g).cuda()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    first = set(ends.tolist())
    targets = torch.tensor([i for i in range(sum(lengths)) if i not in first])
    ends = ends.cuda()
    return ForwardInputs.packed(tokens, ends), ends, targets.cuda()


class AttentionKernels(torch.autograd.Function):
    """Attention's forward and backward kernels over heads that were made by single operations."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, tiles: Any, plan: PrecisionPlan) -> torch.Tensor:
        stored = quantize_keys_and_values(k, v, plan.kv, plan.scales)
        (k_codes, k_scales), (v_codes, v_scales) = stored
        codes = KeyValueCodes(k_codes.contiguous(), k_scales, v_codes.contiguous(), v_scales)
        q = q.contiguous()
        o, lse = attend_tiles(q, stage_keys(codes, tiles), tiles)
        ctx.saved = q, codes, o, lse, tiles
        return o

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*attention_backward(grads[0].contiguous(), *ctx.saved), None, None)


def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's reference composition, each operation on the GPU by itself."""

    def attend(self: Any, layer: int, qkv: torch.Tensor, rope: Any, last: bool) -> torch.Tensor:
        o = AttentionKernels.apply(*rope.heads(qkv), self._tiles, self._plan)
        return o.flatten(-2, -1)

    for module in (attention, decoder, dense):
        monkeypatch.setattr(module, "fuses", lambda x: False)
    monkeypatch.setattr(attention.PackedKeyValues, "attend", attend)


OPTIONS = {"grad_output": "bf16", "scales": "pow2", "last_layers_bf16": 1, "saved": "int8"}
PLANS = {name: PrecisionPlan.preset(name) for name in ("unified", "jet", "int8", "mixed", "bf16")}
PLANS |= {name: PLANS["unified"].replace(**{name: value}) for name, value in OPTIONS.items()}


def gradients_of(p: Policy) -> dict[str, torch.Tensor]:
    found = {}
    for name, master in p.master_weights().items():
        assert master.grad is not None, name
        found[name] = master.grad.clone()
        master.grad = None
    return found


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name, family",
    [(name, "qwen3") for name in PLANS]
    + [(name, family) for name in ("unified", "bf16") for family in ("qwen2", "llama")]
    + [("unified", "smollm2")],
)
def test_the_fused_flow_has_the_bits_of_its_parts(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = policy(PLANS[name], family)
    for master_name, master in p.master_weights().items():
        if master_name.endswith("bias"):
            master.data.normal_(0, 0.5)
    p.requantize()
    batch = packed(p, (130, 1, 7, 300, 65))
    fused, moments = p.train_logprobs(*batch)
    fused.mean().backward()
    gradients = gradients_of(p)
    with torch.no_grad():
        again, _ = p.train_logprobs(*batch)
    checkpointed, _ = p.train_logprobs(*batch, activation_checkpointing=True)
    checkpointed.mean().backward()
    for key, gradient in gradients_of(p).items():
        assert torch.equal(gradient, gradients[key]), f"checkpointing changes {key}"
    unfused(monkeypatch)
    parts, parts_moments = p.train_logprobs(*batch)
    parts.mean().backward()
    assert all(torch.equal(fused, other) for other in (again, checkpointed, parts))
    assert torch.equal(moments, parts_moments)
    # E4M3's rounding on both sides, at four linears of three layers; else ten BF16 roundings.
    fp8 = p.plan.train_linear in ("fp8", "int8") and p.plan.grad_output != "bf16"
    limit = 2**-4 * math.sqrt(2 * 4 * 3 / 3) if fp8 else 10 * 2**-9
    for key, true in gradients_of(p).items():
        assert (gradients[key] - true).norm() <= limit * true.norm(), key


@pytest.mark.parametrize("name", ["bf16", "mixed"])
def test_equal_lengths_without_a_promise_take_the_library(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention of cuDNN and ours are two BF16 forms of one function."""
    p = policy(name)
    batch = packed(p, (96, 96, 96))
    library, _ = p.train_logprobs(*batch)
    library.mean().backward()
    gradients = gradients_of(p)
    init = attention.PackedKeyValues.__init__

    def ragged(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        assert self._length == 96
        self._length = None

    monkeypatch.setattr(attention.PackedKeyValues, "__init__", ragged)
    ours, _ = p.train_logprobs(*batch)
    ours.mean().backward()
    assert not torch.equal(library, ours)
    assert (library - ours).norm() <= 15 * 2**-9 * ours.norm()
    for key, true in gradients_of(p).items():
        assert (gradients[key] - true).norm() <= 15 * 2**-9 * true.norm(), key


@pytest.mark.parametrize("name", ["unified", "bf16"])
def test_gradients_accumulate_and_a_graph_can_be_walked_twice(name: str) -> None:
    p = policy(PLANS[name], "qwen2")
    batch = packed(p, (40, 90))
    logprobs, _ = p.train_logprobs(*batch)
    logprobs.mean().backward(retain_graph=True)
    once = {k: m.grad.clone() for k, m in p.master_weights().items()}
    # Of the embedding lm_head's part and the rows of equal tokens are added one after the other to
    # what is there: a few roundings of 2**-24 of sums that may be larger than their result.
    tied = once.pop("embed.weight")
    logprobs.mean().backward()
    for times in (2, 3):
        for key, gradient in once.items():
            assert torch.equal(p.master_weights()[key].grad, times * gradient), key
        embedding = p.master_weights()["embed.weight"].grad
        assert (embedding - times * tied).norm() <= 2**-20 * (times * tied).norm()
        if times == 2:
            p.train_logprobs(*batch)[0].mean().backward()


@pytest.mark.parametrize("name", ["unified", "jet", "bf16"])
def test_nan_arrives(name: str) -> None:
    """A NaN weight reaches every later log-prob of its sequence, and no other sequence's."""
    p = policy(name)
    bad = 17
    p.master_weights()["embed.weight"].data[bad, 3] = torch.nan
    p.requantize()
    with torch.no_grad():
        spoiled, clean = p.logprobs([[5, 9, bad, 11, 12, 13], [5, 9, 11, 12]])
    assert spoiled[2:].isnan().all()
    assert clean.isfinite().all()


def test_sft_learns_and_stays_exact_after_updates() -> None:
    p = policy("unified")
    trainer = SftTrainer(p, load_config(None, ["sft.lr=1e-3", "sft.steps=20"]))
    rows = torch.randint(0, 1024, (32, 40), generator=torch.Generator().manual_seed(5)).tolist()
    examples = [Example(row[:1], row[1:]) for row in rows]
    losses = [trainer.step(examples)["sft/loss"] for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert measure(p, num_prompts=4, samples=2, max_tokens=30).different == 0
