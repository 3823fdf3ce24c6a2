"""The formulas of docs/algorithms.md give what the functions of the code give.

They are read from there and evaluated on random numbers.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tools.documents.algorithms import with_table

from jetrl.settings.algorithms import ALGORITHMS, CORRECTIONS, AlgorithmSettings
from jetrl.training.advantages import ESTIMATORS, StepRewards, overlong_penalties
from jetrl.training.extras.critic import value_loss
from jetrl.training.objectives import (
    KL_ESTIMATORS,
    LOSSES,
    Correction,
    Objective,
    Tokens,
    UpdateSize,
    token_weights,
)
from jetrl.training.sft import preference_loss

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
NAMES = {
    "min": min,
    "max": max,
    "sum": sum,
    "exp": math.exp,
    "log": math.log,
    "mean": np.mean,
    "std": lambda values: np.std(values, ddof=1),
    "clip": lambda value, low, high: min(max(value, low), high),
}
LENGTHS = [3, 1, 4, 2]
RNG = np.random.default_rng(0)
LOGP = RNG.normal(-1, 0.3, 10)
BEFORE = LOGP - RNG.normal(0, 0.3, 10)
A = RNG.normal(0, 1, 10)


def formulas(heading: str) -> dict[str, str]:
    section = re.split(r"\n#+ ", TEXT.split(f"### {heading}\n")[1])[0]
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.MULTILINE))


def evaluate(formula: str, **values: object) -> float:
    # `clip` is a setting, and a function where it is called: the call is renamed.
    return eval(re.sub(r"\bclip\(", "held(", formula), {**NAMES, "held": NAMES["clip"]}, values)


def tokens() -> Tokens:
    def t(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32))

    return Tokens(t(LOGP), t(BEFORE), t(A), torch.tensor(LENGTHS))


def sequence_of(token: int) -> slice:
    ends = np.cumsum(LENGTHS)
    i = int(np.searchsorted(ends, token, side="right"))
    return slice(int(ends[i] - LENGTHS[i]), int(ends[i]))


# float32 numbers of magnitude below 8 and a few operations: 16 ulps.
CLOSE = {"abs": 16 * 2**-22}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    settings = {"clip": 0.2, "clip_high": 0.28}
    wanted = settings.keys() & inspect.signature(LOSSES[name]).parameters.keys()
    got = LOSSES[name](tokens(), **{key: settings[key] for key in wanted}).loss.tolist()
    log_ratio = LOGP - BEFORE
    for t, value in enumerate(got):
        ratio, s = math.exp(log_ratio[t]), math.exp(np.mean(log_ratio[sequence_of(t)]))
        expected = evaluate(
            formulas("Losses")[name], ratio=ratio, s=s, A=A[t], logp=LOGP[t], **settings
        )
        assert value == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_aggregation(name) -> None:
    size = UpdateSize(tokens=17, sequences=6, max_tokens=9)
    got = token_weights(torch.tensor(LENGTHS), size, name).tolist()
    for t, value in enumerate(got):
        where = sequence_of(t)
        expected = evaluate(
            formulas("Aggregation")[name],
            tokens=17,
            sequences=6,
            max_tokens=9,
            length=where.stop - where.start,
        )
        assert value == pytest.approx(expected, rel=2**-23)


def test_kl() -> None:
    written = formulas("KL to the reference")
    assert written.keys() == KL_ESTIMATORS.keys()
    for name, formula in written.items():
        got = KL_ESTIMATORS[name](tokens().trainer_logprobs, tokens().behavior_logprobs).tolist()
        for t, value in enumerate(got):
            expected = evaluate(formula, logp=LOGP[t], logq=BEFORE[t])
            assert value == pytest.approx(expected, **CLOSE)


def test_corrections() -> None:
    written = formulas("Corrections")
    assert written.keys() == CORRECTIONS.keys()
    rollout = torch.from_numpy((BEFORE - RNG.normal(0, 0.8, 10)).astype(np.float32))
    for name, formula in written.items():
        for level in CORRECTIONS[name].levels:
            settings = AlgorithmSettings(correction=name, correction_level=level)
            correction = Correction.from_settings(settings)
            assert correction is not None
            got = correction(tokens(), rollout)
            difference = BEFORE - rollout.double().numpy()
            for t, value in enumerate(got[0].tolist()):
                part = difference[sequence_of(t)]
                log_ratio = {
                    "token": difference[t],
                    "sequence": part.sum(),
                    "geometric": part.mean(),
                }
                w = math.exp(log_ratio[level])
                expected = evaluate(formula, w=w, low=correction.low, high=correction.high)
                assert value == pytest.approx(expected, rel=1e-5)


REWARDS = np.array([1.0, 0.25, -0.5, 2.0])
GROUPS = np.array([0, 1, 0, 1])
PENALTIES = [RNG.uniform(0, 0.2, n) for n in LENGTHS]
VALUES = [RNG.normal(0, 1, n).astype(np.float32) for n in LENGTHS]


def normalized(values: list[np.ndarray]) -> list[np.ndarray]:
    everything = np.concatenate(values)
    return [(v - everything.mean()) / np.sqrt(everything.var(ddof=1) + 1e-8) for v in values]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages(name: str) -> None:
    formula = formulas("Advantages")[name]
    scores = REWARDS - np.array([p.sum() for p in PENALTIES])
    expected = []
    for i, length in enumerate(LENGTHS):
        members = np.flatnonzero(GROUPS[i] == GROUPS)
        of_sample = {"r": scores[i], "group": scores[members]}
        of_sample["others"] = scores[members[members != i]]
        if name == "global":
            of_sample |= {"r": REWARDS[i], "penalties": list(PENALTIES[i])}
        if name == "gae":
            expected.append(recursion(formula, i))
        else:
            expected.append(np.array([evaluate(formula, t=t, **of_sample) for t in range(length)]))
    if name in ("global", "group_global", "gae"):
        expected = normalized(expected)
    got = ESTIMATORS[name](StepRewards(REWARDS, GROUPS, PENALTIES, VALUES)).advantages
    np.testing.assert_allclose(np.concatenate(got), np.concatenate(expected), rtol=2e-6)


def recursion(formula: str, i: int) -> np.ndarray:
    found = re.search(r"`delta\[t\]` is `([^`]+)`", TEXT)
    assert found is not None
    length = LENGTHS[i]
    reward = -PENALTIES[i]
    reward[-1] += REWARDS[i]
    options = {"gamma": 1.0, "gae_lambda": 0.95}
    V, advantages = [*VALUES[i].tolist(), 0.0], [0.0] * (length + 1)
    delta = [evaluate(found[1], reward=reward, V=V, t=t, **options) for t in range(length)]
    for t in reversed(range(length)):
        advantages[t] = evaluate(formula, delta=delta, A=advantages, t=t, **options)
    return np.array(advantages[:length])


def test_rewards_critic_and_reward_model() -> None:
    written = formulas("Rewards, critic, reward model")
    for length in (3, 16, 17, 20):
        expected = evaluate(written["overlong"], length=length, max_tokens=20, buffer=4)
        assert overlong_penalties(np.array([length]), 20, 4)[0] == expected
    for V, V_old, R in RNG.normal(0, 1, (9, 3)):
        expected = evaluate(written["value_loss"], V=V, V_old=V_old, R=R, c=0.2)
        values = (torch.tensor([x]) for x in (V, V_old, R))
        assert value_loss(*values, 1, 0.2)[0].item() == pytest.approx(expected, rel=1e-5)
        expected = evaluate(written["preference_loss"], better=V, worse=R)
        got = preference_loss(torch.tensor([V]), torch.tensor([R]), 1).item()
        assert got == pytest.approx(expected, rel=1e-5)


def test_every_piece_has_its_formula() -> None:
    assert formulas("Losses").keys() == LOSSES.keys()
    assert formulas("Advantages").keys() == ESTIMATORS.keys()
    for record in ALGORITHMS.values():
        assert record.advantages in formulas("Advantages")
        assert record.loss in formulas("Losses")
        assert record.aggregation in formulas("Aggregation")


def test_the_table_of_algorithms_is_that_of_the_records() -> None:
    assert with_table(TEXT) == TEXT, "make docs"


OPTIMUM, WEIGHT = 0.132, 0.2
KL_ROWS = re.findall(r"^\| `(name=[^`]*)` \|[^|]*\| (\S+) \|$", TEXT, re.MULTILINE)


def push(objective, p, members):
    """Return the expected gradient of the loss at p(best) = p, by the logit of p."""
    odds = math.log(OPTIMUM / (1 - OPTIMUM)) - 1 / WEIGHT  # of the reference
    reference = torch.nn.functional.logsigmoid(torch.tensor([-odds, odds]))
    total, groups = 0.0, np.zeros(members, dtype=np.int64)
    size, lengths = UpdateSize(members, members, 1), torch.ones(members, dtype=torch.long)
    # Every number of better answers that a group may have, by its probability.
    for best in range(members + 1):
        logit = torch.tensor(math.log(p / (1 - p)), requires_grad=True)
        drawn = torch.arange(members).lt(best).long()
        logprobs = torch.nn.functional.logsigmoid(torch.stack((-logit, logit)))[drawn]
        penalty = np.zeros((members, 1))
        if objective.kl_in_reward:
            penalty = objective.penalty(logprobs.detach(), reference[drawn]).numpy()[:, None]
        rewards = StepRewards(drawn.double().numpy(), groups, list(penalty))
        advantages = torch.from_numpy(np.concatenate(objective.advantages(rewards).advantages))
        tokens = Tokens(logprobs, logprobs.detach(), advantages, lengths)
        objective(tokens, size, logprobs.detach(), reference[drawn]).loss.backward()
        chance = math.comb(members, best) * p**best * (1 - p) ** (members - best)
        total += chance * float(logit.grad)
    return total


def converged(objective, members):
    """Return the p(best) at which the expected gradient vanishes."""
    low, high = -9.0, 12.0  # logits
    while high - low > 1e-4:
        middle = (low + high) / 2
        falls = push(objective, 1 / (1 + math.exp(-middle)), members) > 0
        low, high = (low, middle) if falls else (middle, high)
    return 1 / (1 + math.exp(-low))


@pytest.mark.parametrize("row", KL_ROWS, ids=lambda row: row[0])
def test_what_a_kl_converges_to(row):
    settings = dict(word.split("=") for word in row[0].split())
    objective = Objective.from_settings(AlgorithmSettings(kl=WEIGHT, **settings), 1)
    assert f"`{converged(objective, members=8):.3f}`" == row[1]


def test_the_table_of_kl_options_has_each_place_and_estimator():
    assert len(KL_ROWS) == 7
