"""Integer attention, forward and backward, has the bits of its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tests.kernels import integer_attention_numpy as definition
from tests.kernels.test_attention import causal64
from torch import Tensor

from jetrl.kernels.attention import integer
from jetrl.kernels.attention.reference import quantize_keys_and_values, stored_values

FACTORS = {"random": (1, 1, 1), "sharp": (20, 1, 1), "huge": (2**12, 2**7, 1), "uneven": (1, 1, 1)}
of_each = pytest.mark.parametrize("kind", FACTORS)
NEAR_BORDERS = torch.tensor([0, 1, 126, 127, 128, 129, 255, 256, 700, 1022, *range(1023, 1200, 4)])


def inputs(kind: str, tokens: int, heads: int, groups: int, dim: int) -> list[Tensor]:
    """Return q [T, H, D], k and v [T, G, D], bfloat16, with some rows of zeros."""
    g = torch.Generator().manual_seed(len(kind))
    q, k, v = (torch.randn(tokens, n, dim, generator=g) for n in (heads, groups, groups))
    for x in (q, k, v):
        x[torch.rand(x.shape[:2], generator=g) < 0.1] = 0.0
    if kind == "uneven":
        v *= 2.0 ** torch.randint(-30, 20, (tokens, groups, 1), generator=g)
    return [(x * factor).bfloat16() for x, factor in zip((q, k, v), FACTORS[kind], strict=True)]


def coded(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the codes and scales as a batch of one sequence."""
    stored = (integer._quantize_queries(q), *quantize_keys_and_values(k, v, "int8"))
    return [(codes[None], scales[None]) for codes, scales in stored]


def sequence(stored: list[tuple[Tensor, Tensor]]) -> definition.Sequence:
    (q, sq), (k, sk), (v, sv) = ((c[0].long().numpy(), x[0].numpy()) for c, x in stored)
    return definition.Sequence(q=q, sq=sq, k=k[:, 0], sk=sk[:, 0], v=v[:, 0], sv=sv[:, 0])


@of_each
def test_forward_is_its_definition(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "_MAX_SCORES", 2**11)  # so that queries are in chunks
    (q, q_scales), *stored = coded(*inputs(kind, 1200, 2, 1, 16))
    some = (q[:, NEAR_BORDERS], q_scales[:, NEAR_BORDERS])
    got = integer._attend_codes(some, *stored, NEAR_BORDERS[None])
    words = sequence([(q, q_scales), *stored])
    for (row, i), head in itertools.product(enumerate(NEAR_BORDERS.tolist()), range(2)):
        _, mass, out = definition.forward(words, head, i)
        assert got.mass[0, row, head] == mass
        assert torch.equal(got.out[0, row, head], torch.from_numpy(out).bfloat16())


