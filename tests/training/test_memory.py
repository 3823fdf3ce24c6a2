"""Memory that runs out while training: smaller micro-batches, the same gradients, kept for good."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
import torch

from jetrl.errors import OutOfMemoryStop
from jetrl.memory.out_of_memory import is_out_of_memory, within_memory
from jetrl.settings.loading import Settings
from jetrl.training import SftTrainer, Trainer
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize
from jetrl.training.packing import pack
from jetrl.types import Example

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 2.0]
ERRORS = {
    "of a GPU": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "of the CPU": lambda: RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    ),
    "of Python": lambda: MemoryError(),
}


def settings(**keys):
    train = {"lr": 0.01, "tokens_per_micro_batch": 1000} | keys
    return Settings.model_validate({"train": train, "algorithm": {"aggregation": "token_mean"}})


def limited(policy, limit, error=ERRORS["of a GPU"], when=lambda: True):
    """Return the policy on a device that takes `limit` tokens a forward.

    Its `sizes` are those of the forwards that fitted.
    """
    forward, policy.sizes = policy.train_logprobs, []

    def train_logprobs(token_ids, *args, **kwargs):
        if len(token_ids) > limit and when():
            raise error()
        policy.sizes.append(len(token_ids))
        return forward(token_ids, *args, **kwargs)

    policy.train_logprobs = train_logprobs
    return policy


def gradients_of(trainer, samples):
    apply, seen = trainer.optimizer.apply, []

    def record(total_norm):
        masters = trainer.policy.master_weights()
        seen.append({name: p.grad.clone() for name, p in masters.items()})
        apply(total_norm)

    trainer.optimizer.apply = record
    return trainer.step(samples).metrics, seen


def close(a, b, num_tokens, advantage):
    """Assert that two gradients differ by their order of summation at most.

    Each element is a sum of at most num_tokens terms of at most advantage / num_tokens; two orders
    of summation differ by at most 2 (num_tokens - 1) 2^-24 times the sum of their sizes.
    """
    bound = 2 * (num_tokens - 1) * 2.0**-24 * advantage
    return all(float((a[name] - b[name]).abs().max()) <= bound for name in a)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "not exact"])
def test_the_step_goes_on_with_smaller_micro_batches(bigram, caplog, error, exact):
    samples = bigram(exact).draw(REWARDS)
    num_tokens = sum(len(s.completion.token_ids) for s in samples)
    whole, (expected,) = gradients_of(Trainer(bigram(exact), settings()), samples)
    policy = limited(bigram(exact), 14, error)
    trainer = Trainer(policy, settings())
    with caplog.at_level(logging.WARNING):
        metrics, (gradients,) = gradients_of(trainer, samples)
    assert metrics["memory/train_retries"] >= 1
    assert max(policy.sizes) <= 14
    assert close(gradients, expected, num_tokens, advantage=2.0)
    assert metrics["mismatch/num_different"] == 0
    assert metrics["policy/loss"] == pytest.approx(whole["policy/loss"], abs=1e-7)
    assert "tokens per micro-batch instead of train.tokens_per_micro_batch = 1000" in caplog.text
    assert "same up to the order of sums" in caplog.text
    again = trainer.step(policy.draw(REWARDS)).metrics  # the size is kept: no second surprise
    assert "memory/train_retries" not in again


def test_a_later_update_is_begun_anew_and_not_the_first(bigram):
    """Memory runs out in the second of two updates, after the first changed the weights."""
    samples = bigram(False).draw(REWARDS)
    expected, seen = gradients_of(Trainer(bigram(False), settings(updates_per_step=2)), samples)
    policy = bigram(False)
    trainer = Trainer(policy, settings(updates_per_step=2))
    limited(policy, 9, when=lambda: trainer.optimizer.num_updates == 1)
    metrics, found = gradients_of(trainer, samples)
    assert len(found) == 2
    assert all(torch.equal(found[0][name], seen[0][name]) for name in seen[0])
    assert close(found[1], seen[1], 20, advantage=2.0)
    assert metrics["memory/train_retries"] >= 1
    assert metrics["policy/clip_fraction"] == expected["policy/clip_fraction"]


def test_a_forward_before_the_first_update_is_made_smaller_too(bigram):
    samples = bigram(False).draw(REWARDS)
    policy, reference = bigram(False), limited(bigram(seed=5), 12)
    metrics = Trainer(policy, settings(), reference).step(samples).metrics
    assert metrics["memory/train_retries"] >= 1
    assert max(reference.sizes) <= 12
    plain = Trainer(bigram(False), settings(), bigram(seed=5)).step(samples).metrics
    assert metrics["policy/kl_ref"] == pytest.approx(plain["policy/kl_ref"], rel=1e-6)


def test_the_message_names_what_to_change(bigram):
    samples = bigram().draw(REWARDS)
    with pytest.raises(OutOfMemoryStop) as caught:
        Trainer(limited(bigram(), 3), settings()).step(samples)
    longest = max(len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples)
    for words in (f"longest has {longest}", "activation_checkpointing", "rollout.max_tokens"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 7


def test_an_optimizer_without_room_ends_the_run(bigram, monkeypatch):
    trainer = Trainer(bigram(), settings())

    def apply(total_norm):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")

    trainer.optimizer.apply = apply
    with pytest.raises(OutOfMemoryStop, match=r"in the optimizer .*64.00 GiB.*--dry-run"):
        trainer.step(bigram().draw(REWARDS))


def test_other_errors_are_not_taken_for_it(bigram):
    trainer = Trainer(
        limited(bigram(), 3, lambda: RuntimeError("CUDA error: unspecified")), settings()
    )
    with pytest.raises(RuntimeError, match="unspecified"):
        trainer.step(bigram().draw(REWARDS))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_supervised_updates_shrink_too(bigram):
    examples = [Example([1, 2], [3, 4]), Example([5], [6]), Example([2, 2, 2], [3, 0, 1])]
    expected = SftTrainer(bigram(), settings()).step(examples)
    policy = limited(bigram(), 6)
    trainer = SftTrainer(policy, settings())
    metrics = trainer.step(examples)
    assert metrics.pop("memory/train_retries") >= 1
    assert metrics == pytest.approx(expected, rel=12 * 2**-24)
    with pytest.raises(OutOfMemoryStop):
        SftTrainer(limited(bigram(), 2), settings()).step(examples)


def test_the_moments_of_supervised_training_go_with_its_trainer(bigram):
    """Reinforcement learning begins in their memory, before Python looks for cycles."""
    trainer = SftTrainer(bigram(), settings())
    trainer.step([Example([1, 2], [3, 4])])
    moments = [weakref.ref(t) for t in trainer.optimizer.state_tensors().values()]
    gc.disable()
    try:
        del trainer
        assert all(moment() is None for moment in moments)
    finally:
        gc.enable()


def test_the_size_goes_through_a_checkpoint_unless_the_setting_changed():
    size = MicroBatchSize(1000)
    size.load_state({"tokens": 125, "setting": 1000})
    assert size.tokens == 125
    assert MicroBatchSize(1000).state() == {"tokens": 1000, "setting": 1000}
    changed = MicroBatchSize(500)
    changed.load_state(size.state())
    assert changed.tokens == 500


@pytest.mark.parametrize("limit", [1, 4, 7, 12, 1000])
def test_parts_of_a_micro_batch_are_what_it_was_made_of(bigram, limit):
    samples = bigram().draw(REWARDS)
    (batch,) = pack(samples, 1000)
    known = torch.arange(int(batch.loss_mask.sum()), dtype=torch.float32)
    size = MicroBatchSize(limit)
    parts = size.split([MicroBatch(batch, before=known)])
    assert all(p.batch.num_sequences == 1 or p.batch.num_tokens <= limit for p in parts)
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "advantages", "sample_ids"):
        joined = np.concatenate([getattr(part.batch, name) for part in parts])
        assert np.array_equal(joined, getattr(batch, name)), name
    assert torch.equal(torch.cat([part.before for part in parts]), known)
    for part in parts:
        assert part.ref_logprobs is None
        assert part.batch.cu_seqlens[0] == 0
        assert part.batch.cu_seqlens[-1] == part.batch.num_tokens
        assert int(part.batch.loss_mask.sum()) == len(part.before)


def test_memory_of_a_failed_attempt_is_free_before_the_next():
    """The traceback of the failed attempt holds its tensors: they must be gone by then."""
    held = []

    def attempt():
        alive = [ref for ref in held if ref() is not None]
        assert not alive
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        if len(held) < 3:
            raise torch.OutOfMemoryError("no")
        return len(held)

    assert within_memory(attempt, lambda problem: None) == 3
