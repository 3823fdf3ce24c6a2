"""`--dry-run` refuses what a start refuses: both call `check_run`, before any weight is read."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl.cli.main import main
from jetrl.models.tiny import make_tiny
from jetrl.session import open as opening

FP8_ROWS = "layer layers.0.qkv: FP8 needs dimensions that are multiples of 64"
LORA, NVFP4 = "adapter.kind=lora", "precision.base=nvfp4"
PPO = ("algorithm.name=ppo", "algorithm.aggregation=none")
JUDGED, SCALAR = "reward.model=1.0", "Qwen3ForSequenceClassification"
CONTEXT_9 = ("model.config.max_position_embeddings=9", "rollout.max_tokens=2")
BAD: list[tuple[str, ...]] = [  # what the message has, and the words
    (FP8_ROWS, "model.config.hidden_size=608"),
    ("FP8 needs dimensions", "model.config.intermediate_size=200"),
    ("NVFP4 needs dimensions", "model.config.hidden_size=576", LORA, NVFP4),
    ("for a model that is not trained", NVFP4),
    ("is missing; config.json asks", "model.path={dir}/other-shape"),
    ("error: model.path: ", "model.path={dir}/nowhere"),
    ("error: model.tokenizer: no", "model.path={dir}/base", "model.tokenizer=nowhere"),
    ("no weights", "model.path={dir}/no-weights"),
    ("model.safetensors: truncated or not a safetensors file", "model.path={dir}/cut"),
    ("no vocabulary: none of merges.txt", "model.path={dir}/no-words", "model.tokenizer=none"),
    ("error: model.path = aaaaaaaa", "run.name=long", f"model.path={'a' * 5000}"),
    ("error: adapter.path = aaaaaaa", LORA, f"adapter.path={'a' * 5000}"),
    ("head_dim", "model.config.head_dim=33"),
    ("the model has 2 layers", "precision.last_layers_bf16=3"),
    ("vocab_size is 5", "model.config.vocab_size=5"),
    ("matches no linear layer", LORA, 'adapter.targets=["nothing"]'),
    ("train_head and adapter.train_embeddings", LORA, "adapter.train_head=true"),
    ("adapter_config.json", LORA, "adapter.path={dir}/base"),
    ("error: reference.path: ", "reference.path={dir}/nowhere", "algorithm.kl=0.1"),
    ("context of 17 tokens is too short", "reference.path={dir}/short", "algorithm.kl=0.1"),
    ("not the policy's", "reference.path={dir}/base", "algorithm.kl=0.1"),
    ("error: critic.path: ", "critic.path={dir}/nowhere", *PPO),
    ("Qwen3ForCausalLM has a head for tokens", "reward.model_path={dir}/base", JUDGED),
    ("score.weight [1, 576] is missing", "reward.model_path={dir}/narrow", JUDGED),
    ("num_pages = 1000000000", "rollout.num_pages=1000000000"),
    ("KV cache too small", "rollout.num_pages=1", "rollout.page_size=16"),
    ("use precision.preset=int8", "rollout.oversample=0.5", "precision.preset=mixed"),
    ("has no effect under the exact plan 'unified'", "algorithm.correction=tis"),
    ("nowhere.py", "algorithm.name=nowhere.py:loss"),
    ("nowhere.py", "task=nowhere.py:Own"),
    ("no such option", "task.options.nothing=1"),
    ("task arithmetic has no turns", "task.max_turns=3"),
    ("demonstrations", "task={dir}/plain.py:Plain", "sft.steps=2"),
    ("have 10 tokens", "task={dir}/plain.py:Long", "sft.steps=1", *CONTEXT_9),
    ("cannot score", "task={dir}/plain.py:Broken"),
    ("no room for an answer", "model.config.max_position_embeddings=6", "rollout.max_tokens=2"),
    ("device cuda", "run.device=cuda"),
    ("pip install wandb", 'trackers.names=["wandb"]'),
    ("single, non-empty folder name", "run.name=a/b"),
    ("is in use", "run.name=used"),
    ("Not a directory", "run.dir={dir}/plain.py"),
    ("nothing to resume", "run.name=new", "--resume"),
    ("this run has 1 GPU", "distributed.same_bits_down_to=9"),
]
PLAIN = """
from jetrl.tasks import Task
from jetrl.types import Prompt
class Plain(Task):
    alphabet = "01"
    def prompts(self, split): return [Prompt(id="0", text="0", answer="1")]
    def score(self, prompt, completion): return 1.0
