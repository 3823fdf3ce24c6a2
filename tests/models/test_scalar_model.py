"""Decoders with a scalar head agree with transformers; frozen models with trained ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.stored_weights import SIZES
from transformers import AutoModelForSequenceClassification

from jetrl.errors import UserError
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel, check_same_tokenizer
from jetrl.models.source import ModelSource
from jetrl.models.tiny import character_tokenizer
from jetrl.precision import PrecisionPlan

FAMILIES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}


def config(family="qwen3", score=True, **changes):
    ending = "ForSequenceClassification" if score else "ForCausalLM"
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    return {
        **SIZES,
        **sizes,
        "architectures": [FAMILIES[family] + ending],
        "model_type": family,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        **({"num_labels": 1} if score else {}),
        **changes,
    }


def make(cls, preset, seed=0, frozen=False, **changes):
    model = ModelConfig.from_hf(config(score=cls is ScalarModel, **changes))
    return cls(ModelSource.from_seed(model, seed), PrecisionPlan.preset(preset), frozen=frozen)


def sequences(count=7):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 64, (3 + 5 * i % 11,), generator=generator).tolist() for i in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family, tmp_path: Path) -> None:
    model = make(ScalarModel, "fp32", family=family)
    model.save_pretrained(tmp_path / "rm", dtype="float32")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert theirs.config.num_labels == 1
    ours = model.scores(sequences(), 1000)
    for score, tokens in zip(ours, sequences(), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits.item()
        # Two float32 evaluations of the same function, sums in another order: a relative error of
        # about sqrt(128) 2^-24 in each of some 20 operations, on scores of about 1; ten times that.
        assert score.item() == pytest.approx(expected, abs=10 * 20 * 128**0.5 * 2**-24)


@pytest.mark.parametrize("preset", ["jet", "unified", "int8"])
def test_a_score_does_not_depend_on_the_batch(preset) -> None:
    model = make(ScalarModel, preset)
    together = model.scores(sequences(), 1000)
    assert torch.equal(together, model.scores(sequences(), 1))
    assert torch.equal(together.flip(0), model.scores(sequences()[::-1], 20))


def test_a_new_head_says_zero(tmp_path: Path) -> None:
    policy = make(Policy, "unified")
    policy.save_pretrained(tmp_path / "lm", dtype="float32")
    model = ScalarModel.from_language_model(tmp_path / "lm", policy.plan)
    assert not model.scores(sequences(), 1000).any()
    assert set(model.master_weights()) == set(parameter_shapes(model.config))
    with torch.no_grad():
        model.master_weights()["score.weight"].fill_(1.0)
    model.save_pretrained(tmp_path / "rm", dtype="float32")
    again = ScalarModel.from_language_model(tmp_path / "rm", policy.plan)  # has its own head
    assert again.scores(sequences(), 1000).any()


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    make(Policy, "bf16").save_pretrained(tmp_path / "lm")
    make(ScalarModel, "bf16").save_pretrained(tmp_path / "rm")
    plan = PrecisionPlan.preset("bf16")
    with pytest.raises(UserError, match="Qwen3ForCausalLM has a head for tokens"):
        ScalarModel.from_pretrained(tmp_path / "lm", plan)
    with pytest.raises(UserError, match="Qwen3ForSequenceClassification has a head for scores"):
        Policy.from_pretrained(tmp_path / "rm", plan)


@pytest.mark.parametrize("labels", [{"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}, {}])
def test_more_than_one_label_is_refused(labels) -> None:
    contents = config()
    del contents["num_labels"]
    with pytest.raises(UserError, match="labels; a reward model or critic has one"):
        ModelConfig.from_hf(contents | labels)


@pytest.mark.parametrize(
    "preset, tied", [("fp32", True), ("bf16", False), ("mixed", True), ("unified", False)]
)
def test_a_frozen_policy_has_the_same_bits_without_masters(preset, tied) -> None:
    policy = make(Policy, preset, tie_word_embeddings=tied)
    frozen = make(Policy, preset, tie_word_embeddings=tied, frozen=True)
    with torch.no_grad():
        expected, seen = policy.logprobs(sequences()), frozen.logprobs(sequences())
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
    assert frozen.master_weights() == {}


def test_another_tokenizer_is_refused_with_the_token() -> None:
    check_same_tokenizer(character_tokenizer("abc"), character_tokenizer("abc"), "reward model")
    with pytest.raises(UserError, match="reward model m: its tokenizer is not the policy's"):
        check_same_tokenizer(
            character_tokenizer("abc"), character_tokenizer("abd"), "reward model m"
        )
