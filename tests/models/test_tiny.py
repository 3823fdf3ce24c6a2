"""Models from nothing: the rule of random weights, small tokenizers, complete directories."""

from __future__ import annotations

import json
import math
import unicodedata
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_weights import load_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from jetrl.errors import UserError
from jetrl.models.chat import decode, encode_prompt, encode_text
from jetrl.models.families import (
    FAMILIES,
    ModelConfig,
    num_parameters,
    parameter_shapes,
    stored_tensors,
)
from jetrl.models.hf import load_tokenizer, read_config, read_generation_config
from jetrl.models.tiny import (
    RandomWeights,
    character_tokenizer,
    make_tiny,
    random_weights,
    read_texts,
    train_bpe_tokenizer,
)
from jetrl.types import Prompt

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
}
AWKWARD = ["  two  spaces, and . dots", "tab\tand\nnewline\r\n", "日本語 émoji 🙂", "12345+7=", ""]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """200 questions and answers in the shape of GSM8K."""
    file = tmp_path / "text.jsonl"
    words = "apples bananas cherries crates boxes bought sold gave shares pairs together"
    word = words.split()
    records = [
        {
            "question": f"How many {word[n % 11]} are {n} and {n + 1} {word[n % 7]}?",
            "answer": f"They {word[n % 5]} {word[n % 3]}. #### {2 * n + 1}",
        }
        for n in range(200)
    ]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return file


def config(**changes: Any) -> ModelConfig:
    raw = {
        "model_type": "qwen2",
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
    return ModelConfig.from_hf(raw | changes)


def test_random_weights_follow_their_rule() -> None:
    weights = random_weights(config(initializer_range=0.05), seed=3)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == (
        parameter_shapes(config())
    )
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        if "norm" in name:
            assert (tensor == 1).all(), name
        else:
            expected = 0.05 / (
                math.sqrt(2 * 3) if name.endswith(("o.weight", "down.weight")) else 1
            )
            # the standard deviation of n normal values has a relative error of 1 / sqrt(2 n)
            error = 5 / math.sqrt(2 * tensor.numel())
            assert abs(tensor.std().item() / expected - 1) < error, name
            assert abs(tensor.mean().item()) < 5 * expected / math.sqrt(tensor.numel()), name


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (random_weights(config(), seed) for seed in (0, 0, 1))
    torch.manual_seed(5)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    with pytest.raises(UserError, match="initializer_range = 'wide'"):
        random_weights(config(initializer_range="wide"), seed=0)


def test_random_weights_are_made_one_at_a_time_and_in_any_order_the_same() -> None:
    whole, lazy = random_weights(config(), seed=3), RandomWeights(config(), seed=3)
    assert len(lazy) == len(whole)
    assert list(lazy) == list(whole)
    late, early = list(whole)[-2], list(whole)[1]
    for name in (late, early, late, *whole):
        assert torch.equal(lazy[name], whole[name]), name
    assert "nothing" not in lazy
    with pytest.raises(KeyError):
        lazy["nothing"]
    kept = [weakref.ref(tensor) for _, tensor in RandomWeights(config(), seed=3).items()]
    assert sum(reference() is not None for reference in kept) <= 1
    # One generator fills the tensors in order: the bits of a seed stay those of earlier versions.
    generator = torch.Generator().manual_seed(3)
    for name, tensor in whole.items():
        if not name.endswith("norm.weight"):
            std = 0.02 / (math.sqrt(6) if name.endswith((".o.weight", ".down.weight")) else 1)
            expected = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
            assert torch.equal(tensor, expected), name


def test_characters_one_token_each_and_no_spaces_put_in() -> None:
    tokenizer = character_tokenizer()
    text = "12 + 7 = 19 .\n  ok ,"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text)
    assert tokenizer.decode(token_ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer) == 2 + 96
    assert tokenizer.decode([*token_ids, 1, 0, 0], skip_special_tokens=True) == text


def test_characters_have_ids_in_the_order_of_the_alphabet() -> None:
    assert character_tokenizer("0123456789+=").encode("+01=") == [12, 2, 3, 13]
    assert character_tokenizer("日é🙂").encode("🙂日") == [4, 2]
    with pytest.raises(UserError, match=r"repeats .'a'"):
        character_tokenizer("aba")
    with pytest.raises(UserError, match="empty"):
        character_tokenizer("")


def test_bpe_spells_any_text(jsonl: Path) -> None:
    tokenizer = train_bpe_tokenizer([jsonl], vocab_size=320)
    assert len(tokenizer) == 320
    for text in AWKWARD:
        assert decode(tokenizer, tokenizer.encode(text)) == unicodedata.normalize("NFC", text)
    assert len(tokenizer.encode("How many apples are")) < 10
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.encode("<|im_end|>") == [2]


