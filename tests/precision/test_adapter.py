"""Adapters beside a linear layer: bits in any batch, parts, and gradients against float64."""

from __future__ import annotations

import pytest
import torch

from jetrl.precision import PrecisionPlan
from jetrl.precision.adapter import add_adapter
from jetrl.precision.adapter_weight import AdapterShape, AdapterWeight
from jetrl.precision.gradients import Gradients
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import QuantizedWeight

# Q has an adapter and V has one; K, between the two, has none.
SHAPE = AdapterShape(rank=5, scale=0.7, num_rows=96, num_columns=200, parts=((0, 40), (64, 32)))


def weight(dtype: torch.dtype = torch.bfloat16) -> AdapterWeight:
    g = torch.Generator().manual_seed(0)
    a = torch.nn.Parameter(torch.randn(SHAPE.a_shape, generator=g) / 14)
    b = torch.nn.Parameter(torch.randn(SHAPE.b_shape, generator=g))
    return AdapterWeight("layers.0.qkv", a, b, SHAPE, dtype)


def inputs(rows: int = 130) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, SHAPE.num_columns, generator=g).bfloat16()
    return torch.randn(rows, SHAPE.num_rows, generator=g).bfloat16(), x


def dense(w: AdapterWeight, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix [N, K] that the adapter adds to the layer's weight."""
    rows = torch.zeros(SHAPE.num_rows, SHAPE.num_columns, dtype=a.dtype)
    parts = zip(SHAPE.parts, a.split(SHAPE.rank), b.split([40, 32]), strict=True)
    for (first, count), part_a, part_b in parts:
        rows[first : first + count] = SHAPE.scale * part_b @ part_a
    return rows


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    w, (y, x) = weight(), inputs()
    with torch.no_grad():
        whole = add_adapter(y.clone(), x, w)
        for rows in (slice(0, 1), slice(3, 10), slice(5, 69)):
            assert torch.equal(add_adapter(y[rows].clone(), x[rows], w), whole[rows])
    assert torch.equal(whole[:, 40:64], y[:, 40:64]), "no part adds to these rows of the layer"
    assert not torch.equal(whole[:, :40], y[:, :40])


def test_gradients_are_those_of_a_dense_product_in_float64() -> None:
    """Operands are rounded to BF16 at most twice on the way, and sums are FP32: 2 * 2**-8."""
    w, (y, x) = weight(), inputs()
    x.requires_grad_()
    g = torch.Generator().manual_seed(2)
    dy = torch.randn(y.shape, generator=g).bfloat16()
    base = torch.nn.Parameter(torch.randn(96, 200, generator=g).bfloat16().float())
    plan = PrecisionPlan.preset("bf16")
    formats = plan.linear_formats(0, 1)
    roundings = {side: plan.rounding(side, format) for side, format in formats.items()}
    quantized = QuantizedWeight("layers.0.qkv", base, formats, roundings)
    Linear(quantized, None, plan, torch.bfloat16, Gradients(), w)(x, "train").backward(dy)
    assert base.grad is None, "an adapter's base is frozen"
    a, b = (m.detach().double().requires_grad_() for m in (w.a, w.b))
    wide = x.detach().double().requires_grad_()
    (wide @ (base.detach().double() + dense(w, a, b)).mT).backward(dy.double())
    for ours, theirs in ((w.a.grad, a.grad), (w.b.grad, b.grad), (x.grad, wide.grad)):
        assert ours is not None
        assert (ours.double() - theirs).norm() < 2 * 2**-8 * theirs.norm()
    assert w.a.grad.dtype == w.b.grad.dtype == torch.float32


@pytest.mark.parametrize("rank, padded", [(1, 16), (16, 16), (17, 32)])
def test_a_rank_is_filled_up_to_what_the_tensor_core_takes(rank: int, padded: int) -> None:
    shape = AdapterShape(rank, 1.0, 128, 64, ((0, 128),))
    assert shape.padded_rank == padded
    assert (shape.a_shape, shape.b_shape) == ((rank, 64), (128, rank))
