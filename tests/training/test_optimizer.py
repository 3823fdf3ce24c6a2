"""AdamW, its schedule, its clip, and its state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from jetrl.errors import UserError
from jetrl.settings.loading import Settings
from jetrl.training.optimizer import Optimizer, learning_rate


def train_settings(**keys):
    return Settings.model_validate({"train": keys}).train


def make(gradient=1.0, **keys):
    masters = {
        "w.weight": nn.Parameter(torch.full((2, 2), 1.0)),
        "n.weight": nn.Parameter(torch.full((3,), 1.0)),
    }
    optimizer = Optimizer(masters, train_settings(**{"lr": 0.1, "grad_clip": 1e9} | keys), 10)
    for p in masters.values():
        p.grad = torch.full_like(p, gradient)
    return optimizer, masters


def update(optimizer):
    """Applies the gradients; returns their norm."""
    total_norm = optimizer.gradient_norm()
    optimizer.apply(total_norm)
    return float(total_norm)


@pytest.mark.parametrize(
    "keys, expected",
    [
        pytest.param({}, [1.0] * 6, id="constant"),
        pytest.param({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0], id="warmup"),
        pytest.param(
            {"schedule": "linear", "min_lr_ratio": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2], id="linear"
        ),
        pytest.param(
            {"schedule": "cosine", "min_lr_ratio": 0.0},
            [1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0.0, 0.0],
            id="cosine",
        ),
        pytest.param(
            {"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.0},
            [0.5, 1.0, 1.0, 0.5, 0.0, 0.0],
            id="warmup-linear",
        ),
    ],
)
def test_schedule(keys, expected):
    settings = train_settings(lr=1.0, **keys)
    got = [learning_rate(u, settings, 5) for u in range(6)]
    assert got == pytest.approx(expected, abs=1e-12)


def test_decay_acts_on_matrices_alone():
    optimizer, masters = make(gradient=0.0, weight_decay=0.5)
    update(optimizer)
    assert torch.equal(masters["n.weight"], torch.ones(3))
    # 1 - lr * decay = 0.95, rounded in float32 once or twice.
    assert masters["w.weight"][0, 0].item() == pytest.approx(0.95, rel=2**-22)


def test_gradient_is_clipped_to_the_global_norm():
    optimizer, masters = make(gradient=3.0, grad_clip=0.5)
    norm = update(optimizer)
    assert norm == pytest.approx(3.0 * math.sqrt(7), rel=1e-6)
    first_moment = optimizer.state_tensors()["exp_avg.w.weight"]
    # exp_avg = (1 - beta1) * clipped gradient; the clip divides by norm + 1e-6 (torch).
    expected = 0.1 * 3.0 * 0.5 / (3.0 * math.sqrt(7) + 1e-6)
    assert first_moment[0, 0].item() == pytest.approx(expected, rel=1e-5)
    assert masters["w.weight"][0, 0] < 1


def test_state_goes_on_bit_for_bit():
    def run(optimizer, masters, updates):
        for u in updates:
            generator = torch.Generator().manual_seed(u)
            for p in masters.values():
                p.grad = torch.randn(p.shape, generator=generator)
            update(optimizer)

    keys = {"weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2}
    optimizer, masters = make(**keys)
    run(optimizer, masters, range(7))
    cut, cut_masters = make(**keys)
    run(cut, cut_masters, range(3))
    state = {name: t.clone() for name, t in cut.state_tensors().items()}
    resumed, resumed_masters = make(**keys)
    run(resumed, resumed_masters, range(20, 22))  # a state of its own, to be replaced
    resumed.load_state(state, cut.num_updates)
    with torch.no_grad():
        for name, p in resumed_masters.items():
            p.copy_(cut_masters[name])
    run(resumed, resumed_masters, range(3, 7))
    assert resumed.num_updates == 7
    for name, p in masters.items():
        assert torch.equal(p, resumed_masters[name])
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name])


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"exp_avg.x.weight": torch.zeros(2)}, "no parameter", id="unknown"),
        pytest.param({"exp_avg.n.weight": torch.zeros(4)}, r"needs float32 \(3,\)", id="shape"),
        pytest.param({"exp_avg.n.weight": torch.zeros(3).double()}, "float64", id="dtype"),
        pytest.param({"exp_avg_sq.n.weight": None}, "'n.weight' is incomplete", id="incomplete"),
    ],
)
def test_state_that_does_not_fit_is_refused(change, message):
    optimizer, _ = make()
    update(optimizer)
    state = {name: t.clone() for name, t in optimizer.state_tensors().items()} | change
    state = {name: t for name, t in state.items() if t is not None}
    before = optimizer.state_tensors()
    with pytest.raises(UserError, match=message):
        optimizer.load_state(state, 5)
    assert optimizer.num_updates == 1
    assert optimizer.state_tensors().keys() == before.keys()