def test_bpe_has_a_chat_template(jsonl: Path) -> None:
    tokenizer = train_bpe_tokenizer([jsonl], vocab_size=300)
    prompt = Prompt("p", messages=({"role": "user", "content": "How many?"},))
    token_ids = encode_prompt(tokenizer, prompt)
    assert tokenizer.decode(token_ids) == (
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert token_ids[0] == 1


@pytest.mark.parametrize(
    "name, contents, message",
    [
        ("a.jsonl", b'{"q": "text"}\n{"q": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{}\n{"q": "\\udE00"}\n', r"a\.jsonl, line 2: .*half of a character"),
        ("a.jsonl", b'{"q": 3}\n', r"a\.jsonl: no text in it"),
        ("a.txt", b"  \n", r"a\.txt: no text in it"),
        ("a.txt", b"\xff\xfe", r"a\.txt: not UTF-8"),
        ("a.txt", None, r"a\.txt: No such file"),
    ],
    ids=["not json", "deep", "half a character", "no strings", "blank", "not utf-8", "absent"],
)
def test_bad_text_files(name: str, contents: bytes | None, message: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=message):
        train_bpe_tokenizer([tmp_path / name], vocab_size=300)


def test_a_byte_order_mark_in_front_of_texts_is_none_of_them(tmp_path: Path) -> None:
    for name, contents in (("a.jsonl", '\ufeff{"text": "one"}\n'), ("b.txt", "\ufeffone")):
        (tmp_path / name).write_text(contents, encoding="utf-8")
        assert read_texts(tmp_path / name) == ["one"]


def test_bpe_needs_files_and_room_for_bytes(jsonl: Path) -> None:
    with pytest.raises(UserError, match="at least one text file"):
        train_bpe_tokenizer([], vocab_size=300)
    with pytest.raises(UserError, match="vocab_size = 258: byte-level BPE needs at least 259"):
        train_bpe_tokenizer([jsonl], vocab_size=258)


@pytest.mark.parametrize("kind", ["characters", "bpe"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_jetrl_load_a_tiny_model(
    family: str, kind: str, jsonl: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"text_files": [jsonl], "vocab_size": 320} if kind == "bpe" else {}
    path = make_tiny(tmp_path / "m", family, **SMALL, tokenizer=kind, seed=4, **options)
    config = ModelConfig.from_hf(read_config(path))
    weights = load_weights(path, config)
    for name, tensor in random_weights(config, seed=4).items():
        assert torch.equal(weights[name], tensor), name

    model = AutoModelForCausalLM.from_pretrained(path)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(config)
    theirs = model.state_dict()
    for name, parts in stored_tensors(config).items():
        assert torch.equal(torch.cat([theirs[part.name] for part in parts]), weights[name]), name

    tokenizer = load_tokenizer(path)
    assert len(tokenizer) == config.vocab_size
    text = "How many? 1 + 2 =\n  3 ."
    token_ids = encode_text(tokenizer, text)
    loader = AutoTokenizer if (family, kind) != ("qwen2", "characters") else PreTrainedTokenizerFast
    assert loader.from_pretrained(path).encode(text) == token_ids
    assert decode(tokenizer, token_ids) == text
    assert config.eos_token_ids == (tokenizer.eos_token_id,)
    assert tokenizer.eos_token_id in read_generation_config(path)["eos_token_id"]
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_tokenizer_json_wins_over_the_class_transformers_puts_in(tmp_path: Path) -> None:
    """AutoTokenizer makes a Qwen2Tokenizer of every qwen2 directory: spaces would be lost."""
    path = make_tiny(tmp_path / "m", "qwen2", **SMALL)
    text = "1 + 2 ="
    for declared in ("TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", None):
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": declared}))
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode(text) == character_tokenizer().encode(text), declared
        assert (tokenizer.eos_token_id, len(tokenizer)) == (1, 98)


def test_sizes_reach_config_json(tmp_path: Path) -> None:
    path = make_tiny(
        tmp_path / "m", **SMALL, vocab_size=128, alphabet="01", tie_word_embeddings=False
    )
    config = ModelConfig.from_hf(read_config(path))
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (128, 32, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.block.inner, config.tie_word_embeddings) == (48, False)
    assert len(load_tokenizer(path)) == 4


@pytest.mark.parametrize(
    "options, message",
    [
        ({"family": "gpt2"}, "family 'gpt2': one of qwen3, qwen2, llama, mistral, smollm3, phi3"),
        ({"tokenizer": "words"}, "tokenizer 'words': one of characters, bpe"),
        ({"tokenizer": "bpe"}, "at least one text file"),
        ({"text_files": ["a.txt"]}, "'characters' takes none"),
        ({"vocab_size": 50}, "vocab_size = 50: the tokenizer has 98 tokens"),
        ({"num_kv_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"dtype": "fp8"}, "save it as bfloat16"),
    ],
)
def test_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        make_tiny(tmp_path / "m", **(SMALL | options))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_kept(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m", **SMALL)
    with pytest.raises(UserError, match="exists and is not empty"):
        make_tiny(path, **SMALL, seed=1)
    make_tiny(path, **SMALL, seed=1, overwrite=True)
    weights = load_weights(path, ModelConfig.from_hf(read_config(path)))
    expected = random_weights(ModelConfig.from_hf(read_config(path)), seed=1)
    assert torch.equal(weights["embed.weight"], expected["embed.weight"])


def test_a_seed_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"seed 1180591620717411303424: a seed has 64 bits"):
        make_tiny(tmp_path / "tiny", seed=2**70)
