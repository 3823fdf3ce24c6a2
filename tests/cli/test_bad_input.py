"""Bad models and settings end the real commands with exit code 2 and a message.

The message names what is wrong and what to do, and nothing is left in the way of the next try.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

TENSOR = "model.layers.0.mlp.up_proj.weight"


def truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def of_another_shape(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[TENSOR] = tensors[TENSOR][:-1].contiguous()
    save_file(tensors, model / "model.safetensors")


def of_another_architecture(model: Path) -> None:
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace("Qwen3ForCausalLM", "MixtralForCausalLM"))


def without_a_vocabulary(model: Path) -> None:
    """Remove tokenizer.json, so that transformers makes an empty tokenizer."""
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')


SMALL = ["sft.steps=0", "sft.until=none", "loop.steps=1", "eval.every=0", "report.enabled=false"]
SMALL += ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (truncated, "model.safetensors: truncated or not a safetensors file"),
        (of_another_shape, f"tensor {TENSOR} has shape [383, 128], config.json expects [384, 128]"),
        (of_another_architecture, "architecture MixtralForCausalLM"),
        (without_a_vocabulary, "its tokenizer has no vocabulary: none of merges.txt"),
    ],
)
def test_a_spoilt_model_is_refused_before_a_run_is_made(
    spoil: Callable[[Path], None], message: str, jetrl: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    spoil(model)
    words = ["demo", *SMALL, f"run.dir={tmp_path / 'runs'}", f"model.path={model}"]
    done = jetrl("train", *words, "model.config=none", "model.tokenizer=none")
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "runs").exists()


def test_a_cache_too_small_names_the_setting_and_leaves_the_name_free(
    jetrl: Callable, tmp_path: Path
) -> None:
    words = ["train", "demo", *SMALL, f"run.dir={tmp_path}", "rollout.page_size=2"]
    done = jetrl(*words, "rollout.num_pages=2")
    assert done.code == 2
    assert "raise rollout.num_pages to at least 4" in done.err
    assert jetrl(*words).code == 0
    assert "is in use" in jetrl(*words).err
