"""Mixtures of experts on a GPU: sampler and trainer agree; `integer` has the bits of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linears import adapted_policy, gradients
from small_models import config, make_policy
from tests.precision.test_experts import check_dense_bits

from jetrl import Policy
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import has_kernels, selected_backend
from jetrl.session.parity import locate, measure, random_prompts

pytestmark = pytest.mark.gpu
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}
QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | QWEN3,
    "with dense layers": EXPERTS | QWEN3 | {"mlp_only_layers": [0]},
    "olmoe": EXPERTS
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "head_dim": 64,
        "intermediate_size": 192,
    },
    "qwen2_moe": EXPERTS
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "head_dim": 64,
        "shared_expert_intermediate_size": 320,
    },
}

PLANS = {
    "integer": PrecisionPlan.preset("integer"),
    "int8": PrecisionPlan.preset("int8"),
    "int8 grad_output=int8": PrecisionPlan.preset("int8").replace(grad_output="int8"),
    "unified": PrecisionPlan.preset("unified"),
}


# Experts in BF16 on both sides, with sums of one order; their dense layers may be cuBLAS's.
IN_BF16 = {
    "bf16 pinned": PrecisionPlan.preset("bf16").replace(pinned_sums=True),
    "int8 first layer in bf16": PLANS["int8"].replace(first_layers_bf16=1),
}


@pytest.fixture(params=["hopper", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def policy(family: str, plan: str = "integer", device: str = "cuda") -> Policy:
    return make_policy(config("qwen3", **FAMILIES[family]), (PLANS | IN_BF16)[plan], device)


@pytest.mark.parametrize(
    "family, plan",
    [
        *(("qwen3_moe", plan) for plan in PLANS | IN_BF16),
        *((family, plan) for family in list(FAMILIES)[1:] for plan in ("int8", "integer")),
    ],
)
def test_sampled_logprobs_are_the_trainers(family: str, plan: str, backend: str) -> None:
    with selected_backend(backend, defined=(PLANS | IN_BF16)[plan].defined):
        check_sides(policy(family, plan))


def test_mixed_samples_and_trains(backend: str) -> None:
    with selected_backend(backend):
        p = make_policy(config("qwen3", **FAMILIES["qwen3_moe"]), "mixed")
        result = measure(p, prompts=random_prompts(p, 3, 80, seed=2), samples=2, max_tokens=20)
        assert result.tokens == 3 * 2 * 20
        torch.cat(p.logprobs([list(range(5, 205))])).sum().backward()
        found = gradients(p)
    assert [name for name, grad in found.items() if not grad.isfinite().all()] == []
    assert [name for name, grad in found.items() if not grad.any()] == []


def check_sides(p: Policy) -> None:
    prompts = random_prompts(p, 12, 80, seed=2)
    result = measure(p, prompts=prompts, samples=3, max_tokens=80, temperature=0.8)
    where = locate(p, *result.first_different) if result.first_different else None
    assert (result.different, where) == (0, None)
    assert result.tokens == 12 * 3 * 80


@pytest.mark.parametrize("family", ["with dense layers", "olmoe", "qwen2_moe"])
def test_a_forward_and_a_backward_have_the_bits_of_a_cpu(family: str, backend: str) -> None:
    with selected_backend(backend, defined=True):
        check_against_a_cpu(family)


@pytest.mark.parametrize("plan", ["int8", "unified"])
def test_adapters_of_experts_sample_as_they_train(plan: str) -> None:
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    with selected_backend("hopper"):
        p = adapted_policy(plan, changes=FAMILIES["qwen3_moe"], targets=targets)
        check_sides(p)
        torch.cat(p.logprobs([list(range(5, 205))])).sum().backward()
        grads = {n: m.grad for n, m in p.master_weights().items() if n.endswith(("_A", "_B"))}
    assert [name for name, grad in grads.items() if grad is None or not grad.any()] == []


@pytest.mark.parametrize("plan", PLANS)
def test_fused_experts_have_the_bits_of_separate_operations(
    plan: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [list(range(5, 5 + count)) for count in (200, 130, 7)]
    made = []
    with selected_backend(backend, defined=PLANS[plan].defined):
        for fused in (True, False):
            if not fused:
                monkeypatch.setattr("jetrl.models.experts.fuses_experts", lambda *_: False)
            p = policy("qwen3_moe", plan)
            logprobs = torch.cat(p.logprobs(sequences))
            logprobs.sum().backward()
            made.append(gradients(p) | {"logprobs": logprobs.detach()})
    assert [name for name, x in made[0].items() if not torch.equal(x, made[1][name])] == []


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("kind", ["some", "one has all"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_row_has_the_dense_bits(plan: str, kind: str, by_token: bool, backend: str) -> None:
    with selected_backend(backend, defined=PLANS[plan].defined):
        check_dense_bits(PLANS[plan], kind, by_token, "cuda")


def check_against_a_cpu(family: str) -> None:
    on_gpu, on_cpu = policy(family), policy(family, device="cpu")
    assert has_kernels(on_gpu.device)
    g = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 1000, (n,), generator=g).tolist() for n in (200, 130, 7, 300)]
    for ours, theirs in zip(on_gpu.logprobs(sequences), on_cpu.logprobs(sequences), strict=True):
        assert torch.equal(ours.detach().cpu(), theirs.detach())
    found, true = gradients(on_gpu), gradients(on_cpu)
    assert found.keys() == true.keys()
    different = {name: int((found[name] != true[name]).sum()) for name in true}
    assert {name: count for name, count in different.items() if count} == {}
