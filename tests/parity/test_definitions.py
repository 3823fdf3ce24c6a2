"""Backward and optimizer on a CPU: the same bits as their definitions, written in plain NumPy.

The definitions are in the docstrings of the modules. Sums of integers are Python's, so they cannot
round; everything else is one float32 or float64 operation at a time.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jetrl.kernels.adamw import adamw_
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.kernels.norm import block_squares, rms_norm
from jetrl.precision.gemm import free_matmul
from jetrl.precision.gradients import Gradients, matmul_product, rows_added
from jetrl.precision.linear import Linear
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantized_weight import QuantizedWeight
from jetrl.settings.sections import TrainSettings
from jetrl.training.optimizer import Optimizer

F = np.float32


def random(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Return normal values of very different sizes, as the gradients of a run are."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(spread * torch.randn(shape, generator=g))


def on_grid(values: np.ndarray, bits: int) -> tuple[list[int], Fraction]:
    """Return values as integers, `bits` bits below the largest, and the unit of the grid."""
    largest = float(np.abs(values).max())
    unit = Fraction(2) ** (math.frexp(largest)[1] - bits)
    return [round(Fraction(float(value)) / unit) for value in values.ravel()], unit


def norm_of(*gradients: Tensor) -> Tensor:
    """Return the optimizer's norm of gradients."""
    parameters = {f"{n}.weight": nn.Parameter(g.clone()) for n, g in enumerate(gradients)}
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = gradient
    return Optimizer(parameters, TrainSettings(), 10).gradient_norm()


def sum_of_rows(x: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[1], F)
    for block in range(0, len(x), 128):
        own = np.zeros(x.shape[1], F)
        for row in x[block : block + 128]:
            own = own + row
        total = total + own
    return total


@pytest.mark.parametrize("count", [1, 127, 300])
def test_backward_of_rms_norm(count: int) -> None:
    width, eps = 96, 1e-6  # not a power of two: the division by it rounds
    x, weight = random(count, width, spread=0.5).requires_grad_(), random(width).requires_grad_()
    dy = random(count, width, seed=2)
    rms_norm(x, weight, eps).backward(dy)
    x_, w, g = (t.detach().numpy() for t in (x, weight, dy))
    inverse, mean = np.empty((count, 1), F), np.empty((count, 1), F)
    for row in range(count):
        codes, unit = on_grid(x_[row], (53 - 7) // 2)  # 96 terms take 7 bits
        squares = sum(code * code for code in codes) * unit * unit
        inverse[row] = F(1.0 / np.sqrt(float(squares) / width + eps))
    normed, scaled = x_ * inverse, g * w
    for row, products in enumerate(scaled * normed):
        codes, unit = on_grid(products, 30)
        mean[row] = F(float(sum(codes) * unit) / width)
    assert np.array_equal(x.grad.numpy(), inverse * (scaled - normed * mean))
    assert np.array_equal(weight.grad.numpy(), sum_of_rows(g * normed))


def test_gradient_norm() -> None:
    gradients = [random(300, 40, seed=1), random(7, seed=2)]
    blocks = [*gradients[0].numpy().reshape(-1, 40)[:256].reshape(2, -1)]
    blocks += [gradients[0].numpy()[256:].ravel(), gradients[1].numpy()]
    squares = []
    for block in blocks:
        bits = (53 - (block.size - 1).bit_length()) // 2
        codes, unit = on_grid(block, bits)
        squares.append(float(sum(code * code for code in codes) * unit * unit))
    found = torch.cat([block_squares(gradient) for gradient in gradients])
    assert found.flatten().tolist() == squares
    codes, unit = on_grid(np.array(squares), 30)
    assert norm_of(*gradients).item() == F(np.sqrt(float(sum(codes) * unit)))
    true = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm_of(*gradients).item() == pytest.approx(true, rel=1e-5)


def test_gradient_norm_does_not_overflow_and_keeps_what_is_not_finite() -> None:
    assert norm_of(torch.full((3, 4), 1e30)).item() == F(1e30 * 12**0.5)
    for wrong in (math.inf, -math.inf, math.nan):
        gradient = torch.ones(200, 4)
        gradient[150, 2] = wrong
        assert not norm_of(gradient).isfinite()


@pytest.mark.parametrize("shape", [(3, 70_000), (5,)], ids=str)
def test_adamw_with_float32_states(shape: tuple[int, ...]) -> None:
    """Two updates through the optimizer, which clips; a piece of the work has 2**16 elements."""
    master = nn.Parameter(random(*shape, spread=0.0))
    settings = TrainSettings(lr=0.01, weight_decay=0.1, grad_clip=2.0, betas=(0.9, 0.95))
    optimizer = Optimizer({"w.weight": master}, settings, 10)
    w = master.detach().numpy().copy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step in (1, 2):
        gradient = random(*shape, seed=step)
        master.grad = gradient.clone()
        norm = optimizer.gradient_norm()
        optimizer.apply(norm)
        clip = min(F(2.0) * (F(1.0) / (F(norm.item()) + F(1e-6))), F(1.0))
        beta1, beta2 = (0.9, 0.95) if step == 1 else (0.9 * 0.9, 0.95 * 0.95)
        rate, unbias = F(0.01 / (1 - beta1)), F(1 / math.sqrt(1 - beta2))
        decay = F(1 - 0.01 * 0.1) if len(shape) > 1 else F(1.0)
        g = gradient.numpy() * clip
        m = F(0.9) * m + F(1 - 0.9) * g
        v = F(0.95) * v + F(1 - 0.95) * (g * g)
        w = w * decay - (rate * m) / (np.sqrt(v) * unbias + F(settings.eps))
        assert np.array_equal(master.detach().numpy(), w)
    states = optimizer.state_tensors()
    assert np.array_equal(states["exp_avg.w.weight"].numpy(), m)
    assert np.array_equal(states["exp_avg_sq.w.weight"].numpy(), v)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    master, moments = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
    scalars = adamw_scalars(1, lambda k: 0.1, betas=(0.9, 0.8), eps=1e-8, weight_decay=0.0)
    adamw_(master, torch.zeros(4), *moments, torch.tensor(1.0), scalars)
    assert torch.equal(master, torch.ones(4))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.99)], ids=str)
