"""Models with images: tokens, log-probs, gradients and files are those of transformers."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, models
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm import processing_smolvlm

from jetrl.errors import UserError
from jetrl.models.chat import encode_prompt, encode_turns
from jetrl.models.families import ModelConfig, parameter_shapes, stored_tensors
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.models.vision import tower_shapes
from jetrl.models.vision_shape import VisionConfig
from jetrl.types import Image, ImageSpan, Prompt, PromptInputs, Turn
from jetrl.types.images import encoded

SPLIT = {"longest_edge": 64}  # two tiles of 32 pixels to a side
AREA = {"shortest_edge": 256, "longest_edge": 1024}  # 4 to 16 features of 8 x 8 pixels


def picture(seed: int, width: int = 20, height: int = 30) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Pillow.fromarray(pixels), "a picture")


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def model(path: Path, family: str = "idefics3", tiles: bool = True, **sizes: Any) -> Path:
    make_tiny(path, family, initializer_range=0.2, **sizes)
    if family in ("qwen2_5_vl", "qwen3_vl"):
        change(path / "preprocessor_config.json", size=AREA)
    elif tiles:
        change(path / "preprocessor_config.json", do_image_splitting=True, size=SPLIT)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "tiles")


def encode(policy: Policy, text: str, images: Sequence[Image]) -> PromptInputs:
    prompt = Prompt("p", text=text, images=tuple(images))
    return encode_prompt(policy.tokenizer, prompt, tower=policy.tower)


def read_by_transformers(path: Path, text: str, images: Sequence[Image]) -> dict[str, Any]:
    settings = json.loads((path / "preprocessor_config.json").read_text())
    policy = Policy.from_pretrained(path, "fp32", device="meta")
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(**settings), policy.tokenizer, image_seq_len=4
    )
    pictures = [Pillow.open(io.BytesIO(image.data)) for image in images]
    return dict(processor(text=text, images=[pictures], return_tensors="pt"))


TEXTS = [
    ("A<image> wide and<image>a tall one:<image>", [(9, 40, 18), (7, 10, 33), (5, 20, 20)]),
    ("<image><image>are alike", [(1, 16, 16), (1, 16, 16)]),
]


class HiddenModule:
    """Stands in for a module, as transformers 5.17 does without torchvision."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{name} requires the Torchvision library")


def test_a_processor_that_transformers_hides_is_found(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.idefics3, "image_processing_pil_idefics3", HiddenModule())
    policy = Policy.from_pretrained(path, "fp32", "cpu")
    assert policy.tower.num_features(picture(0)) > 0


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "whole"])
@pytest.mark.parametrize("case", range(2))
def test_tokens_log_probs_and_gradients_are_those_of_transformers(
    family: str, tiles: bool, case: int, tmp_path: Path
) -> None:
    path = model(tmp_path / "model", family, tiles, tie_word_embeddings=case == 0)
    text, sizes = TEXTS[case]
    images = [picture(*size) for size in sizes]
    ours = Policy.from_pretrained(path, "fp32")
    inputs = encode(ours, text, images)
    read = read_by_transformers(path, text, images)
    assert list(inputs) == read["input_ids"][0].tolist()
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    logits = theirs(**read).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, read["input_ids"][0, 1:, None])[:, 0]
    (found,) = ours.logprobs([inputs])
    assert (found - expected).abs().max() <= 1e-4
    found.sum().backward()
    expected.sum().backward()
    masters, layers = ours.master_weights(), theirs.model.text_model.layers
    pairs = {
        "embed.weight": theirs.model.text_model.embed_tokens.weight,
        "layers.0.o.weight": layers[0].self_attn.o_proj.weight,
        "layers.1.down.weight": layers[1].mlp.down_proj.weight,
        "layers.1.post_norm.weight": layers[1].post_attention_layernorm.weight,
    }
    for name, weight in pairs.items():
        grad = masters[name].grad
        assert grad is not None
        assert (grad - weight.grad).norm() <= 1e-4 * weight.grad.norm(), name


