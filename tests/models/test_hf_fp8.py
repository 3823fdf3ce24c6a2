"""FP8 checkpoints: written by the one quantizer in the layout others read, read back exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.stored_weights import (
    SIZES,
    assert_same_tensors,
    change_config,
    change_tensors,
    our_config,
    read_model,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import FineGrainedFP8Config

from jetrl.errors import UserError
from jetrl.models.families import stored_tensors
from jetrl.models.hf import Encoding, read_config, save_model
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights
from jetrl.precision import PrecisionPlan
from jetrl.precision.quantize import dequantize, quantize

# at least one 128 x 128 block for each linear, as stored
FP8_SIZES = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


def is_linear(name: str) -> bool:
    return name.split(".")[-2] in ("qkv", "o", "gate_up", "down") and name.endswith(".weight")


@pytest.mark.parametrize("family, scales", [("qwen2", "fp32"), ("llama", "pow2")])
def test_fp8_round_trip_is_the_quantizer(family: str, scales: Any, tmp_path: Path) -> None:
    config = our_config(family, **FP8_SIZES)
    weights = dict(RandomWeights(config, seed=0))
    save_model(
        tmp_path / "m", config, weights, Encoding("fp8", scales=scales), max_shard_bytes=60_000
    )
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
    weights = dict(RandomWeights(config, seed=0))
    save_model(tmp_path / "m", config, weights, Encoding("fp8"))
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


@pytest.mark.parametrize("bf16_layers", [(), (0,)], ids=["all fp8", "first layer bf16"])
def test_fp8_loads_in_transformers(bf16_layers: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers loads FP8 through accelerate")
    config = our_config("qwen3", **FP8_SIZES)
    encoding = Encoding("fp8", bf16_layers)
    save_model(tmp_path / "m", config, dict(RandomWeights(config, seed=0)), encoding)
    ours = read_model(tmp_path / "m")[1]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()  # in BF16 on a CPU
    for name, parts in stored_tensors(config).items():
        rows = torch.cat([theirs[part.name] for part in parts])
        assert torch.equal(rows, ours[name].bfloat16()), name


@pytest.mark.parametrize("preset", ["bf16", "unified"])
def test_the_layers_that_a_plan_keeps_in_bf16_are_so_in_an_fp8_directory(
    preset: str, tmp_path: Path
) -> None:
    """Else the layers would be FP8 on both sides, in the rollout alone, or on neither."""
    plan = PrecisionPlan.preset(preset).replace(last_layers_bf16=1)
    config = our_config("qwen3", **FP8_SIZES)
    policy = Policy(ModelSource.from_seed(config, 0), plan)
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


@pytest.mark.parametrize("rounding", ["nearest", "dithered"])
def test_an_fp8_directory_has_the_codes_of_the_values_that_the_policy_reads(
    rounding: Any, tmp_path: Path
) -> None:
    """Rounded to nearest, a policy has not seen what its master weights gathered."""
    plan = PrecisionPlan.preset("bf16").replace(bf16_rounding=rounding)
    config = our_config("qwen3", **FP8_SIZES)
    policy = Policy(ModelSource.from_seed(config, 0), plan)
    name = "layers.0.o.weight"
    master = policy.master_weights()[name].data
    policy.save_pretrained(tmp_path / "m", dtype="fp8")
    read = master.bfloat16().float() if rounding == "nearest" else master
    stored = load_file(tmp_path / "m" / "model.safetensors")[O_PROJ]
    assert torch.equal(stored, quantize(read, (128, 128)).codes)
    rounded = quantize(master.bfloat16().float(), (128, 128)).codes
    assert not torch.equal(quantize(master, (128, 128)).codes, rounded), "else nothing is shown"


O_PROJ, DOWN = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"


def test_scales_in_e8m0_are_exact_powers_of_two(tmp_path: Path) -> None:
    """All 255 codes: 2**-127 is subnormal in float32."""
    config = our_config("qwen3", **FP8_SIZES)
    encoding = Encoding("fp8", scales="pow2")
    save_model(tmp_path / "m", config, dict(RandomWeights(config, seed=0)), encoding)
    said = read_config(tmp_path / "m")["quantization_config"] | {"scale_fmt": "ue8m0"}
    change_config(tmp_path / "m", quantization_config=said)
    for first in range(0, 256, 2):
        codes = torch.tensor([[first, min(first + 1, 254)]], dtype=torch.uint8)

        def narrow(tensors: dict[str, torch.Tensor], codes: torch.Tensor = codes) -> None:
            tensors[f"{O_PROJ}_scale_inv"] = codes.view(torch.float8_e8m0fnu)
            tensors[O_PROJ] = torch.ones(128, 256).to(torch.float8_e4m3fn)

        change_tensors(tmp_path / "m", narrow)
        values = read_model(tmp_path / "m")[1]["layers.0.o.weight"].double()
        powers = torch.exp2(codes.double() - 127).repeat_interleave(128, 1)
        assert torch.equal(values, powers.expand(128, 256))


def spoil(name: str, number: float) -> Any:
    """Return a change that puts a number at the beginning of a tensor."""
    return lambda tensors: tensors[name].view(-1)[:1].copy_(torch.tensor([number]))


def spoil_e8m0(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{O_PROJ}_scale_inv"
    codes = torch.full(tensors[name].shape, 255, dtype=torch.uint8)
    tensors[name] = codes.view(torch.float8_e8m0fnu)


SCALES = r"safetensors: .*o_proj\.weight_scale_inv has scales that are negative, infinite or NaN"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.update({f"{O_PROJ}_scale_inv": t[f"{O_PROJ}_scale_inv"].T.contiguous()}),
            r"o_proj.weight_scale_inv has shape \[2, 1\].*\[1, 2\]",
        ),
        (lambda t: t.pop(f"{O_PROJ}_scale_inv"), f"no tensor {O_PROJ}_scale_inv"),
        (
            lambda t: t.update({DOWN: t[DOWN].bfloat16()}),
            r"down_proj\.weight is torch\.bfloat16; .* without .*scale_inv",
        ),
        *((spoil(f"{O_PROJ}_scale_inv", number), SCALES) for number in (math.nan, math.inf, -1.0)),
        (spoil_e8m0, SCALES),
        (spoil(DOWN, math.nan), r"safetensors: .*down_proj\.weight has FP8 codes that are NaN"),
    ],
    ids=[
        "scale turned",
        "no scale",
        "no code",
        "scale nan",
        "scale infinite",
        "scale negative",
        "scale e8m0 255",
        "code nan",
    ],
)
def test_wrong_scales_and_what_is_no_number_are_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    config = our_config("qwen3", **FP8_SIZES)
    save_model(tmp_path / "m", config, dict(RandomWeights(config, seed=0)), Encoding("fp8"))
    change_tensors(tmp_path / "m", change)
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "m")


def test_partial_blocks_and_other_quantizations_are_refused(tmp_path: Path) -> None:
    config = our_config()
    weights = dict(RandomWeights(config, seed=0))
    with pytest.raises(UserError, match=r"q_proj.weight \[64, 32\].*save it as bfloat16"):
        save_model(tmp_path / "m", config, weights, Encoding("fp8"))
    assert list(tmp_path.iterdir()) == []
    save_model(tmp_path / "m", config, weights, Encoding())
    change_config(tmp_path / "m", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="weight_block_size is missing"):
        read_model(tmp_path / "m")
