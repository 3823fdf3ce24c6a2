"""Mixtures of experts: config keys, dense layers, files, both sides, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.stored_weights import change_tensors, read_model
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.swiglu import swiglu, swiglu_ref
from jetrl.memory.plan import quantized_bytes
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.block import DenseShape
from jetrl.models.experts_shape import ExpertsShape, OlmoeExperts, Qwen3Experts
from jetrl.models.families import FURTHER_LAYERS, ModelConfig, linear_layers
from jetrl.models.model import check_device
from jetrl.models.peft import read_adapter, read_lora
from jetrl.models.policy import Policy
from jetrl.models.tiny import RandomWeights, make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import HOPPER
from jetrl.precision.int8 import int8_rows
from jetrl.precision.quantize import QTensor, quantize
from jetrl.session.parity import locate, measure

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight".format


GLM = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts": None}


def tiny(path: Path, family: str = "qwen3_moe", **sizes: Any) -> Path:
    return make_tiny(path, family, initializer_range=0.2, **sizes)


def config_of(family: str = "qwen3_moe", **changes: Any) -> ModelConfig:
    raw: dict[str, Any] = {
        "model_type": family, "vocab_size": 40, "hidden_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 192,
        "max_position_embeddings": 64,
    }  # fmt: skip
    return ModelConfig.from_hf({k: v for k, v in (raw | changes).items() if v is not None})


def test_dense_layers_are_those_of_the_keys() -> None:
    config = config_of(decoder_sparse_step=2, mlp_only_layers=[3])
    kinds = [type(layer.block) for layer in config.layers]
    assert kinds == [DenseShape, Qwen3Experts, DenseShape, DenseShape, DenseShape, Qwen3Experts]
    assert config.layers[3].block.intermediate_size == 192
    linears = linear_layers(config)
    assert linears["layers.0.gate_up"][0].name.endswith("mlp.gate_proj.weight")
    assert len(linears["layers.1.gate_up"]) == 8
    assert not any("router" in name for name in linears)


def test_names_of_both_versions_of_transformers() -> None:
    new = config_of(num_experts=None, num_local_experts=4)
    assert new == config_of()
    assert new.layers[0].block.rule.normalized is False  # transformers' default
    assert config_of(norm_topk_prob=True).layers[0].block.rule.normalized is True
    olmoe = config_of("olmoe", head_dim=64).layers[0]
    assert isinstance(olmoe.block, OlmoeExperts)
    assert (olmoe.block.width, olmoe.block.router_aux_loss_coef) == (192, 0.01)
    shapes = olmoe.mixer.parameter_shapes(128)
    assert (shapes["q_norm.weight"], shapes["k_norm.weight"]) == ((128,), (128,))


def test_a_choice_of_experts_is_read_by_its_name() -> None:
    assert config_of(topk_method="greedy").layers[0].block.rule.scores == "softmax"
    assert config_of(**GLM, topk_method="noaux_tc").layers[-1].block.rule.scores == "sigmoid"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5: should be at most num_experts = 4"),
        ({"num_experts": 0}, "num_experts = 0: should be greater than"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"capacity_factor": 1.25}, "capacity_factor = 1.25: should be False or None"),
        ({"expert_capacity": 64}, "expert_capacity = 64"),
        ({"drop_tokens": True}, "drop_tokens = True"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor = 1.0"),
        ({"moe_token_drop_policy": "probs"}, "moe_token_drop_policy = 'probs'"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({"topk_method": "group_limited_greedy"}, "topk_method = 'group_limited_greedy'"),
        ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc': should be 'greedy' or None"),
        (GLM | {"topk_method": "greedy"}, "topk_method = 'greedy': should be 'noaux_tc' or None"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (GLM | {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (GLM | {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"n_group": 8}, "n_group = 8: should be 1 or None"),
        ({"topk_group": 4}, "topk_group = 4"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512"),
        ({"model_type": "qwen2_moe"}, "shared_expert_intermediate_size is missing"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1"),
        (GLM | {"n_group": 8, "topk_group": 4}, "n_group = 8: should be 1 or None"),
        (GLM | {"n_routed_experts": None}, "n_routed_experts is missing"),
        (GLM | {"num_experts_per_tok": 5}, "should be at most num_experts = 4"),
        (GLM | {"partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01: 0 of 64 channels"),
        (GLM | {"kv_lora_rank": 512, "model_type": "glm4_moe_lite"}, "latent attention"),
        ({"model_type": "olmoe", "head_dim": 32}, "2 heads of 32 are not hidden_size = 128"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ],
)
def test_unsupported_keys_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"config\.json: .*{message}"):
        config_of(**changes)


@pytest.mark.parametrize(
    "preset, sizes, message",
    [
        ("jet", {"hidden_size": 192}, "hidden_size = 192: experts in FP8 need a multiple of 128"),
        ("int8", {"moe_intermediate_size": 96}, "the width of experts = 96: .*multiple of 64"),
    ],
)
def test_sizes_that_cross_groups_of_codes_are_refused(
    preset: str, sizes: dict[str, int], message: str
) -> None:
    raw = {**config_of().raw, "num_hidden_layers": 1, "head_dim": 64, **sizes}
    with pytest.raises(UserError, match=message):
        Policy.from_config(raw, preset)
    Policy.from_config(raw, "bf16")


def test_a_base_in_nvfp4_is_refused() -> None:
    plan = PrecisionPlan.preset("jet").replace(base="nvfp4")
    with pytest.raises(UserError, match="nvfp4 is not for experts"):
        config_of().layers[0].block.check_formats(128, plan.linear_format("train", 0, 6))


@pytest.mark.parametrize(
    "preset, options, message",
    [
        ("int8", {}, ""),
        ("int8", {"grad_output": "int8"}, ""),
        ("unified", {}, ""),
        ("bf16", {}, ""),
        ("mixed", {}, ""),
        ("mixed", {"grad_output": "bf16"}, ""),
        ("int8", {"last_layers_bf16": 1}, ""),
        ("fp32", {}, "layer 0 has experts in FP32, .*use another precision.preset"),
        ("int8", {"grad_output": "bf16"}, "gradients in BF16, .*use precision.grad_output=e4m3"),
        ("jet", {"grad_output": "e5m2"}, "gradients in FP8 e5m2"),
        ("jet", {"wgrad_input": "1x128"}, "wgrad_input 1x128"),
    ],
)
def test_a_gpu_refuses_experts_in_formats_without_kernels(
    preset: str, options: dict[str, Any], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("jetrl.models.model.backend_for", lambda device: HOPPER)
    config = ModelConfig.from_hf({**config_of().raw, "head_dim": 64, "num_hidden_layers": 2})
    plan = PrecisionPlan.preset(preset).replace(**options)
    refused = pytest.raises(UserError, match=message) if message else contextlib.nullcontext()
    with refused:
        check_device(config, plan, torch.device("cuda"))


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize("preset", ["bf16", "jet", "unified", "int8", "integer"])
def test_sampler_and_trainer_have_the_same_bits(family: str, preset: str, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(tiny(tmp_path / "model", family), preset)
    result = measure(policy, num_prompts=3, samples=2, max_tokens=6, gradients=True)
    assert (result.tokens, result.different) == (36, 0)


class FusedReferences:
    """SwiGLU's kernels by its reference; `calls` names those that ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def swiglu_quantize(self, gate_up: Tensor, scales: str | None) -> QTensor:
        self.calls.append("forward")
        gated = swiglu_ref(gate_up)
        return int8_rows(gated) if scales is None else quantize(gated, scales=scales)

    def swiglu_backward(self, dy: Tensor, gate_up: Tensor, y: Tensor) -> Tensor:
        self.calls.append("backward")
        entered = gate_up.clone().requires_grad_()
        with torch.enable_grad():
            swiglu(entered).backward(dy)
        assert y is dy
        y.copy_(swiglu_ref(gate_up))
        return entered.grad


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("preset", ["int8", "integer", "unified"])
def test_fused_experts_have_the_bits_of_separate_operations(
    preset: str, frozen: bool, monkeypatch: Any, tmp_path: Path
) -> None:
    path = tiny(tmp_path / "model")

    def results() -> dict[str, Tensor]:
        policy = Policy.from_pretrained(path, preset)
        names = ("gate_up.weight", "down.weight")
        for name, master in policy.master_weights().items():
            master.requires_grad_(not (frozen and name.endswith(names)))
        logprobs = policy.logprobs([[3, 4, 5, 6, 7, 8, 9], [9, 3, 4]])
        torch.cat(logprobs).square().sum().backward()
        made = {n: m.grad for n, m in policy.master_weights().items() if m.grad is not None}
        assert any(name.endswith(names) for name in made) != frozen
        sampled = measure(policy, num_prompts=2, samples=1, max_tokens=4)
        assert (sampled.tokens, sampled.different) == (8, 0)
        return made | {"logprobs": torch.cat(logprobs).detach()}

    separate, kernels = results(), FusedReferences()
    monkeypatch.setattr("jetrl.models.experts_fused.fuses", lambda x: True)
    monkeypatch.setattr("jetrl.models.experts_fused.device_kernels", lambda x: kernels)
    fused = results()
    assert kernels.calls.count("backward") == 2 < kernels.calls.count("forward")
    assert fused.keys() == separate.keys()
    assert [name for name in fused if not torch.equal(fused[name], separate[name])] == []


