"""AdamW, its schedule, its clip and its state, with moments of eight and of three bytes."""

from __future__ import annotations

import math

import pytest
import torch
from tests.training.shared import equal, settings, snapshot
from torch import nn

from jetrl.errors import UserError
from jetrl.kernels.adamw import adamw_
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.settings.loading import load_config
from jetrl.settings.sections import TrainSettings
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.optimizer import Optimizer, learning_rate
from jetrl.training.trainer import Trainer

STEPS = 100
KINDS = pytest.mark.parametrize("states", ["fp32", "compact"])


def make(gradient=1.0, **keys):
    g = torch.Generator().manual_seed(1)
    masters = {
        "w.weight": nn.Parameter(torch.full((2, 2), 1.0)),
        "n.weight": nn.Parameter(torch.full((3,), 1.0)),
        "b.weight": nn.Parameter(torch.randn(3, 129, generator=g)),
    }
    optimizer = Optimizer(masters, TrainSettings(**{"lr": 0.1, "grad_clip": 1e4} | keys), 10)
    for name in ("w.weight", "n.weight"):
        masters[name].grad = torch.full_like(masters[name], gradient)
    return optimizer


def update(optimizer):
    """Apply the gradients; return their norm."""
    total_norm = optimizer.gradient_norm()
    optimizer.apply(total_norm)
    return float(total_norm)


@pytest.mark.parametrize(
    "keys, expected",
    [
        pytest.param({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0], id="warmup"),
        pytest.param(
            {"schedule": "cosine", "min_lr_ratio": 0.0},
            [1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0.0, 0.0],
            id="cosine",
        ),
        pytest.param(
            {"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2},
            [0.5, 1.0, 1.0, 0.6, 0.2, 0.2],
            id="warmup-linear",
        ),
    ],
)
def test_schedule(keys, expected):
    got = [learning_rate(u, TrainSettings(lr=1.0, **keys), 5) for u in range(6)]
    assert got == pytest.approx(expected, abs=1e-12)


@KINDS
def test_decay_acts_on_matrices_alone(states):
    optimizer = make(gradient=0.0, weight_decay=0.5, optimizer_states=states)
    update(optimizer)
    assert torch.equal(optimizer.masters["n.weight"], torch.ones(3))
    # 1 - lr * decay = 0.95, rounded in float32 once or twice.
    assert optimizer.masters["w.weight"][0, 0].item() == pytest.approx(0.95, rel=2**-22)


def test_gradient_is_clipped_to_the_global_norm():
    optimizer = make(gradient=3.0, grad_clip=0.5)
    norm = update(optimizer)
    assert norm == pytest.approx(3.0 * math.sqrt(7), rel=1e-6)
    first_moment = optimizer.state_tensors()["exp_avg.w.weight"]
    # exp_avg = (1 - beta1) * clipped gradient; the clip divides by norm + 1e-6 (torch).
    expected = 0.1 * 3.0 * 0.5 / (3.0 * math.sqrt(7) + 1e-6)
    assert first_moment[0, 0].item() == pytest.approx(expected, rel=1e-5)
    assert optimizer.masters["w.weight"][0, 0] < 1


@KINDS
def test_state_goes_on_bit_for_bit(states):
    def run(optimizer, updates):
        for u in updates:
            generator = torch.Generator().manual_seed(u)
            for name, p in optimizer.masters.items():
                gradient = torch.randn(p.shape, generator=generator)
                p.grad = None if (name, u) == ("b.weight", 1) else gradient
            update(optimizer)

    keys = {"lr": 0.01, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2}
    whole, cut, resumed = (make(**keys, optimizer_states=states) for _ in range(3))
    run(whole, range(7))
    run(cut, range(3))
    run(resumed, range(20, 22))  # a state of its own, to be replaced
    resumed.load_state({n: t.clone() for n, t in cut.state_tensors().items()}, cut.num_updates)
    with torch.no_grad():
        for name, p in resumed.masters.items():
            p.copy_(cut.masters[name])
    run(resumed, range(3, 7))
    assert resumed.num_updates == 7
    assert equal(whole.masters, resumed.masters)
    assert equal(whole.state_tensors(), resumed.state_tensors())
    assert resumed.state_tensors()["step.b.weight"] == 6  # of seven updates one had no gradient


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"exp_avg.x.weight": torch.zeros(2)}, "no parameter", id="unknown"),
        pytest.param({"exp_avg.n.weight": torch.zeros(4)}, r"float32 \(3,\)", id="shape"),
        pytest.param({"exp_avg.n.weight": torch.zeros(3).double()}, "float64", id="dtype"),
        pytest.param({"exp_avg_sq.n.weight": None}, "'n.weight' is incomplete", id="incomplete"),
    ],
)
def test_state_that_does_not_fit_is_refused(change, message):
    optimizer = make()
    update(optimizer)
    before = optimizer.state_tensors()
    state = {name: t for name, t in (before | change).items() if t is not None}
    with pytest.raises(UserError, match=message):
        optimizer.load_state(state, 5)
    assert optimizer.num_updates == 1
    assert equal(optimizer.state_tensors(), before)


@pytest.mark.parametrize("saved, here", [("fp32", "compact"), ("compact", "fp32")])
def test_states_of_the_other_kind_are_refused_in_words(saved, here, bigram, tmp_path):
    def trainer(states):
        return Trainer(bigram(), settings({"optimizer_states": states}))

    first, other = trainer(saved), trainer(here)
    first.step(first.policy.draw([1.0, 0.0, 0.0, 0.5]))
    path = Checkpoints(tmp_path).save(1, first.policy, first.optimizer, {})
    before = snapshot(other.policy)
    with pytest.raises(UserError, match=f"resume with train.optimizer_states={saved}"):
        Checkpoints(tmp_path).load(path, other.policy, other.optimizer)
    assert equal(snapshot(other.policy), before)


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
        steps.append({"w": gradient, "n": gradient[0]})
    return {"w": 0.02 * torch.randn(shape, generator=g), "n": torch.ones(256)}, steps


def adamw_float64(masters, steps, betas, lr=1e-6, eps=1e-8):
    """Return the masters' movement by the definition of AdamW."""
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
    optimizer = Optimizer(parameters, TrainSettings(**{"grad_clip": 1e4} | keys), STEPS)
    for gradients in steps:
        for name, p in parameters.items():
            p.grad = gradients[name].clone()
        update(optimizer)
    return {n: p.detach().double() - masters[n].double() for n, p in parameters.items()}


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.9, 0.999)], ids=str)
def test_masters_move_as_with_float32_moments(betas):
    """After 100 updates at a learning rate of 1e-6 a matrix is off by less than one percent.

    Norm weights near 1 move by parts of their own last place, with float32 moments as well, and are
    the same bits here and there.
    """
    masters, steps = synthetic_gradients()
    reference = adamw_float64(masters, steps, betas)
    compact = movement(masters, steps, optimizer_states="compact", betas=betas)
    wide = movement(masters, steps, betas=betas)
    assert (compact["w"] - reference["w"]).norm() < 0.01 * reference["w"].norm()
    assert torch.equal(compact["n"], wide["n"])


@pytest.mark.parametrize("size", [1e-30, 1e4, 0.0])
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


@pytest.mark.parametrize(
    "keys, message",
    [
        ("train.betas=[0.95,0.9]", r"betas\[0\]\*\*2 below betas\[1\]"),
        ("train.grad_clip=1e5", "gradients of at most 16384"),
    ],
)
def test_what_three_bytes_cannot_hold_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        load_config(None, ["train.optimizer_states=compact", keys])
