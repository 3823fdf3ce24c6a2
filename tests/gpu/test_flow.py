"""The whole flow on a Hopper GPU: what is sampled is what is trained, and training works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.config import load_config
from jetrl.errors import UserError
from jetrl.parity import locate, measure, random_prompts, self_check
from jetrl.precision import PrecisionPlan
from jetrl.training import SftTrainer

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64},
}


def policy(plan: PrecisionPlan | str, family: str = "qwen3", device: str = "cuda") -> Policy:
    config = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": family == "qwen2",
        "initializer_range": 0.1,
        **SHAPES[family],
    }
    plan = PrecisionPlan.preset(plan) if isinstance(plan, str) else plan
    return Policy.from_config(config, plan, seed=0, device=device)


def test_self_check() -> None:
    assert [(c.operation, c.detail) for c in self_check("cuda") if not c.ok] == []


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("preset", ["unified", "jet"])
def test_sampled_logprobs_are_the_trainers(preset: str, family: str) -> None:
    p = policy(preset, family)
    prompts = random_prompts(p, 12, 80, seed=2)
    result = measure(p, prompts=prompts, samples=3, max_tokens=80, temperature=0.8)
    where = locate(p, *result.first_different) if result.first_different else None
    assert (result.different, where) == (0, None)
    assert result.tokens == 12 * 3 * 80


@pytest.mark.parametrize(
    "options",
    [{"scales": "pow2"}, {"kv": "bf16"}, {"first_layers_bf16": 1}, {"lm_head": "fp8"}],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_plan_options_stay_exact(options: dict[str, Any]) -> None:
    plan = PrecisionPlan.preset("unified").replace(**options)
    result = measure(policy(plan), num_prompts=6, samples=2, max_tokens=40)
    assert result.different == 0


def test_mixed_shows_a_gap() -> None:
    result = measure(policy("mixed"), num_prompts=4, samples=2, max_tokens=20)
    assert result.different > result.tokens / 2


def test_results_do_not_depend_on_batch_chunks_or_preemption() -> None:
    p = policy("unified")
    prompts = random_prompts(p, 10, 100, seed=3)
    params = SamplingParams(n=2, max_tokens=100, seed=1, ignore_eos=True)
    together = RolloutEngine(p).generate(prompts, params)
    others = [
        RolloutEngine(p, max_batch_size=3).generate(prompts, params),
        RolloutEngine(p, max_prefill_tokens=64).generate(prompts, params),
        RolloutEngine(p, num_pages=12).generate(prompts, params),
    ]
    alone = [c for prompt in prompts for c in RolloutEngine(p).generate([prompt], params)]
    for other in [*others, alone]:
        assert [c.token_ids for c in other] == [c.token_ids for c in together]
        assert [c.logprobs for c in other] == [c.logprobs for c in together]


@pytest.mark.parametrize("preset", ["unified", "jet", "mixed", "bf16"])
def test_gradients_follow_the_reference(preset: str) -> None:
    """GPU against CPU, the same weights: both are quantized, so they agree to the noise of BF16
    activations (2**-8 relative a rounding, tens of them in a row), not in bits."""
    on_cpu = policy(preset, device="cpu")
    weights = {name: m.detach().clone() for name, m in on_cpu.named_masters().items()}
    on_gpu = Policy(on_cpu.config, on_cpu.plan, weights, "cuda")
    g = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 1024, (n,), generator=g).tolist() for n in (130, 7, 65)]
    for p in (on_cpu, on_gpu):
        torch.cat(p.logprobs(sequences)).mean().backward()
    for name, master in on_cpu.named_masters().items():
        ours, true = on_gpu.named_masters()[name].grad.cpu(), master.grad
        assert (ours - true).norm() <= 0.25 * true.norm(), name


def test_sft_learns_and_stays_exact_after_updates() -> None:
    p = policy("unified")
    trainer = SftTrainer(p, load_config(None, ["sft.lr=1e-3", "sft.steps=20"]))
    g = torch.Generator().manual_seed(5)
    examples = [
        (row[:1], row[1:]) for row in torch.randint(0, 1024, (32, 40), generator=g).tolist()
    ]
    losses = [trainer.step(examples)["sft/loss"] for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert measure(p, num_prompts=4, samples=2, max_tokens=30).different == 0


def test_what_the_gpu_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="e5m2"):
        policy(PrecisionPlan.preset("unified").replace(grad_output="e5m2"))
    with pytest.raises(UserError, match="pages of 64"):
        RolloutEngine(policy("unified"), page_size=16).generate([[1, 2]], SamplingParams())
