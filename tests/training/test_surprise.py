"""sampling/surprise_z: its distribution by brute force, and a fault planted in the sampler."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.shared import make_policy
from torch import Tensor

import jetrl.rollout.sampler as sampler
from jetrl.kernels.logprob import log_softmax_parts
from jetrl.rollout.engine import RolloutEngine
from jetrl.settings.loading import Settings
from jetrl.training.mismatch import EXCESS, VARIANCE, surprise_sums, surprise_z
from jetrl.training.trainer import Trainer
from jetrl.types import SamplingParams

BOUND = 5.0


def sums_of(table: np.ndarray, drawn: np.ndarray, before: np.ndarray) -> tuple[float, float]:
    """The excess and the variance of tokens that rows of a table of probabilities gave."""
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(table > 0, -np.log(table), 0.0)
    moments = np.stack([(table * surprise**k).sum(-1) for k in (1, 2)])
    moments[1] -= moments[0] ** 2
    logprobs = torch.from_numpy(-surprise[before, drawn]).float()
    sums = surprise_sums(logprobs, torch.from_numpy(moments[:, before]).float())
    return float(sums[EXCESS]), float(sums[VARIANCE])


def chains(table: np.ndarray, count: int, seed: int, lost: int = 0) -> tuple[float, float]:
    """The sums of sequences that a table draws up to token 0, or 40 tokens, less the lost ones."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        tokens = [1]
        while len(tokens) <= 40 and (len(tokens) == 1 or tokens[-1]):
            tokens.append(int(rng.choice(len(table), p=table[tokens[-1]])))
        kept = tokens[: len(tokens) - lost]
        pairs += itertools.pairwise(kept)
    before, drawn = np.array(pairs).T
    return sums_of(table, drawn, before)


@pytest.mark.parametrize("scale", [0.3, 3.0], ids=["flat", "sure"])
def test_z_is_standard_normal_whatever_ends_a_sequence(scale: float) -> None:
    """Mean and mean square of S / sqrt(V) of 300 seeds within 5 of their own deviations."""
    logits = scale * np.random.default_rng(1).standard_normal((5, 5))
    table = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    z = np.array([s / math.sqrt(v) for s, v in (chains(table, 12, seed) for seed in range(300))])
    assert abs(z.mean()) < 5 / math.sqrt(len(z))
    assert abs((z**2).mean() - 1) < 5 * math.sqrt((z**4).mean() / len(z))


def test_lost_end_tokens_show_where_the_end_is_what_chance_decides() -> None:
    table = np.array([[0.03, 0.97], [0.03, 0.97]])
    for lost, seen in ((0, False), (1, True)):
        sums = dict(zip((EXCESS, VARIANCE), chains(table, 80, 0, lost), strict=True))
        assert (surprise_z(sums, 2)["sampling/surprise_z"] < -BOUND) is seen


@pytest.mark.parametrize(("factor", "seen"), [(1.0, False), (0.5, True)])
def test_a_sampler_that_draws_at_half_the_temperature_is_seen(
    factor: float, seen: bool, sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler reports the log-probs that were asked for, so none is different."""
    true = sampler.sample

    def planted(logits: Tensor, bits: Tensor, temperature: Tensor, **rest: Any) -> Any:
        tokens = true(logits, bits, temperature=factor * temperature, **rest)[0]
        shifted, _, lse = log_softmax_parts(logits, temperature[:, None])
        return tokens, (shifted.gather(-1, tokens[:, None]) - lse)[:, 0], lse[:, 0]

    monkeypatch.setattr(sampler, "sample", planted)
    policy = make_policy(vocab_size=64, eos_token_id=1)
    params = SamplingParams(n=6, max_tokens=32, seed=1, temperature=1.0)
    prompts = [[3 + i, 5] for i in range(12)]
    completions = RolloutEngine(policy).generate(prompts, params)
    samples = [
        sample(i // 6, prompts[i // 6], done.token_ids, float(i % 2), done.logprobs)
        for i, done in enumerate(completions)
    ]
    metrics = Trainer(policy, Settings()).step(samples).metrics
    assert metrics["mismatch/num_different"] == 0
    assert (abs(metrics["sampling/surprise_z"]) > BOUND) is seen


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout": {"top_p": 0.9, "truncated_logprobs": False}},
        {"rollout": {"oversample": 0.5}},
        {"algorithm": {"name": "dapo"}},
        {"data": {"batch": "shuffle_r1"}},
    ],
    ids=str,
)
def test_nothing_is_said_of_draws_that_were_chosen(settings: dict[str, Any], bigram: Any) -> None:
    policy = bigram()
    metrics = Trainer(policy, Settings.model_validate(settings)).step(policy.draw([0, 1, 1, 0]))
    assert "sampling/surprise_z" not in metrics.metrics
    assert not {EXCESS, VARIANCE} & metrics.metrics.keys()


@pytest.mark.parametrize("updates", [1, 2])
def test_a_temperature_and_later_updates(updates: int, bigram: Any) -> None:
    """z is of the first update's tokens, before any weight changes."""
    policy = bigram()
    samples = policy.draw([0, 1, 1, 0], temperature=0.7)
    given = {"rollout": {"temperature": 0.7}, "train": {"updates_per_step": updates, "lr": 0.1}}
    table = torch.softmax(policy.masters["table.weight"].detach().double() / 0.7, -1).numpy()
    pairs = []
    for s in samples[: len(samples) // updates]:
        tokens = [*s.prompt_token_ids, *s.completion.token_ids][len(s.prompt_token_ids) - 1 :]
        pairs += itertools.pairwise(tokens)
    before, drawn = np.array(pairs).T
    sums = dict(zip((EXCESS, VARIANCE), sums_of(table, drawn, before), strict=True))
    metrics = Trainer(policy, Settings.model_validate(given)).step(samples).metrics
    expected = surprise_z(sums, policy.config.vocab_size)["sampling/surprise_z"]
    assert metrics["sampling/surprise_z"] == pytest.approx(expected, rel=1e-4)
