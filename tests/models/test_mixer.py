"""A second kind of mixer, known only to this file: a gate that reads a token and no other.

Layers with it hold no keys, so a layer's keys lie in the cache at another number than its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file
from tests.models.stored_weights import read_model
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from jetrl.errors import UserError
from jetrl.kernels.swiglu import swiglu
from jetrl.memory.activations import PlannedMicroBatch, kept_bytes, layer_backward_bytes
from jetrl.memory.plan import quantized_bytes
from jetrl.models.attention import Attention, KeyValues, kv_bytes_per_token, norm_linear
from jetrl.models.decoder import MIXERS
from jetrl.models.families import FAMILIES, Family, ModelConfig, linear_layers
from jetrl.models.key_smoothing import key_exponents
from jetrl.models.layer import RMSNorm, Rotary, Rotation, Trace, tell
from jetrl.models.mixer import AttentionShape, Mixer
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights, make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.precision.plan import Side
from jetrl.rollout.kv_cache import PagedCache, Span
from jetrl.session.parity import check_policy, measure

CPU = torch.device("cpu")
EXACT = PrecisionPlan.preset("unified")


class GateShape(Mixer):
    linears = ("gates", "o")

    gate_size: Annotated[int, Field(ge=1, examples=[128])]

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        shapes = {"input_norm": (hidden,), "gates": (2 * self.gate_size, hidden)}
        shapes["o"] = (hidden, self.gate_size)
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def stored_names(self, fused: bool) -> dict[str, tuple[str, ...]]:
        gates = ("token_gate.gate_proj", "token_gate.value_proj")
        return {"input_norm": ("input_layernorm",), "gates": gates, "o": ("token_gate.o_proj",)}

    def cached_bytes(self, kv: object) -> int:
        return 0

    def staged_bytes(self, kv: object, queries: object) -> int:
        return 0

    def kept_bytes(self, wide: int, kv: object, queries: object) -> int:
        return 3 * wide * self.gate_size

    def forward_bytes(self, hidden: int, wide: int, splits: int) -> int:
        return wide * (3 * hidden + 3 * self.gate_size)

    def backward_bytes(self, tokens: int, longest: int, shared: bool, queries: object) -> int:
        return 10**12


class Gate(nn.Module):
    def __init__(
        self, index: int, shape: GateShape, eps: float, weights: Any, formats: Any
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(weights, f"layers.{index}.input_norm", eps)
        self.gates = weights.linear(f"layers.{index}.gates", formats)
        self.o = weights.linear(f"layers.{index}.o", formats)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        kv: KeyValues,
        side: Side,
        trace: Trace | None,
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        x, gates = norm_linear(x, delta, self.norm, self.gates, side, trace)
        if last and kv.rows is not None:
            x, gates = x[kv.rows], gates[kv.rows]
        delta = self.o(swiglu(gates), side)
        tell(trace, "o", delta)
        return x, delta


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    family = Family("Qwen3ForCausalLM", qk_norm=True, mixers={"token_gate": GateShape})
    monkeypatch.setitem(FAMILIES, "qwen3", family)
    monkeypatch.setitem(MIXERS, GateShape, Gate)
    return make_tiny(tmp_path / "model", num_layers=3, initializer_range=0.2)


def with_types(config: ModelConfig, *types: str) -> ModelConfig:
    changes = {"layer_types": list(types), "num_hidden_layers": len(types)}
    return ModelConfig.from_hf({**config.raw, **changes})


def test_the_gate_is_the_first_half_of_its_layer(path: Path) -> None:
    config, weights = read_model(path)
    policy = Policy.from_pretrained(path, PrecisionPlan.preset("fp32"))
    traced: dict[str, Tensor] = {}
    policy.decoder.trace = lambda name, value: traced.setdefault(name, value.detach())
    tokens = torch.arange(2, 20)
    policy.logprobs([tokens.tolist()])
    w = {name: weights[f"layers.0.{name}.weight"] for name in ("input_norm", "gates", "o")}
    x = embedding(tokens, weights["embed.weight"])
    normed = rms_norm(x, x.shape[1:], w["input_norm"], config.rms_norm_eps)
    gate, value = linear(normed, w["gates"]).chunk(2, 1)
    expected = linear(silu(gate) * value, w["o"])
    assert (traced["layers.0.o"] - expected).norm() <= 1e-5 * expected.norm()
    assert {"layers.1.attention", "layers.2.o"} <= traced.keys()
    assert not {"layers.0.attention", "layers.2.attention"} & traced.keys()


@pytest.mark.parametrize("kv", ["fp8", "int8+fp8"])
def test_sampler_and_trainer_have_the_same_bits(path: Path, kv: str) -> None:
    policy = Policy.from_pretrained(path, EXACT.replace(kv=kv))
    result = measure(policy, num_prompts=3, samples=2, max_tokens=6, gradients=True)
    assert (result.tokens > 20, result.different) == (True, 0)


def test_self_checks_see_every_kind_of_layer(path: Path) -> None:
    config, _ = read_model(path)
    config = with_types(config, "token_gate", "token_gate", "token_gate", "full_attention")
    checks = check_policy(Policy(ModelSource.from_seed(config, 0), EXACT))
    assert all(check.ok for check in checks)
    assert {"layers.0.gates", "layers.3.qkv"} <= {check.operation for check in checks}


def test_files_have_the_gates_apart(path: Path) -> None:
    config, weights = read_model(path)
    drawn = RandomWeights(config, 0)
    assert all(torch.equal(weights[name], drawn[name]) for name in drawn)
    stored = load_file(path / "model.safetensors")
    value = stored["model.layers.2.token_gate.value_proj.weight"]
    assert torch.equal(value, drawn["layers.2.gates.weight"][128:])
    assert "model.layers.1.self_attn.q_proj.weight" in stored
    assert "model.layers.0.self_attn.q_proj.weight" not in stored
    assert {"layers.0.gates", "layers.1.qkv", "layers.2.o"} <= linear_layers(config).keys()

    fp8 = path.parent / "fp8"
    Policy.from_pretrained(path, EXACT).save_pretrained(fp8, dtype="fp8")
    stored = load_file(fp8 / "model.safetensors")
    gate = stored["model.layers.0.token_gate.gate_proj.weight"]
    assert gate.dtype == torch.float8_e4m3fn


def test_only_layers_with_attention_take_pages(path: Path) -> None:
    config, weights = read_model(path)
    assert config.layers_with_keys == (1,)
    head = 64 + 4  # bytes of a head in FP8, with its scale
    assert kv_bytes_per_token(config, EXACT) == 2 * 2 * head
    cache = PagedCache(config, EXACT, num_pages=2, page_size=4, device=CPU)
    assert cache.num_bytes == 2 * PagedCache.page_bytes(config, EXACT, 4) == 2 * 4 * 2 * 2 * head
    # The plan's formats go by the layer's number, not by its number in the cache.
    assert cache.key_values([Span(0, 0, 1, [0])]).num_layers == 3
    exponents = key_exponents(weights, config, CPU)
    assert exponents[1].any()
    assert not exponents[[0, 2]].any()


def test_the_memory_plan_has_its_bytes(path: Path) -> None:
    config, _ = read_model(path)
    one = with_types(config, "token_gate", "full_attention", "full_attention")
    # Codes and scales of the matrices; attention has two norms in addition.
    gates, attention = 3 * (128 * 128 + 4), (512 + 256) * 128 + (4 + 2) * 4 + 2 * 2 * 64
    assert quantized_bytes(one, EXACT) - quantized_bytes(config, EXACT) == attention - gates
    saved = kept_bytes(one, EXACT, 10) - kept_bytes(config, EXACT, 10)
    qkv, queries, stored = (256 + 2 * 128) * 2, 256 * 2, 2 * 2 * (64 + 4)
    assert saved == 10 * (qkv + 2 * queries + stored + 4 * 4 - 3 * 2 * 128)
    batch = PlannedMicroBatch(8, 8, several=False)
    assert layer_backward_bytes(config, EXACT, batch) == 10**12


def test_keys_are_the_mixers_own(path: Path, tmp_path: Path) -> None:
    config, _ = read_model(path)
    assert config.raw["layer_types"] == ["token_gate", "full_attention", "token_gate"]
    fields = config.flat()
    assert (fields["gate_size"], fields["num_layers"], fields["num_heads"]) == (128, 3, 4)
    with pytest.raises(UserError, match=r"config\.json: gate_size = 0: should be greater than"):
        ModelConfig.from_hf({**config.raw, "gate_size": 0})
    with pytest.raises(UserError, match=r"layer_types\.1 = 'conv': should be 'full_attention' or"):
        with_types(config, "token_gate", "conv")
    with pytest.raises(UserError, match="llama has no gate_size; it has intermediate_size"):
        make_tiny(tmp_path / "other", "llama", gate_size=2)


class GatedShape(AttentionShape):
    linears = ("qkv", "gate", "o")

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        gate = {"gate.weight": (self.num_heads * self.head_dim, hidden)}
        return super().parameter_shapes(hidden) | gate

    def stored_names(self, fused: bool) -> dict[str, tuple[str, ...]]:
        return super().stored_names(fused) | {"gate": ("self_attn.gate_proj",)}


class Gated(Attention):
    """Attention whose output is multiplied by a gate."""

    def __init__(
        self, index: int, shape: GatedShape, eps: float, weights: Any, formats: Any
    ) -> None:
        super().__init__(index, shape, eps, weights, formats)
        self.gate = weights.linear(f"layers.{index}.gate", formats)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        kv: KeyValues,
        side: Side,
        trace: Trace | None,
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        normed = self.norm(x)
        rotary = Rotary(
            positions=rotation.positions,
            table=rotation.table,
            norms=None if self.q_norm is None else (self.q_norm, self.k_norm),
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            exponents=rotation.exponents,
            trace=trace,
            as_values=True,
        )
        heads = kv.attend(self.index, self.qkv(normed, side), rotary, last)
        gate = self.gate(normed, side)
        if last and kv.rows is not None:
            x, gate = x[kv.rows], gate[kv.rows]
        return x, self.o(heads * torch.sigmoid(gate.double()).to(heads.dtype), side)


@pytest.mark.parametrize("plan", ["unified", "int8"])
def test_a_record_derived_from_attention_has_its_sizes_and_keys(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family("Qwen3ForCausalLM", qk_norm=True, mixers={"gated_attention": GatedShape})
    monkeypatch.setitem(FAMILIES, "qwen3", family)
    monkeypatch.setitem(MIXERS, GatedShape, Gated)
    make_tiny(tmp_path / "model", num_layers=2, initializer_range=0.2)
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings["layer_types"] = ["gated_attention", "full_attention"]
    config = ModelConfig.from_hf(settings)
    assert config.layers[0].mixer.model_dump() == config.layers[1].mixer.model_dump()
    assert config.layers_with_keys == (0, 1)
    policy = Policy.from_config(settings, PrecisionPlan.preset(plan), 0, CPU)
    result = measure(policy, num_prompts=3, samples=2, max_tokens=6, gradients=False)
    assert (result.tokens, result.different) == (36, 0)
