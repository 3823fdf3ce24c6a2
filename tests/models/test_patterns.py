"""Regular expressions of adapters and quantized directories: limits on what they may cost."""

from __future__ import annotations

import json

import pytest

from jetrl.errors import UserError
from jetrl.models import patterns
from jetrl.models.families import ModelConfig
from jetrl.models.nvfp4_files import left_in_16_bits
from jetrl.models.patterns import matching
from jetrl.models.peft import read_lora

NAMES = ("layers.0.q_proj", "layers.10.q_proj", "layers.1.up_proj")
HOSTILE = {
    "overflow": (".{99999999999}", "repetition number is too large"),
    "recursion": ("(" * 4000 + ")" * 4000, "maximum recursion depth"),
    "syntax": ("a[", "unterminated character set"),
    "backtracking": (r"(\w+\.?)+(\w+\.?)+!", "more than 1 s of CPU time"),
    "length": ("a" * 10_001, "more than 10000 characters"),
}
CONFIG = {"model_type": "qwen3", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG |= {"max_position_embeddings": 16}


def test_names_are_matched_whole_or_from_their_beginning() -> None:
    assert matching([r".*\.1.*", "x"], NAMES, "k") == {*NAMES[1:]}
    assert matching([r"layers\.1"], NAMES, "k") == set()
    assert matching([r"layers\.1"], NAMES, "k", whole=False) == {*NAMES[1:]}
    assert matching([], NAMES, "k") == set()


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("of", ["target_modules", "ignore"])
def test_a_hostile_expression_of_a_file_is_refused_by_name(
    kind: str, of: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "LIMIT_S", 1)
    pattern, said = HOSTILE[kind]
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", f"re:{pattern}"],
    }
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": pattern}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    config = ModelConfig.from_hf(CONFIG | {"quantization_config": quantization})
    where = {
        "target_modules": "adapter_config.json: target_modules",
        "ignore": "config.json: quant",
    }
    with pytest.raises(UserError, match=f"{where[of]}.*{said}"):
        read_lora(tmp_path, config) if of == "target_modules" else left_in_16_bits(config)