@of_each
def test_backward_is_its_definition(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first queries do not count, as in a sequence whose prompt counts elsewhere."""
    monkeypatch.setattr(integer, "_MAX_TILE", 2**16)  # two blocks of queries at once
    counted = torch.arange(260) >= 50
    stored = coded(*inputs(kind, 260, 3, 1, 16))
    attended = integer._attend_codes(*stored, torch.arange(260)[None])
    do = inputs("uneven", 260, 3, 3, 16)[2][None] * 2.0**-75  # some too small for their scale
    got = integer._attend_backward(*stored, attended, do, counted[None])
    out_and_do = (x[0].float().numpy() for x in (attended.out, do))
    wanted = definition.backward(sequence(stored), *out_and_do, counted.numpy())
    for own, other in zip(got, wanted, strict=True):
        assert np.array_equal(own.squeeze().numpy(), other)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_decoded() -> None:
    bounds = [0, 1200, 1240, 1241, 1370]
    tensors = inputs("random", 1370, 4, 2, 32)
    packed = integer.attend_packed_integer(*tensors, torch.tensor(bounds))
    for start, end in itertools.pairwise(bounds):
        own = [x[start:end] for x in tensors]
        alone = integer.attend_packed_integer(*own, torch.tensor([0, end - start]))
        assert torch.equal(alone, packed[start:end])
    # Decode: one query next to others, with other keys behind its own.
    q, *keys_and_values = tensors
    stored = quantize_keys_and_values(*keys_and_values, "int8")
    for _, scales in stored:
        scales[1200:] = torch.nan
    expanded = [(c.expand(55, *c.shape), x.expand(55, *x.shape)) for c, x in stored]
    decoded = integer.attend(q[NEAR_BORDERS][:, None], *expanded, NEAR_BORDERS[:, None], "fp32")
    assert torch.equal(decoded[:, 0], packed[NEAR_BORDERS])


def test_gradients_of_shared_rows_are_sums_over_sequences_in_order() -> None:
    """Three sequences share 70 rows; their queries count once."""
    rows = [[*range(70), *range(*own)] for own in ((70, 100), (100, 101), (101, 201))]
    tensors = [x.requires_grad_() for x in inputs("random", 201, 4, 2, 16)]
    bounds = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    out = integer.attend_packed_integer(
        *tensors, bounds, row_of=torch.tensor([*itertools.chain(*rows)])
    )
    do = inputs("sharp", 201, 4, 4, 16)[2]
    out.backward(do)
    sums = [torch.zeros(x.shape) for x in tensors]
    for number, row in enumerate(rows):
        stored = coded(*(x.detach()[row] for x in tensors))
        attended = integer._attend_codes(*stored, torch.arange(len(row))[None])
        assert torch.equal(attended.out[0], out[row])
        counted = torch.arange(len(row)) >= (70 if number else 0)
        parts = integer._attend_backward(*stored, attended, do[row][None], counted[None])
        for total, part in zip(sums, parts, strict=True):
            total[row] += part[0]
    for tensor, total, factor in zip(tensors, sums, (0.25, 0.25, 1), strict=True):
        assert torch.equal(tensor.grad, (total * factor).bfloat16())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_a_bad_value_is_nan_in_all_that_see_it_and_nowhere_else(which: int, bad: float) -> None:
    tensors, bounds = inputs("random", 200, 4, 2, 16), torch.tensor([0, 8, 200])
    clean = integer.attend_packed_integer(*tensors, bounds)
    tensors[which][140, 0, 5] = bad
    out = integer.attend_packed_integer(*(x.requires_grad_() for x in tensors), bounds)
    # A query is one of one head; a key is seen by later queries of two.
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[140 : 141 if which == 0 else 200, : 1 if which == 0 else 2] = True
    assert torch.equal(out.isnan(), touched)
    assert torch.equal(out[~touched], clean[~touched])
    out.backward(torch.ones_like(out))
    assert torch.equal(tensors[0].grad.isnan(), touched)
    for x in tensors[1:]:
        assert x.grad[8:141, 0].isnan().all()
        assert x.grad[:, 1].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_bad_output_gradient_is_nan_in_its_query_and_the_keys_that_it_sees(bad: float) -> None:
    """Keys 141 to 191 are hidden from query 140, and are in the same block of 64 queries."""
    tensors = [x.requires_grad_() for x in inputs("random", 200, 4, 2, 16)]
    out = integer.attend_packed_integer(*tensors, torch.tensor([0, 8, 200]))
    do = inputs("sharp", 200, 4, 4, 16)[2]
    clean = torch.autograd.grad(out, tensors, do, retain_graph=True)
    do[140, 3, 5] = bad
    found = torch.autograd.grad(out, tensors, do)
    for own, other, rows in zip(found, clean, [(140, 3), *[(slice(8, 141), 1)] * 2], strict=True):
        touched = torch.zeros_like(own, dtype=torch.bool)
        touched[rows] = True
        assert torch.equal(own.isnan(), touched)
        assert torch.equal(own[~touched], other[~touched])


def test_values_that_overflow_reach_only_outputs_that_see_them() -> None:
    """Values of 2**99 have finite outputs; those of 2**127 have not, and gradients are then NaN."""
    bounds = torch.tensor([0, 8, 200])
    tensors = [x.requires_grad_() for x in inputs("random", 200, 4, 2, 16)]
    clean = integer.attend_packed_integer(*tensors, bounds)
    touched = torch.zeros_like(clean, dtype=torch.bool)
    touched[140:200, :2] = True
    for power in (99, 127):
        with torch.no_grad():
            tensors[2][140, 0] = 2.0**power
        out = integer.attend_packed_integer(*tensors, bounds)
        assert torch.equal(out[~touched], clean[~touched])
        assert out[touched].isfinite().all() == (power == 99)
        assert out[touched].isfinite().any() == (power == 99)
    (dq,) = torch.autograd.grad(out, tensors[:1], torch.ones_like(out))
    assert torch.equal(dq.isnan(), touched)


def test_scores_of_a_million_are_one_hot() -> None:
    """Scores are k * 2**12, in units of log2, for 256 different k: up to 2**20."""
    k = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    values = inputs("random", 256, 2, 1, 16)[2].sign()
    q = torch.full((256, 2, 16), 2**10 * math.log(2.0)).bfloat16()
    tensors = [q, k[:, None, None].expand(256, 1, 16).bfloat16(), values]
    out = integer.attend_packed_integer(
        *(x.requires_grad_() for x in tensors), torch.tensor([0, 256])
    )
    largest = k.cummax(0).indices
    assert torch.equal(out, values[largest].expand_as(out))
    do = inputs("random", 256, 2, 2, 16)[2]
    out.backward(do)
    assert all(x.grad.isfinite().all() for x in tensors)
    # All other weights of the backward are about 2**-40.
    others = torch.ones(256, dtype=torch.bool)
    others[largest] = False
    assert values.grad[others].abs().max() < 2.0**-38 * do.abs().sum()


def test_scores_beyond_float32_are_nan() -> None:
    large = torch.full((1, 1, 16), 2.0**70).bfloat16()
    attended = integer._attend_codes(*coded(large, large, large), torch.tensor([[0]]))
    assert attended.out.isnan().all()
    assert attended.mass.isnan().all()


def test_errors_are_those_of_two_roundings_to_bf16() -> None:
    """Next to float64 of the codes; a rounding is off by 0.0017 of a norm, in the output too."""
    tensors = [x.requires_grad_() for x in inputs("random", 400, 4, 1, 64)]
    out = integer.attend_packed_integer(*tensors, torch.tensor([0, 400]))
    stored = coded(*(x.detach() for x in tensors))
    wide = [stored_values((c[0], x[0])).double().requires_grad_() for c, x in stored]
    true = causal64(*wide)
    do = inputs("sharp", 400, 4, 4, 64)[2]
    out.backward(do)
    true.backward(do.double())
    assert (out - true).norm() < 0.0018 * true.norm()
    for own, other in zip(tensors, wide, strict=True):
        assert (own.grad - other.grad).norm() < 0.0024 * other.grad.norm()
