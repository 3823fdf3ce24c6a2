"""FP8 checkpoints: written by the one quantizer in the layout others read, read back exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_weights import SIZES, read_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from jetrl.errors import UserError
from jetrl.models.families import ModelConfig, stored_tensors
from jetrl.models.hf import read_config, save_model
from jetrl.models.policy import Policy
from jetrl.models.tiny import random_weights
from jetrl.precision import PrecisionPlan
from jetrl.precision.quantize import dequantize, quantize

# at least one 128 x 128 block for each linear, as stored
FP8_SIZES = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


def our_config(family: str = "qwen3", **sizes: Any) -> ModelConfig:
    raw = SIZES | sizes | {"model_type": family, "rms_norm_eps": 1e-6}
    return ModelConfig.from_hf(raw)


def rewrite(path: Path, change: Any, file: str = "model.safetensors") -> None:
    """Change the tensors of a checkpoint file: `change` gets the dictionary."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / file).items()}
    change(tensors)
    save_file(tensors, str(path / file), metadata={"format": "pt"})


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def is_linear(name: str) -> bool:
    return name.split(".")[-2] in ("qkv", "o", "gate_up", "down") and name.endswith(".weight")


@pytest.mark.parametrize(
    "family, scales", [("qwen3", "fp32"), ("qwen2", "fp32"), ("llama", "fp32"), ("llama", "pow2")]
)
def test_fp8_round_trip_is_the_quantizer(family: str, scales: Any, tmp_path: Path) -> None:
    config = our_config(family, **FP8_SIZES)
    weights = random_weights(config, seed=0)
    save_model(tmp_path / "m", config, weights, "fp8", max_shard_bytes=60_000, scales=scales)
    back_config, back = read_model(tmp_path / "m")
    expected = {
        name: dequantize(quantize(tensor, (128, 128), scales=scales))
        if is_linear(name)
        else tensor.bfloat16()
        for name, tensor in weights.items()
    }
    assert back_config == config
    assert_same_tensors(back, expected)


