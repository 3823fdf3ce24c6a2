"""Training a reward model: the loss by hand, the order that it learns, micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from jetrl.config import Settings
from jetrl.errors import UserError
from jetrl.models.families import ModelConfig
from jetrl.models.tiny import random_weights
from jetrl.precision import PrecisionPlan
from jetrl.scalar_model import ScalarModel
from jetrl.training.losses import preference_loss
from jetrl.training.reward import RewardTrainer

CONFIG = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "model_type": "qwen3",
    "num_labels": 1,
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
}


def trainer(preset="unified", tokens=1000):
    config = ModelConfig.from_hf(CONFIG)
    weights = random_weights(config, 0) | {"score.weight": torch.zeros(1, 128)}
    model = ScalarModel(config, PrecisionPlan.preset(preset), weights)
    keys = {"sft": {"lr": 3e-3, "steps": 30}, "train": {"tokens_per_micro_batch": tokens}}
    return RewardTrainer(model, Settings.model_validate(keys))


def pairs(count=16, seed=0):
    """The better one of two sequences ends in an even token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        start = torch.randint(0, 16, (2 + i % 4,), generator=generator).tolist()
        even, odd = (torch.randint(0, 8, (2,), generator=generator) * 2).tolist()
        found.append(([*start, even], [*start, odd + 1]))
    return found


def test_loss_by_hand():
    better, worse = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 2
    assert preference_loss(better, worse, 2).item() == pytest.approx(expected, rel=1e-6)


def test_a_new_head_knows_nothing():
    metrics = trainer().step(pairs())
    assert metrics["sft/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["reward_model/accuracy"] == 0
    assert metrics["reward_model/margin"] == 0
    assert metrics["sft/grad_norm"] > 0


def test_it_learns_the_order():
    student = trainer()
    for step in range(30):
        metrics = student.step(pairs(seed=step))
    assert metrics["sft/loss"] < 0.2
    assert metrics["reward_model/accuracy"] > 0.9


def test_micro_batches_do_not_matter():
    # fp32: the same sums in another order, of at most 16 x 6 tokens: 96 roundings of 2^-24 each.
    whole, parts = trainer("fp32"), trainer("fp32", tokens=12)
    for student in (whole, parts):
        student.step(pairs())
    a, b = whole.step(pairs(seed=1)), parts.step(pairs(seed=1))
    assert a["sft/loss"] == pytest.approx(b["sft/loss"], rel=96 * 2**-24)
    assert a["reward_model/margin"] == pytest.approx(b["reward_model/margin"], rel=1e-3)


def test_no_pairs():
    with pytest.raises(UserError, match="no pairs"):
        trainer().step([])
