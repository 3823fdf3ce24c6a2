"""Hugging Face directories are exchanged with transformers in both directions.

What transformers saves is read right, what we save it reads back, and bad ones are refused by name.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.stored_weights import (
    SIZES,
    assert_same_tensors,
    change_config,
    change_tensors,
    our_config,
    read_model,
)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from jetrl import Policy
from jetrl.errors import StorageError, UserError
from jetrl.models import hf_save
from jetrl.models.block import DenseShape
from jetrl.models.chat import decode
from jetrl.models.families import FAMILIES, parameter_shapes
from jetrl.models.hf import (
    Encoding,
    eos_token_ids,
    load_tokenizer,
    read_generation_config,
    save_model,
)
from jetrl.models.tiny import RandomWeights, character_tokenizer
from jetrl.precision import PrecisionPlan

TEXT = [name for name, family in FAMILIES.items() if family.language is None]


def their_model(family: str, tied: bool = False) -> PreTrainedModel:
    """A random model of transformers, biases and norms included."""
    torch.manual_seed(0)
    sizes = FAMILIES[family].block.tiny() | SIZES
    if family == "olmoe":  # whose norms fit heads of no other size in transformers
        sizes |= {"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"]}
    config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=tied, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def write_qwen3(path: Path, **options: Any) -> dict[str, Tensor]:
    weights = dict(RandomWeights(our_config(), seed=0))
    save_model(path, our_config(), weights, Encoding("float32"), **options)
    return weights


@pytest.mark.parametrize(
    "family, tied, shard",
    [
        *((family, index % 2 == 0, "5GB") for index, family in enumerate(TEXT)),
        ("qwen3", False, "20KB"),
        ("qwen2", True, "20KB"),
    ],
)
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
    if isinstance(config.layers[1].block, DenseShape):
        gate_up = torch.cat([theirs[f"{mlp}.{part}_proj.weight"] for part in halves])
    else:
        gate_up = theirs[f"{mlp}.experts.gate_up_proj"].flatten(0, 1)
        assert torch.equal(weights["layers.1.router.weight"], theirs[f"{mlp}.gate.weight"])
    assert torch.equal(weights["layers.1.gate_up.weight"], gate_up)
    if config.attention.qkv_bias:
        biases = torch.cat([theirs[f"{attention}.{part}_proj.bias"] for part in "qkv"])
        assert torch.equal(weights["layers.1.qkv.bias"], biases)
    assert ("lm_head.weight" in weights) is not tied

    shard_bytes = 5 << 30 if shard == "5GB" else 20_000
    save_model(tmp_path / "ours", config, weights, Encoding("float32"), max_shard_bytes=shard_bytes)
    assert (tmp_path / "ours" / "model.safetensors").exists() == (shard == "5GB")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back) is type(model)
    assert_same_tensors(back.state_dict(), theirs)
    assert_same_tensors(read_model(tmp_path / "ours")[1], weights)


def test_saving_rounds_once_and_keeps_unknown_keys_of_the_config(tmp_path: Path) -> None:
    config = our_config("llama", attention_dropout=0.25, quantization_config={"a": 1})
    weights = dict(RandomWeights(config, seed=1))
    save_model(tmp_path / "m", config, weights, Encoding())
    back_config, back = read_model(tmp_path / "m")
    assert_same_tensors(back, {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert back_config.raw["dtype"] == back_config.raw["torch_dtype"] == "bfloat16"
    assert back_config.raw["attention_dropout"] == 0.25
    assert "quantization_config" not in back_config.raw
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").dtype == torch.bfloat16


def test_old_rotary_buffers_and_an_equal_tied_head_are_ignored(tmp_path: Path) -> None:
    config = our_config("qwen2", tied=True)
    weights = dict(RandomWeights(config, seed=0))
    save_model(tmp_path / "m", config, weights, Encoding("float32"))

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tmp_path / "m", add)
    assert_same_tensors(read_model(tmp_path / "m")[1], weights)
    change_tensors(tmp_path / "m", lambda tensors: tensors["lm_head.weight"].add_(1.0))
    with pytest.raises(UserError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        read_model(tmp_path / "m")


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda path: change_tensors(path, change)


def content(file: str, make: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: (path / file).write_bytes(make((path / file).read_bytes()))


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


WEIGHTS, EXTRA = "model.safetensors", "model.layers.0.self_attn.q_proj.bias"
NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), r"config\.json: no such file"),
    "no json": (content("config.json", lambda _: b"{"), r"config\.json: not readable as JSON"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "no weights: no model"),
    "pickled": (pickled, "convert pickled ones by"),
    "cut": (content(WEIGHTS, lambda b: b[: len(b) // 2]), r"model\.safetensors: truncated"),
    "header": (content(WEIGHTS, lambda b: b[:8] + b"x" * 100 + b[108:]), "not a safetensors"),
    "missing": (tensors(lambda t: t.pop(NORM)), rf"model\.safetensors: tensor {NORM}"),
    "head": (tensors(lambda t: t.pop("lm_head.weight")), "is tie_word_embeddings true"),
    "extra": (tensors(lambda t: t.update({EXTRA: torch.ones(64)})), f"no place for: {EXTRA}"),
    "integers": (tensors(lambda t: t.update({NORM: t[NORM].to(torch.int8)})), r"torch\.int8"),
    "shape": (
        lambda path: change_config(path, intermediate_size=64),
        r"gate_proj\.weight has shape \[48, 32\], config\.json expects \[64, 32\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_directory_is_named(case: str, tmp_path: Path) -> None:
    damage, message = BAD[case]
    write_qwen3(tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "m")


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "glm4_moe"])
def test_every_tensor_with_a_nan_or_an_infinity_is_named(family: str, tmp_path: Path) -> None:
    config = our_config(family, **FAMILIES[family].block.tiny())
    save_model(tmp_path / "m", config, dict(RandomWeights(config, seed=0)), Encoding("float32"))
    good = load_file(tmp_path / "m" / WEIGHTS)
    assert {".gate." in name for name in good} >= {family != "qwen3"}  # a router
    for number, name in enumerate(good):
        bad = (math.nan, math.inf, -math.inf, 1e300)[number % 4]
        tensor = good[name].double() if bad == 1e300 else good[name].clone()
        tensor.view(-1)[-1] = bad
        save_file(good | {name: tensor}, tmp_path / "m" / WEIGHTS)
        with pytest.raises(UserError, match=rf"{WEIGHTS}: {re.escape(name)} has a NaN or an inf"):
            read_model(tmp_path / "m")


def test_bad_shards(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "m", max_shard_bytes=20_000)
    assert all(file.stat().st_size <= 25_000 for file in (tmp_path / "m").glob("*.safetensors"))
    index = tmp_path / "m" / "model.safetensors.index.json"
    shard = min((tmp_path / "m").glob("*.safetensors"))
    good = shard.read_bytes()

    change_tensors(tmp_path / "m", lambda tensors: tensors.popitem(), shard.name)
    with pytest.raises(UserError, match=r"index\.json: tensor model.* is missing"):
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


def test_target_in_use(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_qwen3(tmp_path / "m")  # an empty directory is fine
    with pytest.raises(UserError, match="exists and is not empty"):
        write_qwen3(tmp_path / "m")
    config = our_config("llama")
    weights = dict(RandomWeights(config, seed=0))
    save_model(tmp_path / "m", config, weights, Encoding(), overwrite=True)
    assert read_model(tmp_path / "m")[0].family == "llama"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(UserError, match="not a model directory"):
        write_qwen3(tmp_path / "photos", overwrite=True)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["m", "photos"]


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


def test_tokenizer_and_generation_config_are_saved_and_read(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    side_files = {"generation_config.json": {"eos_token_id": [3, 1]}}
    write_qwen3(tmp_path / "m", tokenizer=tokenizer, side_files=side_files)
    back = load_tokenizer(tmp_path / "m")
    assert back.get_vocab() == tokenizer.get_vocab()
    assert back.chat_template == tokenizer.chat_template
    assert back.encode("cab") == [4, 2, 3]
    said = read_generation_config(tmp_path / "m")
    assert said == {"eos_token_id": [3, 1]}
    assert eos_token_ids(our_config(eos_token_id=5), said, back) == (3, 1, 5)
    (tmp_path / "m" / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match="m: the tokenizer does not load"):
        load_tokenizer(tmp_path / "m")


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


@pytest.mark.parametrize(
    "preset, rounding, moved",
    [
        ("bf16", "nearest", []),
        ("bf16", "dithered", ["embed.weight", "layers.0.gate_up.weight"]),
        ("int8", "nearest", ["layers.0.gate_up.weight"]),
        ("mixed", "nearest", ["layers.0.gate_up.weight"]),
        ("mixed through BF16", "nearest", []),
    ],
)
def test_a_bf16_directory_keeps_the_small_updates_that_the_policy_reads(
    preset: str, rounding: str, moved: list[str], tmp_path: Path
) -> None:
    """The weights of a file lie on BF16's grid, and an update is far smaller than its steps."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128, "model_type": "llama"}
    plan = PrecisionPlan.preset(preset.split()[0]).replace(bf16_rounding=rounding)
    if preset == "mixed through BF16":  # both sides read BF16 weights, the sampler through FP8
        plan = plan.replace(weights_through_bf16=True)
    policy = Policy.from_config(sizes | {"rms_norm_eps": 1e-6, "vocab_size": 640}, plan)
    masters, start = policy.master_weights(), {}
    for name, master in masters.items():
        start[name] = master.data.bfloat16().float()
        master.data.copy_(start[name]).add_(2e-5)
    policy.weights.requantize()
    policy.save_pretrained(tmp_path / "m")
    stored = {name: w.float() for name, w in read_model(tmp_path / "m")[1].items()}
    shift = {name: float((stored[name] - start[name]).mean()) / 2e-5 for name in start}
    for name in ("embed.weight", "layers.0.gate_up.weight"):
        assert (abs(shift[name] - 1) < 0.2) == (name in moved), shift
    if preset == "bf16":
        read = policy.weights.quantized_tensors()
        assert torch.equal(stored["embed.weight"], read["embed.0"].float())
        assert torch.equal(stored["layers.0.gate_up.weight"], read["layers.0.gate_up.0"].float())
