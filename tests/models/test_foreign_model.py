"""Model directories of others: what a file of a few bytes asks for is bounded before it is made."""

from __future__ import annotations

import json
import os
import time
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import normalizers

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.chat import encode_text
from jetrl.models.hf_files import load_tensors
from jetrl.models.policy import Policy
from jetrl.models.tiny import character_tokenizer, make_tiny
from jetrl.models.tokenizer import encode
from jetrl.precision import PrecisionPlan

PLAN = PrecisionPlan.preset("bf16")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, num_layers=1)
    return folder


@pytest.fixture
def copy(model, tmp_path):
    """A copy of the model whose JSON files can be changed."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change(file, **changes):
    contents = json.loads(file.read_text())
    file.write_text(json.dumps(contents | changes))


SIZES = [
    pytest.param({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000", id="layers"),
    pytest.param({"max_position_embeddings": 10**8}, "max_position_embeddings = 1000", id="rope"),
    pytest.param({"hidden_size": 10**12}, "hidden_size = 1000000000000", id="width"),
    pytest.param({"vocab_size": 10**300}, "vocab_size = 1000", id="vocabulary"),
    pytest.param({"num_attention_heads": -1}, "num_attention_heads = -1", id="heads"),
    pytest.param({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf", id="infinity"),
    pytest.param({"rope_theta": float("nan")}, "rope_theta = nan", id="nan"),
    pytest.param({"architectures": {"a": 1}}, r"architectures = \{", id="architectures"),
    pytest.param({"layer_types": [["full_attention"]]}, "layer_types.0 = ", id="layer-types"),
    pytest.param({"layer_types": 3}, "layer_types = 3", id="number-of-types"),
    pytest.param({"model_type": "\x1b]0;x\x07"}, r"model_type .*x1b", id="control"),
    pytest.param({"eos_token_id": 2**70}, "eos_token_id = 1180", id="token"),
    pytest.param({"rope_scaling": {"factor": []}}, r"rope_scaling.factor = \[\]", id="rope-type"),
    pytest.param({"quantization_config": [1]}, r"quantization_config = \[1\]", id="quantization"),
    pytest.param(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
        "quantization_config.weight_block_size = 128",
        id="block",
    ),
]


@pytest.mark.parametrize("changes, message", SIZES)
def test_a_config_out_of_bounds_names_file_and_key(copy, changes, message):
    change(copy / "config.json", **changes)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(UserError, match=rf"{copy}/config\.json: .*{message}") as caught:
        Policy.from_pretrained(copy, PLAN)
    assert time.process_time() - began < 5
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("contents", ["[]", "3", "{", "[" * 5000, '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_config_names_the_file(copy, contents):
    (copy / "config.json").write_text(contents)
    with pytest.raises(UserError, match=r"config\.json: "):
        hf.model_config(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_is_not_waited_for(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(UserError, match=f"{name}: not a regular file"):
        Policy.from_pretrained(copy, PLAN)


def doubled(times):
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [replace] * times}


def sequence(key, stage, times):
    return {"type": "Sequence", key: [stage] * times}


def between(content):
    return {"type": "Replace", "pattern": {"Regex": ""}, "content": content}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Metaspace", "replacement": "x", "prepend_scheme": "always", "split": True}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [],
    "special_tokens": {},
}
IDS = {"<s>": {"id": "<s>", "ids": [0] * 5000, "tokens": ["<s>"] * 5000}}
one_for_one = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
LONGER = [
    pytest.param({"normalizer": doubled(30)}, "4096 times as long", id="doubled"),
    pytest.param({"normalizer": sequence("normalizers", doubled(7), 2)}, "4096", id="nested"),
    pytest.param({"normalizer": between("a" * 5000)}, "4096", id="between"),
    pytest.param({"normalizer": sequence("normalizers", BYTES, 20)}, "4096", id="bytes"),
    pytest.param(
        {"normalizer": sequence("normalizers", {"type": "NFC"}, 10**5)}, "4096", id="many"
    ),
    pytest.param(
        {"normalizer": {"type": "Sequence", "a": [], "normalizers": [one_for_one | BYTES] * 20}},
        "4096",
        id="keys-of-others",
    ),
    pytest.param({"normalizer": sequence("normalizers", one_for_one, 999)}, "4096", id="equal"),
    pytest.param({"pre_tokenizer": sequence("pretokenizers", BYTES, 20)}, "4096", id="pre-bytes"),
    pytest.param({"pre_tokenizer": sequence("pretokenizers", SPACES, 20)}, "4096", id="spaces"),
    pytest.param({"post_processor": sequence("processors", TWICE, 40)}, "4096", id="template"),
    pytest.param({"post_processor": TWICE | {"special_tokens": IDS}}, "4096", id="ids"),
    pytest.param({"decoder": sequence("decoders", between("ab"), 9)}, "4096", id="decoder"),
    pytest.param({"normalizer": [1]}, "not a tokenizer's", id="list"),
    pytest.param({"normalizer": {"type": "Replace"}}, "not a tokenizer's", id="no-fields"),
]


@pytest.mark.parametrize("parts, message", LONGER)
def test_a_tokenizer_that_multiplies_is_refused(copy, parts, message):
    change(copy / "tokenizer.json", **parts)
    key = next(iter(parts))
    with pytest.raises(UserError, match=rf"tokenizer\.json: {key}.*{message}"):
        hf.load_tokenizer(copy)


def test_parts_of_a_tokenizer_multiply_together(copy):
    growing = {"normalizer": doubled(8), "pre_tokenizer": sequence("pretokenizers", BYTES, 8)}
    change(copy / "tokenizer.json", **growing)
    with pytest.raises(UserError, match="pre_tokenizer: it could make a text more than 4096"):
        hf.load_tokenizer(copy)


FILES = [
    ("tokenizer_config.json", 2**24),
    ("special_tokens_map.json", 2**24),
    ("added_tokens.json", 2**24),
    ("chat_template.jinja", 2**20),
    ("additional_chat_templates/tools.jinja", 2**20),
    ("vocab.txt", 2**28),
    ("tokenizer.model", 2**28),
]


@pytest.mark.parametrize("name, most", FILES)
def test_a_file_that_is_too_large_is_not_read(copy, name, most):
    (copy / name).parent.mkdir(exist_ok=True)
    with (copy / name).open("wb") as file:
        file.truncate(most + 1)
    with pytest.raises(UserError, match=rf"{name}: larger than {most / 2**20:g} MiB"):
        hf.load_tokenizer(copy)


def test_a_token_of_excessive_length_is_refused(copy):
    added = json.loads((copy / "tokenizer.json").read_text())["added_tokens"]
    added.append(added[0] | {"id": 9000, "content": "a" * 2**15})
    change(copy / "tokenizer.json", added_tokens=added)
    with pytest.raises(UserError, match=r"a token of 32,768 characters"):
        hf.load_tokenizer(copy)


def test_tokens_out_of_a_tokenizer_are_bounded():
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("1", "1" * 1000)
    assert len(encode(tokenizer, "1" + "2" * 20)) == 1020
    with pytest.raises(UserError, match=r"text: the tokenizer makes 1,002 tokens of 3 characters"):
        encode_text(tokenizer, "212")
    with pytest.raises(UserError, match=r"text: a text of 33,554,433 characters, and at most"):
        encode_text(tokenizer, "2" * (2**25 + 1))


def test_normalizers_of_real_tokenizers_are_taken(copy):
    stages = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        *({"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")),
    ]
    pre = sequence("pretokenizers", BYTES, 4)
    post = {"type": "Sequence", "processors": [BYTES, TWICE | {"special_tokens": {}}]}
    change(
        copy / "tokenizer.json",
        normalizer={"type": "Sequence", "normalizers": stages},
        pre_tokenizer=pre,
        post_processor=post,
    )
    hf.load_tokenizer(copy)


def test_masters_of_another_kind_are_named(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert set(load_tensors(tmp_path / "x.safetensors")) == {"x"}
    (tmp_path / "x.safetensors").write_bytes(b"[]")
    with pytest.raises(UserError, match=r"x\.safetensors: truncated or not a safetensors file"):
        load_tensors(tmp_path / "x.safetensors")
