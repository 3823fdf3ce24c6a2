"""A trained image tower: its gradients are transformers', its features follow its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models import test_grids, test_images
from tests.models.test_images import encode, model, picture
from transformers import AutoModelForImageTextToText

from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.models.vision import trained_shapes
from jetrl.models.vision_trained import TrainedTower
from jetrl.precision import PrecisionPlan
from jetrl.training.guard import watch
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.packing import pack
from jetrl.types import Completion, Image, Prompt, Sample, Score

FAMILIES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl")
TEXT = "A<image> wide and<image>a tall one:<image>"
SIZES = [(9, 40, 18), (7, 10, 33), (9, 40, 18)]  # the last is the first one again


def trained(path: Path, part: str, plan: str = "fp32") -> Policy:
    source = replace(ModelSource.from_path(path), trained_tower=part)
    return Policy(source, PrecisionPlan.preset(plan))


def read_by_transformers(path: Path, images: Sequence[Image]) -> dict[str, Any]:
    family = Policy.from_pretrained(path, "fp32", device="meta").config.family
    reads = test_grids if family in test_grids.FAMILIES else test_images
    return reads.read_by_transformers(path, TEXT, images)


def file_names(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("part", ["connector", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, part: str, tmp_path: Path) -> None:
    path = model(tmp_path / "model", family)
    policy, images = trained(path, part), [picture(*size) for size in SIZES]
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    read = read_by_transformers(path, images)
    logits = theirs(**read).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, read["input_ids"][0, 1:, None])
    logprobs.sum().backward()
    (found,) = policy.logprobs([encode(policy, TEXT, images)])
    assert (found - logprobs[:, 0]).abs().max() <= 1e-4
    found.sum().backward()
    masters = policy.master_weights()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    # In files of Qwen2.5-VL the tower's names lack the first part.
    pairs = {
        n: (masters[n].grad, expected[f"model.{n.removeprefix('model.')}"])
        for n in policy.weights.of_tower
    }
    whole = sum(float(grad.norm()) for _, grad in pairs.values())
    for name, (grad, wanted) in pairs.items():
        # A bias of keys has a gradient of 0, but for rounding.
        assert (grad - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7 * whole, name
    of_file = {n for n in file_names(path) if ".vision_model." in n or ".connector." in n}
    of_file |= {n for n in file_names(path) if n.removeprefix("model.").startswith("visual.")}
    joins = {n for n in of_file if any(each in n for each in ("connector.", "merger"))}
    assert pairs.keys() == (of_file if part == "all" else joins)
    language = masters["layers.0.o.weight"].grad
    body = theirs.model.text_model if hasattr(theirs.model, "text_model") else None
    wanted = (body or theirs.model.language_model).layers[0].self_attn.o_proj.weight.grad
    assert (language - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("plan", ["fp32", "int8"])
@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_features_follow_the_weights_and_the_trainer_reads_the_samplers(
    family: str, plan: str, tmp_path: Path
) -> None:
    policy = trained(model(tmp_path / "model", family), "all", plan)
    assert policy.tower is not None
    inputs, image = encode(policy, TEXT, [picture(*size) for size in SIZES]), picture(*SIZES[0])
    before = policy.tower.features(image)
    repeats = []
    for _ in range(2):
        (logprobs,) = policy.logprobs([inputs])
        logprobs.sum().backward()
        repeats.append([policy.weights.masters[n].grad for n in policy.weights.of_tower])
        for master in policy.master_weights().values():
            master.grad = None
    assert all(map(torch.equal, repeats[0], repeats[1]))
    assert policy.tower.computed == 2  # backward does not count, nor the image that comes twice
    with torch.no_grad():
        (sampled,) = policy.logprobs([inputs])
        assert torch.equal(sampled, logprobs)
        policy.weights.masters[policy.weights.of_tower[-1]].add_(0.5)
    assert policy.tower.features(image) is before
    policy.requantize()
    after = policy.tower.features(image)
    assert not torch.equal(after, before)
    assert (policy.tower.computed, after.dtype) == (3, policy.weights.dtype)


def test_files_have_the_trained_tensors_and_the_others_as_they_were(tmp_path: Path) -> None:
    path = model(tmp_path / "model", "qwen3_vl")
    before, policy = file_names(path), trained(path, "connector", "bf16")  # dithers matrices
    with torch.no_grad():
        for name in policy.weights.of_tower:
            policy.weights.masters[name].add_(1 / 3)
    policy.requantize()
    for dtype, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        policy.save_pretrained(tmp_path / dtype, dtype)
        after = file_names(tmp_path / dtype)
        for name in before:
            if name in policy.weights.of_tower:
                assert torch.equal(after[name], (before[name] + 1 / 3).to(kind)), name
            elif ".visual." in name:
                assert torch.equal(after[name], before[name]), name
        again = Policy.from_pretrained(tmp_path / dtype, "int8")
        assert again.tower is not None
        assert policy.tower is not None
        features = again.tower.features(picture(0))
        assert torch.equal(features, policy.tower.features(picture(0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tensors_of_a_tower_are_parameters(family: str, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(model(tmp_path / "model", family), "fp32", device="meta")
    vision, width = policy.config.vision, policy.config.hidden_size
    assert vision is not None
    policy = trained(tmp_path / "model", "all")
    assert policy.tower is not None
    assert policy.tower._modules is not None
    count = sum(1 for _ in policy.tower._modules.parameters())
    assert count == len(trained_shapes(vision, width, "all")) == len(policy.weights.of_tower)
    assert trained_shapes(vision, width, "frozen") == {}


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_prompts_that_are_computed_once_give_the_tower_the_same_gradients(
    family: str, tmp_path: Path
) -> None:
    path = model(tmp_path / "model", family, max_position_embeddings=512)
    policy, images = trained(path, "all"), [picture(1, 40, 18), picture(2, 40, 18)]
    inputs = encode(policy, "<image>" + "a long question " * 9 + "<image>?", images)
    score, asked = Score(1.0), Prompt("p", text="")
    samples = [
        Sample(asked, 0, inputs, Completion((5, 6 + n), (-1.0, -1.0), "stop", ""), score)
        for n in range(3)
    ]
    found = []
    for shared in (False, True):
        (batch,) = pack(samples, 4096, share_prompts=shared)
        assert (batch.num_computed_tokens < batch.num_tokens) == shared
        logprobs, _ = batch_logprobs(policy, batch, activation_checkpointing=shared)
        logprobs.sum().backward()
        found.append([policy.weights.masters[n].grad for n in policy.weights.of_tower])
        for master in policy.master_weights().values():
            master.grad = None
    whole = sum(float(grad.norm()) for grad in found[0])
    for one, other in zip(found[0], found[1], strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm() + 1e-7 * whole


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    policy = trained(model(tmp_path / "model", "qwen2_5_vl"), "connector")
    name = policy.weights.of_tower[0]
    inputs = encode(policy, TEXT, [picture(*size) for size in SIZES])
    (logprobs,) = policy.logprobs([inputs])
    assert isinstance(policy.tower, TrainedTower)
    forward = policy.tower._forward

    def broken(part: tuple[torch.Tensor, ...]) -> torch.Tensor:
        made = forward(part)
        made.register_hook(lambda gradient: gradient * torch.nan)
        return made

    policy.tower._forward = broken  # type: ignore[method-assign]
    with watch(policy) as seen:
        logprobs.sum().backward()
    assert seen.first.startswith(f"gradient of {name}, first in row 0")
