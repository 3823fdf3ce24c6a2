from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.training.shared import config

from jetrl.errors import UserError
from jetrl.models.families import ModelConfig
from jetrl.models.model import check_device
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan, QTensor, quantize
from jetrl.precision.formats import BF16, FP8, NVFP4, key_and_value_formats
from jetrl.precision.plan import plan_table
from jetrl.settings.loading import load_config
from jetrl.settings.model_sections import PrecisionSettings

TABLE = {  # docs/precision.md: rollout linears, training linears, keys and values, rest, lm_head
    "fp32": ("fp32", "fp32", "fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16", "bf16", "bf16"),
    "mixed": ("fp8", "bf16", "bf16", "bf16", "bf16"),
    "alike": ("fp8", "fp8", "bf16", "bf16", "bf16"),
    "jet": ("fp8", "fp8", "bf16", "bf16", "bf16"),
    "unified": ("fp8", "fp8", "int8+fp8", "bf16", "bf16"),
    "int8": ("int8", "int8", "int8", "bf16", "bf16"),
    "integer": ("int8", "int8", "int8", "bf16", "int8x2"),
}


@pytest.mark.parametrize("name", TABLE)
def test_presets_are_the_table(name: str) -> None:
    plan = PrecisionPlan.preset(name)
    row = (plan.rollout_linear, plan.train_linear, plan.kv, plan.rest, plan.lm_head)
    assert row == TABLE[name]
    assert plan.exact == (name in ("jet", "unified", "int8", "integer"))
    assert plan.defined == (name == "integer")
    assert (plan.bf16_rounding == "dithered") == (name in ("bf16", "mixed"))
    for one in (plan, plan.replace(bf16_rounding="nearest")):
        assert PrecisionPlan.from_dict(one.to_dict()) == one
    assert "bf16_rounding" not in one.to_dict(), "as before any preset was dithered"
    assert (("BF16 weights", "rounded to nearest") in plan_table(one)) == (
        name in ("bf16", "mixed")
    )


def test_unknown_preset_and_option_are_named() -> None:
    with pytest.raises(UserError, match=r"'fp6'.*unified"):
        PrecisionPlan.preset("fp6")
    with pytest.raises(UserError, match="first_layer"):
        PrecisionPlan.preset("jet").replace(first_layer=1)
    with pytest.raises(UserError, match="fp32 preset takes no options"):
        PrecisionPlan.preset("fp32").replace(kv="fp8")


@pytest.mark.parametrize(
    "option", ["first_layers_bf16=1", "lm_head=bf16", "grad_output=e4m3", "last_layers_bf16=1"]
)
def test_an_option_that_takes_the_definition_away_is_refused(option: str) -> None:
    key, _, value = option.partition("=")
    settings = PrecisionSettings(preset="integer", **{key: int(value) if value == "1" else value})
    with pytest.raises(UserError, match=rf"precision\.{key}: preset integer has the same bits"):
        PrecisionPlan.from_settings(settings)
    settings = PrecisionSettings(preset="integer", key_smoothing=True)
    assert PrecisionPlan.from_settings(settings).defined


def test_layers_kept_in_bf16_are_so_on_both_sides() -> None:
    plan = PrecisionPlan.preset("unified").replace(first_layers_bf16=1, last_layers_bf16=2)
    formats = [[plan.linear_format(side, i, 5) for i in range(5)] for side in ("rollout", "train")]
    assert formats == [[BF16, FP8, FP8, BF16, BF16]] * 2


def test_pinned_sums_make_bf16_exact_and_free_ones_make_nothing_exact() -> None:
    assert PrecisionPlan.preset("bf16").replace(pinned_sums=True).exact
    assert not PrecisionPlan.preset("unified").replace(pinned_sums=False).exact
    assert not PrecisionPlan.preset("mixed").replace(pinned_sums=True).exact  # formats differ


def test_a_plan_without_the_later_options_is_stored_as_before_there_were_any() -> None:
    later = {"wgrad_input", "pinned_sums", "sampler_deviation", "bf16_rounding"}
    assert not later & PrecisionPlan.preset("unified").to_dict().keys()
    plan = PrecisionPlan.preset("jet").replace(wgrad_input="1x128", pinned_sums=False)
    plan = plan.replace(bf16_rounding="dithered")
    assert PrecisionPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    described = dict(plan_table(plan))
    assert described["X into WGrad"] == "1x128 along tokens"
    assert described["sums"] == "the library's order"
    assert described["BF16 weights"] == "rounded by fixed draws"


@pytest.mark.parametrize("kv", ["int8", "fp8+int8", "bf16"])
def test_keys_and_values_have_the_formats_that_are_named(kv: str) -> None:
    plan = PrecisionPlan.from_settings(PrecisionSettings(preset="unified", kv=kv))
    assert plan.kv == kv
    assert plan.exact
    assert PrecisionPlan.from_dict(plan.to_dict()) == plan
    keys, values = key_and_value_formats(kv)
    assert kv == (keys.name if keys == values else f"{keys.name}+{values.name}")


WRONG = [*(("kv", kv) for kv in ("int4", "fp8+fp8", "int8+")), ("lm_head", "fp16")]


