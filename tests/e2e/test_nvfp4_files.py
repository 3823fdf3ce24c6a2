"""Whole runs on a base whose files are in NVFP4 already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.small import SMALL
from tests.models.nvfp4_directories import to_nvfp4

from jetrl import load_config, train
from jetrl.cli.main import main
from jetrl.cli.opening import open_policy
from jetrl.errors import UserError
from jetrl.models.tiny import make_tiny
from jetrl.precision.nvfp4 import NVFP4Weight
from jetrl.runs.directory import RunDirectory

WORDS = [
    *SMALL,
    "sft.steps=1",
    "sft.warmup_steps=0",
    "loop.steps=1",
    "train.lr=1e-2",
    "algorithm.kl=0.01",
    "model.config=none",
    "model.tokenizer=none",
]
ADAPTER = ["precision.base=nvfp4", "adapter.kind=lora", "adapter.rank=4"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "base"
    make_tiny(path, num_layers=2, alphabet="0123456789+=", initializer_range=0.1)
    to_nvfp4(path, "modelopt-sidecar", apart=True, left=("1.mlp.down_proj",))
    return path


def test_a_run_is_exact_and_its_files_go_on(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, *ADAPTER, f"model.path={base}", f"run.dir={tmp_path}", "run.name=run"]
    run = train(load_config("demo", words)).run_path
    train(load_config("demo", [*words, "loop.steps=2"]), resume=True)
    lines = RunDirectory.open(run).metrics("rl")
    assert [line["mismatch/num_different"] for line in lines[-2:]] == [0, 0]
    said = json.loads((run / "model" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(base)

    adapter = shutil.copytree(run / "model", tmp_path / "adapter")
    policies = [open_policy(path, None, "cpu") for path in (run, adapter, base)]
    for policy in policies:
        assert isinstance(policy.decoder.layers[0].mixer.qkv.operand("rollout"), NVFP4Weight)
    with torch.no_grad():
        of_run, of_adapter, of_base = (p.logprobs([[1, 2, 3, 4, 5, 6]])[0] for p in policies)
        assert torch.equal(policies[0].base().logprobs([[1, 2, 3, 4, 5, 6]])[0], of_base)
    assert torch.equal(of_run, of_adapter)
    assert not torch.equal(of_run, of_base)

    command = ["export", str(run), str(tmp_path / "whole"), "--merge", "--dtype", "float32"]
    assert main(command) == 0
    assert "the adapter was added to its dequantized weights" in capsys.readouterr().out
    assert main(["export", str(base), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    name = "model.layers.0.mlp.down_proj"
    merged, wide = (
        load_file(tmp_path / path / "model.safetensors")[f"{name}.weight"]
        for path in ("whole", "wide")
    )
    trained = load_file(adapter / "adapter_model.safetensors")
    a, b = (trained[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
    change = said["lora_alpha"] / said["r"] * b @ a
    assert (merged - wide - change).norm() <= 1e-5 * change.norm()


def test_the_dry_run_knows_the_format(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, f"model.path={base}", f"run.dir={tmp_path}", "--dry-run"]
    assert main(["train", "demo", *words]) == 2
    assert "its linear layers are in NVFP4 (NVIDIA ModelOpt)" in capsys.readouterr().err
    assert main(["train", "demo", *words, *ADAPTER]) == 0
    assert "quantized weights" in capsys.readouterr().out
    assert main(["train", "demo", *words, *ADAPTER, "precision.first_layers_bf16=1"]) == 2
    assert "has layer 0 in BF16" in capsys.readouterr().err
    options = [*words[:-1], *ADAPTER, "algorithm.name=ppo", "critic.path=policy"]
    settings = load_config("demo", options)
    with pytest.raises(UserError, match=r"NVFP4.*precision.base=nvfp4"):
        train(settings)