def test_locate_names_the_operation_of_the_router(tmp_path: Path) -> None:
    policy = Policy.from_pretrained(tiny(tmp_path / "model"), "int8")
    assert locate(policy, [3, 4, 5], [6, 7, 8, 9]) is None
    changed = Policy.from_pretrained(tmp_path / "model", "int8")
    router = changed.decoder.layers[1].block.router
    whole = router.operand

    def sampler_differs(side: str) -> Tensor:
        return whole(side) * (1.5 if side == "rollout" else 1.0)

    router.operand = sampler_differs
    assert locate(changed, [3, 4, 5], [6, 7, 8, 9]).operation == "layers.1.router"


def test_experts_are_read_fused_too(tmp_path: Path) -> None:
    config, weights = read_model(tiny(tmp_path / "model"))

    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            experts: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
            for e in range(8):
                gate, up, down = (
                    tensors.pop(f"{prefix}.{e}.{part}_proj.weight")
                    for part in ("gate", "up", "down")
                )
                experts["gate_up_proj"].append(torch.cat([gate, up]))
                experts["down_proj"].append(down)
            tensors |= {f"{prefix}.{name}": torch.stack(x) for name, x in experts.items()}

    change_tensors(tmp_path / "model", fuse)
    fused = read_model(tmp_path / "model")[1]
    assert all(torch.equal(fused[name], tensor) for name, tensor in weights.items())
    drawn = RandomWeights(config, 0)
    assert torch.equal(fused["layers.1.down.weight"], drawn["layers.1.down.weight"])

    name = "model.layers.1.mlp.experts.gate_up_proj"
    change_tensors(tmp_path / "model", lambda t: t.update({name: t[name].mT.contiguous()}))
    expected = rf"{name} has shape \[8, 128, 256\], config.json expects \[8, 256, 128\]"
    with pytest.raises(UserError, match=expected):
        read_model(tmp_path / "model")


