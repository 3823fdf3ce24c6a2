"""Directories that are in NVFP4 already: their codes are taken as they are, bad ones refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvfp4_directories import LAYOUTS, change_config, change_tensors, quantization, to_nvfp4
from safetensors.torch import load_file
from stored_weights import SIZES
from torch import Tensor

from jetrl.cli.main import main
from jetrl.errors import UserError
from jetrl.memory.plan import quantized_bytes
from jetrl.models import hf
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig, stored_tensors
from jetrl.models.nvfp4_files import left_in_16_bits
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import random_weights
from jetrl.precision import PrecisionPlan
from jetrl.precision.nvfp4 import NVFP4Tensor
from jetrl.precision.nvfp4_weight import NVFP4Weight
from jetrl.session.parity import measure

WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 128}
PLAN = PrecisionPlan.preset("unified").replace(base="nvfp4")


def directory(path: Path, family: str = "qwen3", **sizes: Any) -> Path:
    """Write a directory with random weights of 32 bits."""
    raw = WIDE | sizes | {"model_type": family, "rms_norm_eps": 1e-6, "initializer_range": 0.1}
    config = ModelConfig.from_hf(raw)
    hf.save_model(path, config, random_weights(config, seed=0), "float32")
    return path


def read(path: Path) -> dict[str, Tensor]:
    with hf.open_weights(path, hf.model_config(path)) as weights:
        return dict(weights)


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


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "phi3"])
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
    with hf.open_weights(path, config) as weights:
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


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_values_are_within_two_roundings_of_the_exact_ones(layout: str, tmp_path: Path) -> None:
    """Float32 rounds the last product and the reciprocal: together 2**-23 of each value.

    Readers that multiply both scales first stay within as much.
    """
    path = directory(tmp_path / "m")
    to_nvfp4(path, layout)
    stored, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    divides = layout == "compressed-tensors"
    packed = stored[name + ("_packed" if divides else "")]
    of_matrix = stored[name + ("_global_scale" if divides else "_scale_2")].double()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nibbles = torch.stack((packed % 16, packed // 16), 2).flatten(1).long()
    values = magnitudes[nibbles % 8] * (1 - 2 * (nibbles // 8))
    values *= stored[f"{name}_scale"].double().repeat_interleave(16, 1)
    exact = values / of_matrix if divides else values * of_matrix
    ours = read(path)["layers.0.down.weight"].double()
    assert ((ours - exact).abs() <= 2.0**-23 * exact.abs()).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
def test_a_policy_multiplies_by_the_files_codes(layout: str, apart: bool, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    widened = to_nvfp4(path, layout, apart)
    p = policy(path)
    whole = read(path)
    for index, layer in enumerate(p.decoder.layers):
        linears = (layer.qkv, layer.o, layer.block.gate_up, layer.block.down)
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


def test_gradients_go_through_matrices_with_scales_of_their_own(tmp_path: Path) -> None:
    """DGrad in float64 of the widened values: BF16 rounds it once, float32 sums add 2**-16."""
    path = directory(tmp_path / "m")
    to_nvfp4(path, "modelopt", apart=True)
    p, values = policy(path), read(path)["layers.0.qkv.weight"].double()
    linear = p.decoder.layers[0].qkv
    linear.adapter = None
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 128, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(7, len(values), generator=generator).bfloat16()
    linear(x, "train").backward(dy)
    assert x.grad is not None
    exact, terms = dy.double() @ values, dy.double().abs() @ values.abs()
    assert ((x.grad.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-16 * terms).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_are_left_in_16_bits_stay_so_and_are_counted(
    layout: str, tmp_path: Path
) -> None:
    path = directory(tmp_path / "m")
    left = ("q_proj", "k_proj", "v_proj", "0.mlp.down_proj")
    to_nvfp4(path, layout, left=left)
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
    held = {n: t.nbytes for n, t in p.weights.quantized_tensors().items() if "lora" not in n}
    assert sum(held.values()) + p.decoder.rotary_table.nbytes == quantized_bytes(config, PLAN)
    assert measure(p, num_prompts=2, max_tokens=4).different == 0


def test_a_head_in_nvfp4_is_widened(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    widened = to_nvfp4(path, "modelopt", head=True)
    p = policy(path)
    operand = p.decoder.lm_head.operand("rollout")
    assert isinstance(operand, Tensor)
    assert torch.equal(operand, widened["lm_head.weight"].bfloat16())


def test_one_of_fused_matrices_alone_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    to_nvfp4(path, "modelopt", left=("0.self_attn.v_proj",))
    with pytest.raises(UserError, match=r"safetensors: .*v_proj\.weight is not in NVFP4, and"):
        policy(path)


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


@pytest.mark.parametrize(
    "layout, change, message",
    [
        ("modelopt", missing(f"{NAME}_scale"), rf"there is {NAME}, but no tensor {NAME}_scale:"),
        ("modelopt", missing(f"{NAME}_scale_2"), rf"no tensor {NAME}_scale_2:"),
        ("modelopt", missing(NAME), rf"no tensor {NAME}:"),
        (
            "modelopt",
            missing(f"{NAME}_scale", f"{NAME}_scale_2"),
            rf"no tensor {NAME}_scale:",
        ),
        ("compressed-tensors", missing(f"{NAME}_packed"), rf"no tensor {NAME}_packed:"),
        ("compressed-tensors", missing(f"{NAME}_global_scale"), r"no tensor .*_global_scale:"),
        (
            "modelopt",
            replaced(NAME, lambda codes: codes[:-1].clone()),
            rf"{NAME} has shape \[255, 64\], config\.json expects \[256, 64\]",
        ),
        (
            "modelopt",
            replaced(f"{NAME}_scale", lambda scales: scales[:, ::2].clone()),
            rf"{NAME}_scale has shape \[256, 4\], config\.json expects \[256, 8\]",
        ),
        (
            "modelopt",
            replaced(f"{NAME}_scale", lambda scales: scales.view(torch.uint8).flatten()),
            rf"{NAME}_scale has shape \[2048\]",
        ),
        (
            "modelopt",
            replaced(f"{NAME}_scale", lambda scales: scales.view(torch.uint8)),
            rf"{NAME}_scale is torch\.uint8, and NVFP4",
        ),
        (
            "compressed-tensors",
            replaced(f"{NAME}_global_scale", lambda scale: scale.repeat(2)),
            r"_global_scale has shape \[2\], config\.json expects \[\] or \[1\]",
        ),
        ("modelopt", replaced(f"{NAME}_scale_2", lambda s: -s), r"_scale_2 = -.*positive"),
        ("modelopt", replaced(f"{NAME}_scale_2", lambda s: s / 0), r"_scale_2 = inf.*positive"),
        (
            "compressed-tensors",
            replaced(f"{NAME}_global_scale", lambda s: s * 0),
            r"_global_scale = 0, and",
        ),
        ("modelopt", replaced(f"{NAME}_scale", bad_scale(0x7F)), r"_scale has scales .* NaN"),
        ("modelopt", replaced(f"{NAME}_scale", bad_scale(0x81)), r"_scale has scales .*negative"),
        (
            "modelopt",
            lambda tensors: tensors.update({f"{NAME[:-7]}.pre_quant_scale": torch.ones(128)}),
            r"no place for: .*up_proj\.pre_quant_scale",
        ),
    ],
)
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


@pytest.mark.parametrize(
    "said, message",
    [
        (altered("modelopt", "quant_algo", value="NVFP4_AWQ"), "quant_algo = 'NVFP4_AWQ' is not"),
        (altered("modelopt", "quant_algo", value="FP8"), "quant_algo = 'FP8' is not supported"),
        (altered("modelopt", "quant_algo", value=None), "quant_algo = None is not supported"),
        (
            altered("modelopt", *GROUP, "weights", "group_size", value=32),
            r"group_0\.weights\.group_size = 32: .*groups of 16",
        ),
        (altered("modelopt", "ignore", value="lm_head"), "ignore = 'lm_head': a list"),
        (
            altered("compressed-tensors", "format", value="pack-quantized"),
            r"format 'pack-quantized' with 4 bits of type 'float' is not supported",
        ),
        (
            altered("compressed-tensors", *GROUP, "weights", "type", value="int"),
            "4 bits of type 'int' is not supported",
        ),
        (
            altered("compressed-tensors", *GROUP, "weights", "group_size", value=32),
            r"weights\.group_size = 32",
        ),
        (
            altered("compressed-tensors", *GROUP, "format", value="mxfp4-pack-quantized"),
            "format 'mxfp4-pack-quantized'",
        ),
        (
            altered("compressed-tensors", *GROUP, "weights", "strategy", value="group"),
            "strategy 'group'",
        ),
        (
            altered("compressed-tensors", "transform_config", value={"config_groups": {"R4": {}}}),
            "transform_config is not supported",
        ),
        (altered("compressed-tensors", "config_groups", value=[]), r"config_groups = \[\]"),
        ({"quant_method": "mxfp4"}, "quant_method = 'mxfp4' is not supported"),
        ({"quant_method": "awq", "bits": 4}, "quant_method = 'awq' is not supported"),
    ],
)
def test_other_formats_are_refused(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    to_nvfp4(path, "modelopt")
    change_config(path, quantization_config=said)
    with pytest.raises(UserError, match=message) as raised:
        policy(path)
    assert f"{path}/config.json: " in str(raised.value)


def test_a_file_of_modelopt_without_a_quantization_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"m/hf_quant_config\.json: no object `quantization`"):
        policy(path)


def test_a_plan_that_would_round_the_codes_again_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    to_nvfp4(path, "compressed-tensors")
    fp8 = PrecisionPlan.preset("unified")
    message = r"m: its linear layers are in NVFP4 \(compressed-tensors\).*set precision\.base=nvfp4"
    with pytest.raises(UserError, match=message):
        policy(path, fp8)
    with pytest.raises(UserError, match=message):
        Policy.from_pretrained(path, fp8)
    with pytest.raises(UserError, match=message):
        ScalarModel.from_language_model(path, fp8)
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
        left, right = ours.qkv.operand("train"), theirs.qkv.operand("train")
        assert isinstance(left, NVFP4Weight)
        assert all(torch.equal(*pair) for pair in zip(left.tensors(), right.tensors(), strict=True))
    adapter = Adapter.new(hf.model_config(path).with_scalar_head(), LoRA(4, 8.0), 0)
    judge = ScalarModel.from_language_model(path, PLAN, adapter=adapter)
    left, right = (m.decoder.layers[0].o.operand("train") for m in (judge, whole))
    assert isinstance(left, NVFP4Weight)
    assert all(torch.equal(*pair) for pair in zip(left.tensors(), right.tensors(), strict=True))


def test_export_writes_the_values_of_the_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory(tmp_path / "m")
    widened = to_nvfp4(path, "modelopt", apart=True)
    command = ["export", str(path), str(tmp_path / "wide"), "--dtype", "float32", "--device", "cpu"]
    assert main(command) == 0
    assert "dequantized from the NVFP4" in capsys.readouterr().out
    written = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(written[name], values) for name, values in widened.items())
    assert "quantization_config" not in hf.read_config(tmp_path / "wide")
