"""The trainer's step on a policy whose numbers can be checked by hand."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.training.shared import REWARDS, draw, equal, make_policy, settings, snapshot, trained

from jetrl.errors import MismatchError, RunStopped, UserError
from jetrl.precision import PrecisionPlan
from jetrl.settings.algorithms import ALGORITHMS
from jetrl.training.advantages import group_advantages
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.mismatch import StepMismatchError, compare_step, mismatch_metrics
from jetrl.training.packing import pack
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer
from jetrl.types import Example


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
    done = trainer.step(samples)
    metrics = done.metrics
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
    assert not equal(snapshot(policy), before)
    assert done.timings["update"] > 0
    assert done.timings["requantize"] >= 0
    assert trainer.optimizer.num_updates == 1


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
    (seen,), _ = trained(policy, settings({"tokens_per_micro_batch": budget}), samples)
    # An entry adds at most N terms of at most max|A| / N, in any order, with N float32 roundings;
    # each term has a few of its own (softmax, ratio, quotient: 8 allowed).
    bound = (num_tokens + 8) * 2**-24 * float(np.abs(advantages).max())
    assert (seen["table.weight"].double() - expected).abs().max() <= bound


@pytest.mark.parametrize("updates, exact", [(1, True), (1, False), (2, True)])
def test_one_update_has_no_second_forward_and_several_measure_all_first(bigram, updates, exact):
    policy = bigram(exact=exact)
    samples = policy.draw(REWARDS, groups=4)
    chosen = settings({"updates_per_step": updates, "tokens_per_micro_batch": 1000})
    metrics = Trainer(policy, chosen).step(samples).metrics
    before = ["no_grad"] * (updates - 1)
    assert [name for name, _ in policy.calls] == [*before, *["grad", "requantize"] * updates]
    assert metrics["mismatch/num_different"] == 0


@pytest.mark.parametrize("exact", [True, False])
def test_later_updates_take_the_ratio_to_the_policy_before_the_step(bigram, exact):
    policy = bigram(exact=exact)
    samples = policy.draw(REWARDS, groups=4)
    chosen = settings({"updates_per_step": 2, "lr": 0.1}, {"clip": 1e-4})
    metrics = Trainer(policy, chosen).step(samples).metrics
    # The first update has ratio 1 everywhere; after it, a step of 0.1 leaves the tiny clip.
    assert 0 < metrics["policy/clip_fraction"] <= 0.5 + 0.25


def test_without_exactness_the_trainer_is_its_own_past(bigram):
    policy, other = bigram(exact=False), bigram(exact=False)
    samples = policy.draw(REWARDS)
    shifted = with_logprob(samples, 3, 0, samples[3].completion.logprobs[0] + 0.5)
    (expected,), _ = trained(policy, settings(), samples)
    (seen,), metrics = trained(other, settings(), shifted)
    assert metrics["mismatch/num_different"] == 1
    assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(0.5, rel=1e-6)
    assert equal(seen, expected)


@pytest.mark.parametrize("updates", [1, 4])
def test_a_different_bit_under_an_exact_plan_stops_before_any_change(bigram, updates):
    policy = bigram()
    samples = policy.draw(REWARDS, groups=4)
    value = samples[7].completion.logprobs[1]
    off = float(np.nextafter(np.float32(value), np.float32(0)))
    samples = with_logprob(samples, 7, 1, off)
    samples = with_logprob(samples, 6, 0, math.nan)
    before = snapshot(policy)
    trainer = Trainer(policy, settings({"updates_per_step": updates}))
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
    assert equal(snapshot(policy), before)
    assert all(p.grad is None for p in policy.master_weights().values())
    assert "requantize" not in [name for name, _ in policy.calls]
    assert trainer.optimizer.num_updates == 0


def test_reference_kl(bigram):
    policy, reference = bigram(), bigram(seed=5)
    samples = policy.draw(REWARDS)
    plain, _ = trained(bigram(), settings(), samples)
    before = snapshot(reference)
    seen, metrics = trained(policy, settings(algorithm={"kl": 0.5}), samples, reference)
    assert metrics["policy/kl_ref"] > 0
    assert not torch.equal(seen[0]["table.weight"], plain[0]["table.weight"])
    assert {name for name, _ in reference.calls} == {"no_grad"}
    assert equal(snapshot(reference), before)
    measured, metrics = trained(bigram(), settings(), samples, reference)
    assert torch.equal(measured[0]["table.weight"], plain[0]["table.weight"])
    assert metrics["policy/kl_ref"] > 0


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in ("ppo", "opd")])
def test_every_algorithm_pushes_towards_the_reward(bigram, name):
    """The update raises the mean log-prob of each group's best completion against its worst."""
    policy = bigram()
    samples = policy.draw(REWARDS, groups=2)
    options = {"overlong_buffer": 0} if name == "dapo" else {}  # nothing may be cut off here
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
    (seen,), metrics = trained(policy, settings(algorithm=rloo | {"kl": 0.5}), samples, reference)
    (expected,), _ = trained(bigram(), settings(algorithm=rloo), penalised)
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


