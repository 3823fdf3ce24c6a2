"""Adapters of models with images: exact, and those that transformers and PEFT read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models import test_grids, test_images
from tests.models.test_adapters import edited, moved, retensored
from tests.models.test_images import change, encode, model, picture
from tests.rollout.test_images import LONG, PARAMS, num_different, samples_of
from torch import Tensor
from transformers import AutoModelForImageTextToText

from jetrl.cli.main import main as jetrl
from jetrl.errors import UserError
from jetrl.models.adapter import Adapter, LoRA, adapted_parts
from jetrl.models.hf import model_config
from jetrl.models.peft import read_adapter
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine

FAMILIES = ("idefics3", "qwen2_5_vl", "qwen3_vl")
WHOLE = {"train_norms": True, "train_embeddings": True, "train_head": True}
TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PEFT = "base_model.model."


def adapted(path: Path, preset: str, **options: bool) -> Policy:
    adapter = Adapter.new(model_config(path), LoRA(4, 8.0, **options), seed=0)
    policy: Policy = moved(Policy.from_pretrained(path, preset, adapter=adapter))
    return policy


def logprobs(policy: Policy, family: str) -> Tensor:
    text, sizes = CASES[family]
    images = [picture(*size) for size in sizes]
    with torch.no_grad():
        return policy.logprobs([encode(policy, text, images)])[0]


CASES = dict.fromkeys(FAMILIES, test_grids.CASES[0]) | {"idefics3": test_images.TEXTS[0]}


def selected(model: Any, settings: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The modules of a model that PEFT gives an adapter, and those that it saves whole."""
    targets, saved = settings["target_modules"], settings["modules_to_save"] or []
    names = {name for name, module in model.named_modules() if name}
    adapted = {name for name in names for each in targets if f".{name}".endswith(f".{each}")}
    return adapted, {name for name in names for each in saved if name.endswith(each)}


def as_peft_reads(base: Path, adapter: Path, family: str) -> Tensor:
    """Log-probs by PEFT's rules: W + alpha / r * B A, and modules that are replaced whole."""
    text, sizes = CASES[family]
    images = [picture(*size) for size in sizes]
    reader = test_images if family == "idefics3" else test_grids
    read = reader.read_by_transformers(base, text, images)
    theirs = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    tensors = load_file(adapter / TENSORS)
    changed, whole = selected(theirs, json.loads((adapter / SETTINGS).read_text()))
    names = {f"{PEFT}{name}.lora_{kind}.weight" for name in changed for kind in "AB"}
    assert tensors.keys() == names | {f"{PEFT}{name}.weight" for name in whole}
    with torch.no_grad():
        for name in changed:
            a, b = (tensors[f"{PEFT}{name}.lora_{kind}.weight"] for kind in "AB")
            theirs.get_submodule(name).weight += 8 / 4 * (b @ a)
        for name in whole:
            theirs.get_submodule(name).weight.copy_(tensors[f"{PEFT}{name}.weight"])
        found = theirs(**read).logits[0, :-1].log_softmax(-1)
    return found.gather(1, read["input_ids"][0, 1:, None])[:, 0]


