"""Qwen2.5-VL and Qwen3-VL: tokens, positions, log-probs and gradients are transformers'."""

from __future__ import annotations

import io
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file
from tests.models.test_images import change, encode, model, picture
from tests.models.test_images import read_by_transformers as read_tiles
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
    models,
)
from transformers.models.qwen2_5_vl import Qwen2_5_VLVisionConfig, modeling_qwen2_5_vl
from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLVisionConfig
from transformers.processing_utils import ProcessorMixin

from jetrl import load_config
from jetrl.errors import UserError
from jetrl.models.chat import encode_prompt
from jetrl.models.families import ModelConfig, parameter_shapes, stored_tensors
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.models.tiny import make_tiny
from jetrl.models.vision import tower_shapes
from jetrl.models.vision_shape import DeepVisionConfig, WindowVisionConfig
from jetrl.precision import PrecisionPlan
from jetrl.settings.sections import TowerPart
from jetrl.training.graphs import DecoderGraphs
from jetrl.training.packing import pack_examples
from jetrl.training.sft import SftTrainer
from jetrl.types import Example, Image, Prompt, PromptInputs

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILY = "qwen2_5_vl"
FAMILIES = (FAMILY, "qwen3_vl")
TOLERANCE = 1e-5  # of log-probs in FP32; sums in another order differ by 1e-6 here


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "grids", FAMILY)