@pytest.mark.parametrize("field, value", [*WRONG, ("last_layers_bf16", -1)])
def test_wrong_fields_are_named(field: str, value: Any) -> None:
    shown = re.escape(repr(value))
    with pytest.raises(UserError, match=rf"precision.{field} = {shown}: should be .*('int8'|to 0)"):
        PrecisionPlan.preset("unified").replace(**{field: value})
    with pytest.raises(ValidationError, match=field):
        PrecisionSettings(preset="unified", **{field: value})


def test_a_model_takes_a_preset_by_its_name() -> None:
    with pytest.raises(UserError, match="precision preset 'fp8': use one of fp32, bf16"):
        Policy.from_config(config(), "fp8")
    assert Policy.from_config(config(), "bf16", device="meta").plan == PrecisionPlan.preset("bf16")


def test_a_base_in_nvfp4_stands_for_fp8_on_both_sides() -> None:
    plan = PrecisionPlan.from_settings(PrecisionSettings(base="nvfp4", first_layers_bf16=1))
    formats = [[plan.linear_format(side, i, 3) for i in range(3)] for side in ("rollout", "train")]
    assert formats == [[BF16, NVFP4, NVFP4]] * 2
    assert plan.exact
    assert PrecisionPlan.from_dict(plan.to_dict()) == plan
    described = dict(plan_table(plan))
    assert described["rollout linears"] == described["training linears"]
    assert described["rollout linears"].startswith("NVFP4 weights")
    for preset in ("bf16", "mixed", "fp32"):
        with pytest.raises(UserError, match=r"nvfp4.*unified or jet"):
            PrecisionPlan.preset(preset).replace(base="nvfp4")


def test_weights_through_bf16_move_the_samplers_codes_alone() -> None:
    settings = PrecisionSettings(preset="mixed", weights_through_bf16=True)
    plan = PrecisionPlan.from_settings(settings)
    assert ("sampler only", "weights_through_bf16 = True") in plan_table(plan)
    quantized = Policy.from_config(config(), plan).decoder.layers[0].mixer.qkv.quantized
    sampler = quantized.operand("rollout")
    assert isinstance(sampler, QTensor)
    rounded = quantize(quantized.master.detach().bfloat16(), (128, 128))
    assert torch.equal(sampler.codes.float(), rounded.codes.float())
    assert torch.equal(sampler.scales, rounded.scales)
    assert not PrecisionPlan.preset("unified").replace(weights_through_bf16=True).exact
    with pytest.raises(UserError, match="weights_through_bf16 = true is for FP8 weights"):
        PrecisionPlan.from_settings(PrecisionSettings(preset="int8", weights_through_bf16=True))


@pytest.mark.parametrize(
    "preset, options, stored",
    [
        ("alike", {}, {"weights_through_bf16": True, "attention_split": 256}),
        ("alike", {"weights_through_bf16": False}, {"attention_split": 256}),
        ("mixed", {"weights_through_bf16": True}, {"weights_through_bf16": True}),
        ("unified", {}, None),
    ],
)
def test_the_samplers_own_fields_are_stored_as_before_they_were_fields(
    preset: str, options: dict[str, Any], stored: dict[str, Any] | None
) -> None:
    plan = PrecisionPlan.from_settings(PrecisionSettings(preset=preset, **options))
    assert plan.to_dict().get("sampler_deviation") == stored
    assert PrecisionPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("table", [{"logit_noise": 0.1}, {"attention_split": 64}, 3, [1]])
def test_a_stored_plan_of_a_study_is_refused(table: object) -> None:
    with pytest.raises(UserError, match=r"plan\.json: sampler_deviation: the plan of a study"):
        PrecisionPlan.from_dict({"name": "jet", "sampler_deviation": table}, "plan.json")


def test_the_name_of_before_sets_weights_through_bf16(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[precision]\npreset = "mixed"\n[sampler_deviation]\nweights_through_bf16 = 1\n'
    )
    old, new = "sampler_deviation.weights_through_bf16", "precision.weights_through_bf16"
    with pytest.raises(UserError, match=rf"line 4: {new} = 1: should be a valid boolean"):
        load_config(recipe)
    assert load_config(recipe, [f"{old}=true"]) == load_config(recipe, [f"{new}=true"])
    assert load_config(None, [f"{old}=none"]) == load_config(None)
    with pytest.raises(UserError, match=r"'sampler_deviation\.kv=fp8'.*is for studies"):
        load_config(None, ["sampler_deviation.kv=fp8"])


def test_int8_queries_need_int8_keys_and_values_and_a_cpu() -> None:
    integer = PrecisionPlan.preset("int8").replace(queries="int8")
    assert dict(plan_table(integer))["queries, both sides"] == "INT8, fp32 scales"
    with pytest.raises(UserError, match=r"kv = int8\+fp8 is for queries in BF16.*kv = int8"):
        PrecisionPlan.preset("unified").replace(queries="int8")
    with pytest.raises(UserError, match=r"precision\.kv = bf16.*or precision\.preset = int8$"):
        PrecisionPlan.from_settings(PrecisionSettings(preset="integer", kv="bf16"))
    assert PrecisionPlan.from_settings(PrecisionSettings(preset="int8", kv="bf16")).kv == "bf16"
    model = ModelConfig.from_hf({"architectures": ["Qwen3ForCausalLM"], **config()})
    with pytest.raises(UserError, match=r"INT8 queries: use precision\.preset = integer"):
        check_device(model, integer, torch.device("cuda"), elsewhere=True)
