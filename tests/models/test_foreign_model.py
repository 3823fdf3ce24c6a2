"""Model directories of others: what a file of a few bytes asks for is bounded before it is made."""

from __future__ import annotations

import base64
import json
import os
import time
import tracemalloc

import pytest
from tokenizers import normalizers

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.chat import encode_text
from jetrl.models.policy import Policy
from jetrl.models.tiny import character_tokenizer, make_tiny
from jetrl.models.tokenizer import check_tokenizer_files, encode
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
    ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000"),
    ({"max_position_embeddings": 10**8}, "max_position_embeddings = 1000"),
    ({"vocab_size": 10**300}, "vocab_size = 1000"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
    ({"rope_theta": float("nan")}, "rope_theta = nan"),
    ({"architectures": {"a": 1}}, r"architectures = \{"),
    ({"layer_types": [["full_attention"]]}, "layer_types.0 = "),
    ({"model_type": "\x1b]0;x\x07"}, r"model_type .*x1b"),
    ({"eos_token_id": 2**70}, "eos_token_id = 1180"),
    ({"rope_scaling": {"factor": []}}, r"rope_scaling.factor = \[\]"),
    ({"quantization_config": [1]}, r"quantization_config .*\[1\]"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "size = 128"),
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


def charsmap(length):
    contents = base64.b64encode(bytes(4) + b"a" * length + b"\0")  # an empty trie, then a text
    return {"type": "Precompiled", "precompiled_charsmap": contents.decode()}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Metaspace", "replacement": "x", "prepend_scheme": "always", "split": True}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [],
    "special_tokens": {},
}
LONGER = [
    ({"normalizer": sequence("normalizers", doubled(7), 2)}, "4096 times as long"),
    ({"normalizer": between("a" * 5000)}, "4096"),
    ({"normalizer": sequence("normalizers", BYTES, 20)}, "4096"),
    ({"normalizer": sequence("normalizers", {"type": "NFC"}, 10**5)}, "4096"),
    ({"pre_tokenizer": sequence("pretokenizers", SPACES, 20)}, "4096"),
    ({"post_processor": sequence("processors", TWICE, 40)}, "4096"),
    ({"decoder": sequence("decoders", between("ab"), 4)}, "64 times as long"),
    ({"normalizer": charsmap(5000)}, "4096"),
    ({"normalizer": sequence("normalizers", charsmap(18), 4)}, "4096"),
    ({"normalizer": {"type": "Replace"}}, "not a tokenizer's"),
]


@pytest.mark.parametrize("parts, message", LONGER)
def test_a_tokenizer_that_multiplies_is_refused(copy, parts, message):
    change(copy / "tokenizer.json", **parts)
    key = next(iter(parts))
    with pytest.raises(UserError, match=rf"tokenizer\.json: {key}.*{message}"):
        hf.load_tokenizer(copy)


FILES = [
    ("tokenizer_config.json", 2**24),
    ("additional_chat_templates/tools.jinja", 2**20),
    ("vocab.txt", 2**28),
]


@pytest.mark.parametrize("name, most", FILES)
def test_a_file_that_is_too_large_is_not_read(copy, name, most):
    (copy / name).parent.mkdir(exist_ok=True)
    with (copy / name).open("wb") as file:
        file.truncate(most + 1)
    with pytest.raises(UserError, match=rf"{name}: larger than {most / 2**20:g} MiB"):
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
    post = {"type": "Sequence", "processors": [BYTES, TWICE]}
    normalizer = {"type": "Sequence", "normalizers": stages}
    parts = {"normalizer": normalizer, "pre_tokenizer": BYTES, "post_processor": post}
    change(copy / "tokenizer.json", **parts)
    hf.load_tokenizer(copy)
    assert check_tokenizer_files(copy)[0] < 64, "their long texts are taken"


def test_a_long_text_that_a_stage_multiplies_is_refused(copy):
    change(copy / "tokenizer.json", normalizer=between("a" * 99) | {"pattern": {"Regex": "z"}})
    tokenizer = hf.load_tokenizer(copy)
    assert len(encode(tokenizer, "1" * 10_000)) == 10_000
    said = r"tokenizer\.json: normalizer could .* 20,000 characters 100 times as long; shorten the"
    with pytest.raises(UserError, match=said):
        encode(tokenizer, "1" * 20_000)
