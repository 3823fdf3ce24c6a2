"""Memory that runs out while training: smaller micro-batches, the same gradients, kept for good."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch
from tests.training.shared import REWARDS, gradients_of_step, settings, trained

from jetrl.errors import OutOfMemoryStop
from jetrl.memory.out_of_memory import within_memory
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer
from jetrl.types import Example

ERRORS = {
    "of a GPU": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "of CUDA": lambda: torch.AcceleratorError("CUDA error: out of memory\nSearch for it"),
    "of the CPU": lambda: RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    ),
    "of Python": lambda: MemoryError(),
}


def roomy(**keys):
    return settings({"tokens_per_micro_batch": 1000} | keys)


def limited(policy, limit, error=ERRORS["of a GPU"], when=lambda: True):
    """Return the policy on a device that takes `limit` tokens a forward.

    Its `sizes` are those of the forwards that fitted.
    """
    forward, policy.sizes = policy.train_logprobs, []

    def train_logprobs(inputs, *args, **kwargs):
        if len(inputs) > limit and when():
            raise error()
        policy.sizes.append(len(inputs))
        return forward(inputs, *args, **kwargs)

    policy.train_logprobs = train_logprobs
    return policy


def close(a, b, num_tokens, advantage):
    """Assert that two gradients differ by their order of summation at most.

    Each element is a sum of at most num_tokens terms of at most advantage / num_tokens; two orders
    of summation differ by at most 2 (num_tokens - 1) 2^-24 times the sum of their sizes.
    """
    bound = 2 * (num_tokens - 1) * 2.0**-24 * advantage
    return all(float((a[name] - b[name]).abs().max()) <= bound for name in a)


@pytest.mark.parametrize(
    ("error", "exact"),
    [(make, name in ("of a GPU", "of CUDA")) for name, make in ERRORS.items()],
    ids=ERRORS,
)
def test_the_step_goes_on_with_smaller_micro_batches(bigram, caplog, error, exact):
    samples = bigram(exact).draw(REWARDS)
    num_tokens = sum(len(s.completion.token_ids) for s in samples)
    (expected,), whole = trained(bigram(exact), roomy(), samples)
    policy = limited(bigram(exact), 14, error)
    trainer = Trainer(policy, roomy())
    with caplog.at_level(logging.WARNING):
        (gradients,), metrics = gradients_of_step(trainer, samples)
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
    seen, expected = trained(bigram(False), roomy(updates_per_step=2), samples)
    policy = bigram(False)
    trainer = Trainer(policy, roomy(updates_per_step=2))
    limited(policy, 9, when=lambda: trainer.optimizer.num_updates == 1)
    found, metrics = gradients_of_step(trainer, samples)
    assert len(found) == 2
    assert all(torch.equal(found[0][name], seen[0][name]) for name in seen[0])
    assert close(found[1], seen[1], 20, advantage=2.0)
    assert metrics["memory/train_retries"] >= 1
    assert metrics["policy/clip_fraction"] == expected["policy/clip_fraction"]


def test_the_message_names_what_to_change(bigram):
    samples = bigram().draw(REWARDS)
    with pytest.raises(OutOfMemoryStop) as caught:
        Trainer(limited(bigram(), 3), roomy()).step(samples)
    longest = max(len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples)
    for words in (f"longest has {longest}", "activation_checkpointing", "rollout.max_tokens"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 7


def test_an_optimizer_without_room_ends_the_run(bigram, monkeypatch):
    trainer = Trainer(bigram(), roomy())

    def apply(total_norm):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")

    trainer.optimizer.apply = apply
    with pytest.raises(OutOfMemoryStop, match=r"in the optimizer .*64.00 GiB.*--dry-run"):
        trainer.step(bigram().draw(REWARDS))


def test_supervised_updates_shrink_too(bigram):
    examples = [Example([1, 2], [3, 4]), Example([5], [6]), Example([2, 2, 2], [3, 0, 1])]
    expected = SftTrainer(bigram(), roomy()).step(examples)
    policy = limited(bigram(), 6)
    trainer = SftTrainer(policy, roomy())
    metrics = trainer.step(examples)
    assert metrics.pop("memory/train_retries") >= 1
    assert metrics == pytest.approx(expected, rel=12 * 2**-24)
    with pytest.raises(OutOfMemoryStop):
        SftTrainer(limited(bigram(), 2), roomy()).step(examples)


def test_the_size_goes_through_a_checkpoint_unless_the_setting_changed():
    size = MicroBatchSize(1000)
    size.load_state({"tokens": 125, "setting": 1000})
    assert size.tokens == 125
    assert MicroBatchSize(1000).state() == {"tokens": 1000, "setting": 1000}
    changed = MicroBatchSize(500)
    changed.load_state(size.state())
    assert changed.tokens == 500


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
