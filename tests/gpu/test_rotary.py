"""QK norm, rotary, key smoothing and cache write have the bits of their references in a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linears import assert_same

from jetrl.kernels.attention.layout import KeyValueCodes
from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.kernels.norm import rms_norm_ref
from jetrl.kernels.rotary import rotary, rotary_table
from jetrl.precision.quantize import hadamard

pytestmark = pytest.mark.gpu

KERNELS = "jetrl.kernels.rotary_triton"
EPS = 1e-6
HEADS = [(32, 8, 128), (14, 2, 64), (5, 1, 128)]


def inputs(tokens: int, heads: int, groups: int, head_dim: int):
    g = torch.Generator().manual_seed(tokens + heads)
    qkv = torch.randn(tokens, (heads + 2 * groups) * head_dim, generator=g).bfloat16()
    positions = torch.randint(0, 4000, (tokens,), generator=g)
    frequencies = 1e6 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    table = rotary_table(frequencies, 4096)
    weights = tuple((1 + 0.1 * torch.randn(head_dim, generator=g)).bfloat16() for _ in range(2))
    return qkv, positions, table, weights


def exponents_of(heads: int, groups: int, head_dim: int) -> torch.Tensor:
    """Return factors from 2**-11 to 2**3, as `head_exponents` has them."""
    g = torch.Generator().manual_seed(heads)
    return torch.randint(-11, 4, (heads + groups, head_dim // 2), generator=g, dtype=torch.int8)


def reference(qkv, positions, table, weights, heads, groups, head_dim, exponents=None):
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([heads, groups, groups], dim=1)
    if weights is not None:
        q, k = (rms_norm_ref(x, w, EPS)[0] for x, w in zip((q, k), weights, strict=True))
    of_q, of_k = (None, None) if exponents is None else exponents.split([heads, groups])
    return rotary(q, positions, table, of_q), rotary(k, positions, table, of_k), v


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int8+fp8", "fp8+int8", "bf16"])
@pytest.mark.parametrize("smoothed", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads, groups, head_dim", HEADS)
@pytest.mark.parametrize("tokens", [1, 63, 300])
def test_bits_of_the_reference(
    kernels,
    tokens: int,
    heads: int,
    groups: int,
    head_dim: int,
    normed: bool,
    smoothed: bool,
    kv_format: str,
) -> None:
    qkv, positions, table, weights = inputs(tokens, heads, groups, head_dim)
    qkv[::2, ::head_dim] *= 1000  # a channel above the others
    sizes = (heads, groups, head_dim)
    exponents = exponents_of(*sizes) if smoothed else None
    norms = weights if normed else None
    q, k, v = reference(qkv, positions, table, norms, *sizes, exponents=exponents)
    cache = KeyValueCodes.empty(tokens, groups, head_dim, kv_format, "cuda")
    on_gpu = tuple(w.cuda() for w in weights) if normed else None
    ours = kernels.qk_norm_rotary_cache(
        qkv.cuda(), positions.cuda(), table.cuda(), on_gpu, EPS, heads, cache, None,
        exponents=None if exponents is None else exponents.cuda(),
    )  # fmt: skip
    assert torch.equal(ours.cpu(), q)
    assert_stored(cache, quantize_keys_and_values(k, v, kv_format))


def assert_stored(cache, expected) -> None:
    """Assert that a dense cache holds `quantize_keys_and_values`, where a NaN equals any NaN."""
    ours = (cache.k, cache.k_scales), (cache.v, cache.v_scales)
    for (codes, scales), (true_codes, true_scales) in zip(ours, expected, strict=True):
        assert codes.dtype == true_codes.dtype
        assert (scales is None) == (true_scales is None)
        assert_same(codes, true_codes)
        if scales is not None:
            assert_same(scales, true_scales)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int8+fp8"])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("heads, groups, head_dim", HEADS)
@pytest.mark.parametrize("tokens", [63, 300])
def test_codes_of_any_magnitude_are_the_quantizers(
    kernels, tokens: int, heads: int, groups: int, head_dim: int, scales: str, kv_format: str
) -> None:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads + 2 * groups, head_dim, generator=g)
    x *= 10.0 ** torch.randint(-30, 4, (tokens, heads + 2 * groups, 1), generator=g)
    x[3], x[4, :, 7], x[5, :, 8], x[6, :, 9] = 0, torch.nan, torch.inf, -torch.inf
    # 127 and halves of odd integers, which a scale of 1 leaves for INT8 to round to even.
    x[7] = torch.arange(head_dim) % 127 + 0.5
    x[7, :, 0] = 127
    x = x.bfloat16()
    k, v = x[:, heads : heads + groups], x[:, heads + groups :]
    table = torch.zeros(1, 2, head_dim // 2, device="cuda")
    table[:, 0] = 1  # no rotation
    positions = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    cache = KeyValueCodes.empty(tokens, groups, head_dim, kv_format, "cuda")
    kernels.qk_norm_rotary_cache(
        x.flatten(1).cuda(), positions, table, None, EPS, heads, cache, None, scales
    )
    # NaN and Inf make the other of the rotated pair NaN (0 * Inf): so they do in the reference.
    k = rotary(k, torch.zeros(tokens, dtype=torch.int64), table.cpu())
    assert_stored(cache, quantize_keys_and_values(k, v, kv_format, scales))


@pytest.mark.parametrize("smoothed", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads, groups, head_dim", HEADS)
def test_backward(
    kernels, heads: int, groups: int, head_dim: int, normed: bool, smoothed: bool
) -> None:
    """Against float64 autograd of the composition: one rounding to BF16."""
    tokens = 129
    qkv, positions, table, weights = inputs(tokens, heads, groups, head_dim)
    wide = qkv.double().requires_grad_()
    wide_weights = [w.double().requires_grad_() for w in weights]
    q, k, v = wide.unflatten(1, (-1, head_dim)).split([heads, groups, groups], dim=1)
    if normed:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w
            for x, w in zip((q, k), wide_weights, strict=True)
        )
    cos, sin = table[positions].double().unsqueeze(2).unbind(1)

    exponents = exponents_of(heads, groups, head_dim)

    def turn(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        if not smoothed:
            return turned
        return hadamard(turned * 2.0 ** exponents.repeat(1, 2).double(), head_dim)

    g = torch.Generator().manual_seed(3)
    grads = [torch.randn(x.shape, generator=g).bfloat16() for x in (q, k, v)]
    turned = [turn(q, exponents[:heads]), turn(k, exponents[heads:])]
    torch.autograd.backward([*turned, v], [x.double() for x in grads])
    dqkv, dqw, dkw = kernels.qk_norm_rotary_backward(
        *(x.cuda() for x in grads), qkv.cuda(), positions.cuda(), table.cuda(),
        tuple(w.cuda() for w in weights) if normed else None, EPS,
        exponents.cuda() if smoothed else None,
    )  # fmt: skip
    assert (dqkv.cpu() - wide.grad).norm() <= 2**-8 * wide.grad.norm()
    if normed:
        for ours, w in zip((dqw, dkw), wide_weights, strict=True):
            assert (ours.cpu() - w.grad).norm() <= 1e-5 * w.grad.norm()
