"""The attention reference: right against float64, indifferent to batch, padding and place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from jetrl.kernels.attention.reference import (
    _as_codes,
    _attend,
    attend_packed,
    quantize_keys_and_values,
    stored_values,
)
from jetrl.precision.exact import exp_nonpositive

CODED = ["fp8", "int8", "int8+fp8", "fp8+int8"]
FORMATS = [*CODED, "bf16", "fp32"]


def inputs(tokens: int, heads: int, groups: int, dim: int, kv: str, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if kv == "fp32" else torch.bfloat16
    return [torch.randn(tokens, n, dim, generator=g).to(dtype) * 2 for n in (heads, groups, groups)]


def stored(k: Tensor, v: Tensor, kv: str) -> list[Tensor]:
    """The keys and values as the cache would give them back, float64."""
    return [stored_values(codes).double() for codes in quantize_keys_and_values(k, v, kv)]


def causal64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention over one sequence, q [L, H, D] and k, v [L, G, D], in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("heads,groups,dim", [(8, 2, 32), (5, 1, 128)])
def test_matches_float64(kv: str, heads: int, groups: int, dim: int) -> None:
    lengths = [1, 7, 33, 2]
    q, k, v = inputs(sum(lengths), heads, groups, dim, kv)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    out = attend_packed(q, k, v, cu, kv)
    k64, v64 = stored(k, v, kv)
    for start, length in zip(cu.tolist(), lengths, strict=False):
        s = slice(start, start + length)
        true = causal64(q[s].double(), k64[s], v64[s])
        # scores up to ~50 in float32 are off by 2**-24 * 4 * 50, so weights by that, relatively;
        # the result is then rounded to q's dtype
        rounding = 2.0**-24 if kv == "fp32" else 2.0**-8
        bound = rounding * true.abs() + 400 * 2.0**-24 * v64[s].abs().max()
        assert torch.all((out[s] - true).abs() <= bound)


def on_grid(values: Tensor, bits: int) -> Tensor:
    """Return float64 values on a grid of `bits` bits below the power of two above their largest."""
    step = 2.0 ** (math.frexp(float(values.abs().max()))[1] - bits)
    return (values.double() / step).round() * step


@pytest.mark.parametrize("kv", CODED)
def test_the_documented_roundings_make_the_bits(kv: str) -> None:
    """The rules of docs/precision.md give the bits of the last query of each head."""
    length, heads, dim = 70, 3, 128
    q, k, v = inputs(length, heads, 1, dim, kv)
    (k_codes, k_scales), (v_codes, v_scales) = quantize_keys_and_values(k, v, kv)
    assert k_scales is not None
    assert v_scales is not None
    wide = (*_as_codes(k_codes[None], k_scales[None]), *_as_codes(v_codes[None], v_scales[None]))
    out = _attend(q[None].float(), *wide, torch.arange(length)[None])[0]  # before BF16
    packed = attend_packed(q, k, v, torch.tensor([0, length]), kv)
    assert torch.equal(out.bfloat16(), packed)
    for head in range(heads):
        raw = (k_codes[:, 0].double() @ on_grid(q[-1, head], 24)).float()
        scores = raw * k_scales[:, 0] / torch.tensor(math.sqrt(dim))
        mass = exp_nonpositive(scores - scores.max())
        total = (mass.double() * 2.0**30).round().sum() / 2.0**30
        weights = on_grid(mass * v_scales[:, 0], 18)
        assert torch.equal(out[-1, head], ((weights @ v_codes[:, 0].double()) / total).float())


@pytest.mark.parametrize("kv", [*CODED, "bf16"])
def test_bits_do_not_depend_on_batch_or_padding(kv: str) -> None:
    lengths = [5, 40, 17, 1]
    q, k, v = inputs(sum(lengths), 4, 2, 64, kv)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    together = attend_packed(q, k, v, torch.tensor(cu), kv)
    for start, end in itertools.pairwise(cu):
        s = slice(start, end)
        alone = attend_packed(q[s], k[s], v[s], torch.tensor([0, end - start]), kv)
        assert torch.equal(alone, together[s])


@pytest.mark.parametrize("kv", FORMATS)
def test_gradients_are_those_of_the_stored_values(kv: str) -> None:
    """They pass straight through the codes to the keys and values before."""
    q, k, v = inputs(25, 4, 2, 32, kv)
    wide = [x.double().requires_grad_() for x in (q, *stored(k, v, kv))]
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = attend_packed(*tensors, torch.tensor([0, 6, 25]), kv)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    out.backward(do)
    parts = [causal64(*(x[s] for x in wide)) for s in (slice(0, 6), slice(6, 25))]
    torch.cat(parts).backward(do.double())
    rounding = 2.0**-24 if kv == "fp32" else 2.0**-8
    for narrow, true in zip(tensors, wide, strict=True):
        bound = rounding * true.grad.abs() + 1000 * 2.0**-24 * true.grad.abs().max()
        assert torch.all((narrow.grad - true.grad).abs() <= bound)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "kv, which", [("int8", 0), ("int8", 1), ("int8+fp8", 0), ("fp8+int8", 1)], ids=str
)
def test_a_bad_value_in_int8_shows_in_all_that_see_it(kv: str, which: int, bad: float) -> None:
    """A NaN or an Inf among the INT8 keys (0) or values (1) is no finite number to anybody."""
    q, *keys_and_values = inputs(20, 4, 2, 64, kv)
    clean = attend_packed(q, *keys_and_values, torch.tensor([0, 8, 20]), kv)
    keys_and_values[which][11, 1, 5] = bad
    out = attend_packed(q, *keys_and_values, torch.tensor([0, 8, 20]), kv)
    assert out[11:, 2:].isnan().all()
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[11:, 2:] = True
    assert torch.equal(out[~touched], clean[~touched])
