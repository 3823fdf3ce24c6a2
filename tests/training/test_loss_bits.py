"""Losses, their gradients and the host's statistics have the bits of their written definitions.

`loss_numpy` has the definitions a second time; every comparison here is of all bits.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.training import loss_numpy as bits
from tests.training.loss_numpy import F32

from jetrl.kernels.logprob import chosen_logprobs
from jetrl.models.decoder import _Scores
from jetrl.precision import exact
from jetrl.settings.algorithms import AlgorithmSettings
from jetrl.training import host_math, loss_math
from jetrl.training.advantages import group_advantages
from jetrl.training.extras.critic import value_loss
from jetrl.training.objectives import Objective, Tokens, UpdateSize
from jetrl.training.sft import preference_loss

LENGTHS = [5, 1, 70, 3, 121]
SIZE = UpdateSize(tokens=230, sequences=6, max_tokens=128)


def equal_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    whole = np.asarray(expected)
    assert found.detach().numpy().dtype == whole.dtype
    np.testing.assert_array_equal(found.detach().numpy().view(np.uint8), whole.view(np.uint8))


def numbers(seed: int, spread: float = 1.0, count: int = 200) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * spread).astype(np.float32)


@pytest.mark.parametrize("name", ["exp", "expm1", "log_sigmoid"])
def test_functions(name: str) -> None:
    ends = np.array([0.0, -87.0, -87.1, 88.72283, 100.0, -1e30, 0.3465, 0.3466], np.float32)
    x = np.concatenate([numbers(0, 30.0, 5000), numbers(1, 0.3, 5000), ends])
    leaf = torch.from_numpy(x).requires_grad_()
    y = getattr(loss_math, name)(leaf)
    y.backward(torch.full_like(y, 0.7))
    with np.errstate(over="ignore"):
        if name == "log_sigmoid":
            t = bits.exp(-np.abs(x)).astype(np.float64)
            expected = np.minimum(x, F32(0)) - bits.log64(1.0 + t).astype(np.float32)
            slope = bits.sigmoid(-x)
        else:
            expected = getattr(bits, name)(x)
            slope = expected if name == "exp" else expected + F32(1)
        equal_bits(y, expected)
        equal_bits(leaf.grad, F32(0.7) * slope)


def test_functions_are_near_the_true_ones() -> None:
    x = torch.from_numpy(np.concatenate([numbers(0, 20.0, 5000), numbers(1, 0.1, 5000)]))
    for found, true, ulps in (
        (exact.exp(x), x.double().exp(), 1),
        (exact.expm1(x), x.double().expm1(), 4),
        (exact.log_sigmoid(x), torch.nn.functional.logsigmoid(x.double()), 8),
    ):
        # Of log_sigmoid, the logarithm of a number near 1 has an error of float64's epsilon.
        assert ((found - true).abs() <= ulps * 2.0**-23 * true.abs() + 2.0**-52).all()


@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e20])
def test_sums_do_not_depend_on_the_order(spread: float) -> None:
    x = numbers(2, spread, 3000) * np.exp(numbers(3, 5.0, 3000))
    found = exact.exact_sum(torch.from_numpy(x))
    assert found.item() == bits.exact_sum(x)
    assert exact.exact_sum(torch.from_numpy(x[::-1].copy())).item() == found.item()
    # Half a step of the grid per term.
    assert abs(found.item() - math.fsum(x)) <= 3000 * 2.0**-30 * np.abs(x).max()
    assert exact.exact_sum(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mean", [False, True])
def test_sums_over_sequences(mean: bool) -> None:
    x, g, lengths = numbers(4), numbers(5), torch.tensor(LENGTHS)
    leaf = torch.from_numpy(x).requires_grad_()
    function = loss_math.sequence_mean if mean else loss_math.sequence_sum
    y = function(leaf, lengths)
    y.backward(torch.from_numpy(g))
    equal_bits(y, bits.over_sequences(x, LENGTHS, mean))
    equal_bits(leaf.grad, bits.over_sequences(g, LENGTHS, mean))


def clipped_loss(log_ratio, advantages, low, high, g):
    """-min(r A, clip(r) A) and the gradient of the log-ratio, from that of the loss."""
    ratio = bits.exp(log_ratio)
    held = np.clip(ratio, low, high)
    plain, bounded = ratio * advantages, held * advantages
    d = -g
    share = np.where(plain == bounded, d / F32(2), d)
    through = np.where(plain <= bounded, share * advantages, F32(0))
    clipped = np.where((plain >= bounded) & (ratio == held), share * advantages, F32(0))
    return -np.minimum(plain, bounded), (through + clipped) * ratio


def k3(logprobs, ref, g):
    d = ref - logprobs
    e = bits.expm1(d)
    return e - d, -(g * (e + F32(1)) - g)


def inputs():
    logprobs, behavior = numbers(6) - F32(1), numbers(7, 0.2)
    behavior = logprobs + behavior
    return logprobs, behavior, behavior + numbers(8, 0.1), logprobs + numbers(9, 0.3), numbers(10)


def run(settings: AlgorithmSettings) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, behavior, rollout, ref, advantages = map(torch.from_numpy, inputs())
    logprobs.requires_grad_()
    tokens = Tokens(logprobs, behavior, advantages, torch.tensor(LENGTHS))
    found = Objective.from_settings(settings, SIZE.max_tokens)(tokens, SIZE, rollout, ref)
    found.loss.backward()
    assert logprobs.grad is not None
    return found.loss, logprobs.grad


def test_token_ratios_with_correction_and_kl() -> None:
    logprobs, behavior, rollout, ref, advantages = inputs()
    loss, grad = run(
        AlgorithmSettings(
            name="grpo", clip=0.2, clip_high=0.28, correction="tis", correction_high=1.05,
            kl=0.3, kl_in="loss", kl_estimator="k3",
        )
    )  # fmt: skip
    w = np.repeat((1 / (SIZE.sequences * np.array(LENGTHS, np.float64))).astype(F32), LENGTHS)
    c = np.minimum(bits.exp(behavior - rollout), F32(1.05))
    low, high = F32(1.0 - 0.2), F32(1.0 + 0.28)
    token, slope = clipped_loss(logprobs - behavior, advantages, low, high, w * c)
    kl, kl_slope = k3(logprobs, ref, w * F32(0.3))
    each = (token * c + F32(0.3) * kl) * w
    equal_bits(loss[None], np.array([bits.exact_sum(each)], np.float32))
    equal_bits(grad, slope + kl_slope)


def test_sequence_ratios() -> None:
    logprobs, behavior, _, _, advantages = inputs()
    loss, grad = run(AlgorithmSettings(name="gspo", clip=0.05, clip_high=0.1))
    w = np.repeat((1 / (SIZE.sequences * np.array(LENGTHS, np.float64))).astype(F32), LENGTHS)
    mean = bits.over_sequences(logprobs - behavior, LENGTHS, True)
    token, slope = clipped_loss(mean, advantages, F32(1.0 - 0.05), F32(1.0 + 0.1), w)
    equal_bits(loss[None], np.array([bits.exact_sum(token * w)], np.float32))
    equal_bits(grad, bits.over_sequences(slope, LENGTHS, True))


def test_detached_ratios() -> None:
    logprobs, behavior, _, _, advantages = inputs()
    loss, grad = run(AlgorithmSettings(name="cispo", clip_high=0.1, aggregation="token_mean"))
    weight = np.minimum(bits.exp(logprobs - behavior), F32(1.0 + 0.1))
    w = F32(1.0 / SIZE.tokens)
    each = -weight * advantages * logprobs * w
    equal_bits(loss[None], np.array([bits.exact_sum(each)], np.float32))
    equal_bits(grad, w * (-weight * advantages))


def test_losses_of_critic_and_reward_model() -> None:
    values, old, returns = numbers(11), numbers(12, 0.2), numbers(13)
    leaf = torch.from_numpy(values).requires_grad_()
    loss, clipped = value_loss(leaf, *map(torch.from_numpy, (old, returns)), 230, 0.2)
    held = np.clip(values, old - F32(0.2), old + F32(0.2))
    plain, other = (values - returns) ** 2, (held - returns) ** 2
    total = np.array([bits.exact_sum(np.maximum(plain, other))], np.float32)
    equal_bits(loss[None], F32(0.5) * total / F32(230))
    assert clipped.item() == np.count_nonzero(other > plain) / 230

    better, worse = numbers(14), numbers(15)
    leaf = torch.from_numpy(better).requires_grad_()
    loss = preference_loss(leaf, torch.from_numpy(worse), 200)
    loss.backward()
    d = better - worse
    t = bits.exp(-np.abs(d)).astype(np.float64)
    each = np.minimum(d, F32(0)) - bits.log64(1 + t).astype(np.float32)
    equal_bits(loss[None], -np.array([bits.exact_sum(each)], np.float32) / F32(200))
    equal_bits(leaf.grad, (F32(-1) / F32(200)) * -F32(1) * -bits.sigmoid(-d))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_their_gradient(temperature: float) -> None:
    logits = numbers(16, 6.0, 40 * 1001).reshape(40, 1001)
    logits[3, 5:900] = -np.inf
    logits[7] *= 40
    chosen, g = np.random.default_rng(0).integers(900, 1001, 40), numbers(17, 1.0, 40)
    leaf = torch.from_numpy(logits).requires_grad_()
    logprobs, moments = chosen_logprobs(leaf, torch.from_numpy(chosen), temperature)
    logprobs.backward(torch.from_numpy(g))
    expected = bits.chosen_logprobs(logits, chosen, temperature)
    for found, other in zip((logprobs, *moments), expected, strict=True):
        equal_bits(found, other)
    assert leaf.grad is not None
    equal_bits(leaf.grad, bits.logits_gradient(logits, chosen, temperature, g))


def test_statistics_of_the_host_are_rounded_once() -> None:
    x = np.random.default_rng(1).standard_normal(1000) * 10.0 ** np.arange(-5, 5).repeat(100)
    true = sum(map(Fraction, x.tolist()))
    assert host_math.exact_sum(x) == float(true)
    assert host_math.exact_sum(x[::-1]) == float(true)
    assert host_math.mean(x.tolist()) == float(true) / 1000
    deviations = x - float(true) / 1000
    squares = float(sum(map(Fraction, (deviations * deviations).tolist())))
    assert host_math.variance(x, ddof=1) == squares / 999
    assert host_math.exact_sum([math.inf, 1.0]) == math.inf
    assert math.isnan(host_math.exact_sum([math.inf, -math.inf]))
    assert host_math.exact_sum([1.7e308, 1.7e308]) == math.inf


def test_exponentials_and_logarithms_of_the_host() -> None:
    x = np.concatenate([np.linspace(-700, 700, 5001), np.linspace(-1, 1, 5001)])
    wide = x.astype(np.longdouble)
    assert (np.abs(host_math.exp(x) / np.exp(wide) - 1) <= 2 * 2.0**-52).all()
    assert (np.abs(host_math.expm1(x) - np.expm1(wide)) <= 5 * 2.0**-52 * abs(np.expm1(wide))).all()
    assert host_math.exp(np.array([-800.0, 800.0])).tolist() == [0.0, math.inf]
    assert np.isnan(host_math.expm1(np.array([math.nan]))).all()
    for value in (2.0, 151936.0, 1e-300, 0.7, 3.0):
        assert host_math.log(value) == pytest.approx(math.log(value), rel=5 * 2.0**-52)


def test_the_cosine_schedule() -> None:
    turns = np.linspace(0, 1, 1001)
    found = np.array([host_math.cos_of_half_turns(t) for t in turns.tolist()])
    assert np.abs(found - np.cos(np.pi * turns.astype(np.longdouble))).max() < 4 * 2.0**-53
    assert (found[0], found[-1]) == (1.0, -1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_critics_and_reward_models(dtype: torch.dtype) -> None:
    """The sum over D and that of the gradient over rows have no order, and are near float64's."""
    hidden = torch.from_numpy(numbers(18, 2.0, 50 * 96).reshape(50, 96)).to(dtype)
    weight, g = torch.from_numpy(numbers(19, 1.0, 96)[None]), torch.from_numpy(numbers(20, 1.0, 50))

    def run(columns: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = hidden[rows][:, columns].requires_grad_()
        w = weight[:, columns].requires_grad_()
        scores = _Scores.apply(x, w)
        scores.backward(g[rows])
        assert x.grad is not None
        assert w.grad is not None
        return scores.detach(), x.grad, w.grad

    scores, dx, dw = run(torch.arange(96), torch.arange(50))
    columns, rows = torch.randperm(96), torch.randperm(50)
    turned = run(columns, rows)
    assert torch.equal(turned[0], scores[rows])
    assert torch.equal(turned[1], dx[rows][:, columns])
    assert torch.equal(turned[2], dw[:, columns])
    assert torch.equal(dx, (g[:, None] * weight).to(dtype))
    # A rounding to float32, and of each factor to a grid of at least 2**-22 of its maximum.
    for found, a, b in ((scores, hidden.double(), weight[0].double()),
                        (dw[0], hidden.double().mT, g.double())):  # fmt: skip
        grids = len(b) * 2.0**-22 * a.abs().max() * b.abs().max()
        assert (found - a @ b).abs().max() <= 2.0**-24 * (a @ b).abs().max() + grids


def test_advantages_do_not_depend_on_the_order_of_a_group() -> None:
    rewards = [0.1, 0.7, 1e-3, 0.30000001]
    found = group_advantages(rewards, [0] * 4)
    mean = math.fsum(rewards) / 4
    d = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(x * x for x in d) / 3)
    assert found.tolist() == [float(F32(x / (deviation + 1e-6))) for x in d]
    for order in itertools.permutations(range(4)):
        turned = group_advantages([rewards[i] for i in order], [0] * 4)
        assert turned.tolist() == [found[i] for i in order]
