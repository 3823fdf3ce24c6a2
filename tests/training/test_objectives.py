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
from jetrl.settings.algorithms import ALGORITHMS, AlgorithmSettings
from jetrl.training.advantages import StepRewards
from jetrl.training.objectives import Objective, TokenLoss, Tokens, UpdateSize
from jetrl.training.objectives.pieces import (
    MAX_LOG_RATIO,
    ClippedRatio,
    Correction,
    DetachedRatio,
    Ratio,
    SequenceRatio,
    bounded_exp,
    k1,
    k2,
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


def evaluated(**algorithm):
    """Return loss, clip fraction and gradient of an algorithm on verl's sequences."""
    tokens = verl_tokens()
    loss = objective(**algorithm)(tokens, SIZE, torch.tensor(OLD))
    loss.loss.backward()
    return (
        loss.loss.item(),
        loss.metrics["policy/clip_fraction"].item(),
        tokens.trainer_logprobs.grad.tolist(),
    )


VERL_CLIPPED = {
    "token_mean": (
        0.5568088,
        [0, -0.1005375, -0.1005375, 0.1227968, 0, -0.0555556, 0.3315166, 0.2113843, 0.201075],
    ),
    "sequence_mean": (
        0.4136554,
        [0, -0.0754031, -0.0754031, 0.1381464, 0, -0.125, 0.2486374, 0.1585383, 0.1508062],
    ),
    "sequence_sum": (
        1.2528198,
        [0, -0.2262093, -0.2262094, 0.2762927, 0, -0.125, 0.7459123, 0.4756147, 0.4524187],
    ),
    "constant": (
        0.4176066,
        [0, -0.0754031, -0.0754031, 0.0920976, 0, -0.0416667, 0.2486374, 0.1585383, 0.1508062],
    ),
}


class TestAgainstVerl:
    @pytest.mark.parametrize("aggregation", VERL_CLIPPED)
    def test_clipped_ratio(self, aggregation):
        expected, gradient = VERL_CLIPPED[aggregation]
        loss, clipped, seen = evaluated(name="grpo", clip_high=0.28, aggregation=aggregation)
        assert loss == pytest.approx(expected, abs=DIGITS)
        assert clipped == pytest.approx(2 / 9)
        assert seen == pytest.approx(gradient, abs=DIGITS)

    def test_gspo(self):
        loss, clipped, seen = evaluated(name="gspo", clip=0.05, clip_high=0.1)
        assert loss == pytest.approx(0.3887172, abs=DIGITS)
        assert clipped == pytest.approx(2 / 9)
        gradient = [-0.0890783] * 3 + [0, 0, -0.125] + [0.1811507] * 3
        assert seen == pytest.approx(gradient, abs=DIGITS)

    def test_cispo(self):
        loss, clipped, seen = evaluated(name="cispo", clip_high=0.4)
        assert loss == pytest.approx(-0.3361972, abs=DIGITS)
        assert clipped == pytest.approx(2 / 9)
        gradient = [-0.1555556, -0.1005375, -0.1005375, 0.1227968, 0.07448, -0.0555556]
        gradient += [0.3111111, 0.2113843, 0.201075]
        assert seen == pytest.approx(gradient, abs=DIGITS)

    @pytest.mark.parametrize(
        "estimate, expected",
        [
            (k1, [0.4, -0.1, -0.1, 0.1, -0.4, 0, 0.4, -0.05, -0.1]),
            (k2, [0.08, 0.005, 0.005, 0.005, 0.08, 0, 0.08, 0.00125, 0.005]),
            (
                k3,
                [
                    *(0.07032, 0.0051709, 0.0051709, 0.0048374, 0.0918247),
                    *(0, 0.07032, 0.0012711, 0.0051709),
                ],
            ),
        ],
    )
    def test_kl(self, estimate, expected):
        got = estimate(torch.tensor(NEW), torch.tensor(OLD)).tolist()
        # Logarithms near 2 are float32: their difference is off by an ulp, 2.4e-7.
        assert got == pytest.approx(expected, abs=DIGITS + 2.4e-7)

    @pytest.mark.parametrize(
        "level, expected",
        [
            ("token", [1.3, 0.9048374, 0.9048375, 1.105171, 0.67032, 1, 1.3, 0.9512295, 0.9048374]),
            ("sequence", [1.2214028] * 3 + [0.7408183] * 2 + [1] + [1.2840253] * 3),
        ],
    )
    def test_tis(self, level, expected):
        tokens = Tokens(
            leaf(*NEW), torch.tensor(NEW), torch.tensor(ADVANTAGES), torch.tensor(LENGTHS)
        )
        weights = Correction("tis", level, 0.0, 1.3)(tokens, torch.tensor(OLD)).weights
        assert weights.tolist() == pytest.approx(expected, abs=4 * DIGITS)


class TestClippedRatio:
    @pytest.mark.parametrize(
        "value, advantage, loss, gradient, clipped",
        [
            pytest.param(1.5, 1.0, -1.3, 0.0, 1, id="too-high-good"),
            pytest.param(1.5, -1.0, 1.5, 1.5, 0, id="too-high-bad"),
            pytest.param(0.5, 1.0, -0.5, -0.5, 0, id="too-low-good"),
            pytest.param(0.5, -1.0, 0.8, 0.0, 1, id="too-low-bad"),
            pytest.param(1.25, 2.0, -2.5, -2.5, 0, id="inside-the-higher-clip"),
        ],
    )
    def test_clip(self, value, advantage, loss, gradient, clipped):
        tokens = one(math.log(value), advantage)
        found = ClippedRatio(0.2, 0.3)(tokens)
        found.loss.sum().backward()
        # log(ratio) rounds once (2^-24 relative of at most 1.7) and exp once more: 1e-6 is
        # ten ulps.
        assert found.loss.item() == pytest.approx(loss, rel=1e-6)
        assert tokens.trainer_logprobs.grad.item() == pytest.approx(gradient, rel=1e-6)
        assert found.clipped.item() == bool(clipped)


class TestSequenceRatio:
    def test_a_clipped_sequence_has_no_gradient_anywhere(self):
        logprobs = leaf(0.3, 0.1, 0.0)
        tokens = Tokens(logprobs, torch.zeros(3), torch.ones(3), torch.tensor([2, 1]))
        found = SequenceRatio(0.1, 0.1)(tokens)
        found.loss.sum().backward()
        assert found.clipped.tolist() == [True, True, False]
        assert logprobs.grad.tolist() == [0, 0, -1]


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


class TestKl:
    def test_is_zero_for_the_same_policy_and_has_no_gradient_there(self):
        logprobs = leaf(-0.5, -3.0)
        assert k3(logprobs, logprobs.detach()).tolist() == [0.0, 0.0]
        tokens = Tokens(logprobs, logprobs.detach(), torch.zeros(2), torch.tensor([2]))
        found = objective(kl=1.0)(tokens, UpdateSize(2, 1, 2), logprobs.detach(), logprobs.detach())
        found.loss.backward()
        assert found.metrics["policy/kl_ref"] == 0
        assert logprobs.grad.tolist() == [0.0, 0.0]

    def test_k1_in_the_loss_is_refused(self):
        with pytest.raises(ValueError, match="expected gradient of k1 is zero"):
            AlgorithmSettings(kl=0.1, kl_estimator="k1")

    def test_where_it_counts_by_default(self):
        def kl_term(name="grpo", **keys):
            return AlgorithmSettings(name=name, kl=0.1, **keys).kl_term(ALGORITHMS[name])

        assert kl_term() == ("k3", "loss")
        assert kl_term(kl_in="reward") == ("k1", "reward")
        assert kl_term("ppo") == ("k1", "reward")
        assert kl_term("ppo", kl_in="loss") == ("k3", "loss")
        assert kl_term("reinforce_pp_baseline") == ("k2", "loss")


class TestCorrections:
    TOKENS = Tokens(
        leaf(0.0, 0.0, 0.0),
        torch.tensor([math.log(4.0), math.log(0.5), math.log(1.5)]),
        torch.ones(3),
        torch.tensor([2, 1]),
    )

    @pytest.mark.parametrize(
        "settings, weights, touched",
        [
            pytest.param({"correction": "tis"}, [2, 0.5, 1.5], [1, 0, 0], id="tis"),
            pytest.param(
                {"correction": "tis", "correction_level": "sequence"},
                [2, 2, 1.5],
                [0, 0, 0],
                id="tis-sequence",
            ),
            pytest.param({"correction": "mis"}, [0, 0.5, 1.5], [1, 0, 0], id="mis"),
            pytest.param(
                {"correction": "mis", "correction_level": "sequence", "correction_high": 1.9},
                [0, 0, 1.5],
                [1, 1, 0],
                id="mis-sequence",
            ),
            pytest.param(
                {"correction": "mis", "correction_level": "geometric", "correction_high": 1.45},
                [2**0.5, 2**0.5, 0],
                [0, 0, 1],
                id="mis-geometric",
            ),
            pytest.param({"correction": "icepop"}, [4, 0.5, 1.5], [0, 0, 0], id="icepop"),
            pytest.param(
                {"correction": "icepop", "correction_low": 0.6},
                [4, 0, 1.5],
                [0, 1, 0],
                id="icepop-low",
            ),
            pytest.param(
                {"correction": "sequence_mask", "correction_high": 1.45},
                [1, 1, 0],
                [0, 0, 1],
                id="sequence-mask",
            ),
            pytest.param({"correction": "sequence_mask"}, [0, 0, 0], [1, 1, 1], id="strict"),
        ],
    )
    def test_by_hand(self, settings, weights, touched):
        # Ratios 4 and 1/2 in one sequence (product 2, geometric mean sqrt 2), 3/2 in another.
        correction = Correction.from_settings(AlgorithmSettings(**settings))
        found = correction(self.TOKENS, torch.zeros(3))
        assert found.weights.tolist() == pytest.approx(weights, rel=1e-6)
        assert found.touched.tolist() == [bool(t) for t in touched]

    def test_metrics_and_loss(self):
        chosen = objective(correction="tis", aggregation="token_mean")
        behavior = torch.tensor([math.log(4.0), 0.0])
        logprobs = behavior.clone().requires_grad_()
        tokens = Tokens(logprobs, behavior, torch.tensor([1.0, -1.0]), torch.tensor([2]))
        found = chosen(tokens, UpdateSize(2, 1, 2), torch.zeros(2))
        found.loss.backward()
        assert logprobs.grad.tolist() == [-1.0, 0.5]  # weights 2 and 1, halved
        assert found.metrics["correction/weight_mean"] == 1.5
        assert found.metrics["correction/touched_fraction"] == 0.5
        assert found.peaks["correction/weight_max"] == 2
        assert found.peaks["correction/ratio_max"] == pytest.approx(4)

    def test_equal_log_probs_weigh_exactly_one(self):
        values = torch.tensor([-0.3, -7.7, -1e-3])
        tokens = Tokens(leaf(0, 0, 0), values, torch.ones(3), torch.tensor([3]))
        for settings in (
            {"correction": "tis"},
            {"correction": "mis", "correction_level": "geometric"},
            {"correction": "icepop"},
            {"correction": "sequence_mask"},
        ):
            found = Correction.from_settings(AlgorithmSettings(**settings))(tokens, values)
            assert found.weights.tolist() == [1, 1, 1]
            assert not found.touched.any()


class TestUsers:
    def write(self, tmp_path, text):
        file = tmp_path / "mine.py"
        file.write_text(text)
        return file

    def test_a_function_is_an_algorithm(self, tmp_path):
        file = self.write(
            tmp_path,
            "def push(tokens, strength):\n"
            "    return -strength * tokens.advantages * tokens.trainer_logprobs\n",
        )
        chosen = objective(name=f"{file}:push", options={"strength": 2.0})
        tokens = one(0.0, 3.0)
        chosen(tokens, UpdateSize(1, 1, 1), torch.zeros(1)).loss.backward()
        assert tokens.trainer_logprobs.grad.item() == -6.0

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
        with pytest.raises(UserError, match=r"algorithm\.gamma means nothing to .*mine\.py:mine"):
            objective(name=name, gamma=0.9)
        file = self.write(tmp_path, "def push(tokens): return -tokens.trainer_logprobs\n")
        with pytest.raises(UserError, match=r"algorithm\.clip means nothing to .*mine\.py:push"):
            objective(name=f"{file}:push", clip=0.2)

    @pytest.mark.parametrize(
        "text, member, message",
        [
            ("x = 1\n1 / 0\n", "f", "line 2: ZeroDivisionError"),
            ("def f(:\n", "f", "line 1: SyntaxError"),
            ("def g(tokens): pass\n", "f", "'f' is not a function"),
            ("def f(tokens, tau): pass\n", "f", r"needs algorithm\.options\.tau"),
        ],
    )
    def test_bad_files_are_named(self, tmp_path, text, member, message):
        file = self.write(tmp_path, text)
        with pytest.raises(UserError, match=message):
            objective(name=f"{file}:{member}")

    OWN_ADVANTAGES = (
        "from jetrl.settings.algorithms import Algorithm\n"
        "def shifted(step, shift=0.5): return step.at_tokens(step.rewards - shift)\n"
        "def push(tokens, tau=1.0): return -tau * tokens.advantages * tokens.trainer_logprobs\n"
        "mine = Algorithm('mine', '', shifted, push, 'token_mean')\n"
    )

    def test_a_record_without_what_its_built_in_loss_needs(self, tmp_path):
        text = self.RECORD.replace("'clip': 0.1, ", "")
        with pytest.raises(UserError, match=r"needs algorithm\.options\.clip, .*'clip': \.\.\."):
            objective(name=f"{self.write(tmp_path, text)}:mine")

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
            (
                "    return [np.ones(3), np.ones(2)]",
                "of sample 0 are 3 numbers for its 2 tokens",
            ),
            ("    return [np.ones(2)]", "array for each of the 2 samples"),
            ("    return None", "array for each of the 2 samples"),
            ("    return [np.ones(2), np.full(3, np.nan)]", "sample 1 .* not finite"),
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

    def test_memory_that_ran_out_in_it_is_no_mistake_of_it(self, tmp_path):
        file = self.write(tmp_path, "def f(tokens):\n    raise MemoryError\n")
        with pytest.raises(MemoryError):
            objective(name=f"{file}:f")(one(0.0, 3.0), UpdateSize(1, 1, 1), torch.zeros(1))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "dapoo"}, "did you mean dapo"),
        ({"name": "rloo", "clip": 0.1}, "algorithm.clip means nothing to rloo"),
        ({"name": "grpo", "gamma": 0.9}, "algorithm.gamma means nothing to grpo"),
        ({"name": "ppo", "dynamic_sampling": True}, "means nothing to ppo"),
        ({"dynamic_sampling_rounds": 8}, "set algorithm.dynamic_sampling=true"),
        ({"kl_estimator": "k2"}, "algorithm.kl = 0"),
        ({"correction_high": 3.0}, "correction = none"),
        ({"correction": "tis", "correction_low": 0.5}, "upper bound alone"),
        ({"correction": "icepop", "correction_level": "sequence"}, "icepop has token"),
        ({"correction": "mis", "correction_low": 3.0}, "not below"),
        ({"options": {"a": 1}}, "file.py:function"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmSettings(**settings)


def test_every_algorithm_has_its_pieces():
    for name, record in ALGORITHMS.items():
        chosen = objective(name=name)
        assert isinstance(chosen.token_loss(verl_tokens()), TokenLoss)
        assert record.title
        assert "arXiv" in record.paper


def test_overlong_buffer():
    assert objective(100, name="dapo").overlong_buffer == 20
    assert objective(100, name="dapo", overlong_buffer=0).overlong_buffer == 0
    assert objective(100, name="grpo").overlong_buffer == 0


def test_a_dual_clip_bounds_the_loss_of_tokens_with_a_negative_advantage():
    """With c = 3 a ratio of e^2 and an advantage of -2 lose 6, and the gradient is gone."""
    loss = ClippedRatio(0.2, 0.2, dual_clip=3.0)
    plain = ClippedRatio(0.2, 0.2)
    over = one(2.0, -2.0)
    lost = loss(over)
    lost.loss.sum().backward()
    assert lost.loss.item() == 6.0
    assert lost.clipped.tolist() == [True]
    assert over.trainer_logprobs.grad.tolist() == [0.0]
    for difference, advantage in [(1.0, -2.0), (2.0, 2.0), (-2.0, -2.0), (0.0, -1.0)]:
        with_dual, without = loss(one(difference, advantage)), plain(one(difference, advantage))
        assert with_dual.loss.tolist() == without.loss.tolist()
        assert with_dual.clipped.tolist() == without.clipped.tolist()


@pytest.mark.parametrize("loss", [ClippedRatio(0.2, 0.2), DetachedRatio(4.0), Ratio()])
def test_a_log_ratio_that_overflows_leaves_loss_and_gradient_finite(loss):
    tokens = one(100.0, 1.0)
    loss(tokens).loss.sum().backward()
    assert math.isfinite(tokens.trainer_logprobs.grad.item())


def test_bounding_log_ratios_changes_no_finite_exponential():
    values = torch.cat([torch.linspace(-120, 88, 1000), torch.tensor([MAX_LOG_RATIO, math.nan])])
    assert torch.equal(bounded_exp(values).view(torch.int32), torch.exp(values).view(torch.int32))
    above = torch.nextafter(torch.tensor(MAX_LOG_RATIO), torch.tensor(math.inf))
    assert torch.exp(above).isinf()
    assert bounded_exp(above).isfinite()
    assert k3(torch.tensor(-200.0), torch.tensor(0.0)).isfinite()