@pytest.mark.parametrize("options", [{}, WHOLE], ids=["layers", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_the_one_that_peft_reads_also_when_it_is_read_again_and_merged(
    family: str, options: dict[str, bool], tmp_path: Path
) -> None:
    base = model(tmp_path / "model", family, tie_word_embeddings=True)
    policy = adapted(base, "fp32", **options)
    policy.save_pretrained(tmp_path / "adapter")
    found = logprobs(policy, family)
    expected = as_peft_reads(base, tmp_path / "adapter", family)
    assert (found - expected).abs().max() <= 1e-5
    bare = logprobs(Policy.from_pretrained(base, "fp32"), family)
    assert (found - bare).abs().max() > 0.1
    again = read_adapter(tmp_path / "adapter", policy.config, policy.lora)
    assert torch.equal(logprobs(Policy.from_pretrained(base, "fp32", adapter=again), family), found)
    merged = tmp_path / "merged"
    words = ["export", tmp_path / "adapter", merged, "--merge", "--dtype", "float32"]
    assert jetrl([str(word) for word in words]) == 0
    assert (logprobs(Policy.from_pretrained(merged, "fp32"), family) - found).abs().max() <= 1e-5


@pytest.mark.parametrize("preset", ["int8", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_has_the_bits_of_the_trainer(family: str, preset: str, tmp_path: Path) -> None:
    policy = adapted(model(tmp_path / "model", family), preset)
    prompts = [
        encode(policy, LONG + "<image> or<image>?", [picture(1), picture(2, 40, 9)]),
        encode(policy, "a<image>", [picture(3, 9, 50)]),
    ]
    drawn = RolloutEngine(policy, max_batch_size=4, page_size=8).generate(prompts, PARAMS)
    samples = samples_of(prompts, drawn)
    assert [num_different(policy, samples, share) for share in (False, True)] == [0, 0]
    policy.weights.masters["layers.0.o.lora_B"].data.neg_()  # as an update would
    policy.requantize()
    assert num_different(policy, samples, share=False) > 20


def test_an_adapter_with_the_names_of_older_transformers_is_read(tmp_path: Path) -> None:
    base = model(tmp_path / "model", "qwen2_5_vl")
    policy = adapted(base, "fp32")
    policy.save_pretrained(tmp_path / "adapter")

    def old(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.language_model.layers", "model.layers")] = tensors.pop(name)

    retensored(old)(tmp_path / "adapter")
    edited(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])(
        tmp_path / "adapter"
    )
    with pytest.raises(UserError, match=r"no place for tensor .*gate_proj"):
        read_adapter(tmp_path / "adapter", policy.config)
    edited(target_modules=r"(?!.*visual).*(q|k|v|o|up|gate|down)_proj")(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", policy.config)
    again = Policy.from_pretrained(base, "fp32", adapter=adapter)
    assert torch.equal(logprobs(again, "qwen2_5_vl"), logprobs(policy, "qwen2_5_vl"))


def test_an_adapter_that_unties_the_embedding_merges_to_an_untied_model(tmp_path: Path) -> None:
    base = model(tmp_path / "model", "qwen2_5_vl", tie_word_embeddings=True)
    text = json.loads((base / "config.json").read_text())["text_config"]
    change(base / "config.json", text_config=text | {"tie_word_embeddings": True})
    policy = adapted(base, "fp32", **WHOLE)
    policy.save_pretrained(tmp_path / "adapter")
    embedding = f"{PEFT}model.language_model.embed_tokens"
    retensored(lambda tensors: tensors.pop(f"{PEFT}lm_head.weight"))(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / SETTINGS).read_text())["modules_to_save"]
    assert embedding.removeprefix(PEFT) in saved
    edited(modules_to_save=[name for name in saved if name != "lm_head"])(tmp_path / "adapter")
    (tmp_path / "adapter" / "jetrl_adapter.json").unlink()
    adapter = read_adapter(tmp_path / "adapter", policy.config)
    assert adapter.unties
    expected = logprobs(Policy.from_pretrained(base, "fp32", adapter=adapter), "qwen2_5_vl")
    words = ["export", tmp_path / "adapter", tmp_path / "merged", "--merge", "--dtype", "float32"]
    assert jetrl([str(word) for word in words]) == 0
    merged = Policy.from_pretrained(tmp_path / "merged", "fp32")
    assert not merged.config.tie_word_embeddings
    assert (logprobs(merged, "qwen2_5_vl") - expected).abs().max() <= 1e-5


def on_the_tower(family: str) -> Callable[[dict[str, Tensor]], None]:
    tower = {"idefics3": "vision_model.encoder.layers.0.self_attn.q_proj"}
    module = f"{PEFT}model.{tower.get(family, 'visual.blocks.0.mlp.up_proj')}"
    return lambda tensors: tensors.update({f"{module}.lora_A.weight": torch.ones(4, 32)})


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
def test_an_adapter_of_the_image_tower_is_refused(family: str, tmp_path: Path) -> None:
    base = model(tmp_path / "model", family)
    policy = adapted(base, "fp32")
    path = tmp_path / "adapter"
    policy.save_pretrained(path)
    retensored(on_the_tower(family))(path)
    with pytest.raises(UserError, match=r"is not of the language model, and the image tower is fr"):
        read_adapter(path, policy.config)
    edited(target_modules=["q_proj", "qkv"])(path)
    with pytest.raises(UserError, match=r"'qkv' matches no .* \(the image tower is frozen and has"):
        read_adapter(path, policy.config)
    edited(target_modules=["q_proj"], modules_to_save=["merger"])(path)
    with pytest.raises(UserError, match=r"merger, which the model does not have outside of its fr"):
        read_adapter(path, policy.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_the_layers_of_the_language_model(family: str, tmp_path: Path) -> None:
    config = model_config(model(tmp_path / "model", family))

    def count(targets: tuple[str, ...] | str) -> int:
        return sum(map(len, adapted_parts(config, targets).values()))

    assert count("all-linear") == count(r".*_proj") == count(r"model\..*") == 2 * 7
    assert count(("q_proj", "layers.1.mlp.up_proj")) == 3
    assert count(r"layers\.1\..*") == 7
    parts = [part for of_layer in adapted_parts(config, "all-linear").values() for part in of_layer]
    assert all(re.match(r"model\.(language|text)_model\.layers\.", part.module) for part in parts)
