"""Critic and reward model: their losses by hand and against verl's, their learning, bad numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.training.shared import equal, scalar_config, snapshot

from jetrl.errors import NonFiniteError, OutOfMemoryStop
from jetrl.models.families import ModelConfig
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights
from jetrl.precision import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.training.extras.critic import Critic, value_loss
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, Minibatch
from jetrl.training.packing import pack
from jetrl.training.preparation import value_metrics
from jetrl.training.sft import RewardTrainer


def scalar_model(preset="unified"):
    config = ModelConfig.from_hf(scalar_config())
    weights = dict(RandomWeights(config, 0)) | {"score.weight": torch.zeros(1, 128)}
    return ScalarModel(ModelSource.from_tensors(config, weights), PrecisionPlan.preset(preset))


def critic(action="stop"):
    keys = {"critic": {"path": "policy", "lr": 3e-3}, "algorithm": {"name": "ppo"}}
    train = {"grad_clip": 10.0, "on_nonfinite": action}
    return Critic(scalar_model(), Settings.model_validate(keys | {"train": train}))


def reward_trainer(preset="unified", action="stop"):
    train = {"tokens_per_micro_batch": 1000, "on_nonfinite": action}
    keys = {"sft": {"lr": 3e-3, "steps": 30}, "train": train}
    return RewardTrainer(scalar_model(preset), Settings.model_validate(keys))


def lessons(sample, student):
    """The return is the share of even tokens of the completion."""
    rng = np.random.default_rng(0)
    samples = [sample(i, rng.integers(0, 16, 2), rng.integers(0, 16, 1 + i % 4)) for i in range(12)]
    found = []
    for batch in pack(samples, 24):
        completions = [samples[i].completion.token_ids for i in batch.sample_ids]
        shares = [np.mean([t % 2 == 0 for t in ids]) for ids in completions]
        returns = np.repeat(np.float32(shares), [len(ids) for ids in completions])
        values = student.values(batch)
        found.append(MicroBatch(batch, values=values, returns=torch.from_numpy(returns)))
    return Minibatch(found, MicroBatchSize(24))


def pairs():
    """The better one of two sequences ends in an even token."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(16):
        start = torch.randint(0, 16, (2 + i % 4,), generator=generator).tolist()
        even, odd = (torch.randint(0, 8, (2,), generator=generator) * 2).tolist()
        found.append(([*start, even], [*start, odd + 1]))
    return found


def test_value_loss_against_verl():
    # verl 0.9.1, compute_value_loss with cliprange_value 0.2: 0.1910 and 0.1111, as it prints them.
    values = torch.tensor([0.6, 0.1, 0.7, 0.5, 0.2, 0.3, 1.4, 0.5, 1.0])
    before = torch.tensor([0.5, 0.25, 0.75, 0.1, 0.2, 0.3, 1.0, 0.5, 1.5])
    returns = torch.tensor([0.6606, 0.855, 1.0, 0.036, 0.0, 0.5, 1.3212, 1.71, 2.0])
    loss, clip_fraction = value_loss(values, before, returns, 9, 0.2)
    assert loss.item() == pytest.approx(0.1910, abs=5e-5)
    assert clip_fraction.item() == pytest.approx(0.1111, abs=5e-5)


def test_a_critic_learns_the_returns(sample):
    student = critic()
    first = lessons(sample, student)
    assert all(not lesson.values.any() for lesson in first.micro_batches), "a new head says 0"
    losses = [student.update(0, lessons(sample, student))["critic/loss"] for _ in range(25)]
    assert losses[-1] < 0.25 * losses[0]
    after = lessons(sample, student)
    said = torch.cat([lesson.values for lesson in after.micro_batches])
    true = torch.cat([lesson.returns for lesson in after.micro_batches])
    metrics = value_metrics([said.numpy()], [true.numpy()])
    assert metrics["critic/explained_variance"] > 0.5


def test_too_little_memory_makes_micro_batches_of_pairs_smaller(monkeypatch):
    whole, small = reward_trainer("fp32"), reward_trainer("fp32")
    values = ScalarModel.values
    sizes = []

    def limited(model, token_ids, *args, **options):
        if model is small.model:
            if len(token_ids) > 40:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            sizes.append(len(token_ids))
        return values(model, token_ids, *args, **options)

    monkeypatch.setattr(ScalarModel, "values", limited)
    expected, found = whole.step(pairs()), small.step(pairs())
    assert found.pop("memory/train_retries") >= 1
    assert sum(sizes) == found["sft/tokens"]
    assert found["sft/loss"] == pytest.approx(expected["sft/loss"], rel=96 * 2**-24)
    assert "memory/train_retries" not in small.step(pairs()), "the size is kept"
    with pytest.raises(OutOfMemoryStop, match=r"with one pair in a micro-batch.*has 60 tokens"):
        small.step([([1] * 30, [2] * 30)])


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("kind", ["critic", "reward"])
def test_an_update_that_is_not_finite_changes_nothing(sample, kind, action):
    if kind == "critic":
        student = critic(action)
        bad = lessons(sample, student)
        bad.micro_batches[0].returns[0] = math.inf
        update, message = lambda: student.update(1, bad), r"critic/loss is inf.*Lower critic\.lr"
    else:
        student = reward_trainer(action=action)
        with torch.no_grad():
            student.model.master_weights()["score.weight"][0, 0] = math.inf
        student.model.requantize()
        update, message = lambda: student.step(pairs()), r"sft/loss is nan.*Lower sft\.lr"
    before = snapshot(student.model)
    if action == "stop":
        with pytest.raises(NonFiniteError, match=message):
            update()
    else:
        skipped = {"sft/lr", "sft/tokens", "reward_model/skipped_updates"}
        assert set(update()) == (skipped if kind == "reward" else set())
    assert equal(snapshot(student.model), before)
    assert student.optimizer.num_updates == 0
    assert all(p.grad is None for p in student.model.master_weights().values())