def test_fp8_layout_is_the_one_of_transformers(tmp_path: Path) -> None:
    config = our_config("qwen3", **FP8_SIZES)
    weights = random_weights(config, seed=0)
    save_model(tmp_path / "m", config, weights, "fp8")
    assert read_config(tmp_path / "m")["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    theirs = AutoConfig.from_pretrained(tmp_path / "m").quantization_config
    parsed = FineGrainedFP8Config.from_dict(dict(theirs))
    assert parsed.quant_method == "fp8"
    assert tuple(parsed.weight_block_size) == (128, 128)

    stored = load_file(tmp_path / "m" / "model.safetensors")
    parts = [part for parts in stored_tensors(config).values() for part in parts]
    scaled = {part.name for part in parts if part.linear_weight}
    assert set(stored) == {part.name for part in parts} | {f"{name}_scale_inv" for name in scaled}
    for name in scaled:
        rows, columns = stored[name].shape
        scales = stored[f"{name}_scale_inv"]
        assert stored[name].dtype == torch.float8_e4m3fn
        assert (scales.dtype, tuple(scales.shape)) == (torch.float32, (rows // 128, columns // 128))
    name = "model.layers.1.self_attn.k_proj.weight"
    their_values = Fp8Dequantize(None).convert(
        {"weight": stored[name], "weight_scale_inv": stored[f"{name}_scale_inv"]}
    )["weight"]
    ours = read_model(tmp_path / "m")[1]["layers.1.qkv.weight"][256:384]
    assert torch.equal(their_values, ours)


@pytest.mark.parametrize("bf16_layers", [(), (0,)], ids=["all fp8", "first layer bf16"])
def test_fp8_loads_in_transformers(bf16_layers: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers loads FP8 through accelerate")
    config = our_config("qwen3", **FP8_SIZES)
    save_model(
        tmp_path / "m", config, random_weights(config, seed=0), "fp8", bf16_layers=bf16_layers
    )
    ours = read_model(tmp_path / "m")[1]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()  # in BF16 on a CPU
    for name, parts in stored_tensors(config).items():
        rows = torch.cat([theirs[part.name] for part in parts])
        assert torch.equal(rows, ours[name].bfloat16()), name


def test_fp8_with_layers_kept_bf16_names_them(tmp_path: Path) -> None:
    config = our_config("qwen3", **FP8_SIZES)
    weights = random_weights(config, seed=0)
    save_model(tmp_path / "m", config, weights, "fp8", bf16_layers=[1])
    kept = read_config(tmp_path / "m")["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.down_proj" in kept
    assert len(kept) == 1 + 7
    back = read_model(tmp_path / "m")[1]
    assert back["layers.0.down.weight"].dtype == torch.float32
    assert torch.equal(back["layers.1.down.weight"], weights["layers.1.down.weight"].bfloat16())


@pytest.mark.parametrize("preset", ["bf16", "mixed", "unified"])
def test_the_layers_that_a_plan_keeps_in_bf16_are_so_in_an_fp8_directory(
    preset: str, tmp_path: Path
) -> None:
    """Else the layers would be FP8 on both sides, in the rollout alone, or on neither."""
    plan = PrecisionPlan.preset(preset).replace(last_layers_bf16=1)
    config = our_config("qwen3", **FP8_SIZES)
    policy = Policy(config, plan, random_weights(config, seed=0))
    policy.save_pretrained(tmp_path / "m", dtype="fp8")
    said = read_config(tmp_path / "m")["quantization_config"]
    parts = [part for named in stored_tensors(config).values() for part in named]
    layer_1 = [p.name.removesuffix(".weight") for p in parts if p.linear_weight and p.layer == 1]
    assert said["modules_to_not_convert"] == ["lm_head", *layer_1]
    assert said["ignored_layers"] == layer_1
    stored = load_file(tmp_path / "m" / "model.safetensors")
    for part in parts:
        wanted = torch.float8_e4m3fn if part.linear_weight and part.layer == 0 else torch.bfloat16
        assert stored[part.name].dtype == wanted, part.name


def test_fp8_checkpoints_of_ragged_size_are_read(tmp_path: Path) -> None:
    """Sizes that are not multiples of 128 have ceil(N / 128) x ceil(K / 128) scales."""
    config = our_config(intermediate_size=200)
    weights = random_weights(config, seed=0)
    save_model(tmp_path / "m", config, weights, "float32")
    name = "model.layers.0.mlp.down_proj.weight"

    def to_fp8(tensors: dict[str, Tensor]) -> None:
        quantized = quantize(tensors[name], (128, 128))
        tensors[name], tensors[f"{name}_scale_inv"] = quantized.codes, quantized.scales

    rewrite(tmp_path / "m", to_fp8)
    back = read_model(tmp_path / "m")[1]["layers.0.down.weight"]
    assert torch.equal(back, dequantize(quantize(weights["layers.0.down.weight"], (128, 128))))


def test_fp8_refuses_sizes_that_are_not_whole_blocks(tmp_path: Path) -> None:
    config = our_config()
    with pytest.raises(UserError, match=r"q_proj.weight \[64, 32\].*save it as bfloat16"):
        save_model(tmp_path / "m", config, random_weights(config, seed=0), "fp8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "awq"}, "quant_method = 'awq' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        ({"quant_method": "fp8"}, "weight_block_size = None"),
        ("fp8", "quantization_config = 'fp8'"),
    ],
)
def test_other_quantizations_are_refused(quantization: Any, message: str, tmp_path: Path) -> None:
    config = our_config()
    save_model(tmp_path / "m", config, random_weights(config, seed=0))
    file = tmp_path / "m" / "config.json"
    changed = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "m")


def test_scales_beside_a_weight_that_is_not_fp8_are_refused(tmp_path: Path) -> None:
    config = our_config(**FP8_SIZES)
    save_model(tmp_path / "m", config, random_weights(config, 0))
    extra = "model.layers.0.mlp.down_proj.weight_scale_inv"
    rewrite(tmp_path / "m", lambda tensors: tensors.update({extra: torch.ones(1, 2)}))
    with pytest.raises(UserError, match=r"down_proj\.weight is torch\.bfloat16, and .*scale_inv"):
        read_model(tmp_path / "m")


def test_fp8_without_scales_or_with_a_wrong_grid_is_refused(tmp_path: Path) -> None:
    config = our_config("qwen3", **FP8_SIZES)
    save_model(tmp_path / "m", config, random_weights(config, seed=0), "fp8")
    name = "model.layers.0.self_attn.o_proj.weight"

    def transpose(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].T.contiguous()

    rewrite(tmp_path / "m", transpose)
    with pytest.raises(UserError, match=r"o_proj.weight_scale_inv has shape \[2, 1\].*\[1, 2\]"):
        read_model(tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors.pop(f"{name}_scale_inv"))
    with pytest.raises(UserError, match=f"no tensor {name}_scale_inv"):
        read_model(tmp_path / "m")