def test_an_episode_has_the_penalty_of_its_longest_sample(bigram):
    policy = bigram()
    samples = policy.draw(REWARDS)  # of 1, 2, 3, 4, 1, 2, 3 and 4 tokens
    samples[3] = dataclasses.replace(samples[3], score=samples[2].score, continues=True)
    penalised = [
        dataclasses.replace(s, score=dataclasses.replace(s.score, reward=s.score.reward - penalty))
        for s, penalty in zip(samples, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, 1.0], strict=True)
    ]

    def dapo(buffer):
        algorithm = {"name": "dapo", "overlong_buffer": buffer}
        return settings(algorithm=algorithm, rollout={"max_tokens": 4})

    (seen,), metrics = trained(policy, dapo(2), samples)
    (expected,), _ = trained(bigram(), dapo(0), penalised)
    assert torch.equal(seen["table.weight"], expected["table.weight"])
    assert metrics["reward/overlong_penalty"] == pytest.approx(2.5 / 7)


def test_a_correction_weighs_by_the_mismatch(bigram):
    policy = bigram(exact=False)
    samples = policy.draw(REWARDS)
    value = samples[3].completion.logprobs[0]
    shifted = with_logprob(samples, 3, 0, value - 1.0)  # the sampler saw it e times less likely
    algorithm = {"correction": "tis"}
    plain, _ = trained(bigram(exact=False), settings(), shifted)
    seen, metrics = trained(policy, settings(algorithm=algorithm), shifted)
    num_tokens = metrics["mismatch/num_tokens"]
    assert metrics["correction/weight_max"] == 2
    assert metrics["correction/ratio_max"] == pytest.approx(math.e, rel=1e-6)
    assert metrics["correction/touched_fraction"] == pytest.approx(1 / num_tokens)
    assert metrics["correction/weight_mean"] == pytest.approx(1 + 1 / num_tokens)
    assert not torch.equal(seen[0]["table.weight"], plain[0]["table.weight"])


def test_a_step_without_tokens_stops(bigram, sample):
    with pytest.raises(RunStopped, match="none of the step's 2 samples"):
        Trainer(bigram(), settings()).step([sample(0, [1], []), sample(0, [1], [])])


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(token, bigram, sample):
    with pytest.raises(UserError, match="the model has 0 to 10"):
        Trainer(bigram(), settings()).step([sample(0, [1], [2]), sample(0, [token], [2])])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"logprobs": (-1.0,)}, "logprobs needs one number per token, not 1 for 4 tokens"),
        ({"logprobs": (-1.0,) * 3}, "not 3 for 4 tokens"),
        ({"versions": (1,) * 5}, "versions needs one number per token, or none, not 5"),
        ({"environment": ((2, 5),)}, r"environment = \[2, 5\) is not inside its 4 tokens"),
        *(
            (
                {"logprobs": (-1.0, value, -1.0, -1.0)},
                f"the log-prob of token 1 is {value}; it must",
            )
            for value in (math.nan, -math.inf, 0.5)
        ),
    ],
)
def test_what_is_not_a_samplers_output_is_refused(bigram, changes, problem, exact):
    policy = bigram(exact=exact)
    samples, before = policy.draw(REWARDS), snapshot(policy)
    changes = {"versions": (0,) * 4} | changes  # of an earlier policy: exactness is not checked
    completion = replace(samples[3].completion, **changes)
    samples[3] = replace(samples[3], completion=completion)
    with pytest.raises(UserError, match=rf"sample 3 \(prompt 'p0'\): .*{problem}"):
        Trainer(policy, settings()).step(samples, version=1)
    assert equal(snapshot(policy), before)


@pytest.mark.parametrize("reward", [1e300, -1e300, math.nan, math.inf])
@pytest.mark.parametrize("batch", ["all", "shuffle_r1"])
def test_a_reward_whose_advantage_is_no_number_is_refused(bigram, reward, batch):
    policy = bigram()
    samples = policy.draw([*REWARDS[:5], reward, *REWARDS[6:]])
    with pytest.raises(UserError, match=r"reward of sample 5 \(group 1\) is .*must be a finite"):
        Trainer(policy, settings(data={"batch": batch})).step(samples)


