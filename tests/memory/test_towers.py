"""The plan's bytes of an image tower's forward are those that transformers' modules allocate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.test_plan import planned, row, settings
from tests.models.test_images import change
from torch import nn
from torch.profiler import ProfilerActivity, profile

from jetrl.memory.fitting import DoesNotFitError, check_fits
from jetrl.memory.plan import OtherModels, PlannedRun, Workload, tower_bytes
from jetrl.models import hf
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.models.vision import READERS, trained_shapes
from jetrl.models.vision_shape import DeepShape, TiledShape, VisionShape, WindowShape
from jetrl.precision import PrecisionPlan
from jetrl.settings.sections import TowerPart

WIDTH = 512
FP32 = PrecisionPlan.preset("fp32")
LOAD = Workload(sequences=8, tokens=512, trained=8, prompts=512, image=64)


def shape_of(kind: type[VisionShape], hidden: int, inner: int, side: int) -> VisionShape:
    """A tower of three layers, for images of `side` x `side` patches of 4 x 4 pixels."""
    if kind is TiledShape:
        tower = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 3}
        tower |= {"num_attention_heads": 4, "image_size": 4 * side, "patch_size": 4}
        return TiledShape.model_validate({"vision_config": tower})
    grid = {"hidden_size": hidden, "intermediate_size": inner, "depth": 3, "num_heads": 4}
    grid |= {"patch_size": 4, "out_hidden_size": WIDTH}
    if kind is WindowShape:
        grid |= {"window_size": 32, "fullatt_block_indexes": [1]}
    else:
        grid |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return kind.model_validate({"vision_config": grid})


def tower(shape: VisionShape, side: int, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The modules of a tower without gradients, and a forward of a black image."""
    modules = READERS[type(shape)].modules(shape, WIDTH).requires_grad_(False).eval().to(dtype)

    def forward() -> Any:
        if isinstance(shape, TiledShape):
            return modules(torch.zeros(3, 4 * side, 4 * side, dtype=dtype))
        pixels = torch.zeros(side**2, 3 * 2 * 16, dtype=dtype)
        return modules(pixels, torch.tensor([[1, side, side]]))

    return modules, forward


def measured(shape: VisionShape, side: int, dtype: torch.dtype) -> int:
    """The most bytes that a forward of an image has allocated, its pixels included."""
    _, forward = tower(shape, side, dtype)
    with torch.no_grad():
        forward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            forward()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("inner", [256, 1024], ids=["attention", "mlp"])
@pytest.mark.parametrize("kind", [TiledShape, WindowShape, DeepShape])
def test_a_forward_takes_the_planned_bytes_within_an_eighth(
    kind: type[VisionShape], inner: int, dtype: torch.dtype
) -> None:
    side = 32
    shape = shape_of(kind, hidden=256, inner=inner, side=side)
    expected = shape.forward_bytes((side // 2) ** 2, WIDTH, dtype.itemsize)
    assert 7 / 8 <= measured(shape, side, dtype) / expected <= 9 / 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("part", ["connector", "all"])
@pytest.mark.parametrize("kind", [TiledShape, WindowShape, DeepShape])
def test_a_forward_saves_the_planned_bytes_for_a_backward(
    kind: type[VisionShape], part: TowerPart, dtype: torch.dtype
) -> None:
    side, shape = 32, shape_of(kind, hidden=256, inner=384, side=32)
    modules, forward = tower(shape, side, dtype)
    trained = trained_shapes(shape, WIDTH, part)
    for name, parameter in modules.named_parameters():
        parameter.requires_grad_(READERS[kind].prefix + name in trained)
    own = {parameter.untyped_storage().data_ptr() for parameter in modules.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    expected = shape.saved_bytes((side // 2) ** 2, dtype.itemsize, whole=part == "all")
    found = sum(storage.nbytes() for storage in saved.values())
    assert found == pytest.approx(expected, rel=1 / 16)


@pytest.mark.parametrize("part", ["connector", "all"])
@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_a_trained_tower_has_rows(family: str, part: TowerPart, tmp_path: Path) -> None:
    config = hf.model_config(make_tiny(tmp_path / "model", family))
    assert config.vision is not None
    wide = "precision.preset=fp32"
    frozen = planned(settings(wide), config, OtherModels(), load=LOAD)
    plan = planned(settings(wide, f"train.tower={part}"), config, OtherModels(), load=LOAD)
    shapes = trained_shapes(config.vision, config.hidden_size, part).values()
    count = sum(map(math.prod, shapes))
    more = {"master weights, FP32": 4, "optimizer states, fp32": 8}
    for what, each in more.items():
        assert row(plan, what) - row(frozen, what) == each * count
    gradients = row(plan, "gradients, FP32", "optimizer")
    assert gradients - row(frozen, "gradients, FP32", "optimizer") == 4 * count
    what = "image tower: a backward of 64 tokens"
    assert not [each for each in frozen.rows if each.what == what]
    saved = config.vision.saved_bytes(64, 4, whole=part == "all")
    assert row(plan, what, "optimizer") > saved + 4 * count
    copied = settings(wide, f"train.tower={part}", "algorithm.kl=0.1")
    plan = planned(copied, config, OtherModels(), load=LOAD)
    assert row(plan, "image tower of the reference") == tower_bytes(config, FP32) > 0


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_towers_of_policy_reference_and_teacher_have_rows(family: str, tmp_path: Path) -> None:
    config = hf.model_config(make_tiny(tmp_path / "model", family))
    others = OtherModels(reference=config, teacher=config)
    assert config.vision is not None
    asked = settings("algorithm.kl=0.1", "reference.path=other", "precision.preset=fp32")
    size = config.vision.forward_bytes(64, config.hidden_size, itemsize=4)
    plan = planned(asked, config, others, load=LOAD)
    what = "image tower: a forward of 64 tokens"
    assert row(plan, what) == size
    assert row(plan, f"reference: {what}", "backward") == size
    assert row(plan, f"teacher: {what}", "backward") == size
    offloaded = settings("algorithm.kl=0.1", "reference.path=other", "reference.offload=true")
    plan = planned(offloaded, config, others, load=LOAD)
    assert row(plan, f"reference: {what}", "reference") > 0
    assert row(plan, f"reference: {what}", "backward") == 0
    without = planned(asked, config, others, load=Workload(8, 512, 8, 512))
    assert not [each.what for each in without.rows if "tower: a forward" in each.what]


def test_a_run_that_does_not_fit_names_the_bound_of_images(tmp_path: Path) -> None:
    config = hf.model_config(make_tiny(tmp_path / "model", "qwen2_5_vl"))
    run = PlannedRun(settings(), config, OtherModels(), LOAD)
    with pytest.raises(DoesNotFitError, match="the largest image has 64 tokens: max_pixels"):
        check_fits(run, 2**20)


def test_the_largest_image_of_a_processor_is_known(tmp_path: Path) -> None:
    def most(family: str, **settings: Any) -> int:
        path = tmp_path / family
        if not path.exists():
            make_tiny(path, family)
        change(path / "preprocessor_config.json", **settings)
        tower = Policy.from_pretrained(path, "fp32", device="meta").tower
        assert tower is not None
        return tower.most_features

    assert most("idefics3") == 4
    split = {"do_image_splitting": True, "size": {"longest_edge": 96}}
    assert most("idefics3", **split) == 4 * (3 * 3 + 1)
    assert most("qwen2_5_vl", size={"shortest_edge": 256, "longest_edge": 4096}) == 64
    assert most("qwen3_vl", size={"shortest_edge": 256, "longest_edge": 4100}) == 64
