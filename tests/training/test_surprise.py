"""sampling/surprise_z: its distribution by brute force, and faults planted in the real sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import config
from torch import Tensor

import jetrl.rollout.sampler as sampler
from jetrl.kernels.logprob import log_softmax_parts
from jetrl.models.policy import Policy
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.engine import RolloutEngine
from jetrl.settings.loading import Settings
from jetrl.training import Trainer
from jetrl.training.mismatch import EXCESS, VARIANCE, surprise_sums, surprise_z
from jetrl.types import SamplingParams

BOUND = 5.0
PROMPTS = [[3 + i, 5] for i in range(12)]
GROUP = 6


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


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0], ids=["flat", "ordinary", "sure"])
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


Draw = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool]


def right(*draw: Any) -> Draw:
    return draw


def half_temperature(logits: Tensor, bits: Tensor, temperature: Tensor, *rest: Any) -> Draw:
    return logits, bits, temperature / 2, *rest


def halved_bits(logits: Tensor, bits: Tensor, *rest: Any) -> Draw:
    return logits, bits // 2, *rest


def half_as_many_bits(logits: Tensor, bits: Tensor, *rest: Any) -> Draw:
    return logits, bits >> 27 << 27, *rest


def slipped_top_k(
    logits: Tensor, bits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, _: bool
) -> Draw:
    return logits, bits, temperature, top_p, torch.full_like(top_k, 16), True


def one_number(logits: Tensor, bits: Tensor, *rest: Any) -> Draw:
    return logits, torch.full_like(bits, int(0.37 * 2**53)), *rest


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Draw]) -> None:
    """Draws otherwise than asked, and reports the log-probs that were asked for."""
    true = sampler.sample

    def sample(logits: Tensor, bits: Tensor, temperature: Tensor, *rest: Any) -> Any:
        tokens = true(*change(logits, bits, temperature, *rest))[0]
        shifted, _, lse = log_softmax_parts(logits, temperature[:, None])
        return tokens, (shifted.gather(-1, tokens[:, None]) - lse)[:, 0], lse[:, 0]

    monkeypatch.setattr(sampler, "sample", sample)


def step_metrics(make_sample: Any, lost: int = 0) -> dict[str, float]:
    """The metrics of a training step on about 2,000 tokens of the engine."""
    tiny = config(vocab_size=64, initializer_range=0.1, eos_token_id=1)
    policy = Policy.from_config(tiny, PrecisionPlan.preset("unified"), seed=0)
    params = SamplingParams(n=GROUP, max_tokens=32, seed=1, temperature=1.0)
    completions = RolloutEngine(policy).generate(PROMPTS, params)
    samples = []
    for i, done in enumerate(completions):
        kept = len(done.token_ids) - lost
        drawn = done.token_ids[:kept], float(i % 2), done.logprobs[:kept]
        samples.append(make_sample(i // GROUP, PROMPTS[i // GROUP], *drawn))
    metrics = Trainer(policy, Settings()).step(samples).metrics
    assert metrics["mismatch/num_different"] == 0, "each token has the log-prob that was reported"
    assert metrics["mismatch/num_tokens"] > 1600
    return metrics


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (right, False),
        (half_temperature, True),
        (slipped_top_k, True),
        # All draws come from the lower half of each row: seen as far as the token ids there are
        # more probable than the others, on the average over rows.
        (halved_bits, True),
        # A probability moves by 2^-26: no number of tokens that a run draws shows that.
        (half_as_many_bits, False),
        # Each row gives the token at one quantile, so all samples of a prompt are equal.
        # Of 19 numbers each shows here (-14 to -37), but with twice the initializer_range 0.9 gives
        # 1.2: for one number the sum is what the rows' order of tokens makes it.
        (one_number, True),
    ],
    ids=["right", "half temperature", "top_k", "halved", "half as many", "one"],
)
def test_a_planted_fault_of_the_sampler(
    change: Callable[..., Draw], seen: bool, sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, change)
    z = step_metrics(sample)["sampling/surprise_z"]
    assert (abs(z) > BOUND) is seen, z


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout": {"top_p": 0.9}},
        {"rollout": {"top_k": 4}},
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
