"""Training the distribution that top_k, top_p and min_p leave, by enumeration and by an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.shared import count_different, make_policy, settings
from torch import Tensor

from jetrl.kernels import allowed_tokens
from jetrl.kernels.allowed_tokens import filtered_logits
from jetrl.kernels.logprob import chosen_logprobs
from jetrl.rollout.engine import RolloutEngine
from jetrl.training.mismatch import StepMismatchError
from jetrl.training.trainer import Trainer
from jetrl.types import SamplingParams, TokenFilter

VOCABULARY, T = 6, 0.8
KEPT = [
    TokenFilter(top_k=3),
    TokenFilter(top_p=0.7),
    TokenFilter(min_p=0.3),
    TokenFilter(0.9, 4, 0.1),
]


def naive_set(logits: np.ndarray, kept: TokenFilter) -> list[int]:
    """The tokens of a row that a filter keeps, in float64; no token is near a border."""
    p = np.exp(logits / T)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])[: kept.top_k or None]
    p /= p[order].sum()
    before = np.cumsum(p[order]) - p[order]
    assert np.abs(before - kept.top_p).min() > 1e-4
    assert np.abs(p / p.max() - kept.min_p).min() > 1e-4
    return [
        i
        for i, b in zip(order, before, strict=True)
        if b < kept.top_p and p[i] >= kept.min_p * p.max()
    ]


def naive_probabilities(logits: np.ndarray, kept: TokenFilter) -> np.ndarray:
    own = naive_set(logits, kept)
    p = np.zeros_like(logits)
    p[own] = np.exp(logits[own] / T)
    return p / p.sum()


def expected_reward(table: np.ndarray, rewards: np.ndarray, kept: TokenFilter) -> float:
    """Return the mean reward of two tokens, from row 0 and from the row after the first's."""
    first = naive_probabilities(table[0], kept)
    each = [naive_probabilities(row, kept) @ r for row, r in zip(table[1:], rewards, strict=True)]
    return float(first @ each)


def logprobs_of(table: Tensor, kept: TokenFilter) -> Tensor:
    """Log-probs of all tokens of all rows, [V + 1, V], as the trainer computes them."""
    rows = table.repeat_interleave(VOCABULARY, 0)
    chosen = torch.arange(VOCABULARY).repeat(len(table))
    logits = filtered_logits(rows, chosen, T, kept)
    return chosen_logprobs(logits, chosen, T)[0].view(len(table), VOCABULARY)