def read_by_transformers(path: Path, text: str, images: Sequence[Image]) -> dict[str, Any]:
    settings = json.loads((path / "preprocessor_config.json").read_text())
    policy = Policy.from_pretrained(path, "fp32", device="meta")
    kinds: dict[str, Any] = {FAMILY: Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"):
        # Its processor of videos needs torchvision.
        processor = kinds[policy.config.family](
            Qwen2VLImageProcessorPil(**settings), policy.tokenizer, None
        )
    pictures = [Pillow.open(io.BytesIO(image.data)) for image in images]
    text = text.replace("<image>", PLACE)
    return dict(processor(text=text, images=pictures, return_tensors="pt"))


MANY = [(9, 40, 18), (7, 10, 33), (5, 20, 20), (3, 90, 9)]
CASES = [
    ("A<image> wide and<image>a tall one: <image>?<image>", MANY),
    ("<image><image>are alike", [(1, 16, 16), (1, 16, 16)]),
    ("<image>", [(4, 300, 200)]),
]


def test_graphs_of_updates_leave_features_of_inner_layers_to_the_decoder(tmp_path: Path) -> None:
    policy = Policy.from_pretrained(model(tmp_path / "model", "qwen3_vl"), "unified")
    inputs = encode(policy, "<image>is it?", [picture(1, 32, 32)])
    (expected,) = policy.logprobs([inputs])
    captures = mock.Mock()
    policy.captured = DecoderGraphs(policy.decoder, captures)
    for _ in range(3):
        (found,) = policy.logprobs([inputs])
        assert torch.equal(found, expected)
    assert not captures.mock_calls


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def logits_of(path: Path, read: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return theirs, theirs(**read).logits[0, :-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", range(3))
def test_tokens_log_probs_and_gradients_are_those_of_transformers(
    family: str, case: int, tmp_path: Path
) -> None:
    path = model(tmp_path / "model", family, tie_word_embeddings=case == 0)
    text, sizes = CASES[case]
    images = [picture(*size) for size in sizes]
    ours = Policy.from_pretrained(path, "fp32")
    inputs = encode(ours, text, images)
    read = read_by_transformers(path, text, images)
    assert list(inputs) == read["input_ids"][0].tolist()
    theirs, logits = logits_of(path, read)
    expected = logits.log_softmax(-1).gather(1, read["input_ids"][0, 1:, None])[:, 0]
    (found,) = ours.logprobs([inputs])
    assert (found - expected).abs().max() <= TOLERANCE
    found.sum().backward()
    expected.sum().backward()
    masters, language = ours.master_weights(), theirs.model.language_model
    pairs = {
        "embed.weight": language.embed_tokens.weight,
        "layers.0.o.weight": language.layers[0].self_attn.o_proj.weight,
        "layers.1.down.weight": language.layers[1].mlp.down_proj.weight,
        "layers.1.post_norm.weight": language.layers[1].post_attention_layernorm.weight,
    }
    for name, weight in pairs.items():
        grad = masters[name].grad
        assert grad is not None
        assert (grad - weight.grad).norm() <= 1e-4 * weight.grad.norm(), name


@pytest.mark.parametrize("tower", ["frozen", "all"])
@pytest.mark.parametrize("family", ["idefics3", *FAMILIES])
def test_a_supervised_update_has_the_loss_and_gradient_of_transformers(
    family: str, tower: TowerPart, tmp_path: Path
) -> None:
    """Also when packed with other examples, in several micro-batches."""
    path = model(tmp_path / "model", family)
    read_by = read_tiles if family == "idefics3" else read_by_transformers
    asked: list[tuple[str, list[Any], str]] = [
        ("A<image> wide and<image>a tall one?", MANY[:2], "the first"),
        ("no image?", [], "none"),
        ("<image>how many?", MANY[2:3], "12"),
        ("<image><image>alike?", [(1, 16, 16), (1, 16, 16)], "yes, they are"),
    ]
    source = replace(ModelSource.from_path(path), trained_tower=tower)
    policy = Policy(source, PrecisionPlan.preset("fp32"))
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    assert policy.tokenizer is not None
    examples, expected = [], torch.zeros(())
    count = sum(len(answer) + 1 for _, _, answer in asked)  # with the end token
    for text, sizes, answer in asked:
        images = [picture(*size) for size in sizes]
        inputs = encode(policy, text, images)
        completion = [*policy.tokenizer.encode(answer), policy.tokenizer.eos_token_id]
        examples.append(Example(inputs.token_ids, completion, images=inputs.images))
        asked_ids, said = torch.tensor([inputs.token_ids]), torch.tensor([completion])
        read = read_by(path, text, images) if images else {}
        given = {
            name: torch.cat([values, torch.full_like(said, name == "attention_mask")], 1)
            for name, values in read.items()
            if name in ("attention_mask", "mm_token_type_ids")
        }
        labels = torch.cat([torch.full_like(asked_ids, -100), said], 1)
        read |= {**given, "input_ids": torch.cat([asked_ids, said], 1), "labels": labels}
        expected = expected + theirs(**read).loss * len(completion) / count
    expected.backward()
    words = ["sft.steps=2", "train.tokens_per_micro_batch=100"]
    assert len(pack_examples(examples, 100)) > 1
    metrics = SftTrainer(policy, load_config(None, words)).step(examples)
    assert metrics["sft/tokens"] == count
    assert metrics["sft/loss"] == pytest.approx(expected.item(), abs=1e-4)
    frozen = () if tower == "all" else ("visual", "vision_model", "connector")
    norms = [
        weight.grad.norm()
        for name, weight in theirs.named_parameters()
        if weight.grad is not None and not any(part in name for part in frozen)
    ]
    assert metrics["sft/grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_positions_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = model(tmp_path / "model", family)
    policy, (text, sizes) = Policy.from_pretrained(path, "fp32"), CASES[0]
    images = [picture(*size) for size in sizes]
    inputs, read = encode(policy, text, images), read_by_transformers(path, text, images)
    theirs, _ = logits_of(path, read)
    given = {key: read[key] for key in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    expected, delta = theirs.model.get_rope_index(**given)
    assert inputs.offset == int(delta)
    assert list(inputs.positions(len(inputs), len(inputs) + 2)) == [
        len(inputs) + inputs.offset + ahead for ahead in range(2)
    ]
    assert policy.tower is not None
    rows = policy.tower.rows(inputs.images)
    assert rows.turns is not None
    positions = torch.tensor(inputs.positions(0, len(inputs))).expand(3, -1).clone()
    first_of_axis = [policy.tower.shape.axes.index(axis) for axis in range(3)]
    positions[:, rows.places] = rows.turns[:, first_of_axis].mT
    assert torch.equal(positions, expected[:, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_positions_and_missing_features_would_be_noticed(family: str, tmp_path: Path) -> None:
    path = model(tmp_path / "model", family)
    policy = Policy.from_pretrained(path, "fp32")
    inputs = encode(policy, "<image>is it?", [picture(1, 32, 32)])
    with torch.no_grad():
        (found,) = policy.logprobs([inputs])
        spans = tuple(span.within(0, len(inputs)) for span in inputs.images)
        assert spans == inputs.images
        assert policy.tower is not None
        with mock.patch.object(type(policy.tower.shape), "axes", ()):
            (as_text,) = policy.logprobs([inputs])
        with mock.patch.object(ForwardInputs, "deepened", lambda self, x, layer: x):
            (shallow,) = policy.logprobs([inputs])
        with mock.patch.object(PromptInputs, "positions", lambda self, a, b: range(a, b)):
            (shifted,) = policy.logprobs([inputs])
    assert (as_text - found)[-3:].abs().max() > 10 * TOLERANCE
    assert (shifted - found)[-3:].abs().max() > 10 * TOLERANCE
    apart = (shallow - found)[-3:].abs().max()
    assert (apart > 10 * TOLERANCE) == (family == "qwen3_vl")


@pytest.mark.parametrize(
    "family, rope",
    [
        (FAMILY, {"rope_type": "default", "mrope_section": [2, 4, 10]}),
        ("qwen3_vl", {"rope_type": "default", "mrope_section": [8, 4, 20]}),
        (FAMILY, {**YARN, "mrope_section": [4, 6, 6]}),
        ("qwen3_vl", {**YARN, "mrope_section": [12, 10, 10]}),
    ],
)
def test_other_sections_and_yarn_are_those_of_transformers(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    path = model(tmp_path / "model", family)
    raw = json.loads((path / "config.json").read_text())
    change(path / "config.json", text_config=raw["text_config"] | {"rope_scaling": rope})
    images = [picture(1, 40, 18), picture(2, 10, 33)]
    ours = Policy.from_pretrained(path, "fp32")
    read = read_by_transformers(path, "A<image>or<image>?", images)
    _, logits = logits_of(path, read)
    expected = logits.log_softmax(-1).gather(1, read["input_ids"][0, 1:, None])[:, 0]
    (found,) = ours.logprobs([encode(ours, "A<image>or<image>?", images)])
    assert (found - expected).abs().max() <= TOLERANCE


def test_messages_have_places_as_the_template_writes_them(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("user assistant which is it? " * 9)
    path = make_tiny(tmp_path / "model", FAMILY, tokenizer="bpe", text_files=text)
    policy = Policy.from_pretrained(path, "fp32", device="meta")
    question = "<image>which is it<image>?"
    prompt = Prompt(
        "p",
        messages=({"role": "user", "content": question},),
        images=(picture(1, 20, 20), picture(2, 40, 16)),
    )
    inputs = encode_prompt(policy.tokenizer, prompt, tower=policy.tower)
    asked = question.replace("<image>", PLACE)
    rendered = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert [span.length for span in inputs.images] == [4, 10]
    read = read_by_transformers(path, rendered, prompt.images)
    assert list(inputs) == read["input_ids"][0].tolist()


VL_3B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "tokens_per_second": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


@pytest.mark.parametrize("nested", [False, True])
def test_the_sizes_of_qwen2_5_vl_3b_are_read(nested: bool) -> None:
    raw: dict[str, Any] = VL_3B
    if nested:  # as transformers 5 writes it
        outer = {"architectures", "model_type", "image_token_id", "video_token_id"}
        outer |= {"vision_config"}
        text = {key: value for key, value in raw.items() if key not in outer}
        raw = {key: raw[key] for key in outer} | {"text_config": text}
    config = ModelConfig.from_hf(raw)
    assert config.vision is not None
    assert config.eos_token_ids == (151645,)
    assert (config.head_dim, config.rope_theta, config.rope_scaling) == (128, 1e6, None)
    assert config.vision.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert config.flat()["vision"]["mrope_section"] == (16, 24, 24)
    tower = tower_shapes(config.vision, config.hidden_size)
    language, seen = (sum(map(math.prod, x.values())) for x in (parameter_shapes(config), tower))
    theirs = AutoConfig.for_model(**{k: v for k, v in raw.items() if k != "architectures"})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(theirs)
    assert config.tie_word_embeddings is theirs.tie_word_embeddings is True
    assert language + seen == sum(p.numel() for p in model.parameters())
    names = {part.name for parts in stored_tensors(config).values() for part in parts}
    saved = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        for name in model.state_dict()
    }
    assert names | tower.keys() == saved - {"lm_head.weight"}


VL_2B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
    },
}


def test_the_sizes_of_qwen3_vl_2b_are_read() -> None:
    raw: dict[str, Any] = VL_2B
    config = ModelConfig.from_hf(raw)
    assert config.vision is not None
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (128, 5e6, True)
    axes = config.vision.axes
    assert axes[:7] == (0, 1, 2, 0, 1, 2, 0)
    assert ([axes.count(axis) for axis in range(3)], axes[57:]) == (
        [24, 20, 20],
        (0, 1, 2) + (0,) * 4,
    )
    tower = tower_shapes(config.vision, config.hidden_size)
    theirs = AutoConfig.for_model(**{k: v for k, v in raw.items() if k != "architectures"})
    with torch.device("meta"):
        state = AutoModelForImageTextToText.from_config(theirs).state_dict()
    names = {part.name for parts in stored_tensors(config).values() for part in parts}
    assert names | tower.keys() == state.keys() - {"lm_head.weight"}
    assert all(shape == tuple(state[name].shape) for name, shape in tower.items())


def test_absent_keys_have_the_values_of_transformers() -> None:
    pairs = [(Qwen2_5_VLVisionConfig(), WindowVisionConfig())]
    for theirs, ours in [*pairs, (Qwen3VLVisionConfig(), DeepVisionConfig())]:
        assert all(getattr(theirs, key) == value for key, value in ours.model_dump().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_saved(family: str, tmp_path: Path) -> None:
    path = model(
        tmp_path / "wide", family, hidden_size=256, num_heads=2, num_kv_heads=1, head_dim=128
    )
    policy = Policy.from_pretrained(path, "unified")
    policy.save_pretrained(tmp_path / "fp8", "fp8")
    raw = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert policy.config.vision is not None
    (tower_module,) = policy.config.vision.modules
    assert tower_module in raw["quantization_config"]["modules_to_not_convert"]
    policy.save_pretrained(tmp_path / "saved", "float32")
    kept: dict[str, torch.Tensor] = {}
    tower: dict[str, torch.Tensor] = {}
    for folder, tensors in ((path, tower), (tmp_path / "saved", kept)):
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
    seen = [name for name in tower if name.startswith(f"{tower_module}.")]
    assert len(seen) > 20
    assert all(torch.equal(kept[name], tower[name]) for name in seen)
    images = [picture(1)]
    read = read_by_transformers(tmp_path / "saved", "<image>?", images)
    before, after = (logits_of(folder, read)[1] for folder in (path, tmp_path / "saved"))
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 7]}},
            "17 pairs .* be 16, half",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 12]}}, "mrope_section = .4, 12."),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope type 'linear'; supported"),
        ({"hidden_size": 256, "head_dim": 64}, r"out_hidden_size = 128: should be hidden_size = 2"),
        ({"head_dim": 64}, r"4 heads of 64 are not hidden_size = 128"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(
    changes: dict[str, Any], message: str, path: Path
) -> None:
    raw = json.loads((path / "config.json").read_text())
    text = raw["text_config"] | changes
    if "mrope_section" not in str(text.get("rope_scaling")):
        text["rope_parameters"] = None
    elif "hidden_size" in changes:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [8, 12, 12]}
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(raw | {"text_config": text})


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"deepstack_visual_indexes": [0, 1]},
            "has 2 layers, .* layers; num_hidden_layers = 2 should be above 2",
        ),
        ({"deepstack_visual_indexes": [2]}, "deepstack_visual_indexes has 2, of 2 layers"),
        ({"num_position_embeddings": 37}, "num_position_embeddings = 37: no square"),
        ({"hidden_size": 36}, "hidden_size, 4 x num_heads = 36, 8: not a multiple"),
    ],
)
def test_a_tower_of_qwen3_vl_that_does_not_fit_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = json.loads((model(tmp_path / "model", "qwen3_vl") / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(raw | {"vision_config": raw["vision_config"] | changes})
    raw["text_config"]["rope_scaling"]["mrope_interleaved"] = False
    with pytest.raises(UserError, match="mrope_interleaved = False"):
        ModelConfig.from_hf(raw)


@pytest.mark.filterwarnings("ignore:divide by zero")  # by transformers
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"patch_size": 14}, "patch_size = 14: should be 4, as in config.json"),
        ({"merge_size": 1}, "merge_size = 1: should be 2"),
        ({"do_resize": False}, "do_resize = False"),
        ({"size": {"shortest_edge": 256}}, "no least and most pixels"),
        ({"size": {"shortest_edge": 256, "longest_edge": 64}}, "256 .* most 64"),
        ({"image_mean": {}, "resample": "x"}, "transformers cannot use it"),
        ({"image_std": [0, 0, 0]}, "makes pixels of up to inf; should be at most 256"),
        ({"rescale_factor": math.nan}, "makes pixels of up to nan"),
    ],
)
def test_a_processor_that_does_not_fit_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = model(tmp_path / "model", FAMILY)
    change(path / "preprocessor_config.json", **changes)
    with pytest.raises(UserError, match=rf"preprocessor_config\.json: .*{message}"):
        Policy.from_pretrained(path, "fp32", device="meta")


