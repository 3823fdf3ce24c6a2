"""Training the real decoder: exact steps, micro-batches, checkpointing of layers, and resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_layer import config

from jetrl.models.policy import Policy
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.training import (
    Checkpoints,
    SftTrainer,
    Trainer,
    group_advantages,
    pack,
)
from jetrl.training.micro_batches import at_targets, batch_logprobs
from jetrl.training.packing import with_advantages
from jetrl.types import Example

CONFIG = config(vocab_size=32, initializer_range=0.1)


def make_policy(preset, seed=0):
    return Policy.from_config(CONFIG, PrecisionPlan.preset(preset), seed=seed)


def make_settings(preset="unified", **train):
    keys = {"lr": 1e-2, "tokens_per_micro_batch": 24} | train
    algorithm = {"aggregation": "token_mean"}
    return Settings.model_validate(
        {"train": keys, "precision": {"preset": preset}, "algorithm": algorithm}
    )


def packed(samples, advantages, budget):
    per_token = [
        np.full(len(s.completion.token_ids), advantage)
        for s, advantage in zip(samples, advantages, strict=True)
    ]
    return [with_advantages(batch, per_token) for batch in pack(samples, budget)]


def draw(policy, sample, seed, count=8):
    """Random completions with the policy's own log-probs, as `count` samples in two groups."""
    rng = np.random.default_rng(seed)
    shapes = [(2 + int(rng.integers(4)), 1 + int(rng.integers(6))) for _ in range(count)]
    sequences = [rng.integers(0, CONFIG["vocab_size"], a + b).tolist() for a, b in shapes]
    with torch.no_grad():
        logprobs = policy.logprobs(sequences)
    return [
        sample(i // (count // 2), s[:a], s[a:], float(rng.integers(3)), lp[a - 1 :].tolist())
        for i, ((a, _), s, lp) in enumerate(zip(shapes, sequences, logprobs, strict=True))
    ]


def gradients(policy, settings, samples, reference=None):
    trainer = Trainer(policy, settings, reference)
    seen, apply = {}, trainer.optimizer.apply

    def record(total_norm):
        seen.update({name: p.grad.clone() for name, p in policy.master_weights().items()})
        apply(total_norm)

    trainer.optimizer.apply = record
    return seen, trainer.step(samples).metrics


@pytest.mark.parametrize("preset", ["jet", "unified"])
def test_steps_are_exact_and_change_every_master(sample, preset):
    policy = make_policy(preset)
    before = {name: p.detach().clone() for name, p in policy.master_weights().items()}
    trainer = Trainer(policy, make_settings(preset, updates_per_step=2))
    for step in range(2):
        metrics = trainer.step(draw(policy, sample, step)).metrics
        assert metrics["mismatch/num_different"] == 0
        assert metrics["mismatch/token_mult_prob_error"] == 1
        assert metrics["policy/grad_norm"] > 0
    assert all(not torch.equal(p, before[n]) for n, p in policy.master_weights().items())


def test_micro_batches_change_the_gradient_by_rounding_alone(sample):
    """The per-token gradients are the same under fp32, and are summed in another order.

    Under FP8 the WGrad groups of 128 tokens move with the packing, so there the comparison is one
    of quantization noise.
    """
    samples = draw(make_policy("fp32"), sample, 1)
    whole, _ = gradients(
        make_policy("fp32"), make_settings("fp32", tokens_per_micro_batch=999), samples
    )
    split, _ = gradients(
        make_policy("fp32"), make_settings("fp32", tokens_per_micro_batch=1), samples
    )
    # Each sequence's own part of the gradient, to know what was added up.
    policy = make_policy("fp32")
    advantages = group_advantages([s.score.reward for s in samples], [s.group for s in samples])
    batches = packed(samples, advantages, 1)
    num_targets = sum(int(batch.loss_mask.sum()) for batch in batches)
    added_up = {name: torch.zeros_like(p) for name, p in policy.master_weights().items()}
    for batch in batches:
        logprobs, _ = batch_logprobs(policy, batch)
        (-(at_targets(batch.advantages, batch, "cpu") * logprobs).sum() / num_targets).backward()
        for name, master in policy.master_weights().items():
            added_up[name] += master.grad.abs()
            master.grad = None
    num_tokens = sum(batch.num_tokens for batch in batches)
    for name, expected in whole.items():
        # Adding T tokens in any order: at most T roundings of 2^-24 of the sum of magnitudes. On
        # its way back a token's gradient goes through 8 products with inner size 128, where a
        # product of another number of rows may add in another order too: 8 * 128 more.
        bound = (num_tokens + 8 * 128) * 2**-24 * added_up[name].max()
        assert (split[name] - expected).abs().max() <= bound, name


def test_activation_checkpointing_gives_the_same_bits(sample):
    samples = draw(make_policy("unified"), sample, 2)
    plain, _ = gradients(make_policy("unified"), make_settings(), samples)
    again, _ = gradients(
        make_policy("unified"), make_settings(activation_checkpointing=True), samples
    )
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("cut", [1, 3])
def test_a_cut_and_resumed_run_is_the_uncut_one(sample, tmp_path, cut):
    settings = make_settings(schedule="cosine", warmup_steps=2, updates_per_step=2)
    steps = 4

    def run(policy, trainer, start, end):
        return [trainer.step(draw(policy, sample, step)).metrics for step in range(start, end)]

    uncut = make_policy("unified")
    uncut_trainer = Trainer(uncut, settings)
    expected = run(uncut, uncut_trainer, 0, steps)

    first = make_policy("unified")
    first_trainer = Trainer(first, settings)
    got = run(first, first_trainer, 0, cut)
    Checkpoints(tmp_path).save(cut, first, first_trainer.optimizer, {"cursor": cut})

    resumed = make_policy("unified", seed=123)
    trainer = Trainer(resumed, settings)
    checkpoints = Checkpoints(tmp_path)
    loaded = checkpoints.load(checkpoints.latest().path, resumed, trainer.optimizer)
    got += run(resumed, trainer, loaded.extra["cursor"], steps)

    assert got == expected
    for name, master in uncut.master_weights().items():
        assert torch.equal(master, resumed.master_weights()[name]), name
    state = trainer.optimizer.state_tensors()
    for name, tensor in uncut_trainer.optimizer.state_tensors().items():
        assert torch.equal(tensor, state[name]), name


def test_sft_learns_one_answer():
    policy = make_policy("unified")
    settings = make_settings().model_copy(
        update={"sft": make_settings().sft.model_copy(update={"lr": 1e-2, "steps": 20})}
    )
    trainer = SftTrainer(policy, settings)
    examples = [Example([1, 2, 3], [4, 5, 6]), Example([3, 2, 1], [6, 5, 4])]
    losses = [trainer.step(examples)["sft/loss"] for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]
