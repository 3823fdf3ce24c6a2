"""The trainer's step on a policy whose numbers can be checked by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from jetrl.errors import MismatchError, RunStopped, UserError
from jetrl.settings.algorithms import ALGORITHMS
from jetrl.settings.loading import Settings
from jetrl.training import SftTrainer, StepMismatchError, Trainer, group_advantages
from jetrl.types import Example

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 2.0]


def settings(**sections):
    """GRPO by the mean over tokens, whose numbers are the easiest to work out."""
    chosen = {"train": {"lr": 0.01, "tokens_per_micro_batch": 9}} | sections
    chosen["algorithm"] = {"aggregation": "token_mean"} | chosen.get("algorithm", {})
    return Settings.model_validate(chosen)


def train(**keys):
    return {"train": {"lr": 0.01, "tokens_per_micro_batch": 9} | keys}


def snapshot(policy):
    return {name: p.detach().clone() for name, p in policy.master_weights().items()}


def gradients_of_step(policy, run_settings, samples, reference=None):
    """The gradients that the step's updates see, in order, and the step's metrics."""
    trainer = Trainer(policy, run_settings, reference)
    seen, apply = [], trainer.optimizer.apply

    def record(total_norm):
        seen.append({name: p.grad.clone() for name, p in policy.master_weights().items()})
        apply(total_norm)

    trainer.optimizer.apply = record
    return seen, trainer.step(samples).metrics


def with_logprob(samples, i, token, value):
    logprobs = list(samples[i].completion.logprobs)
    logprobs[token] = value
    completion = dataclasses.replace(samples[i].completion, logprobs=tuple(logprobs))
    changed = list(samples)
    changed[i] = dataclasses.replace(samples[i], completion=completion)
    return changed


def test_metrics_of_an_exact_step(bigram):
    policy = bigram()
    samples = policy.draw(REWARDS)
    before = snapshot(policy)
    trainer = Trainer(policy, settings())
    trained = trainer.step(samples)
    metrics = trained.metrics
    assert set(metrics) == {
        "policy/loss",
        "policy/entropy",
        "policy/clip_fraction",
        "policy/active_fraction",
        "policy/grad_norm",
        "policy/lr",
        "sampling/surprise_z",
        "mismatch/num_tokens",
        "mismatch/num_different",
        "mismatch/mean_abs_logprob_diff",
        "mismatch/max_abs_logprob_diff",
        "mismatch/k3_kl",
        "mismatch/token_mult_prob_error",
    }
    assert metrics["mismatch/num_different"] == 0
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/active_fraction"] == 1
    assert 0 < metrics["policy/entropy"] < math.log(policy.config.vocab_size)
    # At ratio 1 the loss is minus the mean advantage over tokens.
    advantages = group_advantages(REWARDS, [s.group for s in samples])
    lengths = [len(s.completion.token_ids) for s in samples]
    assert metrics["policy/loss"] == pytest.approx(
        -np.average(advantages, weights=lengths), rel=1e-5
    )
    assert any(not torch.equal(p, before[n]) for n, p in policy.master_weights().items())
    assert trained.timings["update"] > 0
    assert trained.timings["requantize"] >= 0
    assert trainer.optimizer.num_updates == 1


def test_one_update_has_no_second_forward(bigram):
    for exact in (True, False):
        policy = bigram(exact=exact)
        samples = policy.draw(REWARDS)
        Trainer(policy, settings(**train(tokens_per_micro_batch=1000))).step(samples)
        assert [name for name, _ in policy.calls] == ["grad", "requantize"]


@pytest.mark.parametrize("budget", [1, 9, 1000])
def test_gradient_is_the_policy_gradient_whatever_the_micro_batches(bigram, budget):
    policy = bigram()
    samples = policy.draw(REWARDS)
    advantages = group_advantages(REWARDS, [s.group for s in samples])
    num_tokens = sum(len(s.completion.token_ids) for s in samples)
    # In float64: -(1/N) sum over tokens of A * d log p.
    table = policy.masters["table.weight"].detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for s, advantage in zip(samples, advantages, strict=True):
        tokens = [*s.prompt_token_ids, *s.completion.token_ids]
        for t in range(len(s.prompt_token_ids), len(tokens)):
            logprob = torch.log_softmax(table[tokens[t - 1]], -1)[tokens[t]]
            loss = loss - float(advantage) * logprob / num_tokens
    (expected,) = torch.autograd.grad(loss, table)
    (seen,), _ = gradients_of_step(
        policy, settings(**train(tokens_per_micro_batch=budget)), samples
    )
    # An entry adds at most N terms of at most max|A| / N, in any order, with N float32 roundings;
    # each term has a few of its own (softmax, ratio, quotient: 8 allowed).
    bound = (num_tokens + 8) * 2**-24 * float(np.abs(advantages).max())
    assert (seen["table.weight"].double() - expected).abs().max() <= bound


def test_several_updates_measure_all_tokens_first(bigram):
    policy = bigram()
    samples = policy.draw(REWARDS, groups=4)
    trainer = Trainer(policy, settings(**train(updates_per_step=2, tokens_per_micro_batch=1000)))
    metrics = trainer.step(samples).metrics
    assert [name for name, _ in policy.calls] == [
        "no_grad",
        "grad",
        "requantize",
        "grad",
        "requantize",
    ]
    assert trainer.optimizer.num_updates == 2
    assert metrics["mismatch/num_different"] == 0


@pytest.mark.parametrize("exact", [True, False])
def test_later_updates_take_the_ratio_to_the_policy_before_the_step(bigram, exact):
    policy = bigram(exact=exact)
    samples = policy.draw(REWARDS, groups=4)
    run_settings = settings(
        algorithm={"clip": 1e-4}, **train(updates_per_step=2, lr=0.1, tokens_per_micro_batch=1000)
    )
    metrics = Trainer(policy, run_settings).step(samples).metrics
    # The first update has ratio 1 everywhere; after it, a step of 0.1 leaves the tiny clip.
    assert 0 < metrics["policy/clip_fraction"] <= 0.5 + 0.25


def test_without_exactness_the_trainer_is_its_own_past(bigram):
    policy, other = bigram(exact=False), bigram(exact=False)
    samples = policy.draw(REWARDS)
    shifted = with_logprob(samples, 3, 0, samples[3].completion.logprobs[0] + 0.5)
    (expected,), _ = gradients_of_step(policy, settings(), samples)
    (seen,), metrics = gradients_of_step(other, settings(), shifted)
    assert metrics["mismatch/num_different"] == 1
    assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(0.5, rel=1e-6)
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


@pytest.mark.parametrize("updates", [1, 4])
def test_a_different_bit_under_an_exact_plan_stops_before_any_change(bigram, updates):
    policy = bigram()
    samples = policy.draw(REWARDS, groups=4)
    value = samples[7].completion.logprobs[1]
    off = float(np.nextafter(np.float32(value), np.float32(0)))
    samples = with_logprob(samples, 7, 1, off)
    samples = with_logprob(samples, 6, 0, math.nan)
    before = snapshot(policy)
    trainer = Trainer(policy, settings(**train(updates_per_step=updates)))
    with pytest.raises(StepMismatchError) as caught:
        trainer.step(samples)
    error = caught.value
    assert isinstance(error, MismatchError)
    assert error.samples == tuple(samples)
    assert error.sample_ids == (6, 7)
    assert (error.first.sample, error.first.token) == (6, 0)
    assert error.metrics["mismatch/num_different"] == 2
    message = str(error)
    num_tokens = sum(len(s.completion.token_ids) for s in samples)
    assert f"2 of {num_tokens} log-probs differ, in 2 of 8 samples" in message
    assert "sample 6, completion token 0: sampler nan (0x7fc00000), trainer -" in message
    assert "prompt 'p3'" in message
    assert "jetrl parity" in message
    assert all(torch.equal(p, before[n]) for n, p in policy.master_weights().items())
    assert all(p.grad is None for p in policy.master_weights().values())
    assert "requantize" not in [name for name, _ in policy.calls]
    assert trainer.optimizer.num_updates == 0


@pytest.mark.parametrize("temperature, effective", [(0.7, 0.7), (0.0, 1.0)])
def test_temperature_is_the_samplers(bigram, temperature, effective):
    policy = bigram()
    samples = policy.draw(REWARDS, temperature=effective)
    rollout = settings().rollout.model_copy(update={"temperature": temperature})
    metrics = (
        Trainer(policy, settings().model_copy(update={"rollout": rollout})).step(samples).metrics
    )
    assert metrics["mismatch/num_different"] == 0


@pytest.mark.parametrize("on", [True, False])
def test_activation_checkpointing_is_passed_on(bigram, on):
    policy = bigram()
    samples = policy.draw(REWARDS)
    Trainer(policy, settings(**train(activation_checkpointing=on))).step(samples)
    assert {value for name, value in policy.calls if name == "grad"} == {on}


def test_reference_kl(bigram):
    policy, reference = bigram(), bigram(seed=5)
    samples = policy.draw(REWARDS)
    plain, _ = gradients_of_step(bigram(), settings(), samples)
    before = snapshot(reference)
    seen, metrics = gradients_of_step(policy, settings(algorithm={"kl": 0.5}), samples, reference)
    assert metrics["policy/kl_ref"] > 0
    assert not torch.equal(seen[0]["table.weight"], plain[0]["table.weight"])
    assert {name for name, _ in reference.calls} == {"no_grad"}
    assert all(torch.equal(p, before[n]) for n, p in reference.master_weights().items())
    measured, metrics = gradients_of_step(bigram(), settings(), samples, reference)
    assert torch.equal(measured[0]["table.weight"], plain[0]["table.weight"])
    assert metrics["policy/kl_ref"] > 0


def test_kl_without_reference_is_refused(bigram):
    with pytest.raises(UserError, match=r"algorithm\.kl = 0\.1 needs a reference"):
        Trainer(bigram(), settings(algorithm={"kl": 0.1}))


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if not ALGORITHMS[n].needs_critic])
def test_every_algorithm_pushes_towards_the_reward(bigram, name):
    """The update raises the mean log-prob of each group's best completion against its worst."""
    policy = bigram()
    samples = policy.draw(REWARDS, groups=2)
    if name in ("dapo", "gspo"):  # nothing may be cut off or clipped here
        options = {"overlong_buffer": 0} if name == "dapo" else {}
    else:
        options = {}
    run_settings = settings(algorithm={"name": name, "aggregation": None, **options})

    def gap():
        logprobs = [policy.logprob_of(s) for s in samples]
        return sum(logprobs[i] for i in (0, 3, 7)) - sum(logprobs[i] for i in (1, 2, 5, 6))

    before = gap()
    metrics = Trainer(policy, run_settings).step(samples).metrics
    assert gap() > before
    assert metrics["policy/grad_norm"] > 0