def tree(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((VOCABULARY + 1, VOCABULARY)).astype(np.float32).astype(np.float64)
    return table, rng.standard_normal((VOCABULARY, VOCABULARY))


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("of_all", [False, True])
def test_the_expected_gradient_is_that_of_the_expected_reward(
    kept: TokenFilter, of_all: bool
) -> None:
    """All pairs of tokens, by their probability, against differences of the reward; of_all: not."""
    table, rewards = tree(3)
    given = torch.from_numpy(table).float().requires_grad_()
    logprobs = logprobs_of(given, TokenFilter() if of_all else kept)
    drawn = torch.from_numpy(np.stack([naive_probabilities(row, kept) for row in table]))
    joint = drawn[0][:, None] * drawn[1:] * torch.from_numpy(rewards)
    (joint * (logprobs[0][:, None] + logprobs[1:]).double()).sum().backward()
    assert given.grad is not None
    step, slopes = 1e-5, np.zeros_like(table)
    for place in np.ndindex(*table.shape):
        up, down = table.copy(), table.copy()
        up[place] += step
        down[place] -= step
        rise = expected_reward(up, rewards, kept) - expected_reward(down, rewards, kept)
        slopes[place] = rise / (2 * step)
    # float32 softmax and gradient: some units of 2**-24 of sums of |joint| below 2.
    error = np.abs(given.grad.numpy() - slopes).max()
    assert (error < 2.0**-19) is not of_all, error
    outside = np.ones_like(table, dtype=bool)
    for row, own in enumerate(naive_set(row, kept) for row in table):
        outside[row, own] = False
    assert of_all or not given.grad.numpy()[outside].any()


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("moved", [0.0, 0.05, 1.0])
def test_the_expected_ratio_is_one_less_the_mass_that_old_draws_cannot_reach(
    kept: TokenFilter, moved: float
) -> None:
    """E[new / old] over old draws is the new mass of the old set, plus that of tokens that left."""
    table, _ = tree(4)
    later = table + moved * np.random.default_rng(5).standard_normal(table.shape)
    old, new = (logprobs_of(torch.from_numpy(x).float(), kept).double() for x in (table, later))
    found = []
    for row in range(len(table)):
        drawn = naive_probabilities(table[row], kept)
        ratio = (new[row] - old[row]).exp().numpy()
        found.append(float(drawn @ ratio))
        own, before = set(naive_set(later[row], kept)), set(naive_set(table[row], kept))
        p = naive_probabilities(later[row], kept)
        weight = np.exp(later[row] / T)
        held = weight[list(own)].sum()
        left = sum(weight[i] / (held + weight[i]) for i in before - own)
        expected = 1 - p[list(own - before)].sum() + left
        assert found[-1] == pytest.approx(expected, abs=2.0**-19)
        assert own != before or expected == pytest.approx(1, abs=1e-12)
    assert moved < 1 or max(np.abs(np.array(found) - 1)) > 0.05


def scored(sample: Callable[..., Any], prompts: list[list[int]], done: Any, n: int) -> list[Any]:
    return [
        sample(i // n, prompts[i // n], c.token_ids, float(sum(c.token_ids) % 3), c.logprobs)
        for i, c in enumerate(done)
    ]


PROMPTS = [[3 + i, 5, 9] for i in range(4)]
FILTERED = {"top_p": 0.9, "top_k": 24, "min_p": 0.02, "temperature": 0.8}


@pytest.mark.parametrize("preset", ["int8", "unified", "integer"])
def test_no_token_differs_while_weights_move(preset: str, sample: Callable[..., Any]) -> None:
    """Three steps of two updates; log-probs of all tokens are then refused."""
    policy = make_policy(preset, vocab_size=64, eos_token_id=1)
    given = settings(
        train={"lr": 0.002, "updates_per_step": 2, "tokens_per_micro_batch": 64},
        algorithm={"kl": 0.05},
        rollout=FILTERED,
    )
    trainer = Trainer(policy, given, reference=make_policy(preset, vocab_size=64, eos_token_id=1))
    engine = RolloutEngine(policy)
    for step in range(3):
        params = SamplingParams(n=4, max_tokens=12, seed=step, ignore_eos=True, **FILTERED)
        done = engine.generate(PROMPTS, params)
        assert count_different(policy, PROMPTS, done, params) == 0
        metrics = trainer.step(scored(sample, PROMPTS, done, 4)).metrics
        assert metrics["mismatch/num_different"] == 0
        assert metrics["mismatch/num_tokens"] == 192
        assert abs(metrics["sampling/surprise_z"]) < 5
        assert 0 < metrics["policy/entropy"] < np.log(24)
        assert step == 0 or metrics["policy/kl_ref"] > 0
    of_all = replace(params, truncated_logprobs=False)
    with pytest.raises(StepMismatchError):
        trainer.step(scored(sample, PROMPTS, engine.generate(PROMPTS, of_all), 4))


def test_log_probs_of_all_tokens_if_asked_for(sample: Callable[..., Any]) -> None:
    policy = make_policy("int8", vocab_size=64, eos_token_id=1)
    asked = {**FILTERED, "truncated_logprobs": False}
    trainer = Trainer(policy, settings(train={"tokens_per_micro_batch": 64}, rollout=asked))
    params = SamplingParams(n=4, max_tokens=12, ignore_eos=True, **asked)
    done = RolloutEngine(policy).generate(PROMPTS, params)
    metrics = trainer.step(scored(sample, PROMPTS, done, 4)).metrics
    assert metrics["mismatch/num_different"] == 0
    assert "sampling/surprise_z" not in metrics


def test_an_equal_reference_has_no_kl(sample: Callable[..., Any]) -> None:
    policy, equal = (make_policy("int8", vocab_size=64) for _ in range(2))
    given = settings(train={"tokens_per_micro_batch": 64}, algorithm={"kl": 0.1}, rollout=FILTERED)
    params = SamplingParams(n=4, max_tokens=12, ignore_eos=True, **FILTERED)
    done = RolloutEngine(policy).generate(PROMPTS, params)
    metrics = Trainer(policy, given, equal).step(scored(sample, PROMPTS, done, 4)).metrics
    assert metrics["policy/kl_ref"] == 0


@pytest.mark.parametrize("temperature, min_p", [(1.0, 0.0), (0.0, 0.5), (1.0, 0.5)])
def test_filters_cost_nothing_unless_they_exclude(
    temperature: float, min_p: float, sample: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = allowed_tokens.exclude_tokens_ref
    monkeypatch.setattr(
        allowed_tokens, "exclude_tokens_ref", lambda *args: calls.append(1) or real(*args)
    )
    policy, excludes = make_policy("int8", vocab_size=64), temperature * min_p > 0
    params = SamplingParams(
        n=4, max_tokens=6, ignore_eos=True, temperature=temperature, min_p=min_p
    )
    done = RolloutEngine(policy).generate(PROMPTS, params)
    assert bool(calls) is excludes
    calls.clear()
    if temperature:
        given = settings(rollout={"min_p": min_p}, train={"tokens_per_micro_batch": 64})
        Trainer(policy, given).step(scored(sample, PROMPTS, done, 4))
        assert bool(calls) is excludes