def test_large_rewards_and_rounded_log_probs_train(bigram):
    policy = bigram(exact=False)
    samples = policy.draw([1e38 * reward for reward in REWARDS])
    rounded = with_logprob(samples, 3, 0, 1e-6)
    assert Trainer(policy, settings()).step(rounded).metrics["policy/grad_norm"] > 0


def test_an_update_without_tokens_is_left_out(bigram, sample):
    policy = bigram()
    trainer = Trainer(policy, settings({"updates_per_step": 2}))
    trainer.step([*policy.draw(REWARDS[:4], groups=1), sample(1, [1], []), sample(1, [2], [])])
    assert trainer.optimizer.num_updates == 1


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


def make_settings(preset="unified", **train):
    train = {"tokens_per_micro_batch": 24} | train
    return settings(train, precision={"preset": preset})


@pytest.mark.parametrize("preset", ["jet", "unified", "int8"])
def test_steps_are_exact_and_change_every_master(sample, preset):
    policy = make_policy(preset)
    before = snapshot(policy)
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
    (whole,), _ = trained(
        make_policy("fp32"), make_settings("fp32", tokens_per_micro_batch=999), samples
    )
    one_each = make_settings("fp32", tokens_per_micro_batch=1)
    (split,), _ = trained(make_policy("fp32"), one_each, samples)
    # Each sequence's own part of the gradient, to know what was added up.
    policy = make_policy("fp32")
    advantages = group_advantages([s.score.reward for s in samples], [s.group for s in samples])
    num_targets = sum(len(s.completion.token_ids) for s in samples)
    num_tokens = num_targets + sum(len(s.prompt_token_ids) for s in samples)
    added_up = {name: torch.zeros_like(p) for name, p in policy.master_weights().items()}
    for batch in pack(samples, 1):
        logprobs, _ = batch_logprobs(policy, batch)
        (-advantages[batch.sample_ids[0]] * logprobs.sum() / num_targets).backward()
        for name, master in policy.master_weights().items():
            added_up[name] += master.grad.abs()
            master.grad = None
    for name, expected in whole.items():
        # Adding T tokens in any order: at most T roundings of 2^-24 of the sum of magnitudes. On
        # its way back a token's gradient goes through 8 products with inner size 128, where a
        # product of another number of rows may add in another order too: 8 * 128 more.
        bound = (num_tokens + 8 * 128) * 2**-24 * added_up[name].max()
        assert (split[name] - expected).abs().max() <= bound, name


def f32(*values):
    return np.array(values, dtype=np.float32)


def test_by_hand():
    got = mismatch_metrics(f32(-1.0, -2.0, -0.5), f32(-1.0, -2.5, -0.25))
    d = [0.0, 0.5, -0.25]
    assert got["mismatch/num_different"] == 2
    assert got["mismatch/mean_abs_logprob_diff"] == 0.25
    assert got["mismatch/max_abs_logprob_diff"] == 0.5
    assert got["mismatch/k3_kl"] == pytest.approx(
        sum(math.exp(x) - x - 1 for x in d) / 3, rel=1e-12
    )
    expected = sum(math.exp(abs(x)) for x in d) / 3
    assert got["mismatch/token_mult_prob_error"] == pytest.approx(expected, rel=1e-12)


def test_nan_is_different_even_from_itself():
    got = mismatch_metrics(f32(np.nan, -1.0), f32(np.nan, -1.0))
    assert got["mismatch/num_different"] == 1
    assert math.isnan(got["mismatch/max_abs_logprob_diff"])


EARLIER = {
    "partial_rollout/earlier_tokens": 1,
    "replay/effective_tokens": 1,
    "replay/effective_sequences": 1,
}


@pytest.mark.parametrize(
    ("version", "logprob", "said"),
    [(2, -1.0, {"mismatch/num_tokens": 0, **EARLIER}), (1, math.nan, {"mismatch/num_tokens": 0})],
    ids=["all of an earlier policy", "NaN"],
)
def test_a_step_without_a_comparison_says_so(sample, version, logprob, said):
    one = sample(0, [1, 2], [4], logprobs=[-1.0])
    one = replace(one, completion=replace(one.completion, versions=(1,)))
    batches = pack([one], 100)
    plan = PrecisionPlan.preset("jet")
    assert compare_step(plan, [one], version, batches, [f32(logprob)]) == said
