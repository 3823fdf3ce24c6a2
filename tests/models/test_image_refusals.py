"""Runs and models with images refuse by name what docs/images.md lists as not supported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.e2e.small import SMALL, demo, trained
from tests.models.nvfp4_directories import LAYOUTS, quantization
from tests.models.test_images import change, model

from jetrl import Policy
from jetrl.errors import UserError
from jetrl.models.families import ModelConfig
from jetrl.models.nvfp4_files import SIDECAR
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import ModelSource
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.session.supervised import train_dpo, train_reward_model

SCORES = "ForSequenceClassification"
TASK = """
from jetrl.tasks.shapes import Shapes

class Mine(Shapes):
    def score(self, prompt, completion):
        return float(len(completion) % 2)

    def preference(self, prompt):
        return "2", "one"

    def self_test(self):
        return []
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The settings of a run on drawn shapes."""
    (tmp_path / "mine.py").write_text(TASK)
    base = [word for word in SMALL if not word.startswith("model.")]
    return [
        *base,
        f"model.path={model(tmp_path / 'model')}",
        f"task={tmp_path / 'mine.py'}:Mine",
        "task.options={count=20}",
        *["sft.steps=0", "rollout.keep_every=1", "checkpoint.every=1", "loop.steps=1"],
    ]


def model_of_text(path: Path, with_images: Path, kind: str = "ForCausalLM") -> Path:
    """Write a model that reads text only, with the tokenizer of one with images."""
    raw = json.loads((with_images / "config.json").read_text())["text_config"]
    raw |= {"architectures": [f"Llama{kind}"], "tie_word_embeddings": True}
    raw |= {"num_labels": 1} if kind == SCORES else {}
    source = ModelSource.from_seed(ModelConfig.from_hf(raw), 0)
    cls = ScalarModel if kind == SCORES else Policy
    cls(source, PrecisionPlan.preset("int8")).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(with_images / file, path / file)
    return path


@pytest.mark.parametrize(
    "key, kind, others",
    [
        ("reference.path", "ForCausalLM", ["algorithm.kl=0.1"]),
        ("teacher.path", "ForCausalLM", ["algorithm.name=opd"]),
        ("critic.path", "ForCausalLM", ["algorithm.name=ppo"]),
        ("reward.model_path", SCORES, ["reward.model=0.5"]),
    ],
)
def test_a_model_of_text_next_to_prompts_with_images_is_named(
    key: str, kind: str, others: list[str], words: list[str], tmp_path: Path
) -> None:
    other = model_of_text(tmp_path / "text", tmp_path / "model", kind)
    blind = rf"prompt 'train-\d+' has images, and {key} reads text only: unset it"
    with pytest.raises(UserError, match=blind):
        trained(words, tmp_path, "run", f"{key}={other}", *others)


def test_a_reference_with_the_same_weights_sees_the_images(
    words: list[str], tmp_path: Path
) -> None:
    same = [f"reference.path={tmp_path / 'model'}", "train.updates_per_step=1"]
    done = trained(words, tmp_path, "run", *same, "algorithm.kl=0.1")
    assert RunDirectory.open(done.run_path).metrics()[-1]["policy/kl_ref"] == 0


def test_pairs_with_images_are_refused(words: list[str], tmp_path: Path) -> None:
    settings = demo(words, tmp_path, "sft.steps=1", name="pairs")
    with pytest.raises(
        UserError, match=r"has images, and pairs have text only so far: drop the row"
    ):
        train_dpo(settings)
    with pytest.raises(UserError, match="a critic or reward model reads text only"):
        train_reward_model(settings)
    of_text = model_of_text(tmp_path / "text", tmp_path / "model")
    settings = demo([*words, f"model.path={of_text}"], tmp_path, "sft.steps=1", name="pairs")
    with pytest.raises(UserError, match=r"has images, and the model reads text only"):
        train_reward_model(settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_in_nvfp4_are_refused(layout: str, tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    if layout == "modelopt-sidecar":
        (path / SIDECAR).write_text(json.dumps(quantization(layout)))
    else:
        change(path / "config.json", quantization_config=quantization(layout))
    with pytest.raises(UserError, match=r"model/config\.json: a model with images is read in 16"):
        Policy.from_pretrained(path, "int8")


def test_special_tokens_as_text_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not supported by task\.special_tokens_as_text = all"):
        trained(words, tmp_path, "run", "task.special_tokens_as_text=all")