def test_messages_are_written_as_by_transformers(path: Path) -> None:
    policy = Policy.from_pretrained(path, "fp32", device="meta")
    tokenizer = copy.deepcopy(policy.tokenizer)
    assert tokenizer is not None
    tokenizer.add_tokens(["<end_of_utterance>"], special_tokens=True)  # as their processor does
    tokenizer.chat_template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE
    text, image = (lambda text: {"type": "text", "text": text}), {"type": "image"}
    images = (picture(1), picture(2, 40, 9))
    messages = (
        {"role": "system", "content": [text("Look.")]},
        {"role": "user", "content": [image, text("or"), image, text("?")]},
        {"role": "assistant", "content": [text("Both")]},
        {"role": "user", "content": [text("No")]},
    )
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    read = read_by_transformers(path, str(rendered), images)
    as_text = ({"role": "user", "content": "<image>or<image>?"}, messages[0], *messages[2:])
    for told in (messages, (as_text[1], as_text[0], *as_text[2:])):
        said = [
            each if isinstance(each["content"], str) or image in each["content"]
            else {**each, "content": each["content"][0]["text"]}
            for each in told
        ]  # fmt: skip
        prompt = Prompt("p", messages=tuple(said), images=images)
        inputs = encode_prompt(tokenizer, prompt, tower=policy.tower)
        assert list(inputs) == read["input_ids"][0].tolist()
        assert sum(span.length for span in inputs.images) == 4 * (5 + 5 - 2)
    # An answer to imitate follows "Assistant:" after a space, as in a conversation.
    tokenizer.eos_token = "<end_of_utterance>"
    answer = {"role": "assistant", "content": [text("Well")]}
    whole = tokenizer.apply_chat_template([*messages, answer], tokenize=False)
    read = read_by_transformers(path, str(whole).rstrip("\n"), images)
    for told in ("Well", " Well", {**answer, "content": "Well"}):
        example = encode_turns(tokenizer, inputs, [Turn(told)], asked=prompt)
        assert [*inputs, *example.completion] == read["input_ids"][0].tolist()
    with pytest.raises(UserError, match=r"a part of type 'image', and no image comes with it"):
        encode_prompt(tokenizer, replace(prompt, messages=messages, images=()), tower=policy.tower)
    with pytest.raises(UserError, match=r"special_tokens_as_text = all"):
        encode_prompt(tokenizer, prompt, plain_text="all", tower=policy.tower)


SMOLVLM = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "vocab_size": 49280,
        "eos_token_id": 49279,
        "perceiver_config": {"model_type": "vllama3"},
        "pixel_shuffle_factor": 4,
    },
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "num_attention_heads": 12,
        "patch_size": 16,
        "size": {"longest_edge": 2048},
    },
}


def test_the_sizes_of_smolvlm_256m_are_read() -> None:
    config = ModelConfig.from_hf(SMOLVLM)
    assert config.vision is not None
    assert (config.vision.tokens, config.eos_token_ids) == (64, (49279,))
    tower = tower_shapes(config.vision, config.hidden_size)
    language, seen = (sum(map(math.prod, x.values())) for x in (parameter_shapes(config), tower))
    theirs = AutoConfig.for_model(**{k: v for k, v in SMOLVLM.items() if k != "architectures"})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(theirs)
    assert language + seen == sum(p.numel() for p in model.parameters())
    names = {part.name for parts in stored_tensors(config).values() for part in parts}
    assert names | tower.keys() == model.state_dict().keys()


def test_features_are_computed_once_and_again_when_they_were_dropped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = Policy.from_pretrained(path, "fp32").tower
    assert tower is not None
    first, again = tower.features(picture(0)), tower.features(picture(0))
    assert (tower.computed, again is first) == (1, True)
    monkeypatch.setattr("jetrl.models.vision.MOST_KEPT", 1)
    tower.features(picture(1))
    assert torch.equal(tower.features(picture(0)), first)
    assert tower.computed == 3


def test_other_pixels_are_another_prompt_with_other_log_probs(path: Path) -> None:
    policy = Policy.from_pretrained(path, "unified")
    one, two, same = (encode(policy, "<image>:?", [picture(n, 32, 32)]) for n in (0, 1, 0))
    assert one.token_ids == two.token_ids
    assert (one.key() == two.key(), one.key() == same.key()) == (False, True)
    assert one.first(1).key() == two.first(1).key()  # before the image
    assert one.first(6).key() != two.first(6).key()
    with torch.no_grad():
        of_one, of_two, of_same = policy.logprobs([one, two, same])
    assert torch.equal(of_one, of_same)
    assert torch.equal(of_one[:1], of_two[:1])
    assert not torch.equal(of_one[-2:], of_two[-2:])