class Broken(Plain):
    def score(self, prompt, completion): return 1 / 0
class Long(Plain):
    def demonstration(self, prompt): return "1" * 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directories, tasks and runs that rows name as {dir}."""
    path = tmp_path_factory.mktemp("inputs")
    (path / "plain.py").write_text(PLAIN)
    base = make_tiny(path / "base", num_heads=2, num_layers=1)
    make_tiny(path / "short", max_position_embeddings=17)
    for name, changed in {
        "other-shape": {"num_hidden_layers": 3, "tie_word_embeddings": False},
        "no-weights": {},
        "cut": {},
        "no-words": {},
        "narrow": {"architectures": [SCALAR], "num_labels": 1, "hidden_size": 576},
    }.items():
        config = json.loads((shutil.copytree(base, path / name) / "config.json").read_text())
        (path / name / "config.json").write_text(json.dumps(config | changed))
    (path / "no-weights" / "model.safetensors").unlink()
    os.truncate(path / "cut" / "model.safetensors", 10_000)
    (path / "no-words" / "tokenizer.json").unlink()  # transformers then makes an empty tokenizer
    words = {"tokenizer_class": "Qwen2Tokenizer"}
    (path / "no-words" / "tokenizer_config.json").write_text(json.dumps(words))
    (path / "runs" / "used").mkdir(parents=True)
    (path / "runs" / "used" / "config.toml").touch()
    return path


PAIRS = [  # of a reward model
    (FP8_ROWS, "model.config.hidden_size=608"),
    ("has none for prompt", "task={dir}/plain.py:Plain"),
    ("is in use", "run.name=used"),
    ("vocab_size is 5", "model.config.vocab_size=5"),
]
COMMANDS = {"train": ["train", "demo"], "sft": ["sft", "demo", "--task", "reward"]}


@pytest.mark.parametrize(
    "command, row",
    [*(("train", row) for row in BAD), *(("sft", row) for row in PAIRS)],
    ids=lambda part: part if isinstance(part, str) else f"{part[0]}-{part[1]}",
)
def test_a_dry_run_refuses_what_a_start_refuses(
    command: str,
    row: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("build_policy", "build_scalar_model"):
        made = getattr(opening, name)

        def outline(*args: Any, made: Any = made) -> Any:
            assert args[3:] == ("meta",), "weights are read"
            return made(*args)

        monkeypatch.setattr(opening, name, outline)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(opening, "free_bytes", lambda _: 2**34)
    message, *given = row
    words = [*COMMANDS[command], f"run.dir={folder / 'runs'}", "sft.until=none", "task.workers=0"]
    words += ["rollout.max_tokens=12", *(word.replace("{dir}", str(folder)) for word in given)]
    if command == "train" and not any(word.startswith("sft.steps") for word in words):
        words.append("sft.steps=0")
    before = sorted(folder.rglob("*"))
    start, dry = ((main([*words, *more]), *capsys.readouterr()) for more in ([], ["--dry-run"]))
    assert message in start[2]
    assert start[::2] == dry[::2]
    assert start[0] == 2
    plan = message in ("is in use", "Not a directory")
    assert ("# memory plan" in dry[1], "#   held" in dry[1]) == (plan, plan)
    assert sorted(folder.rglob("*")) == before


OF_GPUS = [
    ("fp32 cannot use 2 processes", "precision.preset=fp32", "--gpus=2"),
    (
        "below the number of ranks",
        "rollout.oversample=0.5",
        "rollout.prompts_per_step=2",
        "--gpus=4",
    ),
    ("head_dim 64 or 128", "model.config.head_dim=32", "--gpus=2"),
    ("a page has 64 tokens", "rollout.page_size=16", "--gpu-memory=80"),
    ("has 2 GPUs", "distributed.same_bits_down_to=4", "--gpus=2"),
]


@pytest.mark.parametrize("row", OF_GPUS, ids=lambda row: row[0])
def test_of_gpus_elsewhere_the_same_is_refused(
    row: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, *words = row
    assert main(["train", "demo", f"run.dir={tmp_path}", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err
