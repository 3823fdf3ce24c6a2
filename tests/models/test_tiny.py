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
from tests.models.stored_weights import assert_same_tensors, our_config, read_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from jetrl.errors import UserError
from jetrl.models.chat import decode, encode_text
from jetrl.models.families import FAMILIES, ModelConfig, num_parameters
from jetrl.models.hf import load_tokenizer, read_config, read_generation_config
from jetrl.models.tiny import RandomWeights, character_tokenizer, make_tiny, train_bpe_tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
AWKWARD = ["  two  spaces, and . dots", "tab\tand\nnewline\r\n", "日本語 émoji 🙂", "12345+7=", ""]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """200 questions and answers in the shape of GSM8K."""
    file = tmp_path / "text.jsonl"
    records = [
        {"question": f"How many apples are {n} and {n + 1} pears?", "answer": f"#### {2 * n + 1}"}
        for n in range(200)
    ]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return file


CONFIG = our_config(
    "qwen2", vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=3
)


def test_random_weights_are_made_one_at_a_time_and_in_any_order_the_same() -> None:
    whole, lazy = dict(RandomWeights(CONFIG, seed=3)), RandomWeights(CONFIG, seed=3)
    assert list(lazy) == list(whole)
    late, early = list(whole)[-2], list(whole)[1]
    for name in (late, early, late, *whole):
        assert torch.equal(lazy[name], whole[name]), name
    kept = [weakref.ref(tensor) for _, tensor in RandomWeights(CONFIG, seed=3).items()]
    assert sum(reference() is not None for reference in kept) <= 1
    # One generator fills the tensors in order: the bits of a seed stay those of earlier versions.
    generator = torch.Generator().manual_seed(3)
    for name, tensor in whole.items():
        if not name.endswith("norm.weight"):
            std = 0.02 / (math.sqrt(6) if name.endswith((".o.weight", ".down.weight")) else 1)
            expected = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
            # torch's normal_ differs between instruction sets by a unit of the last place.
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7, msg=name)


def test_bpe_spells_any_text(jsonl: Path) -> None:
    tokenizer = train_bpe_tokenizer([jsonl], vocab_size=280)
    assert len(tokenizer) == 280
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


@pytest.mark.parametrize(
    "name, contents, message",
    [
        ("a.jsonl", b'{"q": "text"}\n{"q": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{}\n{"q": "\\udE00"}\n', r"a\.jsonl, line 2: .*surrogates not allowed"),
        ("a.txt", b"  \n", r"a\.txt: no text in it"),
        ("a.txt", b"\xff\xfe", r"a\.txt: .*can't decode"),
    ],
)
def test_bad_text_files(name: str, contents: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=message):
        train_bpe_tokenizer([tmp_path / name], vocab_size=300)


@pytest.mark.parametrize(
    "family, kind",
    [
        *((name, "characters") for name, family in FAMILIES.items() if family.language is None),
        ("qwen3", "bpe"),
    ],
)
def test_transformers_and_jetrl_load_a_tiny_model(
    family: str, kind: str, jsonl: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"text_files": jsonl, "vocab_size": 280} if kind == "bpe" else {}
    if family == "olmoe":  # whose head size follows from the others
        options["head_dim"] = None
    path = make_tiny(tmp_path / "m", family, **SMALL | options, tokenizer=kind, seed=4)
    config = ModelConfig.from_hf(read_config(path))
    weights = read_model(path)[1]
    for name, tensor in dict(RandomWeights(config, seed=4)).items():
        assert torch.equal(weights[name], tensor), name

    model = AutoModelForCausalLM.from_pretrained(path)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(config)
    model.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(read_model(tmp_path / "theirs")[1], weights)

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


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seed": 2**70}, r"seed 1180591620717411303424: a seed has 64 bits"),
        ({"family": "gpt2"}, f"family 'gpt2': one of {', '.join(FAMILIES)}"),
        ({"tokenizer": "bpe"}, "at least one text file"),
        ({"text_files": ["a.txt"]}, "trained on text files"),
        ({"dtype": "bf16"}, "dtype 'bf16': one of 'bfloat16', 'float32', 'fp8'"),
        ({"vocab_size": 50}, "vocab_size = 50: the tokenizer has 98 tokens"),
        ({"num_experts": 4}, r"qwen3 has no num_experts; it has intermediate_size \(channels of"),
        (
            {"family": "olmoe", "moe_intermediate_size": 64},
            r"olmoe has no moe_inter.*; it has num_experts \(.*\), num_experts_per_tok \(.*\), "
            r"intermediate_size \(inner channels of an expert\)$",
        ),
        ({"family": "olmoe", "head_dim": None, "num_heads": 0}, "num_attention_heads = 0: should"),
        ({"head_dim": 0}, "head_dim = 0: should be"),
    ],
)
def test_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        make_tiny(tmp_path / "m", **(SMALL | options))
    assert list(tmp_path.iterdir()) == []