def test_files_keep_the_bytes_of_the_tower(path: Path, tmp_path: Path) -> None:
    changed = model(tmp_path / "bf16")
    file = next(f for f in changed.glob("*.safetensors") if "model.connector" in str(load_file(f)))
    half = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(half, file, metadata={"format": "pt"})
    for plan, dtype in (("fp32", "float32"), ("unified", "bfloat16"), ("unified", "fp8")):
        policy = Policy.from_pretrained(changed, plan)
        policy.save_pretrained(tmp_path / "saved", dtype, overwrite=True)
        kept = {}
        for each in (tmp_path / "saved").glob("*.safetensors"):
            kept |= load_file(each)
        assert all(torch.equal(kept[name], tensor) for name, tensor in half.items())
        assert all(kept[name].dtype == torch.bfloat16 for name in half)
        again = Policy.from_pretrained(tmp_path / "saved", plan)
        assert again.tower is not None
        assert policy.tower is not None
        found = again.tower.features(picture(0))
        assert torch.equal(found, policy.tower.features(picture(0)))
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    kept_out = raw["quantization_config"]["modules_to_not_convert"]
    assert {"model.vision_model", "model.connector"} <= {*kept_out}


def test_absent_keys_have_the_values_of_transformers(path: Path) -> None:
    from transformers import Idefics3VisionConfig

    theirs, ours = Idefics3VisionConfig(), VisionConfig()
    assert all(getattr(theirs, key) == value for key, value in ours.model_dump().items())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"scale_factor": 3}, "^config.json: vision_config has patches of a side, .* = 4, 3: not"),
        ({"image_token_id": 5000}, "image_token_id = 5000 is no token of a vocabulary of"),
        ({"text_config": {"model_type": "mistral"}}, "text_config has model_type 'mistral'"),
        ({"text_config": None}, "text_config has model_type None"),
        ({"vision_config": {"image_size": 0}}, "vision_config.image_size = 0"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(
    changes: dict[str, Any], message: str, path: Path
) -> None:
    raw = json.loads((path / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(raw | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"size": 5}, r"preprocessor_config.json: size = 5"),
        ({"max_image_size": {}}, r"max_image_size.longest_edge is missing"),
        ({"image_mean": {}, "resample": "x", "do_pad": 3}, r"transformers cannot use it"),
        ({"size": {"longest_edge": 80}}, "size.longest_edge = 80: should be a multiple"),
        ({"rescale_factor": 1e30}, "preprocessor_config.json: makes pixels of up to .*e.32"),
        (
            {"max_image_size": {"longest_edge": 16}},
            "max_image_size.longest_edge = 16: should be 32",
        ),
    ],
)
def test_a_processor_that_does_not_fit_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = model(tmp_path / "model")
    change(path / "preprocessor_config.json", **changes)
    with pytest.raises(UserError, match=message):
        Policy.from_pretrained(path, "fp32", device="meta")


def test_what_cannot_have_images_says_so(path: Path, tmp_path: Path) -> None:
    policy, text = Policy.from_pretrained(path, "fp32"), make_tiny(tmp_path / "text")
    with pytest.raises(UserError, match=r"'p': 2 places of images.* for 1 images"):
        encode(policy, "<image> <image>", [picture(0)])
    with pytest.raises(UserError, match=r"'p': 0 places of images.* for 1 images"):
        encode(policy, "?", [picture(0)])
    blind = Policy.from_pretrained(text, "fp32")
    with pytest.raises(UserError, match="'p' has images, and the model reads text only"):
        encode(blind, "<image>", [picture(0)])
    with pytest.raises(UserError, match="Qwen3ForCausalLM reads text only"):
        blind.logprobs([PromptInputs((5, 6), (ImageSpan(picture(0), 0, 2),))])
    with pytest.raises(UserError, match=r"preset = integer: the bits of an image tower"):
        Policy.from_pretrained(path, "integer")
    bare = model(tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"no preprocessor_config\.json"):
        Policy.from_pretrained(bare, "fp32")
