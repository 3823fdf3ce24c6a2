"""Regular expressions of adapters and quantized directories: limits on what they may cost."""

from __future__ import annotations

import json

import pytest
from tests.models.stored_weights import our_config

from jetrl.errors import UserError
from jetrl.models import patterns
from jetrl.models.nvfp4_files import left_in_16_bits
from jetrl.models.peft import read_lora

HOSTILE = {
    "overflow": (".{99999999999}", "repetition number is too large"),
    "backtracking": (r"(\w+\.?)+(\w+\.?)+!", "more than 1 s of CPU time"),
    "length": ("a" * 10_001, "more than 10000 characters"),
}


@pytest.mark.parametrize(
    "kind, of",
    [("overflow", "ignore"), ("length", "target_modules"), ("backtracking", "target_modules")],
)
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
    config = our_config(quantization_config=quantization)
    where = {
        "target_modules": "adapter_config.json: target_modules",
        "ignore": "config.json: quant",
    }
    with pytest.raises(UserError, match=f"{where[of]}.*{said}"):
        read_lora(tmp_path, config) if of == "target_modules" else left_in_16_bits(config)
