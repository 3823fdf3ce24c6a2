"""Training a reward model: the loss by hand, the order that it learns, micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from one_layer import scalar_config

from jetrl.errors import NonFiniteError, OutOfMemoryStop
from jetrl.models.families import ModelConfig
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import random_weights
from jetrl.precision import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.training.sft import RewardTrainer


def trainer(preset="unified", tokens=1000, action="stop"):
    config = ModelConfig.from_hf(scalar_config())
    weights = random_weights(config, 0) | {"score.weight": torch.zeros(1, 128)}
    model = ScalarModel(config, PrecisionPlan.preset(preset), weights)
    train = {"tokens_per_micro_batch": tokens, "on_nonfinite": action}
    keys = {"sft": {"lr": 3e-3, "steps": 30}, "train": train}
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


def test_it_learns_the_order():
    student = trainer()
    for step in range(30):
        metrics = student.step(pairs(seed=step))
    assert metrics["sft/loss"] < 0.2
    assert metrics["reward_model/accuracy"] > 0.9


def test_too_little_memory_makes_micro_batches_smaller(monkeypatch):
    whole, small = trainer("fp32"), trainer("fp32")
    values = ScalarModel.values
    sizes = []

    def limited(model, token_ids, *args):
        if model is small.model:
            if len(token_ids) > 40:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            sizes.append(len(token_ids))
        return values(model, token_ids, *args)

    monkeypatch.setattr(ScalarModel, "values", limited)
    expected, found = whole.step(pairs()), small.step(pairs())
    assert found.pop("memory/train_retries") >= 1
    assert sum(sizes) == found["sft/tokens"]
    assert found["sft/loss"] == pytest.approx(expected["sft/loss"], rel=96 * 2**-24)
    assert "memory/train_retries" not in small.step(pairs()), "the size is kept"
    long = [([1] * 30, [2] * 30)]
    with pytest.raises(OutOfMemoryStop, match=r"with one pair in a micro-batch.*has 60 tokens"):
        small.step(long)


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_update_that_is_not_finite_changes_nothing(action):
    student = trainer(action=action)
    with torch.no_grad():
        student.model.master_weights()["score.weight"][0, 0] = math.inf
    student.model.requantize()
    before = {n: p.detach().clone() for n, p in student.model.master_weights().items()}
    if action == "stop":
        with pytest.raises(NonFiniteError, match=r"sft/loss is nan.*Lower sft\.lr"):
            student.step(pairs())
    else:
        metrics = student.step(pairs())
        assert set(metrics) == {"sft/lr", "sft/tokens", "reward_model/skipped_updates"}
    assert all(torch.equal(p, before[n]) for n, p in student.model.master_weights().items())
    assert student.optimizer.num_updates == 0
