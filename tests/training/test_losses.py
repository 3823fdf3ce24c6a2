"""The losses against hand-worked values."""

from __future__ import annotations

import math

import pytest
import torch

from jetrl.training.losses import cross_entropy, grpo_loss, k3


def leaf(*values):
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    # d/dlogp of -ratio * A / N at ratio 1 is -A / N, exactly.
    logprobs = leaf(-0.5, -1.0, -2.0, -0.1)
    advantages = torch.tensor([1.0, -2.0, 0.0, 0.5])
    loss = grpo_loss(logprobs, logprobs.detach(), advantages, 8, 0.2, 0.2)
    loss.loss.backward()
    assert logprobs.grad.tolist() == [-0.125, 0.25, 0.0, -0.0625]
    assert loss.loss.item() == pytest.approx(0.5 / 8)
    assert loss.metrics["policy/clip_fraction"] == 0


@pytest.mark.parametrize(
    "ratio, advantage, value, gradient, clipped",
    [
        pytest.param(1.5, 1.0, -1.3, 0.0, 1, id="too-high-good"),
        pytest.param(1.5, -1.0, 1.5, 1.5, 0, id="too-high-bad"),
        pytest.param(0.5, 1.0, -0.5, -0.5, 0, id="too-low-good"),
        pytest.param(0.5, -1.0, 0.8, 0.0, 1, id="too-low-bad"),
        pytest.param(1.25, 2.0, -2.5, -2.5, 0, id="inside-the-higher-clip"),
    ],
)
def test_clip(ratio, advantage, value, gradient, clipped):
    logprobs = leaf(-1.0)
    behavior = torch.tensor([-1.0 - math.log(ratio)])
    loss = grpo_loss(logprobs, behavior, torch.tensor([advantage]), 1, 0.2, 0.3)
    loss.loss.backward()
    # log(ratio) rounds once (2^-24 relative of at most 1.7) and exp once more: 1e-6 is ten ulps.
    assert loss.loss.item() == pytest.approx(value, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert loss.metrics["policy/clip_fraction"] == clipped


def test_kl_to_a_reference_by_hand():
    logprobs, ref = leaf(-1.0, -2.0), torch.tensor([-1.5, -1.0])
    loss = grpo_loss(logprobs, logprobs.detach(), torch.zeros(2), 2, 0.2, 0.2, ref, kl_weight=0.1)
    loss.loss.backward()
    kl = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1]
    assert loss.metrics["policy/kl_ref"].item() == pytest.approx(sum(kl) / 2, rel=1e-6)
    assert loss.loss.item() == pytest.approx(0.1 * sum(kl) / 2, rel=1e-6)
    # d/dlogp of exp(d) - d - 1 with d = ref - logp is 1 - exp(d).
    expected = [0.05 * (1 - math.exp(-0.5)), 0.05 * (1 - math.exp(1.0))]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-6)


def test_kl_without_weight_is_measured_only():
    logprobs, ref = leaf(-1.0), torch.tensor([-3.0])
    loss = grpo_loss(logprobs, logprobs.detach(), torch.ones(1), 1, 0.2, 0.2, ref)
    loss.loss.backward()
    assert logprobs.grad.item() == -1
    assert loss.metrics["policy/kl_ref"].item() == pytest.approx(math.exp(-2) + 2 - 1, rel=1e-6)


def test_kl_is_exactly_zero_where_equal_and_never_negative():
    logprobs = torch.linspace(-8, 0, 401)
    assert not k3(logprobs, logprobs).any()
    assert (k3(logprobs, logprobs.flip(0)) >= 0).all()


def test_shares_of_micro_batches_add_up_to_the_update():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(12, generator=generator).abs().neg().double().requires_grad_()
    behavior = logprobs.detach() + 0.3 * torch.randn(12, generator=generator)
    advantages = torch.randn(12, generator=generator)
    whole = grpo_loss(logprobs, behavior, advantages, 12, 0.2, 0.2)
    parts = [
        grpo_loss(logprobs[s], behavior[s], advantages[s], 12, 0.2, 0.2)
        for s in (slice(0, 2), slice(2, 9), slice(9, 12))
    ]
    (gradient,) = torch.autograd.grad(whole.loss, logprobs)
    (split,) = torch.autograd.grad(sum(p.loss for p in parts), logprobs)
    assert torch.equal(gradient, split)  # each token's gradient is in one part alone
    clipped = sum(p.metrics["policy/clip_fraction"] for p in parts)
    assert whole.metrics["policy/clip_fraction"] > 0
    # Three quotients k/12 added in float64: at most 3 roundings of numbers up to 1.
    assert abs(clipped - whole.metrics["policy/clip_fraction"]) <= 3 * 2**-53


def test_cross_entropy():
    assert cross_entropy(leaf(-1.0, -2.0), 4).item() == 0.75