def test_a_bias_for_choice_keeps_its_bits_in_every_file(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "glm4_moe", n_shared_experts=2)
    bias = read_model(path)[1]["layers.1.router.e_score_correction_bias"]
    assert not torch.equal(bias, bias.bfloat16().float())
    policy = Policy.from_pretrained(path, "unified")
    for dtype in ("bfloat16", "fp8"):
        policy.save_pretrained(tmp_path / dtype, dtype=dtype)
        stored = load_file(tmp_path / dtype / "model.safetensors")
        assert torch.equal(stored["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
        assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    left = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert left["modules_to_not_convert"] == ["lm_head", "model.layers.1.mlp.gate"]
    back = Policy.from_pretrained(tmp_path / "fp8", "unified")
    assert torch.equal(back.decoder.layers[1].block.choice_bias, bias)
    result = measure(back, num_prompts=2, samples=1, max_tokens=4)
    assert (result.tokens, result.different) == (8, 0)


def test_layers_that_predict_later_tokens_are_not_read(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "glm4_moe")
    further = "model.layers.2.eh_proj.weight"
    change_tensors(path, lambda tensors: tensors.update({further: torch.zeros(2, 2)}))
    with pytest.raises(UserError, match=f"no place for: {further}"):
        read_model(path)
    raw = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(raw))
    Policy.from_pretrained(path, "bf16").save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())[FURTHER_LAYERS] == 0


def test_a_gpu_refuses_heads_that_rotate_in_part(monkeypatch: Any) -> None:
    monkeypatch.setattr("jetrl.models.model.backend_for", lambda device: HOPPER)
    config = config_of("glm4_moe", n_routed_experts=4, head_dim=64)
    assert (config.rotary_dim, config.head_dim) == (32, 64)
    with pytest.raises(UserError, match=r"rotate in part \(32 of 64 channels\)"):
        check_device(config, PrecisionPlan.preset("jet"), torch.device("cuda"))


def in_fp8(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.gate.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(EXPERT(7, "up")), rf"tensor {EXPERT(7, 'up')} \[128, 128\] is missing"),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), r"0\.mlp\.gate\.weight .* is missing"),
        (
            lambda t: t.update({EXPERT(3, "gate"): torch.zeros(128, 64)}),
            rf"tensor {EXPERT(3, 'gate')} has shape \[128, 64\]",
        ),
        (in_fp8, r"0\.mlp\.gate\.weight is in FP8: a router is read in 16 or 32 bits only"),
        (
            lambda t: t.update({EXPERT(8, "up"): torch.zeros(128, 128)}),
            rf"no place for: {EXPERT(8, 'up')}",
        ),
    ],
    ids=["expert", "router", "shape", "quantized router", "one too many"],
)
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    change_tensors(tiny(tmp_path / "model"), change)
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "model")