def test_an_older_transformers_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Qwen2_5_VLVisionRotaryEmbedding"
    monkeypatch.delattr(modeling_qwen2_5_vl, name)
    with pytest.raises(UserError, match=f"of transformers has no {name}: install a newer"):
        Policy.from_pretrained(path, "fp32")


@pytest.mark.parametrize("size", [None, {"min_pixels": 64, "max_pixels": 256}])
def test_older_files_limit_pixels_by_other_keys(
    size: dict[str, int] | None, tmp_path: Path
) -> None:
    path = model(tmp_path / "model", FAMILY)
    change(path / "preprocessor_config.json", size=size, min_pixels=64, max_pixels=256)
    policy = Policy.from_pretrained(path, "fp32", device="meta")
    inputs = encode(policy, "<image>", [picture(1, 300, 300)])
    assert inputs.images[0].length == 4


@pytest.mark.parametrize(
    "text, size, message",
    [
        ("<image>", (1, 402, 2), r"'p': an image of 402 x 2 pixels: one side is more than 200 t"),
        ("<image>", (1, 400, 2), r"'p': an image of 400 x 2 .* more than the 1024 pixels of pre"),
        ("<image><|video_pad|>", (1, 9, 9), r"'p': it has a place of a video; only images are"),
        (PLACE + PLACE, (1, 9, 9), r"'p': 2 places of images .<image>. for 1 images"),
    ],
)
def test_prompts_that_the_tower_does_not_take_say_so(
    text: str, size: tuple[int, int, int], message: str, path: Path
) -> None:
    policy = Policy.from_pretrained(path, "fp32", device="meta")
    with pytest.raises(UserError, match=message):
        encode(policy, text, [picture(*size)])


def test_equal_numbers_of_features_are_equal_rows_and_columns() -> None:
    """`check_image_tokens` compares numbers only, of models with other sides and limits."""
    library: Any = models.qwen2_vl
    resized = library.image_processing_pil_qwen2_vl.smart_resize
    draw, grids = random.Random(0), defaultdict[Any, set[tuple[int, int]]](set)
    for _ in range(20_000):
        image, side = (draw.randint(20, 60), draw.randint(20, 60)), draw.choice([8, 12, 14, 16])
        least = draw.randint(1, 20) * side**2
        height, width = resized(*image, side, least, least * draw.randint(1, 9))
        rows, columns = height // side, width // side
        grids[image, rows * columns].add((rows, columns))
    assert sum(len(found) for found in grids.values()) == len(grids) > 2000
