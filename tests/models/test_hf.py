"""Hugging Face directories are exchanged with transformers in both directions.

What transformers saves is read right, what we save it reads back, and bad ones are refused by name.
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_weights import SIZES, load_weights, read_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from jetrl.errors import StorageError, UserError
from jetrl.models import hf_save
from jetrl.models.chat import decode
from jetrl.models.families import FAMILIES, ModelConfig, parameter_shapes
from jetrl.models.hf import (
    eos_token_ids,
    load_tokenizer,
    open_weights,
    read_config,
    read_generation_config,
    save_model,
)
from jetrl.models.tiny import character_tokenizer, random_weights


def our_config(family: str = "qwen3", tied: bool = False, **sizes: Any) -> ModelConfig:
    raw = SIZES | sizes | {"model_type": family, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    return ModelConfig.from_hf(raw)


def their_model(family: str, tied: bool = False) -> PreTrainedModel:
    """A random model of transformers, biases and norms included."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, tie_word_embeddings=tied, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def write_qwen3(path: Path, **options: Any) -> dict[str, Tensor]:
    config = our_config()
    weights = random_weights(config, seed=0)
    save_model(path, config, weights, "float32", **options)
    return weights


def rewrite(path: Path, change: Any, file: str = "model.safetensors") -> None:
    """Change the tensors of a checkpoint file: `change` gets the dictionary."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / file).items()}
    change(tensors)
    save_file(tensors, str(path / file), metadata={"format": "pt"})


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


# What transformers saves, we read; what we save, it reads.


@pytest.mark.parametrize("shard", ["5GB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_with_transformers(family: str, tied: bool, shard: str, tmp_path: Path) -> None:
    model = their_model(family, tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs" / "model.safetensors").exists() == (shard == "5GB")
    config, weights = read_model(tmp_path / "theirs")
    theirs = model.state_dict()

    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == (
        parameter_shapes(config)
    )
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    # Phi-3 keeps what we stack in one tensor each.
    parts = {"qkv": ["qkv"], "mlp": ["gate_up"]} if family == "phi3" else {}
    heads, halves = parts.get("qkv", ["q", "k", "v"]), parts.get("mlp", ["gate", "up"])
    stacked = torch.cat([theirs[f"{attention}.{part}_proj.weight"] for part in heads])
    assert torch.equal(weights["layers.1.qkv.weight"], stacked)
    gate_up = torch.cat([theirs[f"{mlp}.{part}_proj.weight"] for part in halves])
    assert torch.equal(weights["layers.1.gate_up.weight"], gate_up)
    if config.qkv_bias:
        biases = torch.cat([theirs[f"{attention}.{part}_proj.bias"] for part in "qkv"])
        assert torch.equal(weights["layers.1.qkv.bias"], biases)
    assert ("lm_head.weight" in weights) is not tied

    shard_bytes = 5 << 30 if shard == "5GB" else 20_000
    save_model(tmp_path / "ours", config, weights, "float32", max_shard_bytes=shard_bytes)
    assert (tmp_path / "ours" / "model.safetensors").exists() == (shard == "5GB")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back) is type(model)
    assert_same_tensors(back.state_dict(), theirs)
    assert_same_tensors(read_model(tmp_path / "ours")[1], weights)


def test_shards_keep_to_the_limit_and_the_index_is_right(tmp_path: Path) -> None:
    weights = write_qwen3(tmp_path / "m", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    total = 0
    for file in files:
        tensors = load_file(file)
        size = sum(4 * tensor.numel() for tensor in tensors.values())
        assert size <= 20_000
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        total += size
    assert index["metadata"]["total_size"] == total
    assert total == sum(4 * tensor.numel() for tensor in weights.values())


def test_bfloat16_rounds_once_and_config_says_so(tmp_path: Path) -> None:
    config = our_config("llama")
    weights = random_weights(config, seed=1)
    save_model(tmp_path / "m", config, weights)
    back_config, back = read_model(tmp_path / "m")
    assert_same_tensors(back, {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert back_config.raw["dtype"] == back_config.raw["torch_dtype"] == "bfloat16"
    assert back_config.raw["architectures"] == ["LlamaForCausalLM"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").dtype == torch.bfloat16


def test_unknown_config_keys_survive_saving(tmp_path: Path) -> None:
    config = our_config(attention_dropout=0.25, dtype="float16", quantization_config={"a": 1})
    save_model(tmp_path / "m", config, random_weights(config, seed=0), "float32")
    saved = read_config(tmp_path / "m")
    assert saved["attention_dropout"] == 0.25
    assert saved["dtype"] == "float32"
    assert "quantization_config" not in saved


def test_old_rotary_buffers_and_an_equal_tied_head_are_ignored(tmp_path: Path) -> None:
    config = our_config("qwen2", tied=True)
    weights = random_weights(config, seed=0)
    save_model(tmp_path / "m", config, weights, "float32")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path / "m", add)
    assert_same_tensors(read_model(tmp_path / "m")[1], weights)
    rewrite(tmp_path / "m", lambda tensors: tensors["lm_head.weight"].add_(1.0))
    with pytest.raises(UserError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        read_model(tmp_path / "m")


# Bad directories


def test_missing_directory_file_and_weights(tmp_path: Path) -> None:
    config = our_config()
    with pytest.raises(UserError, match=r"no such directory.*model\.safetensors"):
        read_config(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a directory"):
        load_weights(tmp_path / "file", config)
    with pytest.raises(UserError, match=r"config\.json: no such file; a Hugging Face"):
        read_config(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="no weights; a Hugging Face model directory has"):
        load_weights(empty, config)
    (empty / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        load_weights(empty, config)
    (empty / "weights.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"but weights\.safetensors; rename"):
        load_weights(empty, config)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1'], ids=["cut", "a list", "unclosed"])
def test_config_that_is_not_a_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: (not readable as JSON|a JSON object)"):
        read_config(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "not safetensors", "bad header"])
def test_damaged_safetensors(damage: str, tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        {
            "truncated": whole[: len(whole) // 2],
            "empty": b"",
            "not safetensors": b"<html>Not found</html>" * 10,
            "bad header": whole[:8] + b"x" * 100 + whole[108:],
        }[damage]
    )
    with pytest.raises(UserError, match=r"model\.safetensors: truncated or not a safetensors"):
        read_model(tmp_path / "m")


def test_a_file_that_cannot_be_opened_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    write_qwen3(tmp_path / "m")
    monkeypatch.setattr("jetrl.models.hf_files.safe_open", fail)
    with pytest.raises(UserError, match=r"model\.safetensors: Too many open files$"):
        read_model(tmp_path / "m")


def test_missing_tensor_names_it_and_the_file(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(UserError, match=r"model\.safetensors: tensor model\.layers\.1\..*k_norm"):
        read_model(tmp_path / "m")


def test_missing_lm_head_suggests_tying(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"lm_head\.weight.*set tie_word_embeddings to true"):
        read_model(tmp_path / "m")


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m")
    extra = "model.layers.0.self_attn.q_proj.bias"
    rewrite(tmp_path / "m", lambda tensors: tensors.update({extra: torch.ones(64)}))
    with pytest.raises(UserError, match=f"no place for: {extra}"):
        read_model(tmp_path / "m")


def test_weights_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m")
    config, loaded = read_model(tmp_path / "m")
    rewrite(
        tmp_path / "m",
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
    )
    with open_weights(tmp_path / "m", config) as weights:
        assert list(weights) == list(loaded)
        assert torch.equal(weights["layers.0.qkv.weight"], loaded["layers.0.qkv.weight"])
        with pytest.raises(UserError, match=r"model\.norm\.weight has shape \[3\]"):
            weights["norm.weight"]


def test_shape_mismatch_says_found_and_expected(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m")
    edit_config(tmp_path / "m", intermediate_size=64)
    message = r"gate_proj\.weight has shape \[48, 32\], config\.json expects \[64, 32\]"
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "m")


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m")

    def to_int8(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    rewrite(tmp_path / "m", to_int8)
    with pytest.raises(UserError, match=r"model\.norm\.weight is torch\.int8"):
        read_model(tmp_path / "m")


def test_bad_shards(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m", max_shard_bytes=20_000)
    index = tmp_path / "m" / "model.safetensors.index.json"
    shard = min((tmp_path / "m").glob("*.safetensors"))
    good = shard.read_bytes()

    rewrite(tmp_path / "m", lambda tensors: tensors.pop("model.norm.weight", None), shard.name)
    rewrite(tmp_path / "m", lambda tensors: tensors.popitem(), shard.name)
    with pytest.raises(UserError, match=f"{shard.name}: tensor model.* is missing, but"):
        read_model(tmp_path / "m")
    shard.write_bytes(good[:-10])
    with pytest.raises(UserError, match=f"{shard.name}: truncated"):
        read_model(tmp_path / "m")
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}: missing, but"):
        read_model(tmp_path / "m")
    index.write_text("{}")
    with pytest.raises(UserError, match=r"index\.json: no weight_map"):
        read_model(tmp_path / "m")


def test_a_tensor_that_no_shard_has_is_missing_from_the_index(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m", max_shard_bytes=20_000)
    edit_config(tmp_path / "m", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"index\.json: tensor model\.layers\.2\.input_layernorm"):
        read_model(tmp_path / "m")


# Writing: whole or not at all


def test_target_in_use(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_qwen3(tmp_path / "m")  # an empty directory is fine
    with pytest.raises(UserError, match="exists and is not empty"):
        write_qwen3(tmp_path / "m")
    config = our_config("llama")
    save_model(tmp_path / "m", config, random_weights(config, seed=0), overwrite=True)
    assert read_model(tmp_path / "m")[0].family == "llama"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file is there already"):
        write_qwen3(tmp_path / "file", overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(UserError, match="not a model directory"):
        write_qwen3(tmp_path / "photos", overwrite=True)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["file", "m", "photos"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_qwen3(tmp_path / "m") if overwrite else None

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_save, "write_json", full)
    with pytest.raises(StorageError, match=r"m: not written: .*No space left"):
        write_qwen3(tmp_path / "m", overwrite=overwrite)
    assert [child.name for child in tmp_path.iterdir()] == (["m"] if overwrite else [])
    if before is not None:
        assert_same_tensors(read_model(tmp_path / "m")[1], before)


def test_weights_stay_readable_after_their_directory_is_replaced(tmp_path: Path) -> None:
    """Loaded tensors are mapped to files; saving over the directory must not change them."""
    write_qwen3(tmp_path / "m")
    config, weights = read_model(tmp_path / "m")
    copy = {name: tensor.clone() for name, tensor in weights.items()}
    doubled = {name: 2 * tensor for name, tensor in weights.items()}
    save_model(tmp_path / "m", config, doubled, "float32", overwrite=True)
    assert_same_tensors(weights, copy)
    assert_same_tensors(read_model(tmp_path / "m")[1], doubled)


def test_weights_that_are_not_the_configs(tmp_path: Path) -> None:
    config = our_config()
    weights = random_weights(config, seed=0)
    with pytest.raises(ValueError, match=r"not of this config .'more'"):
        save_model(tmp_path / "m", config, weights | {"more": torch.ones(1)})
    with pytest.raises(ValueError, match=r"norm.weight is \[3\], not \[32\]"):
        save_model(tmp_path / "m", config, weights | {"norm.weight": torch.ones(3)})
    with pytest.raises(ValueError, match="dtype = 'int4'"):
        save_model(tmp_path / "m", config, weights, "int4")  # type: ignore[arg-type]


# Tokenizer and generation settings


def test_tokenizer_and_generation_config_are_saved_and_read(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    write_qwen3(tmp_path / "m", tokenizer=tokenizer, generation_config={"eos_token_id": [3, 1]})
    back = load_tokenizer(tmp_path / "m")
    assert back.get_vocab() == tokenizer.get_vocab()
    assert back.chat_template == tokenizer.chat_template
    assert back.encode("cab") == [4, 2, 3]
    assert read_generation_config(tmp_path / "m") == {"eos_token_id": [3, 1]}


def test_end_ids_of_both_files_are_merged() -> None:
    config = our_config(eos_token_id=5)
    assert eos_token_ids(config, {"eos_token_id": [9, 5]}) == (9, 5)
    assert eos_token_ids(config, {"eos_token_id": 9}) == (9, 5)
    assert eos_token_ids(config, {}) == (5,)
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id = 'x'"):
        eos_token_ids(config, {"eos_token_id": "x"})


def test_the_tokenizers_end_is_one_too() -> None:
    """Llama 3's first config.json names another; supervised training teaches the tokenizer's."""
    tokenizer = character_tokenizer("abc")
    assert eos_token_ids(our_config(eos_token_id=5), {"eos_token_id": 9}, tokenizer) == (9, 5, 1)
    assert eos_token_ids(our_config(eos_token_id=1), {}, tokenizer) == (1,)
    tokenizer.eos_token = None
    assert eos_token_ids(our_config(eos_token_id=5), {}, tokenizer) == (5,)


def test_a_saved_tokenizers_settings_are_in_words_that_transformers_4_knows(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    write_qwen3(tmp_path / "m", tokenizer=tokenizer)
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    # not TokenizersBackend, and not a list of extra_special_tokens: 4 fails on both
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<a>", "<b>"]
    assert not settings.keys() & {"extra_special_tokens", "backend", "is_local", "local_files_only"}
    for back in (load_tokenizer(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")):
        assert back.encode("<b>c") == tokenizer.encode("<b>c") == [6, 4]
        assert decode(back, [6, 4]) == "c"
        assert back.all_special_tokens == tokenizer.all_special_tokens


def test_several_chat_templates_are_saved_where_all_can_read_them(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    write_qwen3(tmp_path / "m", tokenizer=tokenizer)
    assert load_tokenizer(tmp_path / "m").chat_template == tokenizer.chat_template
    folder = tmp_path / "m" / "additional_chat_templates"
    assert folder.stat().st_mode == (tmp_path / "m").stat().st_mode
    assert (folder / "tool_use.jinja").stat().st_mode == (tmp_path / "m/config.json").stat().st_mode


def test_bad_tokenizers(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m", tokenizer=character_tokenizer())
    shutil.copytree(tmp_path / "m", tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match="damaged: the tokenizer does not load"):
        load_tokenizer(tmp_path / "damaged")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / file).unlink()
    with pytest.raises(UserError, match=r"no tokenizer .*set model\.tokenizer"):
        load_tokenizer(tmp_path / "m")
    with pytest.raises(UserError, match="no such directory"):
        load_tokenizer(tmp_path / "absent")


def test_code_beside_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m", tokenizer=character_tokenizer())
    ran = tmp_path / "ran"
    (tmp_path / "m" / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    file = tmp_path / "m" / "tokenizer_config.json"
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    file.write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path / "m").encode("\n") == [2]  # tokenizer.json needs no code
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="the tokenizer does not load"):
        load_tokenizer(tmp_path / "m")
    assert not ran.exists()
