"""AdamW's moments in three bytes: the masters move as with float32 ones, and resume bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from one_layer import config
from torch import nn

from jetrl.errors import UserError
from jetrl.kernels.adamw import adamw_
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.models.policy import Policy
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import load_config
from jetrl.settings.sections import TrainSettings
from jetrl.training import Checkpoints, SftTrainer, Trainer
from jetrl.training.optimizer import Optimizer
from jetrl.types import Example

STEPS = 100
BETAS = [pytest.param((0.9, 0.99), id="0.99"), pytest.param((0.9, 0.999), id="0.999")]
TINY = config(vocab_size=48)


def language_model_gradients():
    """Return masters, and each step's gradients, of a tiny decoder that learns to add digits."""
    policy = Policy.from_config(TINY, PrecisionPlan.preset("fp32"), seed=0)
    settings = load_config("demo", ["precision.preset=fp32", "sft.lr=3e-3"])
    trainer = SftTrainer(policy, settings)
    masters = {name: p.detach().clone() for name, p in policy.master_weights().items()}
    steps, apply = [], trainer.optimizer.apply

    def record(total_norm):
        scale = min(1.0, 1.0 / float(total_norm))
        steps.append({n: scale * p.grad for n, p in policy.master_weights().items()})
        apply(total_norm)

    trainer.optimizer.apply = record
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        pairs = rng.integers(0, 10, (8, 2)).tolist()
        trainer.step([Example((a, 10, b), (11 + a + b, 40)) for a, b in pairs])
    return masters, steps


def synthetic_gradients():
    """Return masters, and gradients of each step, that are noise about a mean.

    Some channels are 30 times larger than others, and some rows have a gradient now and then, as
    those of an embedding.
    """
    g = torch.Generator().manual_seed(0)
    shape = (128, 256)
    size = torch.exp(torch.randn(128, 1, generator=g) + torch.randn(1, 256, generator=g))
    size[:, ::50] *= 30
    mean = 0.2 * torch.randn(shape, generator=g)
    steps = []
    for _ in range(STEPS):
        gradient = 1e-5 * size * (mean + torch.randn(shape, generator=g))
        gradient[::3] *= (torch.rand(43, 1, generator=g) < 0.2).float()
        steps.append({"w": gradient})
    return {"w": 0.02 * torch.randn(shape, generator=g)}, steps


@pytest.fixture(scope="module", params=["language-model", "synthetic"])
def gradients(request):
    make = language_model_gradients if request.param == "language-model" else synthetic_gradients
    return make()


def adamw_float64(masters, steps, betas, lr=1e-6, eps=1e-8):
    """The masters' movement by the definition of AdamW."""
    moved = {}
    for name, w in masters.items():
        m, v, total = (torch.zeros_like(w, dtype=torch.float64) for _ in "mvt")
        for t, gradients in enumerate(steps, 1):
            g = gradients[name].double()
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            total -= lr * m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        moved[name] = total
    return moved


def movement(masters, steps, **keys):
    """Return by how much an Optimizer moves the masters, in float64."""
    parameters = {name: nn.Parameter(w.clone()) for name, w in masters.items()}
    optimizer = Optimizer(parameters, TrainSettings(**({"grad_clip": 1e4} | keys)), STEPS)
    for gradients in steps:
        for name, p in parameters.items():
            p.grad = gradients[name].clone()
        optimizer.apply(optimizer.gradient_norm())
    return {n: p.detach().double() - masters[n].double() for n, p in parameters.items()}


def relative_error(moved, reference):
    off = sum(float((moved[n] - reference[n]).square().sum()) for n in reference)
    return math.sqrt(off / sum(float(r.square().sum()) for r in reference.values()))


@pytest.mark.parametrize("betas", BETAS)
def test_masters_move_as_with_float32_moments(gradients, betas):
    """After 100 updates at a learning rate of 1e-6 the movement is off by less than one percent.

    Every matrix by itself keeps that promise too. Norm weights near 1 move by parts of their own
    last place, with float32 moments as well, and are the same bits here and there.
    """
    masters, steps = gradients
    reference = adamw_float64(masters, steps, betas)
    compact = movement(masters, steps, optimizer_states="compact", betas=betas)
    wide = movement(masters, steps, betas=betas)
    matrices = {n: r for n, r in reference.items() if r.ndim == 2}
    assert relative_error(compact, matrices) < 0.01
    for name, moved in compact.items():
        if name in matrices:
            assert relative_error(compact, {name: reference[name]}) < 0.01
        else:
            assert torch.equal(moved, wide[name])