def test_bias_corrections_are_rounded_once(betas: tuple[float, float]) -> None:
    """Their powers are products in float64, whose error is far below float32's."""
    for step in (1, 2, 3, 10, 999, 5000):
        scalars = adamw_scalars(step, lambda k: 1.0, betas=betas, eps=1e-8, weight_decay=0.0)
        first, second = (1 - Fraction(beta) ** step for beta in betas)
        assert scalars.rate == F(float(1 / first))
        assert scalars.unbias == F(1 / math.sqrt(float(second)))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_rows_of_an_embedding_are_added_in_the_order_of_tokens(threads) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (4096,), generator=g)
    values, total = random(4096, 64).bfloat16(), random(9, 64, seed=1)
    expected = total.numpy().copy()
    for row, value in zip(rows.tolist(), values.float().numpy(), strict=True):
        expected[row] = expected[row] + value
    assert np.array_equal(rows_added(total.clone(), rows, values, range(9)).numpy(), expected)
    own = rows_added(total[2:6].clone(), rows, values, range(2, 6))
    assert np.array_equal(own.numpy(), expected[2:6])


@pytest.mark.parametrize("tokens", [3, 300])
def test_gradient_of_a_bias(tokens: int) -> None:
    plan = PrecisionPlan.preset("int8")
    weight, bias = nn.Parameter(random(64, 64)), nn.Parameter(random(64, seed=1))
    formats = plan.linear_formats(0, 1)
    roundings = {side: plan.rounding(side, format) for side, format in formats.items()}
    quantized = QuantizedWeight("layers.0.test", weight, formats, roundings)
    layer = Linear(quantized, bias, plan, torch.bfloat16, Gradients())
    without = Linear(quantized, None, plan, torch.bfloat16, Gradients())
    x, dy = random(tokens, 64).bfloat16().requires_grad_(), random(tokens, 64, seed=3).bfloat16()
    y = layer(x, "train")
    y.backward(dy)
    assert torch.equal(y, without(x, "train") + bias.bfloat16())
    assert np.array_equal(bias.grad.numpy(), sum_of_rows(dy.float().numpy()))


def test_products_of_bf16_gradients_have_no_order() -> None:
    """Any order of the tokens or features that are summed gives the same bits, near the truth."""
    dy, x, w = (random(*s, spread=0.5).bfloat16() for s in ((700, 64), (700, 96), (64, 96)))
    tokens, features = torch.randperm(700), torch.randperm(64)
    wgrad, dgrad = matmul_product(dy, x), free_matmul(dy, w)
    assert torch.equal(matmul_product(dy[tokens], x[tokens]), wgrad)
    assert torch.equal(free_matmul(dy[:, features], w[features]), dgrad)
    true = dy.double().mT @ x.double()
    assert (wgrad - true).abs().max() <= 2.0**-18 * true.abs().max()
    assert torch.equal(matmul_product(dy, x, torch.ones_like(wgrad)), wgrad + 1)
