"""Key smoothing: the factors of weights, what smoothing leaves unchanged, and that runs keep it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from benchmarks.shapes import SHAPES

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.errors import UserError
from jetrl.kernels.attention.reference import quantize_kv, stored_values
from jetrl.kernels.rotary import smooth
from jetrl.models.key_smoothing import head_exponents, pair_exponents
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import ModelSource
from jetrl.precision import PrecisionPlan
from jetrl.precision.formats import INT8
from jetrl.precision.quantize import hadamard
from jetrl.session.building import build_reference
from jetrl.settings.loading import Settings
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.optimizer import Optimizer
from jetrl.training.trainer import Trainer

CONFIG = {**SHAPES["tiny"], "hidden_size": 128, "intermediate_size": 128, "vocab_size": 96}
SETTINGS = Settings.model_validate({"algorithm": {"kl": 0.1}})
LAYER = "layers.0.qkv.weight"


def policy(plan: str | PrecisionPlan = "int8") -> Policy:
    return Policy.from_config(CONFIG, plan, seed=0)


def optimizer(p: Policy) -> Optimizer:
    return Trainer(p, Settings()).optimizer


def change_keys(p: Policy) -> None:
    """Make one key channel so large that factors of the weights would be others."""
    first = p.config.num_heads * p.config.head_dim
    with torch.no_grad():
        p.master_weights()[LAYER][first] *= 1000
    p.requantize()


def fresh_exponents(p: Policy) -> torch.Tensor:
    masters = {name: value.detach() for name, value in p.master_weights().items()}
    made = Policy(ModelSource.from_tensors(p.config, masters), p.plan).key_exponents
    assert made is not None
    return made


@pytest.mark.parametrize("biased, normed", [(True, False), (False, True), (False, False)])
def test_factors_are_the_root_of_the_pairs_size(biased: bool, normed: bool) -> None:
    g = np.random.default_rng(0)
    heads, head_dim, width = 3, 16, 40
    weight = g.normal(size=(heads * head_dim, width)) * 10 ** g.uniform(-1, 1, (48, 1))
    bias = g.normal(size=48) * 100 if biased else None
    norm = g.uniform(0.1, 30, head_dim) if normed else None
    found = pair_exponents(weight, bias, norm, heads)
    for head in range(heads):
        expected = []
        for i in range(head_dim // 2):
            rows = [head * head_dim + i, head * head_dim + i + head_dim // 2]
            gains = [1.0, 1.0] if norm is None else [norm[i], norm[i + head_dim // 2]]
            lengths = [math.hypot(*(weight[r] * a)) for r, a in zip(rows, gains, strict=True)]
            offset = 0.0 if bias is None else math.hypot(bias[rows[0]], bias[rows[1]])
            size = offset + math.hypot(*lengths) / math.sqrt(2)
            expected.append(math.floor(math.log2(size) / 2 + 0.5))
        assert found[head].tolist() == [max(e - max(expected), -10) for e in expected]


def test_a_pair_of_zeros_keeps_the_largest_factor() -> None:
    """The pair may grow in training, and dividing it by a small factor would make it dominate."""
    weight = np.ones((4, 8))
    weight[[0, 2]] = 0
    assert pair_exponents(weight, None, None, 1).tolist() == [[0, 0]]
    assert pair_exponents(weight * 0, None, None, 1).tolist() == [[0, 0]]


def test_hadamard_is_the_matrix_in_sylvesters_order() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < 32:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randint(-9, 9, (5, 96)).float()
    expected = (x.unflatten(1, (3, 32)) @ matrix).flatten(1)  # small integers: exact sums
    assert torch.equal(hadamard(x, 32), expected)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_smoothing_leaves_scores_and_saves_small_channels(head_dim: int) -> None:
    torch.manual_seed(head_dim)
    heads, groups = 6, 2
    size = torch.ones(groups, head_dim)
    size[:, [3, head_dim // 2 + 3]] = 100  # one pair of outlier channels
    q, k = torch.randn(50, heads, head_dim), torch.randn(50, groups, head_dim) * size
    q /= size.repeat_interleave(3, 0)  # every channel matters for the scores
    exponents = pair_exponents(
        weight=size.double().numpy().reshape(-1, 1), bias=None, norm=None, num_heads=groups
    )
    of_q, of_k = head_exponents(torch.from_numpy(exponents)[None], heads)[0].split([heads, groups])
    smooth_q, smooth_k = smooth(q, of_q), smooth(k, of_k)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(3, 1))

    true = scores(q, k)
    assert (scores(smooth_q, smooth_k) - true).norm() < 1e-6 * true.norm()
    errors = [
        (scores(one, stored_values(quantize_kv(other, INT8))) - true).norm()
        for one, other in ((q, k), (smooth_q, smooth_k))
    ]
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("preset", ["int8", "unified"])
def test_sampler_and_trainer_agree_and_gradients_are_those_of_plain_keys(preset: str) -> None:
    p = policy(preset)
    change = fresh_exponents(p)
    assert change.shape == (p.config.num_layers, p.config.num_kv_heads, p.config.head_dim // 2)
    engine = RolloutEngine(p, max_batch_size=4, num_pages=64)
    drawn = engine.generate([[1, 2, 3]], SamplingParams(n=3, max_tokens=20, seed=1))
    for one in drawn:
        ours = p.logprobs([[1, 2, 3, *one.token_ids]])[0][2:]
        assert ours.tolist() == list(one.logprobs)

    def gradient(plan: PrecisionPlan) -> torch.Tensor:
        q = Policy.from_config(CONFIG, plan, seed=0)
        torch.cat(q.logprobs([list(range(60))])).sum().backward()
        found = q.master_weights()[LAYER].grad
        assert found is not None
        return found

    smoothed, plain = (gradient(p.plan.replace(key_smoothing=on)) for on in (True, False))
    assert torch.nn.functional.cosine_similarity(smoothed.flatten(), plain.flatten(), 0) > 0.99
    assert not torch.equal(smoothed, plain)


def test_a_run_keeps_its_factors_through_checkpoints_reference_and_critic(tmp_path) -> None:
    p = policy()
    change_keys(p)
    assert p.key_exponents is not None
    assert not torch.equal(p.key_exponents, fresh_exponents(p))
    start = p.key_exponents.clone()
    before = torch.cat(p.logprobs([list(range(40))]))
    path = Checkpoints(tmp_path).save(1, p, optimizer(p), {})
    other = Policy.from_config(CONFIG, "int8", seed=3)  # which has factors of its own
    change_keys(other)
    masters = dict(other.master_weights())
    other = Policy(ModelSource.from_tensors(other.config, masters), other.plan)
    assert not torch.equal(other.key_exponents, start)
    Checkpoints(tmp_path).load(path, other, optimizer(other))
    assert torch.equal(other.key_exponents, start)
    assert torch.equal(before, torch.cat(other.logprobs([list(range(40))])))
    reference = build_reference(SETTINGS, p, tmp_path)
    assert reference is not None
    assert torch.equal(before, torch.cat(reference.logprobs([list(range(40))])))
    source = ModelSource.from_tensors(p.config, p.whole_masters()).with_scalar_head()
    critic = ScalarModel(source, p.plan, key_exponents=p.key_exponents)
    assert torch.equal(critic.key_exponents, start)


def test_a_checkpoint_without_factors_or_with_others_is_refused(tmp_path) -> None:
    p = policy()
    for text in (None, "00", "xyz"):
        with pytest.raises(UserError, match=r"state.json: key_exponents"):
            p.restore_key_exponents(text, "state.json")
    path = Checkpoints(tmp_path).save(1, p, optimizer(p), {})
    assert len(json.loads((path / "state.json").read_text())["key_exponents"]) > 0
    plain = policy(p.plan.replace(key_smoothing=False))
    path = Checkpoints(tmp_path).save(2, plain, optimizer(plain), {})
    assert "key_exponents" not in json.loads((path / "state.json").read_text())


def test_plans_of_earlier_runs_keep_their_keys() -> None:
    stored = PrecisionPlan.preset("int8").to_dict()
    assert stored.pop("key_smoothing") is True
    assert PrecisionPlan.from_dict(stored) == dataclasses.replace(
        PrecisionPlan.preset("int8"), key_smoothing=False
    )
    assert not PrecisionPlan.preset("int8").replace(kv="bf16").smooths_keys
    for name in ("jet", "bf16", "mixed", "alike", "fp32"):
        assert not PrecisionPlan.preset(name).key_smoothing
