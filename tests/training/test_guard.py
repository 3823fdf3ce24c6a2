"""Updates that are not finite: refused whole, reported, skipped or stopped at, and located."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from tests.training.shared import REWARDS, equal, settings, snapshot

from jetrl.errors import NonFiniteError
from jetrl.training.guard import MOST_IN_A_ROW
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer
from jetrl.types import Example


def guarded(**keys):
    return settings({"on_nonfinite": "skip"} | keys)


@pytest.fixture
def poisoned(bigram, monkeypatch):
    """Return a policy whose forwards with gradient give NaN for one token id.

    The weights stay good, as with a kernel that fails now and then.
    """

    def make(token):
        policy = bigram(exact=False)
        forward = policy.train_logprobs

        def train_logprobs(inputs, cu_seqlens, targets, *args, **kwargs):
            logprobs, moments = forward(inputs, cu_seqlens, targets, *args, **kwargs)
            if torch.is_grad_enabled() and policy.poison is not None:
                logprobs = logprobs * torch.where(
                    inputs.token_ids[targets] == policy.poison, math.nan, 1.0
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
    trainer = Trainer(policy, guarded())
    metrics = trainer.step(samples).metrics
    assert metrics["policy/skipped_updates"] == 1
    assert "policy/loss" not in metrics
    assert "policy/grad_norm" not in metrics
    assert equal(snapshot(policy), before)
    assert all(p.grad is None for p in policy.master_weights().values())
    assert trainer.optimizer.num_updates == 0
    policy.poison = None  # and the run goes on as if the step had not been
    after = trainer.step(samples).metrics
    other = bigram(exact=False)
    expected = Trainer(other, guarded()).step(samples).metrics
    assert after == expected
    assert equal(snapshot(policy), snapshot(other))


def test_the_other_updates_of_the_step_are_applied(poisoned):
    policy = poisoned(None)
    samples = policy.draw(REWARDS)
    first = {t for s in samples[:4] for t in s.completion.token_ids}
    second = {t for s in samples[4:] for t in s.completion.token_ids}
    policy.poison = min(second - first)
    trainer = Trainer(policy, guarded(updates_per_step=2))
    metrics = trainer.step(samples).metrics
    assert metrics["policy/skipped_updates"] == 1
    assert trainer.optimizer.num_updates == 1
    alone = Trainer(poisoned(None), guarded()).step(samples[:4]).metrics
    assert {name: metrics[name] for name in ("policy/loss", "policy/grad_norm")} == {
        name: alone[name] for name in ("policy/loss", "policy/grad_norm")
    }


def test_a_run_that_does_not_come_out_of_it_stops(poisoned):
    policy = poisoned(None)
    samples = policy.draw(REWARDS)
    policy.poison = samples[0].completion.token_ids[0]
    trainer = Trainer(policy, guarded())
    for _ in range(MOST_IN_A_ROW - 1):
        assert trainer.step(samples).metrics["policy/skipped_updates"] == 1
    resumed = Trainer(policy, guarded())
    resumed.guard.load_state(trainer.guard.state())  # the count goes through a checkpoint
    with pytest.raises(NonFiniteError, match=f"update {MOST_IN_A_ROW} in a row"):
        resumed.step(samples)


def test_supervised_updates_are_guarded_too(poisoned):
    policy = poisoned(4)
    before = snapshot(policy)
    trainer = SftTrainer(policy, guarded())
    metrics = trainer.step([Example([1, 2], [3, 4])])
    assert set(metrics) == {"policy/skipped_updates", "sft/lr", "sft/tokens"}
    assert equal(snapshot(policy), before)
    with pytest.raises(NonFiniteError, match="sft/loss is nan"):
        SftTrainer(policy, guarded(on_nonfinite="stop")).step([Example([1, 2], [3, 4])])
    assert equal(snapshot(policy), before)


def test_one_wait_for_the_device_an_update(bigram, monkeypatch):
    """Numbers leave the device in one piece: `tolist` of one tensor, whatever is measured."""
    policy = bigram(exact=False)
    samples = policy.draw(REWARDS)
    trainer = Trainer(policy, guarded())
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
