"""Directories that are in NVFP4 already: their codes are taken as they are, bad ones refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.nvfp4_directories import LAYOUTS, quantization, to_nvfp4
from tests.models.stored_weights import SIZES, change_config, change_tensors, our_config, read_model
from torch import Tensor

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import stored_tensors
from jetrl.models.nvfp4_files import left_in_16_bits
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import RandomWeights
from jetrl.precision import PrecisionPlan
from jetrl.precision.nvfp4 import NVFP4Tensor, NVFP4Weight
from jetrl.precision.quantized_weight import operand_tensors as tensors
from jetrl.session.parity import measure

WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 128}
PLAN = PrecisionPlan.preset("unified").replace(base="nvfp4")


def directory(path: Path, family: str = "qwen3") -> Path:
    """Write a directory with random weights of 32 bits."""
    config = our_config(family, **WIDE, initializer_range=0.1)
    hf.save_model(path, config, dict(RandomWeights(config, seed=0)), hf.Encoding("float32"))
    return path


def policy(path: Path, plan: PrecisionPlan = PLAN) -> Policy:
    """Return the policy of a directory with an adapter that has become something."""
    adapter = Adapter.new(hf.model_config(path), LoRA(4, 8.0), 0)
    made = Policy.from_pretrained(path, plan, adapter=adapter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, master in made.master_weights().items():
            if name.endswith("lora_B"):
                master.add_(torch.randn(master.shape, generator=generator) * 0.05)
    made.requantize()
    return made


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_codes_are_the_files(
    layout: str, apart: bool, family: str, tmp_path: Path
) -> None:
    path = directory(tmp_path / "m", family)
    widened = to_nvfp4(path, layout, apart)
    stored = load_file(path / "model.safetensors")
    config = hf.model_config(path)
    packed = "_packed" if layout == "compressed-tensors" else ""
    linears = 0
    weights = hf.open_weights(path, config)
    for name, parts in stored_tensors(config).items():
        names = [part.name for part in parts]
        if not parts[0].linear_weight or names[0] not in widened:
            assert weights.codes(name) is None
            assert torch.equal(weights[name], torch.cat([stored[part] for part in names]))
            continue
        linears += 1
        assert torch.equal(weights[name], torch.cat([widened[part] for part in names]))
        codes = weights.codes(name)
        assert isinstance(codes, NVFP4Tensor)
        assert torch.equal(codes.codes, torch.cat([stored[part + packed] for part in names]))
        scales = torch.cat([stored[f"{part}_scale"].view(torch.uint8) for part in names])
        assert torch.equal(codes.scales.view(torch.uint8), scales)
        assert bool(codes.rows) == (apart and len(parts) > 1)
    assert linears == 4 * config.num_layers


@pytest.mark.parametrize("layout, apart", [("compressed-tensors", False), ("modelopt", True)])
def test_a_policy_multiplies_by_the_files_codes(layout: str, apart: bool, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    widened = to_nvfp4(path, layout, apart)
    p = policy(path)
    whole = read_model(path)[1]
    for index, layer in enumerate(p.decoder.layers):
        linears = (layer.mixer.qkv, layer.mixer.o, layer.block.gate_up, layer.block.down)
        for linear, name in zip(linears, ("qkv", "o", "gate_up", "down"), strict=True):
            values = whole[f"layers.{index}.{name}.weight"].double()
            weight = linear.operand("train")
            assert isinstance(weight, NVFP4Weight)
            assert linear.operand("rollout") is weight
            x = torch.randn(5, values.shape[1], generator=torch.Generator().manual_seed(2))
            x = x.bfloat16()
            y = (x.double() @ values.mT).float()  # rounded twice: one unit of BF16 at most
            with torch.no_grad():
                assert linear.adapter is not None
                linear.adapter, kept = None, linear.adapter
                ours = linear(x, "train").float()
                linear.adapter = kept
            assert ((ours - y).abs() <= 2.0**-8 * y.abs() + 1e-12).all()
    assert widened.keys() == {n for n in widened if "proj" in n}
    assert measure(p, num_prompts=3, max_tokens=6).different == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_are_left_in_16_bits_stay_so(layout: str, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    left = ("q_proj", "k_proj", "v_proj", "0.mlp.down_proj")
    widened = to_nvfp4(path, layout, left=left, head=True)
    config = hf.model_config(path)
    expected = {"layers.0.qkv.weight", "layers.1.qkv.weight", "layers.0.down.weight"}
    assert left_in_16_bits(config) == expected
    if layout == "compressed-tensors":  # which may name the layers with codes instead
        said = altered(layout, *GROUP, "targets", value=["re:.*(o|gate|up|1.mlp.down)_proj$"])
        change_config(path, quantization_config=said)
        assert left_in_16_bits(hf.model_config(path)) == expected
    p = policy(path)
    kept = load_file(path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    operand = p.decoder.layers[0].block.down.operand("rollout")
    assert isinstance(operand, Tensor)
    assert torch.equal(operand, kept.bfloat16())
    assert isinstance(p.decoder.layers[1].block.down.operand("rollout"), NVFP4Weight)
    head = p.decoder.lm_head.operand("rollout")
    assert isinstance(head, Tensor)
    assert torch.equal(head, widened["lm_head.weight"].bfloat16())
    assert measure(p, num_prompts=2, max_tokens=4).different == 0


NAME = "model.layers.1.mlp.up_proj.weight"


def missing(*names: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def replaced(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


def bad_scale(byte: int) -> Callable[[Tensor], Tensor]:
    """Return a function that puts one E4M3 number among scales."""

    def change(scales: Tensor) -> Tensor:
        scales.view(torch.uint8)[3, 2] = byte
        return scales

    return change


SCALE, WHOLE, DIVISOR = f"{NAME}_scale", f"{NAME}_scale_2", f"{NAME}_global_scale"
NVIDIA, NEURAL = "modelopt", "compressed-tensors"
BAD = [
    (NVIDIA, missing(SCALE), rf"tensor {SCALE} .* is missing; NVFP4"),
    (NVIDIA, missing(NAME), rf"tensor {NAME} .* is missing"),
    (NEURAL, missing(f"{NAME}_packed"), rf"tensor {NAME}_packed .* is missing"),
    (NVIDIA, replaced(NAME, lambda codes: codes[:-1].clone()), r"shape \[255, 64\].* \[256, 64\]"),
    (NVIDIA, replaced(SCALE, lambda s: s[:, ::2].clone()), r"shape \[256, 4\].* \[256, 8\]"),
    (NVIDIA, replaced(SCALE, lambda s: s.view(torch.uint8)), rf"{SCALE} is torch\.uint8"),
    (NEURAL, replaced(DIVISOR, lambda s: s.repeat(2)), r"shape \[2\].* \[\] or \[1\]"),
    (NVIDIA, replaced(WHOLE, lambda s: -s), r"_scale_2 = -.*positive"),
    (NEURAL, replaced(DIVISOR, lambda s: s * 0), r"_global_scale = 0, and"),
    (NVIDIA, replaced(SCALE, bad_scale(0x7F)), r"_scale has scales .* NaN"),
    (NVIDIA, replaced(SCALE, bad_scale(0x81)), r"_scale has scales .*negative"),
    (
        NVIDIA,
        lambda tensors: tensors.update({f"{NAME[:-7]}.pre_quant_scale": torch.ones(128)}),
        r"no place for: .*up_proj\.pre_quant_scale",
    ),
]


@pytest.mark.parametrize("layout, change, message", BAD)
def test_bad_tensors_are_named(
    layout: str, change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    path = directory(tmp_path / "m")
    to_nvfp4(path, layout)
    change_tensors(path, change)
    with pytest.raises(UserError, match=message) as raised:
        policy(path)
    assert str(path) in str(raised.value)


def altered(layout: str, *keys: str, value: Any) -> dict[str, Any]:
    """Return what a layout says about its weights, with one number changed."""
    said = quantization(layout)
    place = said
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return said


GROUP = ("config_groups", "group_0")


OTHER = [
    (altered(NVIDIA, "quant_algo", value="NVFP4_AWQ"), "quant_algo = 'NVFP4_AWQ': should be"),
    (altered(NVIDIA, "ignore", value="lm_head"), "ignore = 'lm_head': should be a valid list"),
    (altered(NEURAL, "format", value="pack-quantized"), "format = 'pack-quantized'"),
    (altered(NEURAL, *GROUP, "format", value="mxfp4-pack-quantized"), "format = 'mxfp4-pack"),
    (altered(NEURAL, "transform_config", value={"config_groups": {"R4": {}}}), "transform_config"),
    (altered(NEURAL, "config_groups", value=[]), r"config_groups = \[\]"),
    ({"quant_method": "mxfp4"}, "quant_method = 'mxfp4': should be 'fp8'"),
]


@pytest.mark.parametrize("said, message", OTHER)
def test_other_formats_are_refused(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    to_nvfp4(path, "modelopt")
    change_config(path, quantization_config=said)
    with pytest.raises(UserError, match=message) as raised:
        policy(path)
    assert f"{path}/config.json: " in str(raised.value)


def test_a_plan_that_would_round_the_codes_again_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    to_nvfp4(path, "compressed-tensors")
    fp8 = PrecisionPlan.preset("unified")
    message = r"m: its linear layers are in NVFP4 \(compressed-tensors\).*set precision\.base=nvfp4"
    for make in (policy, Policy.from_pretrained, ScalarModel.from_language_model):
        with pytest.raises(UserError, match=message):
            make(path, fp8)
    with pytest.raises(UserError, match=r"layer 1 in BF16: leave precision\.first_layers_bf16"):
        policy(path, PLAN.replace(last_layers_bf16=1))
    with pytest.raises(UserError, match=r"base=nvfp4 is for weights that are not trained"):
        Policy.from_pretrained(path, PLAN)


def test_a_frozen_reference_and_a_judge_keep_the_codes(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    to_nvfp4(path, "modelopt")
    reference = Policy.from_pretrained(path, PLAN, frozen=True)
    whole = policy(path).base()
    for ours, theirs in zip(reference.decoder.layers, whole.decoder.layers, strict=True):
        left, right = ours.mixer.qkv.operand("train"), theirs.mixer.qkv.operand("train")
        assert isinstance(left, NVFP4Weight)
        assert all(torch.equal(*pair) for pair in zip(tensors(left), tensors(right), strict=True))
    adapter = Adapter.new(hf.model_config(path).with_scalar_head(), LoRA(4, 8.0), 0)
    judge = ScalarModel.from_language_model(path, PLAN, adapter=adapter)
    left, right = (m.decoder.layers[0].mixer.o.operand("train") for m in (judge, whole))
    assert isinstance(left, NVFP4Weight)
    assert all(torch.equal(*pair) for pair in zip(tensors(left), tensors(right), strict=True))
