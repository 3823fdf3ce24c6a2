"""The losses, weights and KL estimates against hand-worked values, and against verl's.

VERL: verl 0.9.1, verl/trainer/ppo/core_algos.py and rollout_corr_helper.py, called on the sequences
below (padded to 3 tokens there) and its results typed in, with as many digits as are compared.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from jetrl.errors import UserError
from jetrl.precision.exact import exp
from jetrl.settings.algorithms import ALGORITHMS, AlgorithmSettings
from jetrl.training.advantages import StepRewards
from jetrl.training.objectives import (
    LOSSES,
    MAX_LOG_RATIO,
    Correction,
    Objective,
    Tokens,
    UpdateSize,
    bounded_exp,
    k3,
)

OLD = [-1.0, -0.5, -2.0, -0.3, -1.2, -0.7, -1.5, -0.2, -0.9]
NEW = [-0.6, -0.6, -2.1, -0.2, -1.6, -0.7, -1.1, -0.25, -1.0]
ADVANTAGES = [1.0, 1, 1, -1, -1, 0.5, -2, -2, -2]
LENGTHS = [3, 2, 1, 3]
SIZE = UpdateSize(tokens=9, sequences=4, max_tokens=3)
DIGITS = 2e-7  # verl's values have 7 decimals and are float32 near 1: half a digit and an ulp


def leaf(*values):
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def verl_tokens():
    return Tokens(leaf(*NEW), torch.tensor(OLD), torch.tensor(ADVANTAGES), torch.tensor(LENGTHS))


def one(logprob_difference, advantage):
    return Tokens(
        leaf(logprob_difference), torch.zeros(1), torch.tensor([advantage]), torch.tensor([1])
    )


def objective(max_tokens=3, **algorithm):
    return Objective.from_settings(AlgorithmSettings(**algorithm), max_tokens)


AGAINST_VERL = {
    "grpo": (
        {"clip_high": 0.28, "aggregation": "token_mean"},
        0.5568088,
        [0, -0.1005375, -0.1005375, 0.1227968, 0, -0.0555556, 0.3315166, 0.2113843, 0.201075],
    ),
    "grpo by sequence": (
        {"clip_high": 0.28, "aggregation": "sequence_mean"},
        0.4136554,
        [0, -0.0754031, -0.0754031, 0.1381464, 0, -0.125, 0.2486374, 0.1585383, 0.1508062],
    ),
    "gspo": (
        {"clip": 0.05, "clip_high": 0.1},
        0.3887172,
        [-0.0890783] * 3 + [0, 0, -0.125] + [0.1811507] * 3,
    ),
    "cispo": (
        {"clip_high": 0.4},
        -0.3361972,
        [
            *(-0.1555556, -0.1005375, -0.1005375, 0.1227968, 0.07448, -0.0555556),
            *(0.3111111, 0.2113843, 0.201075),
        ],
    ),
}


@pytest.mark.parametrize("name", AGAINST_VERL)
def test_against_verl(name):
    algorithm, expected, gradient = AGAINST_VERL[name]
    tokens = verl_tokens()
    found = objective(name=name.split()[0], **algorithm)(tokens, SIZE, torch.tensor(OLD))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected, abs=DIGITS)
    assert found.metrics["policy/clip_fraction"].item() == pytest.approx(2 / 9)
    assert tokens.trainer_logprobs.grad.tolist() == pytest.approx(gradient, abs=DIGITS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_add_up(name):
    settings = {"kl": 0.1} | ({"kl_in": "loss", "kl_estimator": "k3"})
    chosen = objective(name=name, correction="tis", **settings)
    generator = torch.Generator().manual_seed(0)
    logprobs, behavior, rollout, ref = torch.randn(4, 12, generator=generator) * 0.1 - 1
    advantages = torch.randn(12, generator=generator)
    size = UpdateSize(12, 5, 7)

    def part(tokens, lengths):
        where = Tokens(
            logprobs[tokens], behavior[tokens], advantages[tokens], torch.tensor(lengths)
        )
        return chosen(where, size, rollout[tokens], ref[tokens])

    whole = part(slice(0, 12), [2, 3, 1, 4, 2])
    parts = [part(slice(0, 5), [2, 3]), part(slice(5, 12), [1, 4, 2])]
    # Sums of 12 float32 of magnitude below 4, in another order: 11 roundings of 2^-24 each.
    assert sum(p.loss.item() for p in parts) == pytest.approx(
        whole.loss.item(), abs=4 * 11 * 2**-24
    )
    for key, value in whole.metrics.items():
        assert sum(p.metrics[key].item() for p in parts) == pytest.approx(value.item(), rel=1e-12)
    for key, value in whole.peaks.items():
        assert max(p.peaks[key].item() for p in parts) == value.item()


def test_the_kl_of_the_same_policy_is_zero_and_has_no_gradient():
    logprobs = leaf(-0.5, -3.0)
    tokens = Tokens(logprobs, logprobs.detach(), torch.zeros(2), torch.tensor([2]))
    found = objective(kl=1.0)(tokens, UpdateSize(2, 1, 2), logprobs.detach(), logprobs.detach())
    found.loss.backward()
    assert found.metrics["policy/kl_ref"] == 0
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "settings, weights, touched",
    [
        ({"correction": "tis"}, [2, 0.5, 1.5], [1, 0, 0]),
        ({"correction": "tis", "correction_level": "sequence"}, [2, 2, 1.5], [0, 0, 0]),
        (
            {"correction": "mis", "correction_level": "geometric", "correction_high": 1.45},
            [2**0.5, 2**0.5, 0],
            [0, 0, 1],
        ),
        ({"correction": "icepop", "correction_low": 0.6}, [4, 0, 1.5], [0, 1, 0]),
        ({"correction": "sequence_mask"}, [0, 0, 0], [1, 1, 1]),
    ],
)
def test_corrections_by_hand(settings, weights, touched):
    # Ratios 4 and 1/2 in one sequence (product 2, geometric mean sqrt 2), 3/2 in another.
    behavior = torch.tensor([math.log(4.0), math.log(0.5), math.log(1.5)])
    tokens = Tokens(leaf(0.0, 0.0, 0.0), behavior, torch.ones(3), torch.tensor([2, 1]))
    correction = Correction.from_settings(AlgorithmSettings(**settings))
    found, changed, _ = correction(tokens, torch.zeros(3))
    assert found.tolist() == pytest.approx(weights, rel=1e-6)
    assert changed.tolist() == [bool(t) for t in touched]


def test_the_overlong_buffer_is_a_fifth_of_the_limit_unless_set():
    settings = AlgorithmSettings(name="dapo")
    assert Objective.from_settings(settings, max_tokens=100).overlong_buffer == 20
    settings = AlgorithmSettings(name="dapo", overlong_buffer=7)
    assert Objective.from_settings(settings, max_tokens=100).overlong_buffer == 7


def test_no_kl_is_subtracted_from_rewards_if_its_weight_is_zero():
    for weight in (0.0, 0.1):
        settings = AlgorithmSettings(name="ppo", kl=weight)
        assert Objective.from_settings(settings, 8).kl_in_reward == (weight > 0)


class TestUsers:
    def write(self, tmp_path, text):
        file = tmp_path / "mine.py"
        file.write_text(text)
        return file

    def test_the_example_of_the_document(self, tmp_path):
        document = Path(__file__).parents[2] / "docs" / "algorithms.md"
        code = document.read_text().split("```python\n")[1].split("```")[0]
        file = self.write(tmp_path, code)
        chosen = objective(name=f"{file}:soft", options={"tau": 0.5})
        tokens = one(0.0, 3.0)
        chosen(tokens, UpdateSize(1, 1, 1), torch.zeros(1)).loss.backward()
        # d/dlogp of -A tau log(1 + ratio / tau) at ratio 1: -A / (1 + 1 / tau).
        assert tokens.trainer_logprobs.grad.item() == pytest.approx(-3 / 3)

    def test_the_advantages_of_the_document(self, tmp_path):
        document = Path(__file__).parents[2] / "docs" / "algorithms.md"
        code = document.read_text().split("```python\n")[3].split("```")[0]
        record = (
            "from jetrl.settings.algorithms import Algorithm\n"
            "mine = Algorithm('mine', '', above_median, 'ratio', 'token_mean')\n"
        )
        name = f"{self.write(tmp_path, code + record)}:mine"
        rewards, groups = np.array([0.0, 1.0, 5.0, 2.0]), np.array([0, 0, 0, 1])
        step = StepRewards(rewards, groups, [np.zeros(n) for n in (1, 2, 3, 1)])
        found = objective(name=name, options={"shift": 0.5}).advantages(step).advantages
        assert [values.tolist() for values in found] == [[-1.5], [-0.5] * 2, [3.5] * 3, [-0.5]]

    RECORD = (
        "from jetrl.settings.algorithms import Algorithm\n"
        "mine = Algorithm('mine', '', 'leave_one_out', 'clipped_ratio', 'sequence_sum',\n"
        "    options={'clip': 0.1, 'clip_high': 0.3, 'dynamic_sampling': True},\n"
        "    kl_estimator='k2', kl_in='reward', compares_group=False)\n"
    )

    def test_a_record_says_what_its_kl_is_and_what_it_samples(self, tmp_path):
        name = f"{self.write(tmp_path, self.RECORD)}:mine"
        chosen = objective(name=name, kl=0.5)
        assert chosen.kl_in_reward
        penalty = chosen.penalty(torch.tensor([-1.0]), torch.tensor([-3.0]))
        assert penalty.item() == 0.5 * 2.0**2 / 2
        assert chosen.dynamic_sampling
        assert not objective(name=name, dynamic_sampling=False).dynamic_sampling

    def test_the_settings_of_a_record_can_be_set(self, tmp_path):
        name = f"{self.write(tmp_path, self.RECORD)}:mine"
        assert objective(name=name).clips == (0.1, 0.3)
        assert objective(name=name, clip=0.2).clips == (0.2, 0.3)
        with pytest.raises(UserError, match=r"algorithm\.gamma has no effect on .*mine\.py:mine"):
            objective(name=name, gamma=0.9)
        file = self.write(tmp_path, "def push(tokens): return -tokens.trainer_logprobs\n")
        with pytest.raises(UserError, match=r"algorithm\.clip has no effect on .*mine\.py:push"):
            objective(name=f"{file}:push", clip=0.2)

    @pytest.mark.parametrize(
        "text, member, message",
        [
            ("x = 1\n1 / 0\n", "f", "line 2: ZeroDivisionError"),
            ("def g(tokens): pass\n", "f", "'f' is not a function"),
            ("def f(tokens, tau): pass\n", "f", r"needs algorithm\.options\.tau"),
        ],
    )
    def test_bad_files_are_named(self, tmp_path, text, member, message):
        file = self.write(tmp_path, text)
        with pytest.raises(UserError, match=message):
            objective(name=f"{file}:{member}")

    @pytest.mark.parametrize(
        "text, message",
        [
            (
                "def f(tokens):\n    return tokens.logprobs\n",
                r"mine.py:f: it raised AttributeError: .*'logprobs' \(.*mine.py, line 2\)",
            ),
            (
                "def f(tokens):\n    return -tokens.advantages\n",
                r"mine.py:f: its loss has no gradient; make it of tokens.trainer_logprobs",
            ),
            ("def f(tokens):\n    return 1.0\n", "one loss for each of the 1 tokens, not float"),
        ],
    )
    def test_a_function_that_is_no_loss_is_named(self, tmp_path, text, message):
        chosen = objective(name=f"{self.write(tmp_path, text)}:f")
        with pytest.raises(UserError, match=message):
            chosen(one(0.0, 3.0), UpdateSize(1, 1, 1), torch.zeros(1))

    @pytest.mark.parametrize(
        "code, message",
        [
            ("    return step.rewards", r"array for each of the 2 samples.*step\.at_tokens"),
            ("    return [np.ones(2), np.array([1, np.nan, 1])]", "sample 1 .* not finite"),
            ("    return [np.ones(2), np.ones((3, 1))]", "array for each of the 2 samples"),
            ("    return [np.ones(2), np.ones(2)]", "sample 1 are 2 numbers for its 3 tokens"),
            ("    return step.reward", r"raised AttributeError: .* \(.*mine\.py, line 4\)"),
        ],
    )
    def test_advantages_that_are_none_are_named(self, tmp_path, code, message):
        text = (
            "import numpy as np\nfrom jetrl.settings.algorithms import Algorithm\n"
            f"def found(step):\n{code}\n"
            "mine = Algorithm('mine', '', found, 'ratio', 'token_mean')\n"
        )
        chosen = objective(name=f"{self.write(tmp_path, text)}:mine")
        step = StepRewards(np.array([1.0, 0.0]), np.array([0, 0]), [np.zeros(2), np.zeros(3)])
        with pytest.raises(UserError, match=f"mine.py:mine: its advantages.*{message}"):
            chosen.advantages(step)

    @pytest.mark.parametrize(
        "returns, message",
        [
            ("", "have no returns, which the critic learns"),
            (", [np.ones(2), np.ones(2)]", "have returns that do not fit: they of sample 1"),
        ],
    )
    def test_returns_that_a_critic_cannot_learn_are_named(self, tmp_path, returns, message):
        text = (
            "import numpy as np\nfrom jetrl.settings.algorithms import Algorithm\n"
            "from jetrl.training.advantages import Advantages\ndef found(step):\n"
            f"    return Advantages([np.ones(2), np.ones(3)]{returns})\n"
            "mine = Algorithm('mine', '', found, 'ratio', 'token_mean')\n"
        )
        chosen = objective(name=f"{self.write(tmp_path, text)}:mine")
        penalties = [np.zeros(2), np.zeros(3)]
        rewards, groups = np.array([1.0, 0.0]), np.array([0, 0])
        step = StepRewards(rewards, groups, penalties, values=penalties)
        with pytest.raises(UserError, match=message):
            chosen.advantages(step)

    def test_an_option_that_the_loss_does_not_have_is_named(self, tmp_path):
        file = self.write(tmp_path, "def f(tokens, tau):\n    return tokens.advantages * tau\n")
        with pytest.raises(UserError, match=r"options\.tua: .* no such argument; it has tau"):
            objective(name=f"{file}:f", options={"tua": 0.5})

    def test_memory_that_ran_out_in_it_is_no_mistake_of_it(self, tmp_path):
        file = self.write(tmp_path, "def f(tokens):\n    raise MemoryError\n")
        with pytest.raises(MemoryError):
            objective(name=f"{file}:f")(one(0.0, 3.0), UpdateSize(1, 1, 1), torch.zeros(1))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "dapoo"}, "did you mean dapo"),
        ({"name": "rloo", "clip": 0.1}, "algorithm.clip has no effect on rloo"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "k1 in the loss only adds noise"),
        ({"correction_high": 3.0}, "correction = none"),
        ({"correction": "icepop", "correction_level": "sequence"}, "icepop has token"),
        ({"correction": "mis", "correction_low": 3.0}, "not below"),
        ({"options": {"a": 1}}, "file.py:function"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmSettings(**settings)


def test_a_dual_clip_bounds_the_loss_of_tokens_with_a_negative_advantage():
    """With c = 3 a ratio of e^2 and an advantage of -2 lose 6, and the gradient is gone."""
    over = one(2.0, -2.0)
    lost = LOSSES["clipped_ratio"](over, 0.2, 0.2, dual_clip=3.0)
    lost.loss.sum().backward()
    assert lost.loss.item() == 6.0
    assert lost.clipped.tolist() == [True]
    assert over.trainer_logprobs.grad.tolist() == [0.0]
    gained = LOSSES["clipped_ratio"](one(2.0, 0.5), 0.2, 0.2, dual_clip=3.0)
    assert gained.loss.item() == pytest.approx(-1.2 * 0.5)  # the usual clip


@pytest.mark.parametrize(
    ("difference", "advantage", "dual_clip"),
    [(0.0, 1.0, None), (0.0, -1.0, None), (0.0, -1.0, 1.0), (2.0, 0.0, 3.0), (-2.0, 0.0, 3.0)],
)
def test_a_ratio_on_a_bound_and_an_advantage_of_0_are_not_clipped(difference, advantage, dual_clip):
    lost = LOSSES["clipped_ratio"](one(difference, advantage), 0.0, 0.0, dual_clip=dual_clip)
    assert lost.clipped.tolist() == [False]


@pytest.mark.parametrize("name", ["tis", "mis", "sequence_mask"])
def test_a_weight_on_a_bound_is_kept(name):
    tokens = one(0.0, 1.0)
    for low, high in [(0.5, 1.0), (1.0, 2.0)]:
        weights, touched, _ = Correction(name, "token", low, high)(tokens, torch.zeros(1))
        assert (weights.tolist(), touched.tolist()) == ([1.0], [False])


def test_metrics_are_shares_of_the_update_and_peaks_the_largest():
    # Two of an update's four tokens: ratios 2 and 1, and sampler's weights 4 and 1.
    tokens = Tokens(leaf(math.log(2.0), 0.0), torch.zeros(2), torch.ones(2), torch.tensor([1, 1]))
    mine = objective(name="grpo", correction="tis", correction_high=3.0, kl=0.5, kl_in="reward")
    size, rollout = UpdateSize(tokens=4, sequences=4, max_tokens=1), torch.tensor([-math.log(4), 0])
    found = mine(tokens, size, rollout, torch.zeros(2))
    shares = {name: value.item() for name, value in found.metrics.items()}
    assert shares == {
        "policy/clip_fraction": 1 / 4,
        "correction/weight_mean": pytest.approx((3 + 1) / 4),
        "correction/touched_fraction": 1 / 4,
        "policy/kl_ref": pytest.approx((math.log(2) - 0.5) / 4, rel=1e-6),
    }
    peaks = {name: value.item() for name, value in found.peaks.items()}
    assert peaks == pytest.approx({"correction/weight_max": 3, "correction/ratio_max": 4})
    # The KL is in the rewards already: -(1.2 * 3 + 1) / 4 is the loss of both tokens.
    assert found.loss.item() == pytest.approx(-(1.2 * 3 + 1) / 4)


@pytest.mark.parametrize("loss", [("clipped_ratio", 0.2, 0.2), ("detached_ratio", 4.0), ("ratio",)])
def test_a_log_ratio_that_overflows_leaves_loss_and_gradient_finite(loss):
    tokens = one(100.0, 1.0)
    LOSSES[loss[0]](tokens, *loss[1:]).loss.sum().backward()
    assert math.isfinite(tokens.trainer_logprobs.grad.item())


def test_bounding_log_ratios_changes_no_finite_exponential():
    values = torch.cat([torch.linspace(-120, 88, 1000), torch.tensor([MAX_LOG_RATIO, math.nan])])
    assert torch.equal(bounded_exp(values).view(torch.int32), exp(values).view(torch.int32))
    above = torch.nextafter(torch.tensor(MAX_LOG_RATIO), torch.tensor(math.inf))
    assert exp(above).isinf()
    assert bounded_exp(above).isfinite()
    assert k3(torch.tensor(-200.0), torch.tensor(0.0)).isfinite()