def test_kl_in_the_reward_is_taken_from_the_advantages(bigram):
    """RLOO with a k1 penalty: the same gradient as without, on rewards from which it was taken."""
    policy, reference = bigram(), bigram(seed=5)
    samples = policy.draw(REWARDS)
    penalised = []
    for s in samples:
        own = math.fsum(s.completion.logprobs)
        penalty = 0.5 * (own - reference.logprob_of(s))
        score = dataclasses.replace(s.score, reward=s.score.reward - penalty)
        penalised.append(dataclasses.replace(s, score=score))
    rloo = {"name": "rloo", "aggregation": None}
    (seen,), metrics = gradients_of_step(
        policy, settings(algorithm=rloo | {"kl": 0.5}), samples, reference
    )
    (expected,), _ = gradients_of_step(bigram(), settings(algorithm=rloo), penalised)
    taken = np.mean(
        [a.score.reward - b.score.reward for a, b in zip(samples, penalised, strict=True)]
    )
    # Log-probs are float32 numbers below 8, up to 4 of them a sample: 4 roundings of 2^-22 each.
    assert metrics["reward/kl_penalty"] == pytest.approx(taken, abs=4 * 2**-22)
    assert torch.allclose(seen["table.weight"], expected["table.weight"], atol=16 * 2**-22)


