"""Warnings about runs: spikes, collapses and runs that learn nothing."""

from __future__ import annotations

import math
import random

import pytest

from jetrl.runs.anomalies import ENOUGH, RECENT, STEPS, WINDOW, Anomalies, Learning

Z, K3, REF = "sampling/surprise_z", "mismatch/k3_kl", "policy/kl_ref"


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


def rare(share, samples):
    """Mean rewards of a task that few samples solve."""
    rng = random.Random(0)
    return [
        step(reward=sum(rng.random() < share for _ in range(samples)) / samples)
        for _ in range(2000)
    ]


@pytest.mark.parametrize(
    "steps",
    [
        usual(1000),
        # Groups of equal rewards give a norm of 0, which says nothing about the usual size.
        [step(norm=0.0) if k % 3 else step(norm=1.0 + 0.01 * k) for k in range(100)],
        [step(entropy=2 * 0.9**k, reward=1 - 0.95**k) for k in range(60)],  # it has learned
        rare(0.005, 128),
        rare(0.5, 8),
        [step(reward=-1.0)] * 20 + [step(reward=-3.0)] * 20,
        [{}, {"policy/grad_norm": math.inf}, *usual(20), {}, {"policy/entropy": math.nan}],
        [*usual(ENOUGH - 1), step(norm=1e6, loss=1e6)],  # too little is known
        # A pretrained model under `mixed`, whose largest step of all studies was 0.045.
        [step() | {K3: 0.045 if k % 4 == 3 else 0.02, REF: 0.2} for k in range(100)],
        [step() | {K3: 0.0006 if k < 20 else 0.0048} for k in range(100)],
        [step() | {K3: math.nan, REF: math.nan}] * 9,
    ],
    ids=["usual", "flat", "sure", "rare", "half", "neg", "missing", "early", "mixed", "low", "nan"],
)
def test_a_usual_run_is_quiet(steps):
    assert said(steps) == []


MIXED = {Z: -40.0, "mismatch/num_different": 3}


@pytest.mark.parametrize(
    "steps, at, words",
    [
        ([*usual(30), step(norm=50.0), *usual(9)], 30, ["gradient norm 50, ", "train.grad_clip"]),
        ([*usual(30), step(loss=-3.0), *usual(9)], 30, ["policy loss -3; "]),
        ([step() | {Z: 4.9}, *[step() | {Z: 5.1}] * 2], 1, ["less probable", "5.1 standard"]),
        ([step() | {Z: -4.9}, *[step() | MIXED] * 2], 1, ["more probable", "preset=int8"]),
        # The K3 KL of a healthy sampler, and with one layer that is never updated.
        (
            [*[step() | {K3: 0.0006}] * 20, *[step() | {K3: 0.0445}] * 9],
            23,
            ["nats apart", "was 0.0006"],
        ),
        ([step() | {K3: 0.0445}] * 9, 0, ["0.0445 nats apart", "stale or wrong", "--locate"]),
        ([*[step() | {K3: 0.001}] * 20, *[step() | {K3: 0.0085}] * 9], 23, ["it was 0.001"]),
        (
            [*[step() | {REF: 0.02}] * 20, *[step() | {REF: 8.0}] * 9],
            20,
            ["2.02 nats", "algorithm.kl"],
        ),
        ([step() | {REF: 8.0}, step() | {REF: math.inf}], 0, ["8 nats per token"]),
        *(
            (
                [
                    *usual(WINDOW),
                    *(step(entropy=2 + (target - 2) * k / 10) for k in range(11)),
                    *[step(entropy=target)] * 40,
                ],
                None,
                [f"entropy {word}"],
            )
            for target, word in ((0.05, "collapses"), (6.0, "explodes"))
        ),
        (
            usual(40) + [step(reward=0.02)] * 40,
            range(40, 40 + RECENT),
            ["reward collapses, from 0.288 to 0.0916 in 4 steps", "train.updates_per_step"],
        ),
        (
            [step(reward=0.4 + 0.02 * k) for k in range(16)]
            + [step(reward=max(0.7 - 0.1 * k, 0.0)) for k in range(10)],
            None,
            ["reward collapses"],
        ),
    ],
)
def test_an_anomaly_is_said_once_with_its_size_and_what_to_do(steps, at, words):
    ((found, text),) = said(steps)
    assert at is None or found in (at if isinstance(at, range) else [at])
    assert all(word in text for word in words), text


def test_a_resumed_run_sees_the_same():
    steps = usual(60)
    steps[40] = steps[41] = step(norm=80.0, loss=2.0)
    whole = said(steps)
    assert whole
    for cut in (5, 40, 41, 42, 59):
        watch = Anomalies(steps[:cut])
        rest = [(k, t) for k, m in enumerate(steps[cut:], start=cut) for t in watch.see(m)]
        assert rest == [(k, text) for k, text in whole if k >= cut]


FINE = {
    "reward/mean": 0.4,
    "reward/std": 0.4,
    "reward/zero_std_groups": 0.3,
    "response_length/clip_ratio": 0.1,
    "reward/part/answered": 0.9,
}
ZERO = FINE | {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_groups": 1.0}
WITHOUT_GROUPS = {k: v for k, v in ZERO.items() if k != "reward/zero_std_groups"}


def warnings(*steps: dict[str, float]) -> list[list[str]]:
    learning = Learning()
    return [learning.see(metrics) for metrics in steps]


def test_a_run_that_learns_is_not_warned():
    rising = [FINE | {"reward/mean": 0.1 + 0.02 * step} for step in range(40)]
    assert warnings(*rising) == [[]] * 40


@pytest.mark.parametrize(
    "bad, words",
    [
        (ZERO, ["every completion got the reward 0", "sft.steps"]),
        (WITHOUT_GROUPS, ["every completion got the reward 0"]),
        (ZERO | {"reward/mean": 1.0}, ["got the reward 1", "If the task is solved"]),
        (FINE | {"reward/zero_std_groups": 0.95}, ["95.0% of the groups", "data.order=pass_rate"]),
        (FINE | {"response_length/clip_ratio": 0.6}, ["60.0% of the", "rollout.max_tokens"]),
        (FINE | {"reward/part/answered": 0.0}, ["have an answer in", "task.system_prompt"]),
    ],
)
def test_each_problem_is_said_after_some_steps_and_again_when_it_returns(bad, words):
    said = warnings(*[bad] * (STEPS + 3), *[FINE] * STEPS, *[bad] * STEPS)
    assert [bool(texts) for texts in said[: STEPS + 3]] == [
        k == STEPS - 1 for k in range(STEPS + 3)
    ]
    assert sum(map(len, said)) == 2
    (text,) = said[STEPS - 1]
    assert text.startswith(f"over {STEPS} steps: ")
    assert all(word in text for word in words), text


def test_evaluations_are_no_steps_and_a_resumed_run_says_the_same():
    steps = [ZERO] * (STEPS - 1)
    uncut, resumed = Learning(), Learning(steps)
    for metrics in (*steps, {"eval/x/mean": 0.0}):
        assert uncut.see(metrics) == []
    assert uncut.see(ZERO) == resumed.see(ZERO) != []
