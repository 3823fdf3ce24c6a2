"""Anomalies are distinguished from ordinary steps, on made-up runs whose answer is known."""

import math
import random

import pytest

from jetrl.runs.anomalies import ENOUGH, RECENT, WINDOW, Anomalies


def step(norm=1.0, loss=0.0, entropy=2.0, reward=0.3):
    return {
        "policy/grad_norm": norm,
        "policy/loss": loss,
        "policy/entropy": entropy,
        "reward/mean": reward,
    }


def usual(count, seed=0):
    rng = random.Random(seed)
    return [
        step(
            norm=math.exp(rng.gauss(0, 0.4)),
            loss=rng.gauss(0, 0.01),
            entropy=2 + rng.gauss(0, 0.1),
            reward=0.3 + rng.gauss(0, 0.03),
        )
        for _ in range(count)
    ]


def said(steps):
    watch = Anomalies()
    return [(k, text) for k, metrics in enumerate(steps) for text in watch.see(metrics)]


@pytest.mark.parametrize("seed", range(2))
def test_a_usual_run_is_quiet(seed):
    assert said(usual(1000, seed)) == []


def test_a_gradient_spike_is_said_once_and_with_its_size():
    steps = usual(40)
    steps[30] = step(norm=50.0)
    ((at, text),) = said(steps)
    assert at == 30
    assert text.startswith("gradient norm 50, ")
    assert "train.grad_clip" in text


@pytest.mark.parametrize(
    ("z", "different", "words"),
    [
        (5.1, 0, ["less probable", "5.1 standard deviations", "random numbers"]),
        (-40.0, 0, ["more probable", "40 standard deviations", "random numbers"]),
        (-40.0, 3, ["more probable", "perhaps the only cause", "precision.preset=unified"]),
    ],
)
def test_draws_that_are_not_the_policys_are_said_from_the_first_step(z, different, words):
    fault = {"sampling/surprise_z": z, "mismatch/num_different": different}
    fine = {"sampling/surprise_z": math.copysign(4.9, z)}
    ((at, text),) = said([step() | fine, step() | fault, step() | fault])
    assert at == 1
    assert all(word in text for word in words), text


def test_a_loss_spike():
    steps = usual(40)
    steps[30] = step(loss=-3.0)
    ((at, text),) = said(steps)
    assert at == 30
    assert text.startswith("policy loss -3; ")


def test_nothing_is_said_before_enough_is_known():
    assert said([*usual(ENOUGH - 1), step(norm=1e6, loss=1e6)]) == []
    assert len(said([*usual(ENOUGH), step(norm=1e6, loss=1e6)])) == 2


def test_steps_without_gradient_do_not_make_the_next_one_a_spike():
    """Groups of equal rewards give a norm of 0; they say nothing about the usual size."""
    steps = [step(norm=0.0) if k % 3 else step(norm=1.0 + 0.01 * k) for k in range(100)]
    assert said(steps) == []


@pytest.mark.parametrize("target, word", [(0.05, "collapses"), (6.0, "explodes")])
def test_entropy_that_runs_away_without_reward(target, word):
    flat = usual(WINDOW)
    away = [step(entropy=2 + (target - 2) * k / 10) for k in range(11)]
    after = [step(entropy=target) for _ in range(40)]
    found = said([*flat, *away, *after])
    assert len(found) == 1, found
    assert f"entropy {word}" in found[0][1]


def test_a_policy_that_learns_its_task_may_be_sure_of_itself():
    steps = [step(entropy=2 * 0.9**k, reward=1 - 0.95**k) for k in range(60)]
    assert said(steps) == []


def test_a_reward_that_collapses_is_said_once():
    steps = usual(40) + [step(reward=0.02) for _ in range(40)]
    ((at, text),) = said(steps)
    assert 40 <= at < 40 + RECENT
    assert text.startswith("reward collapses, from 0.288 to 0.0916 in 4 steps")
    assert "train.updates_per_step" in text


def test_a_reward_that_collapses_while_it_rises():
    """Runs of the study did so: their rewards rose to 0.7 and fell to 0 within 14 steps."""
    up = [step(reward=0.4 + 0.02 * k) for k in range(16)]
    down = [step(reward=max(0.7 - 0.1 * k, 0.0)) for k in range(10)]
    assert [text.partition(",")[0] for _, text in said([*up, *down])] == ["reward collapses"]


@pytest.mark.parametrize("share, samples", [(0.005, 128), (0.1, 32), (0.5, 8)])
def test_rewards_that_few_samples_have_do_not_collapse(share, samples):
    rng = random.Random(0)
    rewards = [sum(rng.random() < share for _ in range(samples)) / samples for _ in range(2000)]
    assert said([step(reward=reward) for reward in rewards]) == []


def test_a_reward_below_zero_has_no_half():
    assert said([step(reward=-1.0)] * 20 + [step(reward=-3.0)] * 20) == []


def test_a_resumed_run_sees_the_same():
    steps = usual(60)
    steps[40] = step(norm=80.0, loss=2.0)
    steps[41] = step(norm=80.0, loss=2.0)
    whole = said(steps)
    for cut in (5, 40, 41, 42, 59):
        watch = Anomalies(steps[:cut])
        rest = [(k, t) for k, m in enumerate(steps[cut:], start=cut) for t in watch.see(m)]
        assert rest == [(k, text) for k, text in whole if k >= cut]


def test_missing_and_infinite_values():
    assert (
        said([{}, {"policy/grad_norm": math.inf}, *usual(20), {}, {"policy/entropy": math.nan}])
        == []
    )