def test_the_limit_counts_what_an_environment_said(bigram):
    """A sample cut off at rollout.max_tokens has the whole penalty, few as its tokens may be."""
    policy = bigram()
    samples = policy.draw(REWARDS)
    first = samples[3].completion
    assert len(first.token_ids) == 4
    completion = dataclasses.replace(first, environment=((0, 3),), finish_reason="length")
    samples[3] = dataclasses.replace(samples[3], completion=completion)
    algorithm = {"name": "dapo", "overlong_buffer": 2}
    limit = {"rollout": {"max_tokens": 4}}
    metrics = Trainer(policy, settings(algorithm=algorithm, **limit)).step(samples).metrics
    assert metrics["reward/overlong_penalty"] == 0.375


def test_a_correction_weighs_by_the_mismatch(bigram):
    policy = bigram(exact=False)
    samples = policy.draw(REWARDS)
    value = samples[3].completion.logprobs[0]
    shifted = with_logprob(samples, 3, 0, value - 1.0)  # the sampler saw it e times less likely
    algorithm = {"correction": "tis"}
    plain, _ = gradients_of_step(bigram(exact=False), settings(), shifted)
    seen, metrics = gradients_of_step(policy, settings(algorithm=algorithm), shifted)
    num_tokens = metrics["mismatch/num_tokens"]
    assert metrics["correction/weight_max"] == 2
    assert metrics["correction/ratio_max"] == pytest.approx(math.e, rel=1e-6)
    assert metrics["correction/touched_fraction"] == pytest.approx(1 / num_tokens)
    assert metrics["correction/weight_mean"] == pytest.approx(1 + 1 / num_tokens)
    assert not torch.equal(seen[0]["table.weight"], plain[0]["table.weight"])