def test_an_export_in_fp8_leaves_the_router_in_bf16(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", num_layers=3)
    raw = json.loads((path / "config.json").read_text()) | {"mlp_only_layers": [1]}
    policy = Policy.from_config({**raw, "intermediate_size": 256}, "unified")
    policy.save_pretrained(tmp_path / "fp8", dtype="fp8")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    layer = "model.layers.{}.mlp.{}".format
    for name in (
        layer(0, "experts.7.gate_proj"),
        layer(1, "gate_proj"),
        layer(2, "experts.0.down_proj"),
    ):
        assert stored[f"{name}.weight"].dtype == torch.float8_e4m3fn
        assert stored[f"{name}.weight_scale_inv"].dtype == torch.float32
    assert stored[layer(0, "gate.weight")].dtype == torch.bfloat16
    left = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    # Whole names, so that no pattern for `gate` is one for `gate_proj` of the dense layer.
    assert left["modules_to_not_convert"] == ["lm_head", layer(0, "gate"), layer(2, "gate")]
    back = Policy.from_pretrained(tmp_path / "fp8", "unified")
    result = measure(back, num_prompts=2, samples=1, max_tokens=4)
    assert (result.tokens, result.different) == (8, 0)


def test_codes_count_every_expert_and_its_row_of_the_router() -> None:
    plan = PrecisionPlan.preset("unified")
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 128}
    config, fewer = config_of(**sizes), config_of(**sizes, num_experts=3)
    one = 3 * (128 * 128 + 4) + 2 * 128
    assert quantized_bytes(config, plan) - quantized_bytes(fewer, plan) == 2 * one


def test_every_expert_has_gradients_of_its_tokens_only(tmp_path: Path) -> None:
    policy = Policy.from_pretrained(tiny(tmp_path / "model"), "integer")
    chosen: list[Tensor] = []
    policy.decoder.trace = lambda name, x: chosen.append(x) if name.endswith("experts") else None
    policy.logprobs([[3, 9, 4]])[0].sum().backward()
    masters = policy.master_weights()
    for layer, experts in enumerate(chosen):
        shape = policy.config.layers[layer].block
        assert isinstance(shape, ExpertsShape)
        down = masters[f"layers.{layer}.down.weight"].grad.unflatten(0, (8, -1))
        # The last token's log-probs are of no token, so its experts may have no gradient.
        used = {e for e in range(8) if down[e].any()}
        assert set(experts[:-1].flatten().tolist()) == used
        assert masters[f"layers.{layer}.router.weight"].grad.any()


def test_adapters_are_on_attention_and_by_name_on_experts(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", num_layers=2)
    config = read_model(path)[0]
    assert {x.split(".")[2] for x in LoRA(8, 16.0).shapes(config)} == {"qkv", "o"}
    lora = LoRA(8, 16.0, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    assert len(lora.shapes(config)["layers.1.gate_up"].parts) == 2 * 8
    policy = Policy.from_pretrained(path, "int8", adapter=Adapter.new(config, lora, seed=1))
    with torch.no_grad():
        for name, master in policy.master_weights().items():
            if name.endswith("lora_B"):
                master.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    policy.requantize()
    result = measure(policy, num_prompts=2, samples=2, max_tokens=5, gradients=True)
    assert (result.tokens, result.different) == (20, 0)
    policy.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.experts.7.up_proj.lora_B.weight"
    assert stored[name].shape == (128, 8)
    again = read_adapter(tmp_path / "adapter", config)
    back = Policy.from_pretrained(path, "int8", adapter=again)
    tokens = [[3, 9, 4, 17, 8]]
    assert torch.equal(back.logprobs(tokens)[0], policy.logprobs(tokens)[0])
    policy.logprobs(tokens)[0].sum().backward()
    masters = policy.master_weights()
    assert masters["layers.0.down.lora_B"].grad.any()
    assert masters["layers.0.gate_up.lora_A"].grad.any()


def test_adapters_of_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    config = read_model(tiny(tmp_path / "model"))[0]
    contents = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    contents["target_parameters"] = ["mlp.experts.gate_up_proj"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(contents))
    with pytest.raises(
        UserError, match=r"target_parameters = \['mlp.experts.gate_up_proj'\] is not"
    ):
        read_lora(tmp_path, config)


def test_a_shared_expert_is_an_ordinary_linear_layer(tmp_path: Path) -> None:
    config, weights = read_model(tiny(tmp_path / "model", "qwen2_moe"))
    linears = linear_layers(config)
    assert "layers.0.shared_gate" not in linears
    names = [part.name for part in linears["layers.0.shared_gate_up"]]
    assert names[0] == "model.layers.0.mlp.shared_expert.gate_proj.weight"
    assert weights["layers.1.shared_gate.weight"].shape == (1, 128)
    adapted = {layer.split(".")[2] for layer in LoRA(8, 16.0).shapes(config)}
    assert adapted == {"qkv", "o", "shared_gate_up", "shared_down"}
