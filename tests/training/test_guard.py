"""Updates that are not finite: refused whole, reported, skipped or stopped at, and located."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from jetrl.errors import NonFiniteError
from jetrl.settings.loading import Settings
from jetrl.training import SftTrainer, Trainer
from jetrl.training.guard import MOST_IN_A_ROW, Guard, NonFiniteUpdate
from jetrl.training.losses import MicroBatchLoss
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.training.sft import PairMinibatch
from jetrl.training.update import Update
from jetrl.types import Example

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 2.0]


def settings(**keys):
    train = {"lr": 0.01, "tokens_per_micro_batch": 9, "on_nonfinite": "skip"} | keys
    return Settings.model_validate({"train": train, "algorithm": {"aggregation": "token_mean"}})


def snapshot(policy):
    return {name: p.detach().clone() for name, p in policy.master_weights().items()}


def same(policy, before):
    return all(torch.equal(p, before[name]) for name, p in policy.master_weights().items())


@pytest.fixture
def poisoned(bigram, monkeypatch):
    """Return a policy whose forwards with gradient give NaN for one token id.

    The weights stay good, as with a kernel that fails now and then.
    """

    def make(token):
        policy = bigram(exact=False)
        forward = policy.train_logprobs

        def train_logprobs(token_ids, cu_seqlens, targets, *args, **kwargs):
            logprobs, moments = forward(token_ids, cu_seqlens, targets, *args, **kwargs)
            if torch.is_grad_enabled() and policy.poison is not None:
                logprobs = logprobs * torch.where(
                    token_ids[targets] == policy.poison, math.nan, 1.0
                )
            return logprobs, moments

        policy.poison = token
        policy.train_logprobs = train_logprobs
        return policy

    return make


def test_a_skipped_update_changes_nothing_and_is_counted(bigram, poisoned):
    policy = poisoned(None)
    samples = policy.draw(REWARDS)
    policy.poison = samples[0].completion.token_ids[0]
    before = snapshot(policy)
    trainer = Trainer(policy, settings())
    metrics = trainer.step(samples).metrics
    assert metrics["policy/skipped_updates"] == 1
    assert "policy/loss" not in metrics
    assert "policy/grad_norm" not in metrics
    assert same(policy, before)
    assert all(p.grad is None for p in policy.master_weights().values())
    assert trainer.optimizer.num_updates == 0
    policy.poison = None  # and the run goes on as if the step had not been
    after = trainer.step(samples).metrics
    other = bigram(exact=False)
    expected = Trainer(other, settings()).step(samples).metrics
    assert after == expected
    assert same(policy, snapshot(other))


def test_the_other_updates_of_the_step_are_applied(poisoned):
    policy = poisoned(None)
    samples = policy.draw(REWARDS)
    first = {t for s in samples[:4] for t in s.completion.token_ids}
    second = {t for s in samples[4:] for t in s.completion.token_ids}
    policy.poison = min(second - first)
    trainer = Trainer(policy, settings(updates_per_step=2))
    metrics = trainer.step(samples).metrics
    assert metrics["policy/skipped_updates"] == 1
    assert trainer.optimizer.num_updates == 1
    alone = Trainer(poisoned(None), settings()).step(samples[:4]).metrics
    assert {name: metrics[name] for name in ("policy/loss", "policy/grad_norm")} == {
        name: alone[name] for name in ("policy/loss", "policy/grad_norm")
    }


def test_what_is_reported(poisoned):
    policy = poisoned(None)
    samples = policy.draw(REWARDS)
    policy.poison = samples[0].completion.token_ids[0]
    trainer = Trainer(policy, settings(on_nonfinite="stop"))
    seen = []

    def report(update: NonFiniteUpdate) -> str:
        assert all(p.grad is None for p in policy.master_weights().values())
        update.repeat()
        assert all(p.grad is None for p in policy.master_weights().values())
        seen.append(update)
        return "kept in FOLDER"

    trainer.guard.report = report
    with pytest.raises(NonFiniteError, match=r"policy/loss is nan.*kept in FOLDER.*on_nonfinite"):
        trainer.step(samples)
    (update,) = seen
    assert update.index == 0
    assert update.parameters == ["table.weight", "table.bias"]
    assert math.isfinite(update.values["policy/entropy"])


def test_a_run_that_does_not_come_out_of_it_stops(poisoned):
    policy = poisoned(None)
    samples = policy.draw(REWARDS)
    policy.poison = samples[0].completion.token_ids[0]
    trainer = Trainer(policy, settings())
    for _ in range(MOST_IN_A_ROW - 1):
        assert trainer.step(samples).metrics["policy/skipped_updates"] == 1
    resumed = Trainer(policy, settings())
    resumed.guard.load_state(trainer.guard.state())  # the count goes through a checkpoint
    with pytest.raises(NonFiniteError, match=f"update {MOST_IN_A_ROW} in a row"):
        resumed.step(samples)


def test_supervised_updates_are_guarded_too(poisoned):
    policy = poisoned(4)
    before = snapshot(policy)
    trainer = SftTrainer(policy, settings())
    metrics = trainer.step([Example([1, 2], [3, 4])])
    assert set(metrics) == {"policy/skipped_updates", "sft/lr", "sft/tokens"}
    assert same(policy, before)
    with pytest.raises(NonFiniteError, match="sft/loss is nan"):
        SftTrainer(policy, settings(on_nonfinite="stop")).step([Example([1, 2], [3, 4])])
    assert same(policy, before)


def test_one_wait_for_the_device_an_update(bigram, monkeypatch):
    """Numbers leave the device in one piece: `tolist` of one tensor, whatever is measured."""
    policy = bigram(exact=False)
    samples = policy.draw(REWARDS)
    trainer = Trainer(policy, settings())
    calls = []
    for name in ("tolist", "item", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def counted(tensor, original=original, name=name):
            if "/src/jetrl/" in sys._getframe(1).f_code.co_filename:
                calls.append(name)
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    trainer.step(samples)
    assert calls == ["tolist"]


def test_a_repetition_that_breaks_off_leaves_no_gradients(bigram):
    """The look at every value takes memory, and may run out of memory."""
    trainer = Trainer(bigram(), settings())

    def loss(micro_batch, minibatch):
        for master in trainer.optimizer.masters.values():
            master.grad = torch.ones_like(master)
        if repeating:
            raise torch.OutOfMemoryError
        return MicroBatchLoss(torch.full((), math.nan, requires_grad=True))

    repeating, guard = [], Guard("skip")
    refused = []
    guard.report = lambda update: refused.append(update) or ""
    update = Update(trainer.policy, trainer.optimizer, guard, loss, "policy")
    update.run(PairMinibatch([([1], [2])], MicroBatchSize(9)))
    repeating.append(True)
    with pytest.raises(torch.OutOfMemoryError):
        refused[0].repeat()
    assert all(master.grad is None for master in trainer.optimizer.masters.values())
