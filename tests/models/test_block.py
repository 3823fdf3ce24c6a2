"""A second kind of block, known only to this file: a router, and experts in stacked rows.

Every token visits all experts, which needs no grouped product.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file
from tests.models.stored_weights import read_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from jetrl.errors import UserError
from jetrl.kernels.swiglu import swiglu
from jetrl.memory.plan import quantized_bytes
from jetrl.models.block import Block
from jetrl.models.decoder import BLOCKS
from jetrl.models.families import FAMILIES, Family, ModelConfig, linear_layers
from jetrl.models.layer import RMSNorm
from jetrl.models.policy import Policy
from jetrl.models.tiny import RandomWeights, make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.precision.formats import number_format
from jetrl.session.parity import measure

EXACT = PrecisionPlan.preset("unified")


class Experts(Block):
    linears = ("gate_up", "down")

    num_experts: Annotated[int, Field(ge=1, examples=[3])]
    num_experts_per_tok: Annotated[int, Field(ge=1, examples=[3])]
    moe_intermediate_size: Annotated[int, Field(ge=1, examples=[128])]
    norm_topk_prob: bool = True

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        count, inner = self.num_experts, self.moe_intermediate_size
        linears = {"gate_up": (count * 2 * inner, hidden), "down": (count * hidden, inner)}
        shapes = {"post_norm": (hidden,), "router": (count, hidden), **linears}
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def stored_names(self, fused: bool) -> dict[str, tuple[str, ...]]:
        experts = [f"mlp.experts.{number}" for number in range(self.num_experts)]
        return {
            "post_norm": ("post_attention_layernorm",),
            "router": ("mlp.gate",),
            "gate_up": tuple(f"{e}.{half}_proj" for e in experts for half in ("gate", "up")),
            "down": tuple(f"{e}.down_proj" for e in experts),
        }

    def kept_values(self, *_: Any) -> int:
        raise NotImplementedError

    forward_values = backward_bytes = adapted_backward_bytes = kept_values


class AllExperts(nn.Module):
    self_checks: Mapping[str, object] = {}

    def __init__(self, index: int, shape: Experts, eps: float, weights: Any, formats: Any) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.norm = RMSNorm(weights, f"{name}.post_norm", eps)
        self.router = weights.linear(
            f"{name}.router", dict.fromkeys(formats, number_format(weights.plan.rest))
        )
        self.gate_up = weights.linear(f"{name}.gate_up", formats)
        self.down = weights.linear(f"{name}.down", formats)

    def forward(self, x: Tensor, delta: Tensor, side: str, trace: object) -> tuple[Tensor, Tensor]:
        x = x + delta
        normed = self.norm(x)
        shares = self.router(normed, side).float().softmax(-1).to(x.dtype)
        total, count = torch.zeros_like(x), shares.shape[1]
        for expert, gates in enumerate(self.gate_up(normed, side).chunk(count, 1)):
            of_all = self.down(swiglu(gates.contiguous()), side)  # one of which is this expert's
            total = total + shares[:, expert, None] * of_all.chunk(count, 1)[expert]
        return x, total


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    family = Family("Qwen3MoeForCausalLM", Experts, qk_norm=True)
    monkeypatch.setitem(FAMILIES, "qwen3_moe", family)
    monkeypatch.setitem(BLOCKS, Experts, AllExperts)
    return make_tiny(tmp_path / "model", "qwen3_moe", initializer_range=0.2)


def test_transformers_has_the_same_log_probs_and_gradients(path: Path) -> None:
    ours = Policy.from_pretrained(path, PrecisionPlan.preset("fp32"))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.arange(2, 20)
    logprobs = theirs(tokens[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, tokens[1:, None])[:, 0]
    (found,) = ours.logprobs([tokens.tolist()])
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    found.sum().backward()
    expected.sum().backward()
    for index, layer in enumerate(theirs.model.layers):
        weights = {"router": layer.mlp.gate.weight, "gate_up": layer.mlp.experts.gate_up_proj}
        for name, weight in (weights | {"down": layer.mlp.experts.down_proj}).items():
            grad = ours.master_weights()[f"layers.{index}.{name}.weight"].grad
            assert (grad - weight.grad.reshape(grad.shape)).norm() <= 1e-4 * grad.norm(), name


def test_sampler_and_trainer_have_the_same_bits(path: Path) -> None:
    policy = Policy.from_pretrained(path, EXACT)
    result = measure(policy, num_prompts=3, samples=2, max_tokens=6, gradients=True)
    assert (result.tokens > 20, result.different) == (True, 0)


def test_files_have_every_expert_and_the_router_is_no_linear_layer(path: Path) -> None:
    config, weights = read_model(path)
    drawn = RandomWeights(config, 0)
    assert all(torch.equal(weights[name], drawn[name]) for name in drawn)
    up = load_file(path / "model.safetensors")["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert torch.equal(up, drawn["layers.1.gate_up.weight"][5 * 128 :])
    assert not any("router" in name for name in linear_layers(config))

    fp8 = path.parent / "fp8"
    Policy.from_pretrained(path, EXACT).save_pretrained(fp8, dtype="fp8")
    stored, layer = load_file(fp8 / "model.safetensors"), "model.layers.{}.mlp.{}".format
    assert stored[layer(0, "experts.2.down_proj.weight")].dtype == torch.float8_e4m3fn
    assert stored[layer(0, "gate.weight")].dtype == torch.bfloat16
    left = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    assert left["modules_to_not_convert"] == ["lm_head", layer(0, "gate"), layer(1, "gate")]

    smaller = ModelConfig.from_hf({**config.raw, "num_experts": 2})
    one = 3 * (128 * 128 + 4) + 2 * 128  # codes and scales of an expert, and its row of the router
    assert quantized_bytes(config, EXACT) - quantized_bytes(smaller, EXACT) == 2 * one


def test_keys_are_the_blocks_own(path: Path, tmp_path: Path) -> None:
    config, _ = read_model(path)
    fields = config.flat()  # absent is norm_topk_prob: so transformers' default
    assert (fields["norm_topk_prob"], fields["moe_intermediate_size"]) == (False, 128)
    with pytest.raises(UserError, match=r"config\.json: num_experts = 0: should be greater than"):
        ModelConfig.from_hf({**config.raw, "num_experts": 0})
    with pytest.raises(UserError, match="qwen3 has no num_experts; it has intermediate_size"):
        make_tiny(tmp_path / "other", num_experts=2)