@pytest.mark.parametrize(
    "size", [pytest.param(1e-30, id="tiny"), pytest.param(1e4, id="huge"), 0.0]
)
def test_gradients_of_any_size_give_bounded_updates(size):
    """No update is larger than AdamW's own bound on |m| / sqrt(v) allows, whatever the gradients.

    With the correction of the last rounding it may be a unit more; no gradients give no update.
    """
    shape = (8, 40)
    ratio, root = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.int16)
    master, g = torch.zeros(shape), torch.Generator().manual_seed(0)
    for step in range(1, 30):
        scalars = adamw_scalars(step, lambda k: 1.0, (0.9, 0.99), 1e-8, 0.0)
        before = master.clone()
        gradient = size * torch.randn(shape, generator=g) * 10 ** (4 * torch.randn(1, generator=g))
        adamw_(master, gradient.clamp(-16384, 16384), ratio, root, torch.tensor(1.0), scalars)
        assert (master - before).abs().max() <= 3.5
        assert torch.isfinite(master).all()
    if size == 0.0:
        assert not master.any()


def make(policy_masters, **keys):
    settings = TrainSettings(
        **({"lr": 0.01, "optimizer_states": "compact", "weight_decay": 0.1} | keys)
    )
    return Optimizer(policy_masters, settings, 10)


def small_masters():
    g = torch.Generator().manual_seed(1)
    return {
        "a.weight": nn.Parameter(torch.randn(5, 7, generator=g)),
        "b.weight": nn.Parameter(torch.randn(3, 129, generator=g)),
        "n.weight": nn.Parameter(torch.ones(7)),
    }


def run(optimizer, updates):
    for u in updates:
        g = torch.Generator().manual_seed(u)
        for name, p in optimizer.masters.items():
            gradient = torch.randn(p.shape, generator=g)
            p.grad = None if (name, u) == ("b.weight", 1) else gradient
        optimizer.apply(optimizer.gradient_norm())


def test_state_goes_on_bit_for_bit():
    whole = make(small_masters(), schedule="cosine", warmup_steps=2)
    run(whole, range(7))
    cut = make(small_masters(), schedule="cosine", warmup_steps=2)
    run(cut, range(3))
    state = {name: t.clone() for name, t in cut.state_tensors().items()}
    resumed = make(small_masters(), schedule="cosine", warmup_steps=2)
    run(resumed, range(20, 22))
    resumed.load_state(state, cut.num_updates)
    with torch.no_grad():
        for name, p in resumed.masters.items():
            p.copy_(cut.masters[name])
    run(resumed, range(3, 7))
    for name, p in whole.masters.items():
        assert torch.equal(p, resumed.masters[name])
    assert whole.state_tensors().keys() == resumed.state_tensors().keys()
    for name, tensor in whole.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name])
    assert resumed.state_tensors()["step.b.weight"] == 6  # of seven updates one had no gradient


@pytest.mark.parametrize("saved, here", [("fp32", "compact"), ("compact", "fp32")])
def test_states_of_the_other_kind_are_refused_in_words(saved, here, bigram, tmp_path):
    def trainer(states):
        keys = ["train.lr=0.05", f"train.optimizer_states={states}"]
        return Trainer(bigram(), load_config(None, keys))

    first = trainer(saved)
    first.step(first.policy.draw([1.0, 0.0, 0.0, 0.5]))
    path = Checkpoints(tmp_path).save(1, first.policy, first.optimizer, {})
    other = trainer(here)
    before = {n: p.detach().clone() for n, p in other.policy.master_weights().items()}
    with pytest.raises(UserError, match=f"resume with train.optimizer_states={saved}"):
        Checkpoints(tmp_path).load(path, other.policy, other.optimizer)
    assert all(torch.equal(p, before[n]) for n, p in other.policy.master_weights().items())
    again = trainer(saved)
    Checkpoints(tmp_path).load(path, again.policy, again.optimizer)
    for t in (first, again):
        t.step(t.policy.draw([1.0, 0.0, 0.0, 0.5]))
    for name, p in first.policy.master_weights().items():
        assert torch.equal(p, again.policy.master_weights()[name])


@pytest.mark.parametrize(
    "keys, message",
    [
        pytest.param("train.betas=[0.95,0.9]", r"betas\[0\]\*\*2 below betas\[1\]", id="betas"),
        pytest.param("train.grad_clip=1e5", "gradients up to 16384", id="clip"),
    ],
)
def test_what_three_bytes_cannot_hold_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        load_config(None, ["train.optimizer_states=compact", keys])
