"""The mismatch metrics: exact zeros, NaN, signs of zero, and hand-worked differences."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jetrl.training.mismatch import compare_step, differences, mismatch_metrics
from jetrl.training.packing import pack


def f32(*values):
    return np.array(values, dtype=np.float32)


def test_equal_bits_are_exactly_nothing():
    x = f32(-0.1, -3.0, -0.0, -np.inf)
    assert mismatch_metrics(x, x.copy()) == {
        "mismatch/num_tokens": 4,
        "mismatch/num_different": 0,
        "mismatch/mean_abs_logprob_diff": 0,
        "mismatch/max_abs_logprob_diff": 0,
        "mismatch/k3_kl": 0,
        "mismatch/token_mult_prob_error": 1,
    }


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


def test_differences_say_where(sample):
    samples = [
        sample(0, [1, 2, 3], [4, 5], logprobs=[-1.0, -2.0]),
        sample(0, [1], [6, 7, 8], logprobs=[-3.0, -4.0, -5.0]),
    ]
    (batch,) = pack(samples, 100)
    trainer = f32(-1.0, -2.0, -3.0, -4.0, -5.5)
    (found,) = differences(batch, trainer)
    assert (found.sample, found.token, found.trainer, found.rollout) == (1, 2, -5.5, -5.0)
    assert str(found) == (
        "sample 1, completion token 2: sampler -5.0 (0xc0a00000), trainer -5.5 (0xc0b00000)"
    )


@pytest.mark.parametrize(
    ("version", "logprob", "said"),
    [
        (2, -1.0, {"mismatch/num_tokens": 0, "partial_rollout/earlier_tokens": 1}),
        (1, math.nan, {"mismatch/num_tokens": 0}),
    ],
    ids=["all of an earlier policy", "NaN"],
)
def test_a_step_without_a_comparison_says_so(sample, version, logprob, said):
    one = sample(0, [1, 2], [4], logprobs=[-1.0])
    one = replace(one, completion=replace(one.completion, versions=(1,)))
    batches = pack([one], 100)
    assert compare_step("jet", True, [one], version, batches, [f32(logprob)]) == said