def test_a_correction_of_an_exact_flow_changes_no_bit(bigram):
    samples = bigram().draw(REWARDS)
    algorithm = {"correction": "tis", "correction_under_exact_plan": True}
    (plain,), _ = gradients_of_step(bigram(), settings(), samples)
    (seen,), metrics = gradients_of_step(bigram(), settings(algorithm=algorithm), samples)
    assert all(torch.equal(seen[name], plain[name]) for name in plain)
    assert metrics["correction/weight_mean"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["correction/touched_fraction"] == 0


def test_a_step_without_tokens_stops(bigram, sample):
    with pytest.raises(RunStopped, match="none of the step's 2 samples"):
        Trainer(bigram(), settings()).step([sample(0, [1], []), sample(0, [1], [])])


def test_an_update_without_tokens_is_left_out(bigram, sample):
    policy = bigram()
    trainer = Trainer(policy, settings(**train(updates_per_step=2)))
    trainer.step([*policy.draw(REWARDS[:4], groups=1), sample(1, [1], []), sample(1, [2], [])])
    assert trainer.optimizer.num_updates == 1


def test_a_gradient_that_is_not_finite_stops(bigram):
    policy = bigram(exact=False)
    samples = policy.draw(REWARDS)
    with torch.no_grad():
        policy.masters["table.weight"][samples[0].prompt_token_ids[-1]] = math.nan
    with pytest.raises(RunStopped, match=r"policy/loss is nan.*not finite \(table\.weight"):
        Trainer(policy, settings()).step(samples)


class TestSft:
    EXAMPLES = (Example([1, 2], [3, 4]), Example([5], [6]), Example([2, 2, 2], [3, 0, 1]))

    def test_loss_is_the_token_mean_and_falls(self, bigram):
        policy = bigram()
        table = policy.masters["table.weight"].detach().double()
        pairs = [(2, 3), (3, 4), (5, 6), (2, 3), (3, 0), (0, 1)]
        expected = -sum(float(torch.log_softmax(table[a], -1)[b]) for a, b in pairs) / 6
        trainer = SftTrainer(policy, settings(sft={"lr": 0.1, "steps": 30}))
        first = trainer.step(self.EXAMPLES)
        assert first["sft/loss"] == pytest.approx(expected, rel=1e-6)
        assert first["sft/tokens"] == 6
        assert first["sft/lr"] == 0.1
        losses = [trainer.step(self.EXAMPLES)["sft/loss"] for _ in range(29)]
        assert losses[-1] < 0.5 * expected
        assert trainer.optimizer.num_updates == 30
        assert [name for name, _ in policy.calls].count("requantize") == 30

    def test_no_examples(self, bigram):
        with pytest.raises(UserError, match="no examples"):
            SftTrainer(bigram(), settings()).step([])
