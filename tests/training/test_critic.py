"""The critic: its loss by hand and against verl's, its learning, its state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from one_layer import scalar_config

from jetrl.errors import NonFiniteError, OutOfMemoryStop
from jetrl.memory.out_of_memory import within_memory
from jetrl.models.families import ModelConfig
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import random_weights
from jetrl.precision import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.training import Critic, pack
from jetrl.training.extras.critic import explained_variance
from jetrl.training.losses import value_loss
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, Minibatch


def critic(seed=0, lr=3e-3, action="stop"):
    config = ModelConfig.from_hf(scalar_config())
    weights = random_weights(config, seed)
    weights["score.weight"] = torch.zeros(1, 128)
    model = ScalarModel(config, PrecisionPlan.preset("unified"), weights)
    keys = {"critic": {"path": "policy", "lr": lr}, "algorithm": {"name": "ppo"}}
    train = {"grad_clip": 10.0, "on_nonfinite": action}
    return Critic(model, Settings.model_validate(keys | {"train": train}))


def lessons(sample, student, count=12):
    """The return is the share of even tokens of the completion."""
    rng = np.random.default_rng(0)
    samples = [
        sample(i, rng.integers(0, 16, 2), rng.integers(0, 16, 1 + i % 4)) for i in range(count)
    ]
    found = []
    for batch in pack(samples, 24):
        returns = np.concatenate(
            [
                np.full(len(ids), np.mean([t % 2 == 0 for t in ids]), dtype=np.float32)
                for ids in (samples[i].completion.token_ids for i in batch.sample_ids)
            ]
        )
        values = student.values(batch)
        found.append(MicroBatch(batch, values=values, returns=torch.from_numpy(returns)))
    return Minibatch(found, MicroBatchSize(24))


def test_value_loss_against_verl():
    # verl 0.9.1, compute_value_loss with cliprange_value 0.2: 0.1910 and 0.1111, as it prints them.
    values = torch.tensor([0.6, 0.1, 0.7, 0.5, 0.2, 0.3, 1.4, 0.5, 1.0])
    before = torch.tensor([0.5, 0.25, 0.75, 0.1, 0.2, 0.3, 1.0, 0.5, 1.5])
    returns = torch.tensor([0.6606, 0.855, 1.0, 0.036, 0.0, 0.5, 1.3212, 1.71, 2.0])
    found = value_loss(values, before, returns, 9, 0.2)
    assert found.loss.item() == pytest.approx(0.1910, abs=5e-5)
    assert found.clip_fraction.item() == pytest.approx(0.1111, abs=5e-5)


def test_it_learns_the_returns(sample):
    student = critic()
    first = lessons(sample, student)
    assert all(not lesson.values.any() for lesson in first.micro_batches), "a new head says 0"
    losses = [student.update(0, lessons(sample, student))["critic/loss"] for _ in range(40)]
    assert losses[-1] < 0.25 * losses[0]
    after = lessons(sample, student)
    said = torch.cat([lesson.values for lesson in after.micro_batches])
    true = torch.cat([lesson.returns for lesson in after.micro_batches])
    assert explained_variance(said.numpy(), true.numpy()) > 0.5


def test_a_value_looks_at_what_precedes_its_token_alone(sample):
    student = critic()
    with torch.no_grad():
        student.model.master_weights()["score.weight"].normal_()
    one, other = sample(0, [1, 2], [3, 4, 5]), sample(0, [1, 2], [3, 4, 9])
    (batch,), (changed,) = pack([one], 24), pack([other], 24)
    assert torch.equal(student.values(batch), student.values(changed))


def test_state_is_taken_over_bit_for_bit(sample):
    whole, cut = critic(), critic()
    for student in (whole, cut):
        student.update(0, lessons(sample, student))
    resumed = critic(seed=5)
    saved = {name: t.clone() for name, t in cut.state_tensors().items()}
    resumed.load_tensors(saved)
    for student in (whole, resumed):
        student.update(0, lessons(sample, student))
    a, b = whole.state_tensors(), resumed.state_tensors()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_optimizer_without_room_is_not_begun_anew(sample):
    """The masters may have changed by then: a second attempt would update them twice."""
    student = critic()

    def apply(total_norm):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64")

    student.optimizer.apply = apply
    with pytest.raises(OutOfMemoryStop, match=r"in the critic's optimizer .*to allocate 64"):
        within_memory(lambda: student.update(0, lessons(sample, student)), pytest.fail)


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_update_that_is_not_finite_changes_nothing(sample, action):
    student = critic(action=action)
    student.update(0, lessons(sample, student))
    before = {name: t.clone() for name, t in student.state_tensors().items()}
    bad = lessons(sample, student)
    bad.micro_batches[0].returns[0] = math.inf
    reported = []
    student.guard.report = lambda update: reported.append(update) or "found"
    if action == "stop":
        with pytest.raises(NonFiniteError, match=r"critic/loss is inf.*found.*Lower critic\.lr"):
            student.update(1, bad)
    else:
        assert student.update(1, bad) == {}
    after = student.state_tensors()
    assert all(torch.equal(after[name], before[name]) for name in before)
    (update,) = reported
    assert (update.index, update.model) == (1, student.model)
    assert update.parameters
    update.repeat()
    assert all(p.grad is None for p in student.model.master_weights().values())
    assert student.update(2, lessons(sample, student))["critic/loss"] > 0
